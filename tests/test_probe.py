"""`rlhf-trl probe`: a fault planted in a loss or a trainer is found by the property it breaks."""

import pytest

from rlhf_trl.algorithms import algorithm, formulation, names
from rlhf_trl.cli import main
from rlhf_trl.compare.probe import trainer as probe_trainer
from rlhf_trl.compare.probe.loss import NAMES, probe
from rlhf_trl.errors import InputError
from rlhf_trl.run.yaml_loader import read_word

GARBAGE, NAN, WIDER, SIDE, ORDER, PROMPTS, SPLIT, FLAT, RATIO, ONCE = NAMES
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


# --- trainers ------------------------------------------------------------------------------------

# a subclass of a trainer of TRL: method, how it spoils its inputs or outputs, fields, what breaks
CALLED = "def _compute_loss(self, model, inputs, *more):\n        {}\n        "
CALLED += "return super()._compute_loss(model, inputs, *more)"
MADE = "def _generate_and_score_completions(self, inputs):\n        "
MADE += "out = super()._generate_and_score_completions(inputs)\n        {}\n        return out"
IN = "inputs = dict(inputs); "
OUT = "a = out['advantages'].view(-1, self.num_generations); "
TRAINERS = {
    "padding is read": (
        "GRPOTrainer",
        CALLED.format(
            IN + "inputs['advantages'] = inputs['advantages'] * (1 + "
            "inputs['completion_ids'].float().mean() / 100)"
        ),
        {},
        {GARBAGE: SCALED, WIDER: SCALED, SPLIT: SCALED},
    ),
    "the width counts": (
        "GRPOTrainer",
        CALLED.format(
            IN + "inputs['advantages'] = inputs['advantages'] / inputs['completion_mask'].shape[1]"
        ),
        {},
        {WIDER: SCALED},
    ),
    "padding of prompts is attended to": (
        "GRPOTrainer",
        CALLED.format(IN + "inputs['prompt_mask'] = inputs['prompt_mask'] * 0 + 1"),
        {},
        {SIDE: BROKEN, RATIO: BROKEN, ONCE: BROKEN},  # not so at generation
    ),
    "the first completion counts twice": (
        "GRPOTrainer",
        MADE.format(OUT + "a[:, 0] *= 2"),
        {},
        {ORDER: BROKEN},
    ),
    "the first prompt counts twice": (
        "GRPOTrainer",
        MADE.format(OUT + "a[0] *= 2"),
        {},
        {PROMPTS: BROKEN},
    ),
    "a mean over the tokens of a micro-batch": (
        *("GRPOTrainer", "", {"loss_type": "bnpo"}),
        {SPLIT: SCALED},
    ),
    "rewards are not compared": (
        "RLOOTrainer",
        MADE.format("out['advantages'] += 1"),
        {},
        {FLAT: BROKEN},
    ),
    "the policy at generation is another": (
        "GRPOTrainer",
        MADE.format(
            "old = out.get('old_per_token_logps')\n        "
            "out |= {} if old is None else {'old_per_token_logps': old * 1.1}"
        ),
        {},
        {RATIO: BROKEN},
    ),
    "the end token is dropped": (
        "GRPOTrainer",
        CALLED.format(
            IN + "m = inputs['completion_mask']; "
            "inputs['completion_mask'] = m * (m.cumsum(1) < m.sum(1, keepdim=True))"
        ),
        {},
        {ONCE: BROKEN},
    ),
    "the end of a chosen or rejected text is dropped": (
        "DPOTrainer",
        CALLED.format(
            IN + "m = inputs['completion_mask']; "
            "inputs['completion_mask'] = m * (m.flip(1).cumsum(1).flip(1) != 1)"
        ),
        {},
        {ONCE: BROKEN},
    ),
    "pairs depend on their place": (
        "DPOTrainer",
        "def get_batch_samples(self, *a, **k):\n        return super().get_batch_samples(*a, **k)\n"
        "    def compute_loss(self, model, inputs, *a, **k):\n        "
        "inputs = dict(inputs); inputs['completion_mask'] = inputs['completion_mask'].clone(); "
        "inputs['completion_mask'][0] = 0\n        "
        "return super().compute_loss(model, inputs, *a, **k)",
        {},
        {PROMPTS: BROKEN, SPLIT: BROKEN},
    ),
    "SFT averages over each micro-batch": (
        "SFTTrainer",
        "def compute_loss(self, model, inputs, *a, num_items_in_batch=None, **k):\n        "
        "loss = super().compute_loss(model, inputs, *a, **k)\n        "
        "return loss / self.args.gradient_accumulation_steps",
        {},
        {SPLIT: SCALED},
    ),
}


@pytest.mark.parametrize("fault", TRAINERS)
def test_a_fault_planted_in_a_trainer_is_found(fault, tmp_path, monkeypatch):
    base, method, fields, broken = TRAINERS[fault]
    monkeypatch.chdir(tmp_path)
    name = f"trainer_{tmp_path.name}"
    body = method or "pass"
    text = f"from trl import {base}\n\n\nclass Planted({base}):\n    {body}\n"
    (tmp_path / f"{name}.py").write_text(text)
    found = {e.name: e for e in probe_trainer.probe(f"{name}:Planted", fields, [(2, 4)])}
    wrong = {n: e.verdict for n, e in found.items() if e.verdict in (SCALED, BROKEN)}
    assert wrong == broken, {n: found[n].example for n in wrong}


OUR = "rlhf_trl.trainers"
HOLD = {  # trainer, fields -> what does not hold, how many properties do not apply
    ("trl:GRPOTrainer", "beta=0.1"): ({}, 1),
    ("trl:DPOTrainer", ""): ({}, 4),
    ("trl:KTOTrainer", ""): ({}, 6),
    ("trl:RewardTrainer", ""): ({}, 6),
    ("trl:SFTTrainer", ""): ({}, 4),
    (f"{OUR}.policy_gradient:BookGRPOTrainer", "algorithm=maxrl"): ({}, 1),
    (f"{OUR}.policy_gradient:BookGRPOTrainer", "algorithm=reinforce"): ({FLAT: BROKEN}, 1),
    (f"{OUR}.policy_gradient:BookGRPOTrainer", "algorithm=dapo formulation=code"): (
        *({SPLIT: SCALED}, 1),
    ),
    (f"{OUR}.ppo:BookPPOTrainer", ""): ({}, 3),
    (f"{OUR}.distillation:BookDistillationTrainer", "algorithm=sdpo"): ({}, 3),
    (f"{OUR}.orpo:BookORPOTrainer", ""): ({}, 4),
    (f"{OUR}.direct_alignment:BookKTOTrainer", ""): ({}, 6),
    (f"{OUR}.reward_models:BookTokenRewardTrainer", "algorithm=prm"): ({}, 5),
}


@pytest.mark.parametrize(("trainer", "fields"), HOLD)
def test_trainers_hold(trainer, fields):
    given = {name: read_word(v) for name, v in (word.split("=") for word in fields.split())}
    found = probe_trainer.probe(trainer, given, [(2, 4)])
    wrong = {each.name: each.verdict for each in found if each.verdict in (SCALED, BROKEN)}
    silent = [each.example for each in found if each.verdict == "does not apply"]
    assert (wrong, len(silent)) == HOLD[trainer, fields] and all(silent)


def test_the_command_takes_a_trainer(capsys, monkeypatch):
    monkeypatch.setattr(probe_trainer.probe, "__defaults__", ([(2, 2)],))
    main(["probe", "--trainer", "trl:GRPOTrainer", "loss_type=bnpo"])
    out = capsys.readouterr().out
    assert "normalizer not invariant" in out and "broken" not in out
    with pytest.raises(SystemExit, match="probe needs MODULE:FUNCTION, or --trainer"):
        main(["probe"])
    with pytest.raises(SystemExit, match="no module"):
        main(["probe", "--trainer", "GRPOTrain"])
