"""`rlhf-trl compare --paper-index`: claims are read, told apart, and their fixes measured."""

import json
import runpy
from importlib.metadata import version
from pathlib import Path

import pytest

from rlhf_trl.cli import main
from rlhf_trl.compare.pages.paper_index import INDEX, Claim, page, read_index
from rlhf_trl.errors import InputError

FAULTS = Path(__file__).parent.parent / "recipes" / "experiments" / "2026-11-22-two-faults"
PAGE = INDEX.parents[1] / "paper_index.md"
INDEX_TEXT = """# Paper Index

## Group Relative Policy Optimization

### Dr. GRPO: A Critical Perspective

**Paper**: https://huggingface.co/papers/2503.20783

Like [GRPO](https://huggingface.co/papers/2402.03300).

```python
from trl import GRPOConfig

training_args = GRPOConfig(
    ...
    loss_type="dr_grpo",
    per_device_train_batch_size=1, # 8 GPUs
    num_generations=8,
    max_completion_length=3_000,
    run_name=my_name,
)
trainer = GRPOTrainer(..., args=training_args)
```

### LoRA

```python
peft_config = LoraConfig(r=8)
args = NashMDConfig(mixture_coef=0.5)
```

```sh
trl grpo --config GRPOConfig(epsilon=1)
```

### Odds

**Paper**: https://huggingface.co/papers/2402.14740

```python
args = RLOOConfig(warmup_share=0.1, beta=0.05)
```
"""


@pytest.fixture
def index(tmp_path):
    path = tmp_path / "paper_index.md"
    path.write_text(INDEX_TEXT)
    return path


def test_claims_are_read_from_markdown(index):
    fields = {"loss_type": "dr_grpo", "per_device_train_batch_size": 1, "num_generations": 8}
    source, claims = read_index(index)
    assert source == str(index)
    title = "Dr. GRPO: A Critical Perspective"
    assert claims == [
        Claim(14, title, "2503.20783", "GRPOConfig", fields | {"max_completion_length": 3000}),
        Claim(28, "LoRA", "", "LoraConfig", {"r": 8}),
        Claim(29, "LoRA", "", "NashMDConfig", {"mixture_coef": 0.5}),
        Claim(41, "Odds", "2402.14740", "RLOOConfig", {"warmup_share": 0.1, "beta": 0.05}),
    ]
    assert [claim.algorithm for claim in claims] == ["drgrpo", "", "", "rloo"]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("# nothing", r"has no XConfig\(...\) in a block of ```python"),
        ("```python\nx = GRPOConfig(\n```", r"line 1: not Python"),
    ],
)
def test_an_index_without_claims_is_refused(tmp_path, text, sentence):
    path = tmp_path / "index.md"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        read_index(path)
    with pytest.raises(InputError, match="cannot be read"):
        read_index(tmp_path / "none.md")


def test_each_claim_gets_a_verdict_and_its_fix_is_measured(index, capsys):
    main(["compare", "--paper-index", str(index), "--format", "json"])
    dr_grpo, lora, nash, rloo = json.loads(capsys.readouterr().out)
    # 1 x 8 processes of the paper
    assert dr_grpo["builds"].startswith("no: generation_batch_size (1) must be divisible")
    assert dr_grpo["computes"].startswith("none; closest dapo (chapter)")  # whose scale it keeps
    found = dr_grpo["paper's equation"]
    assert found.startswith("drgrpo: cosine 0.8448, ratio 3.1352"), found
    assert (dr_grpo["fix"], dr_grpo["then"]) == ("scale_rewards: none", "equal")
    assert lora["builds"] == "not a trainer"
    assert nash["builds"] == f"no such class in TRL {version('trl')}"
    # what is no field is left out of what is measured; RLOO clips, and only then differs
    assert "unexpected keyword argument 'warmup_share'" in rloo["builds"]
    assert rloo["paper's equation"].endswith(", equal on-policy")
    assert rloo["fix"] == "one update per generation"


def test_the_page_has_every_claim_of_the_shipped_index():
    text = PAGE.read_text(encoding="utf-8")
    assert text.startswith(f"# TRL's paper index on TRL {version('trl')}\n")
    _, claims = read_index()
    assert len(claims) == 70
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][2:]
    assert [line[0] for line in lines] == [f"| {claim.line}" for claim in claims]


def test_the_demonstration_is_the_claim_of_the_index():
    _, (shown,) = read_index(FAULTS / "dr_grpo.md")
    _, claims = read_index()
    (claim,) = [each for each in claims if each.algorithm == "drgrpo"]
    assert (shown.paper, shown.config, shown.fields) == (claim.paper, claim.config, claim.fields)


@pytest.mark.promise
def test_the_sign_of_the_kl_shows_in_the_gradient(tmp_path):
    largest = runpy.run_path(str(FAULTS / "kl_sign.py"))["largest_norms"](tmp_path, 0.04)
    assert largest["code"] > 50 > 5 > largest["chapter"]


@pytest.mark.promise
def test_the_page_is_what_the_command_writes():
    assert PAGE.read_text(encoding="utf-8") == page(output_format="markdown") + "\n"
    assert Path(INDEX).is_file()
