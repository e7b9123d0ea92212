"""What a pipeline's folder says, against numbers counted by hand or straight from its files."""

import json
import math
import statistics

import pytest
from pipeline_folder import COURSES, make_folder

from rlhf_trl.errors import InputError
from rlhf_trl.pipeline.results import Answers, Sample, measure, read_results, summary


def answers(gold, proxy=None, greedy=None):
    """Answers with a gold of each sample, by question, and perhaps a proxy."""
    proxy = proxy or gold
    samples = [
        [Sample("text", n > 0, 10 + n, proxies[n], golds[n], 0.5, 0.25) for n in range(len(golds))]
        for golds, proxies in zip(gold, proxy, strict=True)
    ]
    return Answers([f"question {n}" for n in range(len(gold))], greedy or [1.0, None], samples)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("pipeline") / "out")


def test_a_model_is_measured_as_by_hand():
    policy = answers([[1.0, 0.0], [1.0, 1.0]])
    reference = answers([[0.0, 0.0], [1.0, 0.0]])
    numbers = measure(policy, reference)
    # question 0: 1 against 0 and 0, 0 against 0 and 0; question 1: twice 1 against 1 and 0
    assert [numbers[name] for name in ("win", "tie", "loss")] == [4 / 8, 4 / 8, 0]
    assert numbers["gold"] == 3 / 4
    assert numbers["greedy"] == 1  # of the one question to which it applies
    assert (numbers["tokens"], numbers["cut_off"]) == (10.5, 0.5)
    assert (numbers["kl"], numbers["k1"]) == (0.5, 0.25)
    assert (numbers["right"], numbers["wrong"]) == (3, 1)
    assert measure(reference, policy)["loss"] == 4 / 8
    assert math.isnan(measure(reference, reference)["tie"])


def test_a_score_that_does_not_apply_counts_nowhere():
    policy = answers([[1.0, None], [None, None]])
    numbers = measure(policy, answers([[0.0, 1.0], [0.0, 0.0]]))
    assert (numbers["gold"], numbers["right"], numbers["wrong"]) == (1, 1, 0)
    assert [numbers[name] for name in ("win", "tie", "loss")] == [1 / 2, 1 / 2, 0]


@pytest.mark.parametrize("right", [19, 20, 21])
def test_the_auc_is_that_of_all_pairs_and_needs_twenty_of_either(right):
    gold = [[1.0] * right + [0.0] * (41 - right)]
    proxy = [[(7 * n) % 13 + 3.0 * (n < right) for n in range(41)]]
    numbers = measure(answers(gold, proxy, [1.0]), answers([[0.0]], greedy=[0.0]))
    scores = proxy[0]
    pairs = [(a > b) + (a == b) / 2 for a in scores[:right] for b in scores[right:]]
    if right == 19:
        assert math.isnan(numbers["auc"])
    else:
        assert numbers["auc"] == pytest.approx(statistics.fmean(pairs), abs=1e-12)


def test_the_summary_is_mean_and_spread_of_what_the_files_hold(folder):
    results = read_results(folder)
    assert results.models == ["tiny", "sft", "grpo", "grpo_beta"]
    table = {line["model"]: line for line in summary(results)}
    for name, title in {"tiny": "tiny (reference)", "sft": "sft", "grpo": "GRPO"}.items():
        kls = []
        for seed in range(3):
            lines = (folder / "answers" / f"seed-{seed}.jsonl").read_text().splitlines()
            word = name if name == "tiny" else f"{folder}/{name}/seed-{seed}"
            samples = [one for line in lines for one in json.loads(line)[word]["samples"]]
            kls.append(statistics.fmean(one["scores"]["kl"] for one in samples))
        cell = f"{statistics.fmean(kls):.2f} ± {statistics.stdev(kls):.2f}"
        assert table[title]["KL"] == cell
    assert table["GRPO"]["AUC of the proxy"] == "- (0 right, 160 wrong)"
    assert table["tiny (reference)"]["win"] == "-"
    assert table["sft"]["AUC of the proxy"].split(" (")[0].endswith(" in 1 of 3 seeds")


def test_a_curve_begins_with_the_reference_where_its_run_does(folder):
    results = read_results(folder)
    assert results.with_curve() == ["grpo"]
    assert [point.step for point in results.curve("grpo", 1)] == [0, 10, 20, 40, 60]
    assert results.curve("grpo", 1)[0].answers is results.answers["tiny", None, 1]
    assert results.curve("grpo", 1)[-1].answers is results.answers["grpo", None, 1]
    config = folder / "grpo" / "seed-1" / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace("model_name_or_path: tiny", "model_name_or_path: other"))
    assert [point.step for point in results.curve("grpo", 1)] == [10, 20, 40, 60]
    config.write_text(text)


def test_a_stage_may_be_the_reference(tmp_path):
    folder = make_folder(tmp_path / "out", seeds=1)
    for word in (f"{folder}/sft/seed-0", f"{folder}/sft/seed-0/model"):
        (folder / "answers" / "seed-0.json").write_text(json.dumps({"reference": word}))
        results = read_results(folder)
        assert results.models == ["sft", "grpo", "grpo_beta"]  # tiny is no stage
        assert results.title(results.reference) == "sft"
    assert [line["win"] == "-" for line in summary(results)] == [True, False, False]


def test_without_gold_its_columns_are_left_out(tmp_path):
    results = read_results(make_folder(tmp_path / "out", gold=None, seeds=1))
    assert [*summary(results)[0]] == ["model", "proxy", "KL", "KL, k1", "tokens", "cut off"]


def test_a_folder_that_is_not_whole_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match=r"nothing/pipeline\.json cannot be read \(No such file"):
        read_results(tmp_path / "nothing")
    folder = make_folder(tmp_path / "out", {"sft": COURSES["sft"]}, seeds=2)
    path = folder / "answers" / "seed-1.jsonl"
    text = path.read_text()
    path.write_text(text[:-20])
    with pytest.raises(InputError, match=r"seed-1\.jsonl cannot be read"):
        read_results(folder)
    path.write_text(text.replace('"tiny"', '"other"'))
    with pytest.raises(InputError, match=r"seed-0\.jsonl has no answers of other; move seed-0"):
        read_results(folder)
    path.unlink()
    with pytest.raises(InputError, match=r"name the folder of a pipeline that has run to its end"):
        read_results(folder)


def test_stages_with_one_title_are_told_apart(tmp_path):
    folder = make_folder(tmp_path / "out", seeds=1)
    path = folder / "pipeline.json"
    path.write_text(path.read_text().replace("GRPO, penalty", "GRPO"))
    results = read_results(folder)
    assert [results.title(name) for name in results.stages] == ["rm", "sft", "grpo", "grpo_beta"]
