"""The README's example of a new algorithm, executed as it stands there."""

import re
from pathlib import Path

import pytest
import torch

from rlhf_trl import algorithms, policy_gradient_loss
from rlhf_trl.book import surrogates
from rlhf_trl.compare.explain import explain

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
SECTION = README[README.index("## Add an algorithm") : README.index("## What is where")]
FUNCTION, ROW, CONFIG = re.findall(r"```(?:python|yaml)\n(.*?)```", SECTION, re.DOTALL)


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
def spo(monkeypatch):
    """Do what the section says, in memory."""
    monkeypatch.setitem(algorithms.ALGORITHMS, "spo", None)  # so that it is removed afterwards
    exec(compile(FUNCTION, "README.md", "exec"), vars(surrogates))
    exec(compile(ROW, "README.md", "exec"), vars(algorithms.table))
    yield
    del surrogates.proximity_penalty


def test_the_example_is_at_most_thirty_lines():
    assert sum(len(block.strip().splitlines()) for block in (FUNCTION, ROW, CONFIG)) <= 30


def test_the_new_loss_is_the_papers_by_hand(spo):
    logps = torch.tensor([[-1.0], [-2.0]], dtype=torch.float64, requires_grad=True)
    old = torch.log(torch.tensor([[1.1], [0.5]], dtype=torch.float64).reciprocal()) + logps.detach()
    # rewards 1 and 0 standardise to +a and -a with a = .5 / (sqrt(.5) + 1e-4)
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


def test_the_new_algorithm_trains_and_is_explained(spo, run, tmp_path):
    config = tmp_path / "spo.yaml"
    config.write_text(CONFIG.replace("grpo.yaml", str(ROOT / "configs" / "tiny" / "grpo.yaml")))
    small = ["--dataset.size", 40, "--dataset.eval_size", 8, "--max_steps", 2]
    batch = ["--num_generations", 4, "--per_device_train_batch_size", 8]
    _, out = run("grpo", str(config.with_suffix("")), *small, *batch)
    assert out.startswith("spo (chapter) on cpu")
    assert "(rho_t - 1)^2" in explain("spo")
