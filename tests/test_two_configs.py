"""`rlhf-trl compare --config A --config B`: fields that differ, and what they do to a gradient."""

import json

import pytest
import torch

from rlhf_trl.cli import main
from rlhf_trl.compare import two_configs
from rlhf_trl.compare.matrix import Matrix
from rlhf_trl.compare.measure import Book
from rlhf_trl.compare.windows.batches import BATCHES
from rlhf_trl.run.differences import UNSET, differences


def test_fields_that_differ_are_named_with_their_dots():
    before = {"a": 1, "block": {"x": [1, 2], "y": 0}, "gone": None, "swap": {"k": 1}}
    now = {"a": 1, "block": {"x": [1, 3], "y": 0, "z": {"w": 5}}, "swap": 2}
    assert differences(before, now) == {
        "block.x": ([1, 2], [1, 3]),
        "block.z": (UNSET, {"w": 5}),
        "gone": (None, UNSET),
        "swap": ({"k": 1}, 2),
    }
    assert differences(now, now) == {}


def test_two_policy_gradients_are_compared_field_by_field_and_on_the_same_batches(tmp_path, capsys):
    grpo, gspo = tmp_path / "grpo.yaml", tmp_path / "gspo.yaml"
    grpo.write_text("algorithm: grpo\nlearning_rate: 1.0e-4\n")
    gspo.write_text("algorithm: gspo\nformulation: chapter\nepsilon: 0.2\nlearning_rate: 2.0e-4\n")
    main(["compare", "--config", str(grpo), "--config", str(gspo), "--format", "json"])
    found = json.loads(capsys.readouterr().out)
    # what one writes and the other has by default does not differ
    assert found["fields"] == {
        "algorithm": ["grpo", "gspo"],
        "learning_rate": [1.0e-4, 2.0e-4],
    }
    assert found["unseen"] == ["learning_rate"]
    measured = {each["batch"]: each for each in found["batches"]}
    assert measured["on_policy"]["verdict"] == "equal"  # every ratio is 1

    # the book's functions on the same batch, where the trainers were measured above
    batch = next(batch for batch in BATCHES if batch.name == "heavy")
    matrix = Matrix()
    window = matrix.window("GRPOTrainer", (), batch)
    (loss, left), (other_loss, right) = (
        matrix.side(Book(name), window) for name in ("grpo", "gspo")
    )
    heavy = measured["heavy"]
    assert heavy["first_loss"] == pytest.approx(loss, abs=1e-5)
    assert heavy["second_loss"] == pytest.approx(other_loss, abs=1e-5)
    assert heavy["error"] == pytest.approx(float((right - left).norm() / left.norm()), rel=1e-4)
    cosine = float(torch.nn.functional.cosine_similarity(left, right, dim=0))
    assert heavy["cosine"] == pytest.approx(cosine, rel=1e-4) and heavy["cosine"] < 0.9


def test_what_cannot_be_measured_together_is_said(tmp_path, capsys):
    pairs, prompts, answers = (tmp_path / f"{name}.yaml" for name in ("dpo", "grpo", "sft"))
    pairs.write_text("algorithm: dpo\nbeta: 3.0\n")
    prompts.write_text("algorithm: grpo\nbeta: 0.0\n")
    answers.write_text("dataset: {source: reasoning_gym}\n")
    main(["compare", "--config", str(pairs), "--config", str(prompts)])
    printed = capsys.readouterr().out
    assert "beta: 3.0 -> 0.0\n" in printed
    assert "DPOTrainer and GRPOTrainer train on different kinds of data" in printed.replace(
        "\n", " "
    )
    main(["compare", "--config", str(answers), "--config", str(pairs)])
    printed = " ".join(capsys.readouterr().out.split())
    assert "SFTTrainer and DPOTrainer train on different kinds of data" in printed


def test_two_configs_of_sft_are_measured_on_the_same_batches(tmp_path):
    plain, smoothed = (tmp_path / f"{name}.yaml" for name in ("plain", "smoothed"))
    plain.write_text("dataset: {source: reasoning_gym}\n")
    smoothed.write_text("dataset: {source: reasoning_gym}\nlabel_smoothing_factor: 0.1\n")
    compared = two_configs.compare_configs(str(plain), str(smoothed))
    assert compared.fields == {"label_smoothing_factor": (0.0, 0.1)} and compared.unseen == ()
    assert {result.verdict for result in compared.batches} == {"differs"}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("--config a --config b --config c", "--config is given 3 times; compare takes two"),
        ("--config a --config b --trainer c.D", "--trainer is about one --config"),
        ("--config a --config b --require grpo", "--require is about one --config"),
        ("--config a --config b --format html", "write table, markdown or json"),
        ("--trainer a.B --quick", "--quick belongs to the matrix; leave out --quick or --trainer"),
        ("--config a --page b", "--page belongs to the matrix; leave out --page or --config"),
    ],
)
def test_options_that_do_not_go_together_are_refused(words, sentence):
    with pytest.raises(SystemExit) as stop:
        main(["compare", *words.split()])
    assert str(stop.value.code).startswith("error: ") and sentence in str(stop.value.code)


def test_nothing_is_measured_for_two_configs_of_which_one_is_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(two_configs, "Matrix", None)
    (tmp_path / "a.yaml").write_text("algorithm: grpo\n")
    with pytest.raises(SystemExit) as stop:
        main(["compare", "--config", str(tmp_path / "a.yaml"), "--config", "no.yaml"])
    assert "no.yaml" in str(stop.value.code)
