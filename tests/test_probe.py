"""`rlhf-trl probe`: a fault planted in a plain loss is found by the property that it breaks."""

import pytest

from rlhf_trl.algorithms import algorithm, formulation, names
from rlhf_trl.cli import main
from rlhf_trl.compare.probe import probe
from rlhf_trl.errors import InputError

GARBAGE = "garbage under the mask changes nothing"
NAN = "NaN under the mask changes nothing"
WIDER = "more padding changes nothing"
SIDE = "the side of the padding does not matter"
ORDER = "the order of the completions of a prompt does not matter"
PROMPTS = "the order of the prompts does not matter"
SPLIT = "micro-batches of one prompt average to the batch"
FLAT = "a zero-variance group gives no gradient"
RATIO = "at the first step every ratio is 1"
ONCE = "each token, and EOS, counts once"
SCALED, BROKEN = "normalizer not invariant", "broken"

# a clipped surrogate, and where a fault is put in its place
LOSS = """
import torch

def loss(per_token_logps, old_per_token_logps, rewards, completion_mask, num_generations):
    mask = completion_mask
    rewards = rewards.view(-1, num_generations)
    centered = rewards - rewards.mean(1, keepdim=True)
    advantages = (centered / (rewards.std(1, keepdim=True) + 1e-4)).flatten()[:, None]
    difference = per_token_logps - old_per_token_logps
    difference = torch.where(mask == 1, difference, 0.0)
    ratio = torch.exp(difference)
    per_token = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return ((per_token * mask).sum(1) / mask.sum(1)).mean(), {}
"""
# fault -> (text, its replacement, what the properties say)
FAULTS = {
    "none": ("", "", {}),
    "the sum has no mask": (
        *("(per_token * mask).sum(1)", "per_token.sum(1)"),
        {WIDER: BROKEN},
    ),
    "padding is part of a sum": (
        "torch.exp(difference)",
        "torch.exp(difference + 0.1 * (per_token_logps - old_per_token_logps).sum(1)[:, None])",
        {GARBAGE: BROKEN, NAN: BROKEN},
    ),
    "nothing is masked before the exponential": (
        *("    difference = torch.where(mask == 1, difference, 0.0)\n", ""),
        {NAN: BROKEN},
    ),
    "the mean is over the width": ("/ mask.sum(1)", "/ mask.shape[1]", {WIDER: SCALED}),
    "padding is expected on the right": (
        "    mask = completion_mask\n",
        "    mask = completion_mask.sort(1, descending=True).values\n",
        {SIDE: BROKEN},
    ),
    "the first completion is the baseline": (
        *("rewards.mean(1, keepdim=True)", "rewards[:, :1]"),
        {ORDER: BROKEN},
    ),
    "completions of a prompt do not stand together": (
        "rewards.view(-1, num_generations)",
        "rewards.view(num_generations, -1).T",
        {PROMPTS: BROKEN, ORDER: BROKEN, SPLIT: BROKEN, FLAT: BROKEN},
    ),
    "a mean over tokens": (
        "((per_token * mask).sum(1) / mask.sum(1)).mean()",
        "(per_token * mask).sum() / mask.sum()",
        {SPLIT: SCALED},
    ),
    "advantages are whitened over the batch": (
        ".flatten()[:, None]",
        ".flatten()[:, None]\n    advantages = advantages / (rewards.std() + 1e-4)",
        {SPLIT: SCALED},
    ),
    "nothing is added to the standard deviation": (" + 1e-4", "", {FLAT: BROKEN}),
    "another temperature than when it was sampled": (
        *("= per_token_logps - old", "= per_token_logps / 0.7 - old"),
        {RATIO: BROKEN, ONCE: BROKEN},  # so tokens weigh exp(logp / 0.7 - logp) each
    ),
    "EOS is dropped": (
        "    mask = completion_mask\n",
        "    mask = completion_mask\n    mask = mask * (mask.cumsum(1) < mask.sum(1)[:, None])\n",
        {ONCE: BROKEN},
    ),
    "the first token counts twice": (
        *("(per_token * mask).sum(1)", "((per_token * mask).sum(1) + per_token[:, 0])"),
        {ONCE: BROKEN, SIDE: BROKEN},  # on the left it is padding
    ),
}


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """Write a loss into a module of its own, with a fault, and return its name."""
    monkeypatch.chdir(tmp_path)

    def planted(fault):
        before, after, _ = FAULTS[fault]
        assert before in LOSS
        name = f"planted_{len(list(tmp_path.iterdir()))}_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(LOSS.replace(before, after) if before else LOSS)
        return f"{name}:loss"

    return planted


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(planted, fault):
    found = {each.name: each for each in probe(planted(fault), {})}
    wrong = {name: each.verdict for name, each in found.items() if each.verdict != "holds"}
    assert wrong == FAULTS[fault][2], {name: found[name].example for name in wrong}


def test_the_counter_example_is_the_smallest_batch(planted):
    found = {each.name: each for each in probe(planted("a mean over tokens"), {})}
    # one prompt has nothing to average with; two of 2 and 3 + 2 and 3 tokens weigh the same
    says = found[SPLIT].example
    assert says.startswith("2 x 2 completions of 5, 4, 3, 2 tokens: the gradient is "), says


def having(name):
    return algorithm(name).formulations


OURS = {name: {} for name in names("policy_gradient") if name != "ppo"} | {
    "drgrpo": {"max_completion_length": 12},
    "reinforce": {"baseline": "none"},
}


@pytest.mark.parametrize(
    ("name", "which"),
    [(n, which) for which in ("chapter", "code") for n in OURS if which in having(n)],
)
def test_ours_hold(name, which):
    row = formulation(name, which)
    settings = {"algorithm": name, "formulation": which} | OURS[name]
    settings = {n: v for n, v in settings.items() if n in ("algorithm", "formulation", *row.reads)}
    for beta in {0.0, 0.1} & ({0.0, 0.1} if "beta" in row.reads else {0.0}):
        given = settings | ({"beta": beta} if beta else {})
        found = {each.name: each.verdict for each in probe("rlhf_trl:policy_gradient_loss", given)}
        # rewards of a prompt are compared with nothing
        kept = {FLAT: BROKEN} if name == "reinforce" else {}
        if row.aggregation == "token_mean":
            kept[SPLIT] = SCALED
        assert {n: v for n, v in found.items() if v != "holds"} == kept, beta


def test_the_command(planted, capsys):
    name = planted("EOS is dropped")
    with pytest.raises(SystemExit, match=rf"error: {name} is broken: {ONCE}"):
        main(["probe", name])
    out = capsys.readouterr().out
    assert "1 x 2 completions of 3, 2 tokens: the tokens of row 0, all alike, have" in out
    main(["probe", "rlhf_trl:policy_gradient_loss", "algorithm=gspo", "epsilon=0.1"])
    assert capsys.readouterr().out.count("holds") == 10


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("rlhf_trl", "names no function; write module:function"),
        ("nowhere:loss", "nowhere:loss cannot be imported"),
        ("math:sqrt", "has no parameter for logps"),
        ("rlhf_trl:policy_gradient_loss", "needs algorithm; write NAME=VALUE for each"),
    ],
)
def test_what_cannot_be_probed_is_said(function, sentence):
    with pytest.raises(InputError, match=sentence):
        probe(function, {})
