"""The matrix of book against TRL: verdicts, proofs, command, page."""

import json
import math
import re
from pathlib import Path

import pytest
import torch

from rlhf_trl.algorithms import ALGORITHMS
from rlhf_trl.cli import main
from rlhf_trl.compare import as_stock
from rlhf_trl.compare.identities import sampler_weight
from rlhf_trl.compare.matrix import EQUAL, RESIDUAL, Matrix, judge, kind_of
from rlhf_trl.compare.pages import matrix_page as page
from rlhf_trl.compare.pages import report
from rlhf_trl.compare.rows import OWN_ROWS, ROWS
from rlhf_trl.compare.trainers import OURS
from rlhf_trl.compare.windows import pair_examples
from rlhf_trl.compare.windows.batches import BATCHES
from rlhf_trl.compare.windows.terms import Terms
from rlhf_trl.tiny.tokenizer import build_tokenizer

ROOT = Path(__file__).parent.parent
BATCH = {batch.name: batch for batch in BATCHES}


@pytest.fixture(scope="module")
def matrix():
    """One for the whole file: windows and sides are measured once."""
    return Matrix()


@pytest.fixture(scope="module")
def results(matrix):
    return matrix.run(ROWS, BATCHES)


@pytest.fixture(scope="module")
def stocks():
    return as_stock.measure()


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


def test_every_trainer_of_the_package_is_compared(results):
    files = (ROOT / "rlhf_trl" / "trainers").glob("*.py")
    ours = {n for f in files for n in re.findall(r"^class (Book\w+Trainer)\b", f.read_text(), re.M)}
    assert ours == set(OURS) and len(ours) == 10
    own = [r for r in results if r.row in OWN_ROWS]
    assert {r.row.right.trainer for r in own} == ours
    # the code's mean of SFT is over a micro-batch; a proof says so
    other = {(r.row.algorithm, r.batch) for r in own if r.verdict != "equal"}
    assert other == {("sft", "accumulation")}


def test_the_windows_of_our_reward_models_are_what_they_say():
    batch, tokenizer = BATCH["accumulation"], build_tokenizer()
    for kind, classes in (("orm", {0, 1}), ("prm", {0, 1}), ("prm/code", {0, 1, 2})):
        rows, micro = pair_examples.by_hand(kind, batch)
        assert len(rows) == 16 and [len(part["labels"]) for part in micro] == [8, 8]
        ids, labels = (micro[1][name][3].tolist() for name in ("input_ids", "labels"))
        row, steps = rows[8 + 3], rows[8 + 3].get("completions", [])
        plain = [token for token in ids if token != tokenizer.pad_token_id]
        text = row["prompt"] + (row["completion"] + "<|end|>" if kind == "orm" else "")
        text += "".join(f"{step}\n" for step in steps)
        assert tokenizer.decode(plain) == text  # a character a token, but for the end
        start, counted = len(row["prompt"]), [n for n, label in enumerate(labels) if label != -100]
        if kind == "orm":
            assert counted == list(range(start, len(plain)))
            assert {labels[n] for n in counted} == {int(row["label"])} == {0}  # the rejected
            continue
        ends = [start + len("".join(steps[: n + 1])) + n for n in range(len(steps))]
        wanted = dict(zip(ends, row["labels"], strict=True))
        if kind == "prm":  # neutral steps count for nothing, good ones are 1, bad ones 0
            wanted = {n: (label + 1) // 2 for n, label in wanted.items() if label}
        else:
            wanted = {n: label + 1 for n, label in wanted.items()}
        assert {n: labels[n] for n in counted} == wanted and len(steps) > 1
        assert {x for part in micro for x in part["labels"].unique().tolist()} - {-100} == classes
    rows, micro = pair_examples.by_hand("kwise", batch)
    assert len(rows[0]["ranked"]) == 3 and [len(part["input_ids"]) for part in micro] == [12, 12]
    texts = tokenizer.batch_decode(micro[0]["input_ids"][3:6], skip_special_tokens=True)
    assert texts == [rows[1]["prompt"] + text for text in rows[1]["ranked"]]


def test_the_batches_are_what_they_say(matrix):
    row = next(r for r in ROWS if r.algorithm == "grpo")
    views = {name: matrix.window(*kind_of(row), batch).view() for name, batch in BATCH.items()}
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


def by_hand(mode, low, high, old, sampled):
    """The weights of one completion's tokens, in plain numbers."""
    ratios = [math.exp(a - b) for a, b in zip(old, sampled, strict=True)]
    if mode.startswith("sequence"):
        ratios = [math.prod(ratios)] * len(ratios)
    if mode.endswith("mask"):
        return [r if low <= r <= high else 0.0 for r in ratios]
    return [min(max(r, low), high) for r in ratios]


MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")


@pytest.mark.parametrize("mode", MODES)
def test_the_weights_of_another_sampler_are_the_plain_formulas(matrix, found, mode):
    window = matrix.window("GRPOTrainer", (), BATCH["sampler"])
    view = window.view()
    terms = Terms(view, view.mask, 0 * view.mask, view.mask, 0.0)
    sampler_weight(mode, 0.8, 1.2).apply(terms)
    after = terms.surrogate
    kept = set()
    for row, length in enumerate(view.lengths.flatten().int().tolist()):
        sampled = [
            -4.8 + 0.5 * math.sin(token + place)
            for place, token in enumerate(view.ids[row, :length].tolist())
        ]
        expected = by_hand(mode, 0.8, 1.2, view.old_logps[row, :length].tolist(), sampled)
        assert after[row, :length].tolist() == pytest.approx(expected, rel=1e-6)
        kept |= {
            "low" if w == 0.8 else "high" if w == 1.2 else "0" if not w else "w" for w in expected
        }
    assert kept == ({"0", "w"} if mode.endswith("mask") else {"low", "high", "w"})
    for right in ("TRL grpo", "BookGRPOTrainer"):
        result = found["grpo", mode, "chapter", right]["sampler"]
        assert result.verdict == "differs" and result.residual < 1e-5


def test_ktos_reference_point_matters_on_the_batches(matrix):
    row = next(r for r in ROWS if r.algorithm == "kto")
    points = {}
    for name in ("mild", "heavy", "ragged", "accumulation"):
        parts = matrix.window(*kind_of(row), BATCH[name]).view.micro
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
    ("cispo_window", "no lower bound", "chapter", "TRL cispo", ("heavy", "ragged"), "equal", 1),
    ("cispo", "no lower bound", "chapter", "TRL cispo", ("heavy",), "equal", 1),
    ("cispo", "no lower bound", "chapter", "TRL cispo", ("ragged",), "differs", None),
    ("dapo_per_prompt", "", "chapter", "TRL dapo", ("heavy",), "equal", 1),
    ("dapo_per_prompt", "", "chapter", "TRL dapo", ("ragged",), "differs", None),
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


def test_a_proof_that_leaves_out_a_term_is_none(matrix):
    """An identity is not proved by having the right name."""
    from dataclasses import replace

    row = next(r for r in ROWS if r.variant == "TRL's default" and r.algorithm == "grpo")
    short = replace(row, identities=row.identities[1:])
    [result] = matrix.run([short], [BATCH["ragged"]])
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
def test_other_formats_hold_the_verdicts(how, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    arguments = ["--algorithms", "drgrpo", "--batches", "on_policy", "--format", how]
    main(["compare", *arguments, "--verbose"])
    printed = capsys.readouterr().out
    assert "scaled by 1.5" in printed and "alone: 5.0e-01 of the gradient" in printed


def test_contributions_are_those_of_single_terms(found):
    result = found["drgrpo", "", "chapter", "code"]["beta"]
    terms = {part.term: part.relative_change for part in result.contributions}
    assert terms["normalizer"] == pytest.approx(0.5) and 0 < terms["KL"] < 0.1


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


NUMBER = re.compile(r"(?<![\w.`#/])[-+]?\d+\.\d+(?:e[-+]?\d+)?(?![\w.])|\b\d+e[-+]\d+\b")


def untrue(committed, measured, tolerance=0.01):
    """Return the lines of a page that a new measurement contradicts, in words or numbers.

    Numbers below 1e-4 only need to stay there.
    """
    old, new = committed.splitlines(), measured.splitlines()
    if len(old) != len(new):
        return [f"{len(old)} lines -> {len(new)} lines"]
    return [f"{a} -> {b}" for a, b in zip(old, new, strict=True) if not agree(a, b, tolerance)]


def agree(one, other, tolerance):
    if NUMBER.sub("#", one) != NUMBER.sub("#", other):
        return False
    pairs = zip(NUMBER.findall(one), NUMBER.findall(other), strict=True)
    return all(
        abs(float(a) - float(b)) <= tolerance and (abs(float(a)) < 1e-4) == (abs(float(b)) < 1e-4)
        for a, b in pairs
    )


def test_formulation_trl_is_stock_bit_for_bit(stocks):
    assert [as_stock.verdict(result) for result in stocks] == ["the same bits"] * len(
        as_stock.CASES
    )
    trainers = {case.trainer for case in as_stock.CASES}
    assert {f"Book{name}" for name in trainers} == {
        name for name in OURS if name not in ("BookPPOTrainer", "BookDistillationTrainer")
    } - {"BookTokenRewardTrainer"}
    losses = {round(result.loss_stock, 6) for result in stocks if result.case.batch != "beta"}
    assert len(losses) >= 20  # the cases are not one and the same


def test_a_trainer_that_is_not_stock_is_named(monkeypatch, capsys):
    from rlhf_trl.trainers.rloo import BookRLOOTrainer

    compute = BookRLOOTrainer._compute_loss
    monkeypatch.setattr(
        BookRLOOTrainer, "_compute_loss", lambda *given: compute(*given) * (1 + 1e-6)
    )
    wanted = [case for case in as_stock.CASES if case.trainer in ("RLOOTrainer", "RewardTrainer")]
    monkeypatch.setattr(as_stock, "CASES", wanted)
    with pytest.raises(SystemExit, match="bit for bit: RLOOTrainer normalize_advantages=True"):
        main(["compare", "--batches", "over_long,heavy"])
    assert re.search(r"differs: loss \S+, gradient \S+", capsys.readouterr().out)


def test_the_committed_page_tells_the_truth(results, stocks, monkeypatch):
    committed = (ROOT / "rlhf_trl/compare/README.md").read_text(encoding="utf-8")
    for name, row in [*ALGORITHMS.items()]:  # an added row may wait for the next page
        if "code" not in row.formulations and f"### {row.title}\n" not in committed:
            monkeypatch.delitem(ALGORITHMS, name)
    assert untrue(committed, page.page(results, stocks)) == []
    for picture in re.findall(r"!\[[^]]*\]\(([^)]+)\)", committed):
        assert (ROOT / "rlhf_trl/compare" / picture).stat().st_size > 10_000


def test_a_page_with_a_wrong_number_or_verdict_is_found_out():
    line = "| - | chapter | code | differs | 9e-01 | 0.401 | 0.597 | 2e-06 | ragged | none |"
    assert untrue(line, line.replace("0.401", "0.404").replace("2e-06", "7e-07")) == []
    for old, new in (("0.401", "0.421"), ("differs", "equal"), ("2e-06", "2e-02")):
        assert len(untrue(line, line.replace(old, new))) == 1
