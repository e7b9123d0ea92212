"""What a pipeline's files say of training: costs, steadiness; and ANALYSIS.md as a whole."""

import json
import re
from statistics import mean

import pytest
from pipeline_folder import COURSES, PROBES, make_folder

from rlhf_trl.pipeline.analysis import as_markdown, chapters
from rlhf_trl.pipeline.results import read_results
from rlhf_trl.pipeline.training import accepted_gain, steadiness, training


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "out", seeds=2, checkpoints=False, probes=PROBES)


def log(folder, name, seed, **columns):
    """Give a run another log: a list of values for each name."""
    rows = zip(*columns.values(), strict=True)
    entries = [
        {"step": step, **dict(zip(columns, row, strict=True))} for step, row in enumerate(rows, 1)
    ]
    (folder / name / f"seed-{seed}" / "log.json").write_text(json.dumps(entries))


def parts(folder):
    return {part.heading: part for part in training(read_results(folder))}


def test_the_price_of_a_gain_counts_what_a_run_was_made_from(folder):
    results = read_results(folder)
    golds = {
        name: mean(
            sample["scores"]["exact_match"]
            for line in (folder / "answers" / "seed-1.jsonl").read_text().splitlines()
            for sample in json.loads(line)[word]["samples"]
        )
        for name, word in {"tiny": "tiny", "beta": f"{folder}/grpo_beta/seed-1"}.items()
    }
    gain = golds["beta"] - golds["tiny"]
    assert accepted_gain(results, "grpo_beta", 1) == pytest.approx(gain, rel=1e-12)
    costs = parts(folder)["Costs"]
    lines = {line["stage"]: line for line in costs.table}
    # 20 CPU s with seed 0, 21 with seed 1, and as many for the reward model
    prices = [40 * 0.01 / accepted_gain(results, "grpo_beta", 0), 42 * 0.01 / gain]
    price = lines["GRPO, penalty"]["CPU s per 0.01 gained"]
    assert price.startswith(f"{mean(prices):.2f} ± ")
    assert f"GRPO, penalty paid {price} CPU s for 0.01 of gold." in costs.sentences
    # gold fell: nothing that could be accepted, at any price
    assert lines["GRPO"]["accepted gain"] == lines["GRPO"]["CPU s per 0.01 gained"] == "-"
    assert not any(sentence.startswith("GRPO paid") for sentence in costs.sentences)
    assert lines["all"]["CPU s"] == "82.0 ± 2.8"


def test_without_a_clear_gain_no_price_is_told(tmp_path):
    courses = {name: [(60, 1.0, 0.3, 0.0)] for name in COURSES}
    assert parts(make_folder(tmp_path / "out", courses))["Costs"].sentences == [
        "No run has an accepted gain."
    ]


def test_spikes_are_named_where_there_are_some(folder):
    calm = [
        "Largest gradient norm, in medians: above 10 in 0 of 8 runs.",
        "Largest rise of the KL, in medians: no run tells.",
        "Restarts: above 0 in 4 of 8 runs: rm with seed 1 (1), sft with seed 1 (1), "
        "GRPO with seed 1 (1), GRPO, penalty with seed 1 (1).",
    ]
    assert parts(folder)["Stability"].sentences == calm
    log(folder, "grpo", 1, grad_norm=[1.0, 2.0, 2.0, 50.0, 2.0], kl=[0.0, 0.1, 0.3, 0.2, 0.3])
    log(folder, "sft", 0, grad_norm=[1.0, float("nan"), 1.0])
    log(folder, "grpo", 0, grad_norm=[1.0] * 5, kl=[0.0, 0.1, 0.2, 3.2, 3.1])
    stability = parts(folder)["Stability"]
    assert stability.sentences[:2] == [
        "Largest gradient norm, in medians: above 10 in 2 of 8 runs: sft with seed 0 (inf), "
        "GRPO with seed 1 (25).",
        "Largest rise of the KL, in medians: above 10 in 1 of 2 runs: GRPO with seed 0 (30).",
    ]
    lines = {line["stage"]: line for line in stability.table}
    assert lines["GRPO"]["Largest rise of the KL"] == "1.600 ± 1.980"  # 3.0 and 0.2
    assert lines["rm"]["Largest gradient norm"] == "3.000 ± 0.000"
    assert lines["rm"]["Largest rise of the KL"] == "-"


def test_a_fall_is_from_the_best_evaluation_before(folder):
    log(folder, "grpo", 0, eval_exact_match=[0.4, 0.9, 0.5, 0.8, 0.7], grad_norm=[1.0] * 5)
    log(folder, "grpo", 1, eval_exact_match=[0.4, 0.5, 0.5, 0.8, 0.9], grad_norm=[1.0] * 5)
    results = read_results(folder)
    falls = [steadiness(results, "grpo", seed)["Largest fall"] for seed in (0, 1)]
    assert falls == pytest.approx([0.4, 0.0])


# Words that a sentence may have only if a number says so.
VERDICTS = re.compile("rises|falls|agrees|claims (more|less)|not clearly|over-optimization")


def test_other_numbers_give_other_words(tmp_path):
    """The same pipeline with the roles of two policies exchanged: their sentences are, too."""
    one = make_folder(tmp_path / "one", probes=PROBES)
    swapped = {**COURSES, "sft": COURSES["grpo_beta"], "grpo_beta": COURSES["sft"]}
    probes = {**PROBES, "sft": PROBES["grpo_beta"], "grpo_beta": PROBES["sft"]}
    other = make_folder(tmp_path / "other", swapped, probes=probes)
    texts = []
    for folder in (one, other):
        results = read_results(folder)
        texts.append(as_markdown(results, chapters(results)))
    told = [[line[2:] for line in text.splitlines() if line.startswith("- ")] for text in texts]

    def verdicts(sentences, name):
        own = [sentence for sentence in sentences if sentence.startswith(f"{name}: ")]
        return [[match[0] for match in VERDICTS.finditer(sentence)] for sentence in own]

    assert verdicts(told[0], "sft") == verdicts(told[1], "GRPO, penalty")
    assert verdicts(told[0], "GRPO, penalty") == verdicts(told[1], "sft")
    assert verdicts(told[0], "sft") != verdicts(told[1], "sft")
    assert verdicts(told[0], "GRPO") == verdicts(told[1], "GRPO")
    headings = [line for line in texts[0].splitlines() if line.startswith("#")]
    assert headings == [
        f"# Analysis of {one}",
        "## Models",
        "## Failures",
        "### The reward model against gold",
        "### Agreement",
        "### Out of distribution",
        "### Capability",
        "### Safety",
        "## Training",
        "### Costs",
        "### Stability",
        "### Curves",
    ]
    assert "None here" not in texts[0]
    assert "3 seeds, 40 held-out questions, 4 sampled answers to each" in texts[0]
