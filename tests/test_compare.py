"""The matrix of book against TRL: verdicts, proofs, tampering, configs, page."""

import json
import re
from pathlib import Path

import pytest
import torch

from rlhf_trl.cli import main
from rlhf_trl.compare import page, report
from rlhf_trl.compare.closest import distances, read_subject
from rlhf_trl.compare.matrix import EQUAL, RESIDUAL, Matrix, judge
from rlhf_trl.compare.policy import BATCHES
from rlhf_trl.compare.rows import ROWS
from rlhf_trl.errors import InputError

ROOT = Path(__file__).parent.parent
BATCH = {batch.name: batch for batch in BATCHES}


@pytest.fixture(scope="module")
def results():
    return Matrix().run(ROWS, BATCHES)


@pytest.fixture(scope="module")
def found(results):
    """(algorithm, variant, left, right) -> batch -> result."""
    table = {}
    for r in results:
        key = (r.row.algorithm, r.row.variant, r.row.left.label, r.row.right.label)
        table.setdefault(key, {})[r.batch] = r
    return table


# --- the whole matrix ----------------------------------------------------------------------------


def test_every_difference_is_proved(results):
    assert [(r.row, r.batch, r.residual) for r in results if not r.explained] == []
    unproved = [r for r in results if r.verdict in ("differs", "scaled") and r.residual is None]
    assert unproved == []
    assert max(r.residual for r in results if r.residual is not None) <= RESIDUAL
    for r in results:
        if r.residual is not None:
            assert report.explanation(r) not in ("", "unexplained"), (r.row, r.batch)


def test_rows_are_distinct_and_many(found, results):
    assert len(found) == len(ROWS) >= 60
    assert {r.batch for r in results} == set(BATCH)


def test_the_batches_are_what_they_say():
    matrix, row = Matrix(), next(r for r in ROWS if r.algorithm == "grpo")
    views = {name: matrix.window(row, batch).view() for name, batch in BATCH.items()}
    ratios = {name: v.ratio[v.mask.bool()] for name, v in views.items()}
    assert (ratios["on_policy"] == 1).all()
    assert 0.6 < ratios["mild"].min() < 0.9 and 1.1 < ratios["mild"].max() < 1.6
    assert ratios["heavy"].min() < 0.5 and ratios["heavy"].max() > 2
    sign = views["clipped"].rewards.view(-1, 4) - views["clipped"].rewards.view(-1, 4).mean(1, True)
    sign = sign.view(-1, 1).sign().expand_as(views["clipped"].mask)
    ratio = views["clipped"].ratio
    assert (ratio[sign > 0] > 1.4).all() and (ratio[sign < 0] < 0.8).all()
    for name, view in views.items():
        ragged = BATCH[name].ragged
        assert (len(view.lengths.unique()) > 3) == ragged
    assert len(views["accumulation"].mask) == 16
    kl = (views["mild"].logps - views["mild"].ref_logps).abs()
    assert kl.max() > 0.05  # the reference is another policy, so that beta matters


def test_ktos_reference_point_matters_on_the_batches():
    matrix, row = Matrix(), next(r for r in ROWS if r.algorithm == "kto")
    points = {}
    for name in ("mild", "heavy", "ragged", "accumulation"):
        parts = matrix.window(row, BATCH[name]).view.micro
        points[name] = [float((part.kl[0] - part.kl[1]).mean()) for part in parts]
    assert min(points[name][0] for name in points) > 0.05
    assert points["accumulation"][1] < 0  # and is clamped once


# What was stated elsewhere, measured once on another batch: here the direction of each claim.
CLAIMS = [
    # algorithm, variant, left, right, batches, verdict, ratio
    ("grpo", "", "chapter", "TRL grpo", ("on_policy", "heavy", "ragged"), "equal", 1),
    ("drgrpo", "", "chapter", "TRL dr_grpo", ("on_policy", "heavy", "ragged"), "equal", 1),
    ("drgrpo", "", "code", "TRL grpo", ("on_policy", "heavy", "ragged"), "equal", 1),
    ("drgrpo", "", "chapter", "code", ("on_policy",), "scaled", 12 / 8),
    ("gspo", "", "chapter", "TRL grpo", ("on_policy", "heavy", "ragged"), "equal", 1),
    ("gspo", "default loss_type", "chapter", "TRL dapo", ("ragged",), "differs", None),
    ("sapo", "", "chapter", "TRL sapo", ("on_policy", "heavy", "ragged"), "equal", 1),
    ("dapo", "", "chapter", "TRL dapo", ("ragged", "accumulation"), "equal", 1),
    ("dapo", "", "chapter", "TRL dapo", ("steps_per_generation",), "scaled", None),
    ("cispo", "no lower bound", "chapter", "TRL cispo", ("heavy", "ragged"), "equal", 1),
    ("cispo", "bound copied", "chapter", "TRL cispo", ("on_policy",), "scaled", 0.4),
    ("cispo", "bound unset", "chapter", "TRL cispo", ("on_policy",), "scaled", 0.2),
    ("rloo", "beta 0", "chapter", "TRL RLOOTrainer", ("on_policy",), "equal", 1),
    ("rloo", "beta 0", "chapter", "TRL RLOOTrainer", ("heavy",), "differs", None),
    ("rloo", "as weighted GRPO", "code", "TRL grpo", ("on_policy",), "equal", 1),
    ("rloo", "", "chapter", "code", ("on_policy",), "scaled", 1 / 8),
    ("grpo", "TRL's default", "chapter", "TRL dapo", ("on_policy", "mild"), "equal", 1),
    ("grpo", "TRL's default", "chapter", "TRL dapo", ("ragged",), "differs", None),
    ("grpo", "", "chapter", "TRL grpo", ("clipped",), "both zero", None),
    ("grpo", "", "chapter", "TRL grpo", ("temperature",), "differs", None),
    ("kl", "k2, TRL's default", "chapter", "TRL grpo", ("on_policy",), "equal", 1),
    ("kl", "k2, TRL's default", "chapter", "TRL grpo", ("heavy",), "differs", None),
    ("kl", "k3 in the loss", "chapter", "TRL grpo", ("on_policy", "heavy"), "equal", 1),
    ("kl", "k3 of the code", "code", "TRL grpo", ("heavy",), "differs", None),
    ("dpo", "", "chapter", "TRL sigmoid", ("heavy", "ragged"), "equal", 1),
    ("cdpo", "", "chapter", "TRL sigmoid + robust", ("heavy", "ragged"), "equal", 1),
    ("cdpo", "plain sigmoid", "chapter", "TRL sigmoid", ("on_policy",), "scaled", 1 / 0.8),
    ("cdpo", "robust", "chapter", "TRL robust", ("on_policy",), "scaled", 1 / 0.8**2),
    ("ipo", "on averages", "trl", "TRL ipo", ("heavy", "ragged"), "equal", 1),
    ("ipo", "", "chapter", "TRL ipo", ("on_policy",), "scaled", 1 / 9),
    ("dpo_norm", "", "chapter", "TRL sigmoid_norm", ("heavy", "ragged"), "equal", 1),
    ("apo_zero", "", "chapter", "TRL apo_zero", ("heavy", "ragged"), "equal", 1),
    ("apo_down", "", "chapter", "TRL apo_down", ("heavy", "ragged"), "equal", 1),
    ("simpo", "", "chapter", "TRL simpo", ("heavy", "ragged"), "equal", 1),
    ("orpo", "", "chapter", "TRL ORPOTrainer", ("ragged",), "differs", None),
    ("kto", "", "chapter", "TRL kto", ("heavy", "ragged"), "equal", 1),
    ("kto", "", "code", "TRL kto", ("heavy",), "scaled", 1 / 2),
    ("kto", "weights doubled", "code", "TRL kto", ("heavy",), "equal", 1),
    ("kto", "weights doubled", "code", "TRL kto", ("ragged",), "differs", None),
    ("reward", "", "chapter", "TRL RewardTrainer", ("heavy", "ragged"), "equal", 1),
    ("reward", "margin", "chapter", "TRL RewardTrainer", ("heavy", "ragged"), "equal", 1),
    ("sft", "", "code", "TRL SFTTrainer", ("ragged",), "equal", 1),
    ("sft", "", "code", "TRL SFTTrainer", ("accumulation",), "differs", None),
]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: " ".join([*c[:4], c[4][0]]))
def test_claim(claim, found):
    *key, batches, verdict, ratio = claim
    for name in batches:
        result = found[tuple(key)][name]
        assert result.verdict == verdict
        if ratio is not None:
            assert result.grad_norm_ratio == pytest.approx(ratio, rel=1e-5)


def test_apos_loss_is_larger_by_one(found):
    for name in ("apo_zero", "apo_down"):
        for result in found[name, "", "chapter", f"TRL {name}"].values():
            assert result.loss_right - result.loss_left == pytest.approx(1, abs=1e-5)


def test_the_epsilon_of_the_code_matters_for_small_rewards_only(found):
    rows = found["grpo", "", "code", "TRL grpo"]
    assert rows["mild"].grad_rel_error < 1e-3
    assert rows["small_rewards"].grad_norm_ratio == pytest.approx(0.833, abs=0.01)


def test_rounding_gives_equal_rewards_an_advantage_in_the_code(found):
    # eight float32 numbers of .3: their mean is one unit in the last place, 2^-25, below .3, and
    # their standard deviation sqrt(8/7) times that
    unit = 2.0**-25
    spread = unit * (8 / 7) ** 0.5
    for right in ("chapter", "TRL grpo"):
        (result,) = found["grpo", "equal rewards", "code", right].values()
        expected = (spread + 1e-8) / (spread + 1e-4)
        assert result.grad_norm_ratio == pytest.approx(expected, rel=1e-4)
        assert result.explained and result.grad_cosine == pytest.approx(1, abs=1e-6)
    assert unit / (spread + 1e-8) == pytest.approx(0.71, abs=0.005)  # the advantage


def test_float64_leaves_nothing_of_a_rounding_error(found):
    for name, right in (("reward", "TRL RewardTrainer"), ("simpo", "TRL simpo")):
        for result in found[name, "", "chapter", right].values():
            assert result.grad_rel_error_float64 < 1e-12 < result.grad_rel_error < EQUAL


def test_a_proof_that_leaves_out_a_term_is_none(results):
    """An identity is not proved by having the right name."""
    from dataclasses import replace

    row = next(r for r in ROWS if r.variant == "TRL's default" and r.algorithm == "grpo")
    short = replace(row, identities=row.identities[1:])
    [result] = Matrix().run([short], [BATCH["ragged"]])
    assert not result.explained and report.explanation(result) == "unexplained"


def test_judge_tells_the_four_verdicts_apart():
    g = torch.tensor([3.0, 4.0], dtype=torch.float64)
    zero = torch.zeros(2, dtype=torch.float64)
    assert judge(g, g * (1 + 1e-6))[-1] == "equal"
    error, cosine, ratio, verdict = judge(g, 2 * g)
    assert (error, cosine, ratio, verdict) == (1.0, pytest.approx(1), 2.0, "scaled")
    assert judge(g, torch.tensor([4.0, 3.0], dtype=torch.float64))[1] == pytest.approx(0.96)
    assert judge(g, -g)[-1] == "differs"  # no learning rate undoes it
    assert judge(g, g * float("nan"))[-1] == "differs"
    assert judge(zero, zero)[-1] == "both zero"
    assert judge(g, zero)[-1] == judge(zero, g)[-1] == "differs"


# --- tampering with TRL --------------------------------------------------------------------------


def edited(monkeypatch, owner, name, old, new):
    """Replace a method by its own source with one change."""
    import inspect
    import textwrap

    method = getattr(owner, name)
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(old) >= 1, f"{old!r} is not in {name}"
    space = dict(vars(inspect.getmodule(method)))
    space["__class__"] = owner
    source = re.sub(r"super\(\)", f"super({owner.__name__}, self)", source.replace(old, new, 1))
    exec(compile(source, f"<edited {name}>", "exec"), space)
    monkeypatch.setattr(owner, name, space[name])


GRPO_LOSS = "trl.GRPOTrainer._compute_loss"
TAMPERINGS = {
    "sign of the surrogate": (
        GRPO_LOSS,
        "per_token_loss = -torch.min(per_token_loss1, per_token_loss2)",
        "per_token_loss = torch.min(per_token_loss1, per_token_loss2)",
        {"grpo", "drgrpo", "gspo", "dapo"},
    ),
    "a detach": (
        GRPO_LOSS,
        "torch.clamp(coef_1, max=self.epsilon_high).detach()",
        "torch.clamp(coef_1, max=self.epsilon_high)",
        {"cispo"},
    ),
    "normaliser of dr_grpo": (
        GRPO_LOSS,
        "(per_token_loss.size(0) * self.max_completion_length)",
        "(per_token_loss.size(0) * self.max_completion_length + 1)",
        {"drgrpo"},
    ),
    "normaliser of dapo": (
        GRPO_LOSS,
        'inputs["num_items_in_batch"].clamp(min=1.0)',
        "mask.sum().clamp(min=1.0)",
        {"cispo", "dapo"},
    ),
    "epsilon of the standard deviation": (
        "trl.GRPOTrainer._generate_and_score_completions",
        "std_rewards + 1e-4",
        "std_rewards + 1e-2",
        {"grpo", "gspo", "cispo", "sapo", "dapo"},
    ),
    "clipped from above only": (
        GRPO_LOSS,
        "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)",
        "torch.clamp(coef_1, max=1 + self.epsilon_high)",
        {"grpo", "drgrpo", "gspo", "dapo"},
    ),
    "sapo's temperatures exchanged": (
        GRPO_LOSS,
        "advantages > 0, self.args.sapo_temperature_pos, self.args.sapo_temperature_neg",
        "advantages > 0, self.args.sapo_temperature_neg, self.args.sapo_temperature_pos",
        {"sapo"},
    ),
    "rewards of the reward model exchanged": (
        "trl.RewardTrainer.compute_loss",
        "rewards_chosen - rewards_rejected).mean()",
        "rewards_rejected - rewards_chosen).mean()",
        {"reward", "kwise"},
    ),
    "DPO's mask shifted by one": (
        "trl.DPOTrainer._compute_loss",
        'inputs["input_ids"].masked_fill(completion_mask == 0, -100)',
        'inputs["input_ids"].masked_fill(completion_mask.roll(1, 1) == 0, -100)',
        {"dpo", "cdpo", "ipo", "dpo_norm", "apo_zero", "apo_down"},
    ),
    "IPO's target": (
        "trl.DPOTrainer._compute_loss",
        "(ipo_delta - 1 / (2 * self.beta)) ** 2",
        "(ipo_delta - 1 / self.beta) ** 2",
        {"ipo"},
    ),
    "KTO without a reference point": (
        "trl.KTOTrainer._compute_loss",
        "self.accelerator.gather_for_metrics(kl).mean().clamp(min=0)",
        "self.accelerator.gather_for_metrics(kl).mean().clamp(min=0) * 0",
        {"kto"},
    ),
    "KTO's reference point not clamped": (
        "trl.KTOTrainer._compute_loss",
        ".mean().clamp(min=0)",
        ".mean()",
        {"kto"},
    ),
}


def clean_rows():
    """One row per algorithm whose sides are equal, stock TRL on the right."""
    rows = {}
    for row in ROWS:
        if row.right.label.startswith("TRL") and row.algorithm != "kl":
            rows.setdefault(row.algorithm, row)
    pick = {"grpo": "", "cispo": "no lower bound", "rloo": "beta 0", "ipo": "on averages"}
    for row in ROWS:
        stock = row.right.label.startswith("TRL") and row.left.label != "code"
        if stock and pick.get(row.algorithm) == row.variant:
            rows[row.algorithm] = row
    return [row for row in rows.values() if row.algorithm not in ("orpo", "sft")]


def verdicts(rows):
    wanted = [BATCH["clipped"], BATCH["accumulation"]]
    broken = set()
    for result in Matrix().run(rows, wanted):
        usual = ["differs"] if result.row.algorithm == "rloo" else ["equal", "both zero"]
        if result.verdict not in usual or not result.explained:
            broken.add(result.row.algorithm)
    return broken


def test_nothing_is_found_where_nothing_was_changed():
    assert verdicts(clean_rows()) == set()


@pytest.mark.parametrize("case", TAMPERINGS)
def test_tampering_flips_those_verdicts_and_no_others(case, monkeypatch):
    import trl

    place, old, new, concerned = TAMPERINGS[case]
    _, owner, name = place.split(".")
    edited(monkeypatch, getattr(trl, owner), name, old, new)
    assert verdicts(clean_rows()) == concerned


COLLATORS = {
    "chosen and rejected": ("dpo", "dpo_trainer", "DataCollatorForPreference", "chosen_ids"),
    "margins": ("reward", "reward_trainer", "DataCollatorForPreference", "margin"),
    "labels": ("kto", "kto_trainer", "DataCollatorForUnpairedPreference", "label"),
}


@pytest.mark.parametrize("what", COLLATORS)
def test_a_collator_that_changes_the_data_is_found_out(what, monkeypatch):
    from importlib import import_module

    algorithm, module, name, column = COLLATORS[what]
    collator = getattr(import_module(f"trl.trainer.{module}"), name)
    collate = collator.torch_call

    def changed(self, examples):
        examples = [dict(each) for each in examples]
        for each in examples:
            if column == "chosen_ids":
                each["chosen_ids"], each["rejected_ids"] = each["rejected_ids"], each["chosen_ids"]
            elif column in each:
                each[column] = not each[column] if column == "label" else -each[column]
        return collate(self, examples)

    monkeypatch.setattr(collator, "torch_call", changed)
    rows = [row for row in ROWS if row.algorithm == algorithm]
    rows = [row for row in rows if what != "margins" or row.variant == "margin"]
    with pytest.raises(InputError, match=f"does not collate the fixed data as it is: {what}"):
        Matrix().run(rows, [BATCH["ragged"]])


def test_a_shuffle_that_tears_rows_apart_is_found_out(monkeypatch):
    from trl.trainer import grpo_trainer

    from rlhf_trl.compare import policy

    policy._check_shuffle.cache_clear()
    monkeypatch.setattr(
        grpo_trainer,
        "shuffle_sequence_dict",
        lambda batch: {name: t[torch.randperm(len(t))] for name, t in batch.items()},
    )
    with pytest.raises(InputError, match="tears the rows of a batch apart"):
        Matrix().run([row for row in ROWS if row.algorithm == "grpo"], [BATCH["mild"]])
    policy._check_shuffle.cache_clear()


# --- configs and trainers of users ---------------------------------------------------------------

# As TRL's documentation gives them for these papers, with what people have around them.
CONFIGS = {
    "GRPO": (
        """
        model_name_or_path: Qwen/Qwen2-0.5B-Instruct
        dataset_name: trl-lib/DeepMath-103K
        loss_type: grpo
        num_generations: 16
        beta: 0.04
        epsilon: 0.2
        use_bias_correction_kl: false
        learning_rate: 1e-6
        """,
        "grpo/chapter",
        ("drgrpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    ),
    "TRL's defaults": (
        "{num_generations: 8, gradient_accumulation_steps: 8, reward_funcs: [x.y]}",
        "dapo/chapter",
        ("grpo", {"loss_type": "grpo"}),
    ),
    "Dr. GRPO": (
        "{loss_type: dr_grpo, scale_rewards: none, beta: 0.0, num_generations: 8}",
        "drgrpo/chapter",
        ("grpo", {"loss_type": "grpo", "scale_rewards": "group"}),
    ),
    "DAPO": (
        """
        epsilon: 0.2
        epsilon_high: 0.28
        beta: 0.0
        loss_type: dapo
        mask_truncated_completions: true
        max_completion_length: 20480
        num_generations: 16
        per_device_train_batch_size: 512
        num_iterations: 16
        """,
        "dapo/chapter",
        ("gspo", {"loss_type": "grpo", "importance_sampling_level": "sequence"}),
    ),
    "GSPO": (
        """
        importance_sampling_level: sequence
        loss_type: grpo
        beta: 0.0
        epsilon: 3e-4
        epsilon_high: 4e-4
        gradient_accumulation_steps: 1
        steps_per_generation: 4
        """,
        "gspo/chapter",
        ("grpo", {"importance_sampling_level": "token"}),
    ),
    "CISPO": (
        "{loss_type: cispo, epsilon_high: 5.0, num_iterations: 16, scale_rewards: batch}",
        None,
        ("cispo/trl", {"scale_rewards": "group"}),
    ),
    "DPO": (
        "{loss_type: sigmoid, beta: 0.1, label_smoothing: 0.1, max_length: 512}",
        "dpo/chapter",
        (
            "cdpo",
            {"loss_type": ["sigmoid", "robust"], "loss_weights": pytest.approx([1.8, -0.8])},
        ),
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_users_config(case, tmp_path):
    text, closest, (other, changes) = CONFIGS[case]
    path = tmp_path / "run.yaml"
    path.write_text("\n".join(line.strip() for line in text.splitlines()))
    subject = read_subject(path, None)
    if closest:
        first = distances(subject)[0]
        assert (f"{first.algorithm}/{first.formulation}", first.equal) == (closest, True)
        assert first.changes == {} and first.worst.grad_rel_error < EQUAL
    name, _, which = other.partition("/")
    [asked] = distances(subject, [(name, which or "chapter")])
    assert not asked.equal and asked.worst.grad_rel_error > 1e-3
    assert asked.changes == changes
    assert asked.then.verdict == "equal"


def test_ours_with_the_lower_bound_is_the_chapters_cispo():
    first = distances(read_subject(ROOT / "configs/tiny/cispo.yaml", None))[0]
    assert (first.algorithm, first.formulation, first.equal) == ("cispo", "chapter", True)


@pytest.mark.parametrize(
    "name", ["grpo", "dapo", "reinforce", "maxrl", "dpo", "cdpo", "ipo", "simpo", "orpo"]
)
def test_our_configs_compute_what_they_are_called(name):
    subject = read_subject(ROOT / f"configs/tiny/{name}.yaml", None)
    [asked] = distances(subject, [(name, "chapter")])
    assert asked.equal


TRAINER = """
from __future__ import annotations
from dataclasses import dataclass
from trl import DPOTrainer, GRPOConfig, GRPOTrainer

class Same(GRPOTrainer):
    pass

class Doubled(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return 2 * super()._compute_loss(model, inputs)

class Shortened(GRPOTrainer):
    def _generate_and_score_completions(self, inputs):
        out = super()._generate_and_score_completions(inputs)
        out["completion_ids"] = out["completion_ids"][:, :-1]
        out["completion_mask"] = out["completion_mask"][:, :-1]
        out.pop("old_per_token_logps", None)
        return out

class Negated(GRPOTrainer):
    def _compute_loss(self, model, inputs):
        return -super()._compute_loss(model, inputs)

@dataclass
class OwnConfig(GRPOConfig):
    my_coef: float = 0.5

class Weighted(GRPOTrainer):
    def __init__(self, model, reward_funcs, args: OwnConfig, **kwargs):
        super().__init__(model, reward_funcs, args, **kwargs)

    def _compute_loss(self, model, inputs):
        return self.args.my_coef * super()._compute_loss(model, inputs)

class Demanding(GRPOTrainer):
    def __init__(self, *args, needed, **kwargs):
        super().__init__(*args, **kwargs)

class Hinged(DPOTrainer):
    def _compute_loss(self, model, inputs, return_outputs):
        self.loss_types = ["hinge"]
        return super()._compute_loss(model, inputs, return_outputs)
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    name = f"users_{abs(hash(str(tmp_path))) % 10**9}"
    (tmp_path / f"{name}.py").write_text(TRAINER)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_users_trainer(package):
    [same] = distances(read_subject(None, f"{package}.Same"), [("dapo", "chapter")])
    assert same.equal
    [twice] = distances(read_subject(None, f"{package}.Doubled"), [("dapo", "chapter")])
    assert twice.worst.verdict == "scaled"
    assert twice.worst.grad_norm_ratio == pytest.approx(2, rel=1e-5)
    [hinged] = distances(read_subject(None, f"{package}.Hinged"), [("dpo", "chapter")])
    assert hinged.worst.verdict == "differs"
    [negated] = distances(read_subject(None, f"{package}.Negated"), [("dapo", "chapter")])
    assert negated.worst.verdict == "differs"
    for name, sentence in (
        ("Shortened", "Shortened changed the completions"),
        ("Demanding", "Demanding cannot be run on the fixed batches: TypeError: .*needed"),
    ):
        with pytest.raises(InputError, match=sentence):
            distances(read_subject(None, f"{package}.{name}"), [("dapo", "chapter")])


def test_a_users_own_config_field_counts(package, tmp_path):
    for value, equal in ((1.0, True), (0.25, False)):
        path = tmp_path / f"{value}.yaml"
        path.write_text(f"my_coef: {value}\nloss_type: grpo")
        subject = read_subject(path, f"{package}.Weighted")
        [asked] = distances(subject, [("grpo", "chapter")])
        assert asked.equal == equal


# text, algorithm asked for, equal, changes, what else the answer must say
ASKED = {
    "several losses": (
        "{loss_type: [sigmoid, bco_pair, sft], loss_weights: [0.8, 0.2, 1.0], beta: 0.1}",
        "dpo",
        False,
        {"loss_type": ["sigmoid"], "loss_weights": None},
    ),
    "a weight on one loss": (
        "{loss_type: [sigmoid], loss_weights: [0.5], beta: 0.1}",
        "dpo",
        False,
        {"loss_weights": None},
    ),
    "plain DPO is no cDPO": (
        "{loss_type: sigmoid, beta: 0.1, max_length: 9}",
        "cdpo",
        False,
        {
            "loss_type": ["sigmoid", "robust"],
            "loss_weights": [1.8, -0.8],
            "label_smoothing": 0.1,
        },
    ),
    "KTO without reference point": (
        "{loss_type: apo_zero_unpaired, desirable_weight: 1.0}",
        "kto",
        False,
        {"loss_type": "kto"},
    ),
    "a term that no batch triggers": (
        "{loss_type: grpo, delta: 10.0, num_generations: 8}",
        "grpo",
        False,
        {"delta": None},
    ),
    "a KL that DAPO has not": (
        "{loss_type: dapo, epsilon_high: 0.28, beta: 0.04, num_generations: 8}",
        "dapo",
        False,
        {"beta": 0.0},
    ),
    "several windows of a generation": (
        "{loss_type: dapo, epsilon_high: 0.28, num_generations: 8, generation_batch_size: 64, "
        "per_device_train_batch_size: 8}",
        "dapo",
        False,
        {"steps_per_generation": 1},
    ),
    "a relative bound of CISPO": (
        "{loss_type: cispo, epsilon_high: 0.2, num_generations: 8}",
        "cispo/trl",
        False,
        {"epsilon_high": 1.2},
    ),
    "SimPO with its own margin": (
        "{loss_type: simpo, beta: 2.5, simpo_gamma: 1.0, cpo_alpha: 0.0}",
        "simpo",
        True,
        {},
    ),
    "a boolean for scale_rewards": (
        "{loss_type: dr_grpo, scale_rewards: false, num_generations: 8}",
        "drgrpo",
        True,
        {},
    ),
}


@pytest.mark.parametrize("case", ASKED)
def test_what_a_config_is_asked(case, tmp_path):
    text, asked_for, equal, changes = ASKED[case]
    path = tmp_path / "run.yaml"
    path.write_text(text)
    name, _, which = asked_for.partition("/")
    [asked] = distances(read_subject(path, None), [(name, which or "chapter")])
    assert (asked.equal, asked.changes) == (equal, changes)
    if changes:
        assert asked.then.verdict == "equal"


def test_what_is_left_out_is_said(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("{loss_type: grpo, num_generations: 8, mask_truncated_completions: true}")
    main(["compare", "--config", str(path), "--algorithms", "grpo"])
    assert "not measured: mask_truncated_completions, num_generations" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "trainer", "sentence"),
    [
        ("loss_typ: grpo\nepsilon: 0.2", None, r"loss_typ is not a known key.*loss_type"),
        (
            "epsilon: wide\nnum_generations: 4",
            None,
            r'run.yaml: epsilon is "wide", a string; write a number',
        ),
        ("beta: 0.1", None, r"fit .*DPOTrainer.*; say which with --trainer"),
        ("loss_type: grop", None, r"fit no single trainer; say which with --trainer"),
        ("loss_type: grop", "GRPOTrainer", r"cannot be run .*Unknown loss type: grop"),
        ("temperature: 0.0", "GRPOTrainer", r"cannot be run .*ZeroDivisionError"),
        ("epsilon: -1.0", "GRPOTrainer", r"epsilon must be at least 0"),
        ("algorithm: kto", None, r"a config for kto is not compared"),
        ("algorithm: ppo", None, r"a config for ppo is not compared"),
        ("algorithm: gropo", None, r"unknown algorithm 'gropo'.*grpo"),
        ("a: [", None, r"run.yaml"),
        ("beta: 0.1", "nowhere.Trainer", r"nowhere cannot be imported"),
        ("beta: 0.1", "trl.Trainers", r"trl has no Trainers"),
        ("beta: 0.1", "pathlib.Path", r"not a subclass of a trainer of TRL"),
        ("beta: 0.1", "GRPOTrainr", r"has no module.*GRPOTrainer"),
    ],
)
def test_bad_input_ends_in_one_sentence(text, trainer, sentence, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=sentence) as caught:
        distances(read_subject(path, trainer))
    assert "\n" not in str(caught.value)


# --- the command ---------------------------------------------------------------------------------


def test_the_command_requires(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("loss_type: grpo\nnum_generations: 8\nenv: {A: b}")
    main(["compare", "--config", str(path), "--algorithms", "grpo", "--require", "grpo"])
    assert "equal to grpo (chapter)" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["compare", "--config", str(path), "--algorithms", "grpo", "--require", "drgrpo"])
    assert stopped.value.code != 0
    assert re.search(
        r"is not drgrpo/chapter: relative gradient error .*; to get there: loss_type: dr_grpo, "
        "scale_rewards: none",
        str(stopped.value.code),
    )


def test_json_has_the_fields_that_programs_read(capsys):
    arguments = ["--algorithms", "grpo,dpo", "--batches", "ragged,clipped", "--format", "json"]
    main(["compare", *arguments])
    records = json.loads(capsys.readouterr().out)
    fields = """algorithm variant left right batch loss_left loss_right grad_rel_error grad_cosine
    grad_norm_ratio verdict explanation settings identity residual"""
    assert all(set(fields.split()) <= set(each) for each in records)
    assert {each["algorithm"] for each in records} == {"grpo", "dpo"}
    zero = [each for each in records if each["verdict"] == "both zero"]
    assert zero and zero[0]["grad_cosine"] is None


@pytest.mark.parametrize("how", ["table", "markdown", "html"])
def test_other_formats_hold_the_verdicts(how, capsys):
    arguments = ["--algorithms", "drgrpo", "--batches", "on_policy", "--format", how]
    main(["compare", *arguments, "--verbose"])
    printed = capsys.readouterr().out
    assert "scaled by 1.5" in printed and "alone: 5.0e-01 of the gradient" in printed


def test_contributions_are_those_of_single_terms(found):
    result = found["drgrpo", "", "chapter", "code"]["beta"]
    terms = {part.term: part.relative_change for part in result.contributions}
    assert terms["normaliser"] == pytest.approx(0.5) and 0 < terms["KL"] < 0.1


def test_unknown_names_are_refused():
    for arguments, sentence in (
        (["--batches", "raged"], "'raged' is not known.*ragged"),
        (["--algorithms", "gpro"], "'gpro' is not known.*grpo"),
        (["--require", "grpo"], "--require is about --config or --trainer"),
        (["--algorithms", "dpo", "--batches", "clipped"], "clipped does not apply to dpo"),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["compare", *arguments])
        assert re.search(sentence, str(stopped.value.code))


# --- the page ------------------------------------------------------------------------------------


def test_the_committed_page_tells_the_truth(results):
    committed = (ROOT / "rlhf_trl/compare/README.md").read_text(encoding="utf-8")
    assert page.untrue(committed, page.page(results)) == []
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", committed):
        assert (ROOT / "rlhf_trl/compare" / picture).stat().st_size > 10_000


def test_a_page_with_a_wrong_number_or_verdict_is_found_out():
    line = "| - | chapter | code | differs | 9e-01 | 0.401 | 0.597 | 2e-06 | ragged | none |"
    assert page.untrue(line, line.replace("0.401", "0.404").replace("2e-06", "7e-07")) == []
    for old, new in (("0.401", "0.421"), ("differs", "equal"), ("2e-06", "2e-02")):
        assert len(page.untrue(line, line.replace(old, new))) == 1
