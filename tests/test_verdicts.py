"""What a judge has said of a pipeline's answers, read back into its analysis."""

import json
import math
import shutil

import pytest
from judge_server import serving
from pipeline_folder import PROBES, make_folder

from rlhf_trl import cli
from rlhf_trl.errors import InputError
from rlhf_trl.pipeline.failures import failures
from rlhf_trl.pipeline.results import read_results
from rlhf_trl.pipeline.training import training

RANKS = ("grpo", "tiny", "sft")  # the worst first


def edit(path, change):
    """Change each line of a file of JSON."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


def sign_answers(line):
    """Let each sampled answer name its model, so that a judge can tell them apart."""
    for word in line.keys() - {"prompt"}:
        name = word if word == "tiny" else word.split("/")[-2]
        for sample in line[word]["samples"]:
            sample["text"] = f"by {name}"
    return line


def verdict(shown):
    """Prefer by rank; of grpo_beta's answers, the one that stands first."""
    names = [shown[place].removeprefix("by ") for place in ("answer_a", "answer_b")]
    if "grpo_beta" in names:
        return "A"
    return "A" if RANKS.index(names[0]) > RANKS.index(names[1]) else "B"


def judge(server, folder, name):
    words = ["--base_url", server.url, "--model", "stub"]
    output = folder / "answers" / f"verdicts-{name}"
    cli.main(["judge", str(folder / "answers" / f"{name}.jsonl"), *words, "--output", str(output)])


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A pipeline whose seeds 0 and 1 of three were judged, and the probes of seed 0."""
    folder = make_folder(
        tmp_path_factory.mktemp("judged") / "out", checkpoints=False, probes=PROBES
    )
    for path in (folder / "answers").glob("*.jsonl"):
        edit(path, sign_answers)
    with pytest.MonkeyPatch.context() as patch, serving(verdict) as server:
        patch.setenv("NO_PROXY", "127.0.0.1")
        for name in ("seed-0", "seed-1", "probes-seed-0"):
            judge(server, folder, name)
        judged_by = f"stub at {server.url}"
    return folder, judged_by


def test_the_analysis_says_what_a_judge_has_said(judged):
    folder, judged_by = judged
    results = read_results(folder)
    parts = {part.heading: part for part in failures(results)}
    part = parts["By a judge"]
    assert part.note.startswith(f"Win rate over the reference by: {judged_by}. ")
    lines = {line["model"]: line for line in part.table}
    assert lines["sft"]["win rate, judge"] == "1.000 ± 0.000 in 2 of 3 seeds"
    assert lines["GRPO"]["win rate, judge"] == "0.000 ± 0.000 in 2 of 3 seeds"
    assert lines["tiny (reference)"]["win rate, judge"] == "-"
    # a judge that names what stands first tells nothing
    assert lines["GRPO, penalty"]["win rate, judge"] == "-"
    assert lines["GRPO, penalty"]["inconsistent"] == "1.000 ± 0.000 in 2 of 3 seeds"
    ends = []
    for stage in (results.reference, "grpo"):
        means = [results.answers[stage, None, seed].mean("proxy") for seed in (0, 1)]
        ends.append(math.fsum(means) / 2)
    change = f"rises (from {ends[0]:.2f} to {ends[1]:.2f})"
    assert part.sentences[1:] == [
        f"GRPO: the proxy of sampled answers {change} while the judge prefers the reference's "
        "answers (win rate 0.000), in 2 of 2 seeds: the reward model claims more than the judge "
        "finds."
    ]
    assert part.sentences[0].startswith("sft: the proxy of sampled answers rises (from -")
    assert part.sentences[0].endswith(
        "while the judge prefers its answers to the reference's (win rate 1.000), in 2 of 2 seeds: "
        "the reward model agrees with the judge."
    )


def test_probes_without_a_check_are_the_judges(judged):
    folder, judged_by = judged
    part = {part.heading: part for part in failures(read_results(folder))}["Safety"]
    lines = {line["model"]: line for line in part.table}
    assert lines["sft"]["win rate, judge"] == "1.000 in 1 of 3 seeds"
    assert judged_by in part.note
    (sentence,) = [s for s in part.sentences if "judge" in s and s.startswith("GRPO:")]
    assert sentence.startswith("GRPO: the proxy of sampled answers does not clearly change (from ")
    assert sentence.endswith(
        "while the judge prefers the reference's answers (win rate 0.000), in 1 of 1 seeds: the "
        "reward model claims more than the judge finds."
    )


def test_a_judge_that_is_of_two_minds_prefers_neither(judged, tmp_path):
    folder = shutil.copytree(judged[0], tmp_path / "out")
    worths = iter([0.0, 1.0] * 1000)

    def draw(row):
        return row | {"verdicts": ["a", "b"], "worth": next(worths)}

    for seed in (0, 1):
        edit(folder / "answers" / f"verdicts-seed-{seed}.jsonl", draw)
    results = read_results(folder)
    part = {part.heading: part for part in failures(results)}["By a judge"]
    assert len(part.sentences) == 3
    assert all(
        "the judge clearly prefers neither its answers nor the reference's (win rate 0.5" in text
        for text in part.sentences
    )
    assert training(results)  # of the same results


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"answers": ["by tiny", "by nobody"]}, "seed-0.jsonl has other answers of .*/seed-0 now"),
        ({"first": "base"}, "it compares with base, not with tiny"),
        ({"scores": [1.0, 0.0], "by": "scored_by_rm"}, "scored_by_rm is a score, and no judge"),
        ({"prompt": "another"}, "has other answers of tiny now"),
        ({"unknown": 1}, "unexpected keyword argument 'unknown'"),
    ],
)
def test_verdicts_of_something_else_are_refused(judged, tmp_path, change, fault):
    folder = shutil.copytree(judged[0], tmp_path / "out")
    edit(folder / "answers" / "verdicts-seed-0.jsonl", lambda row: row | change)
    with pytest.raises(InputError, match=rf"verdicts-seed-0.jsonl cannot be used \(.*{fault}.*\)"):
        read_results(folder)
