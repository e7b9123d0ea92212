"""The README's examples of new algorithms, executed as they stand there."""

import re
from pathlib import Path

import pytest
import torch

from rlhf_trl import algorithms, policy_gradient_loss, preference_loss
from rlhf_trl.algorithms import direct_alignment, policy_gradients
from rlhf_trl.book import preference, surrogates
from rlhf_trl.errors import InputError
from rlhf_trl.ports.book_code import translate
from rlhf_trl.run.config import read_config
from rlhf_trl.run.explain import explain
from rlhf_trl.run.stages import stage_of_config

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SECTION = README[README.index("## Add an algorithm") : README.index("## What is where")]
BLOCKS = re.findall(r"```(?:python|yaml)\n(.*?)```", SECTION, re.DOTALL)
EXAMPLES = [
    ("spo", BLOCKS[:3], surrogates, "proximity_penalty", policy_gradients),
    ("slic", BLOCKS[3:], preference, "slic", direct_alignment),
]


def test_documented_races_have_folders_of_their_own():
    text = (ROOT / "recipes" / "README.md").read_text().replace("\\\n", " ")
    races = re.findall(r"^rlhf-trl race .*$", text, re.MULTILINE)
    folders = [re.search(r"--output_dir (\S+)", f"{r} --output_dir outputs/race")[1] for r in races]
    assert len(races) >= 4 and len(set(folders)) == len(folders), folders


def test_links_between_pages_lead_somewhere():
    broken = [
        (str(page.relative_to(ROOT)), link)
        for page in [
            *ROOT.glob("*.md"),
            *(ROOT / "recipes").rglob("*.md"),
            *ROOT.glob("rlhf_trl/*/*.md"),
        ]
        for link in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / link).exists()
    ]
    assert not broken


@pytest.fixture
def added(monkeypatch, tmp_path):
    """Do what the section says, in memory; return the configs."""
    for name, blocks, home, function, family in EXAMPLES:
        # afterwards all are as they were
        monkeypatch.setitem(family.ROWS, name, None)
        monkeypatch.setattr(home, function, None, raising=False)
        source = tmp_path / f"{name}.py"  # where `explain` finds the function
        source.write_text(blocks[0])
        exec(compile(blocks[0], str(source), "exec"), vars(home))
        exec(compile(blocks[1], "README.md", "exec"), vars(family))
        monkeypatch.setitem(algorithms.ALGORITHMS, name, family.ROWS[name])
    return {name: blocks[2] for name, blocks, *_ in EXAMPLES}


def test_the_first_example_is_at_most_thirty_lines():
    assert sum(len(block.strip().splitlines()) for block in BLOCKS[:3]) <= 30


def test_the_new_loss_is_the_papers_by_hand(added):
    logps = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.log(torch.tensor([[1.1], [0.5]], dtype=torch.float64).reciprocal()) + logps.detach()
    # rewards 1 and 0 standardize to +a and -a with a = .5 / (sqrt(.5) + 1e-4)
    a = 0.5 / (0.5**0.5 + 1e-4)
    rewards = torch.tensor([1.0, 0.0], dtype=torch.float64)
    result = policy_gradient_loss(
        "spo", logps=logps, old_logps=old, mask=torch.ones(2, 1), rewards=rewards, epsilon=0.2
    )
    first = -(1.1 * a - a / 0.4 * 0.1**2)
    second = -(0.5 * -a - a / 0.4 * 0.5**2)
    assert result.loss.item() == pytest.approx((first + second) / 2, abs=1e-12)
    result.loss.backward()
    slope = [-(a - a / 0.2 * 0.1) * 1.1 / 2, -(-a - a / 0.2 * -0.5) * 0.5 / 2]
    assert logps.grad.flatten().tolist() == pytest.approx(slope, abs=1e-12)


def test_the_relative_of_dpo_is_the_papers_by_hand(added):
    # d_c = 1 and -1, d_r = -2 and 1: gaps of 3, beyond the hinge at 1 / beta = 2, and -2
    chosen = torch.tensor([-4.0, -6.0], dtype=torch.float64, requires_grad=True)
    rejected = torch.tensor([-7.0, -2.0], dtype=torch.float64)
    reference = {"ref_chosen_logps": rejected * 0 - 5, "ref_rejected_logps": rejected * 0 - 5}
    reference["ref_rejected_logps"][1] = -3
    given = {"policy_chosen_logps": chosen, "policy_rejected_logps": rejected, **reference}
    result = preference_loss("slic", **given, beta=0.5)
    assert result.loss.item() == (0 + 2) / 2
    result.loss.backward()
    assert chosen.grad.tolist() == [0, -0.5 / 2]


@pytest.mark.parametrize(
    ("name", "recipe", "equation"),
    [("spo", "grpo", "(rho_t - 1)^2"), ("slic", "dpo", "max(0, 1 - beta (d_c - d_r))")],
)
def test_the_new_algorithm_trains_and_is_explained(added, run, tmp_path, name, recipe, equation):
    config = tmp_path / f"{name}.yaml"
    base = str(ROOT / "configs" / "tiny" / f"{recipe}.yaml")
    config.write_text(added[name].replace(f"{recipe}.yaml", base))
    small = ["--dataset.size", 40, "--dataset.eval_size", 8, "--max_steps", 2]
    batch = ["--num_generations", 4] if recipe == "grpo" else ["--dataset.pairs", "offline"]
    batch += ["--per_device_train_batch_size", 8]
    _, out = run(recipe, str(config.with_suffix("")), *small, *batch)
    assert out.startswith(f"{name} (chapter) on cpu")
    assert equation in explain(name)


def test_the_books_code_is_not_said_to_have_it(added, tmp_path):
    path = tmp_path / "spo.yaml"
    path.write_text("loss: spo\n")
    with pytest.raises(InputError, match=r"loss is 'spo'.*; write .*maxrl, dpo, .*_down, sdpo\.$"):
        translate(path)


COMMAND = r"recipes/(\w+)\.py\s+(?:\\\n\s+)?--config (configs/\S+\.yaml)((?:[^\n]*\\\n)*[^\n]*)"


def test_the_commands_of_the_pages_follow_each_other_in_folders_of_their_own():
    pages = [README, (ROOT / "recipes" / "README.md").read_text()]
    blocks = [
        block for page in pages for block in re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    ]
    found = [command for block in blocks for command in re.findall(COMMAND, block)]
    folders = []
    for recipe, config, rest in found:
        given = read_config(ROOT / config)
        assert stage_of_config(given).name == recipe
        named = re.search(r"--output_dir (\S+)", rest)
        folders.append(named[1] if named else given["output_dir"])
    assert len(folders) == len(set(folders)) >= 20
