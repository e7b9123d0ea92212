"""Reward-model data: what is made, sampled and read, and every broken input's sentence."""

import json
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from datasets import Dataset

from rlhf_trl.data import columns, files
from rlhf_trl.data.blocks import FileData, GymData, SampledPairs, Spec
from rlhf_trl.data.files import read
from rlhf_trl.data.gym import GymTasks
from rlhf_trl.data.judgment_blocks import (
    AnswersFile,
    OfflineRewardPairs,
    OutcomeData,
    RankedFile,
    RankedLists,
    RewardData,
    RewardPairsFile,
    SampledAnswers,
    SampledRewardPairs,
    SampledTraces,
    SyntheticTraces,
    TracesFile,
)
from rlhf_trl.data.judgments import (
    checked_outcomes,
    checked_ranked,
    checked_traces,
    chunked,
    load_outcomes,
    load_pairs_or_ranked,
    load_traces,
)
from rlhf_trl.data.made import ORDER, offline_pairs, ranked_demonstrations, synthetic_traces
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.steps import LETTERS
from rlhf_trl.errors import InputError
from rlhf_trl.rewards.verifiers import exact_match
from rlhf_trl.rollouts import sampling
from rlhf_trl.rollouts.generate import SAMPLED
from rlhf_trl.tiny.demonstrator import MIXTURES

SPELL = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})
SUM = Spec("chain_sum", config={"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
GYM = {"specs": [SPELL], "size": 40, "eval_size": 20}


def said(text):
    return [{"role": "assistant", "content": f"<think></think><answer>{text}</answer>"}]


class Sampler:
    """Answers with the right word and its mirror image in turn, and notes what was asked for."""

    def __init__(self):
        self.calls = []

    def __call__(self, rows, count, side):
        self.calls.append((len(rows), count, side))
        return [
            {
                "prompt": row["prompt"],
                "completion": said(row["answer"] if n % 2 == 0 else row["answer"][::-1] + "x"),
                "label": n % 2 == 0,
                "finished": True,
                **{name: row[name] for name in ("question", "answer", "task")},
            }
            for row in rows
            for n in range(count)
        ]


def never(*_):
    raise AssertionError("nothing is to be sampled")


def right(rows, column):
    given = {"answer": [row["answer"] for row in rows], "task": [row["task"] for row in rows]}
    return exact_match([row[column] for row in rows], **given)


# --- pairs ---------------------------------------------------------------------------------------


def test_mixed_pairs_are_the_offline_and_the_on_policy_ones_shuffled():
    def sample(rows, count, side):  # wrong answers to seven questions, beside right ones
        wrong = [row["rejected"] for row in offline_pairs(rows[:7], 99)]
        return [
            {"completion": wrong[i] if n and i < 7 else said(row["answer"])}
            for i, row in enumerate(rows)
            for n in range(count)
        ]

    config = SampledPairs(**GYM, pairs="mixed")
    found = load_preferences(config, sample=sample)
    tasks = GymTasks(GymData(**GYM))
    offline = offline_pairs(tasks.train, config.seed)
    expected = [{**row, "kind": "offline"} for row in offline]
    expected += [{**row, "kind": "on_policy"} for row in offline_pairs(tasks.train[:7], 99)]
    assert list(found.train) != expected
    assert sorted(map(json.dumps, found.train)) == sorted(map(json.dumps, expected))
    assert Counter(row["kind"] for row in found.held_out) == {"offline": 20, "on_policy": 7}
    assert found.dropped == {"right and wrong not both among 8 samples": 33}
    assert found.dropped_held_out == {"right and wrong not both among 8 samples": 13}
    assert list(load_preferences(config, sample=sample).train) == list(found.train)
    other = load_preferences(SampledPairs(**GYM, pairs="mixed", seed=1), sample=sample)
    kinds = [[row["kind"] for row in rows] for rows in (found.train, other.train)]
    assert kinds[0] != kinds[1]


def test_offline_pairs_sample_the_candidates_only():
    sample = Sampler()
    found = load_pairs_or_ranked(OfflineRewardPairs(**GYM, candidates=4), None, sample)
    assert sample.calls == [(20, 4, "held-out")]
    assert (len(found.train), len(found.held_out), len(found.candidates)) == (40, 20, 80)
    assert found.conversational
    none = load_pairs_or_ranked(OfflineRewardPairs(**GYM, candidates=0), None, never)
    assert (none.candidates, list(none.train)) == ([], list(found.train))


@pytest.mark.parametrize(("candidates", "asked"), [(2, 6), (8, 8)])
def test_pairs_and_candidates_share_the_held_out_samples(candidates, asked):
    sample = Sampler()
    config = SampledRewardPairs(
        **GYM, pairs="on_policy", samples_per_prompt=6, candidates=candidates
    )
    found = load_pairs_or_ranked(config, 30, sample)
    assert sample.calls == [(30, 6, "train"), (20, asked, "held-out")]
    assert (len(found.train), len(found.held_out)) == (30, 20)
    assert len(found.candidates) == 20 * candidates
    for row, task in zip(found.train, found.tasks.train[:30], strict=True):
        assert row["chosen"] == said(task["answer"])
        assert row["rejected"] == said(task["answer"][::-1] + "x")
    questions = [row["question"] for row in found.candidates]
    assert questions == [r["question"] for r in found.tasks.held_out for _ in range(candidates)]
    assert [row["label"] for row in found.candidates[:2]] == [True, False]


def test_pairs_are_made_of_as_many_answers_as_asked_for_and_not_of_all_candidates():
    late = {"train": 2, "held-out": 3}  # the first right answer to a question

    def sample(rows, count, side):
        numbered = [(row, n) for row in rows for n in range(count)]
        return [{"completion": said(r["answer"] if n >= late[side] else "x")} for r, n in numbered]

    config = SampledRewardPairs(**GYM, pairs="mixed", samples_per_prompt=3, candidates=8)
    found = load_pairs_or_ranked(config, None, sample)
    assert Counter(row["kind"] for row in found.train) == {"offline": 40, "on_policy": 40}
    assert Counter(row["kind"] for row in found.held_out) == {"offline": 20}
    assert len(found.candidates) == 20 * 8


PAIR = {"prompt": "one", "chosen": "yes", "rejected": "no"}


def written(tmp_path, rows, name="rows.jsonl"):
    (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / name)


def test_margins_are_kept_where_the_recipe_reads_them(tmp_path):
    path = written(tmp_path, [{**PAIR, "better_by": 3}, {**PAIR, "better_by": 0.5}])
    config = RewardPairsFile(source="path", path=path, columns={"margin": "better_by"})
    found = load_pairs_or_ranked(config, None, never)
    assert list(found.train) == [{**PAIR, "margin": 3.0}, {**PAIR, "margin": 0.5}]
    assert (found.held_out, found.candidates, found.tasks) == (None, [], None)
    plain = written(tmp_path, [{**PAIR, "margin": 1.0}])
    kept = load_pairs_or_ranked(RewardPairsFile(source="path", path=plain), None, never)
    assert list(kept.train) == [{**PAIR, "margin": 1.0}]
    assert list(load_preferences(FileData(source="path", path=plain)).train) == [PAIR]


@pytest.mark.parametrize("margin", [float("nan"), float("inf"), "2", None, True])
def test_margins_that_are_no_numbers(tmp_path, margin):
    config = RewardPairsFile(source="path", path=written(tmp_path, [{**PAIR, "margin": margin}]))
    with pytest.raises(InputError, match=r"line 1: margin is .* not a number") as found:
        load_pairs_or_ranked(config, None, never)
    assert "\n" not in str(found.value)


def test_a_negative_margin_contradicts_the_pair(tmp_path):
    rows = [{**PAIR, "margin": 2}, {**PAIR, "margin": -2}]
    config = RewardPairsFile(source="path", path=written(tmp_path, rows))
    sentence = r".*, line 2: margin is -2, which makes rejected the better one; swap the two"
    with pytest.raises(InputError, match=sentence):
        load_pairs_or_ranked(config, None, never)
    assert len(load_preferences(config).train) == 2  # where margins are not read


# --- ranked lists --------------------------------------------------------------------------------


def test_the_order_knows_every_kind_of_demonstration():
    assert {kind for kinds in MIXTURES.values() for kind in kinds} == set(ORDER)


def kind_of(text, answer):
    """The kind of a demonstration, told from its text alone."""
    if "<answer>" not in text:
        return "malformed"
    said = text.removeprefix("<think></think><answer>").removesuffix("</answer>")
    if said == answer:
        return "right"
    if said == answer[::-1]:
        return "copied"
    return "last_letter_dropped" if said == answer[:-1] else "letters_swapped"


def test_ranked_lists_are_different_demonstrations_best_first():
    tasks = GymTasks(GymData(**{**GYM, "size": 300}))
    answers = {row["prompt"][0]["content"]: row["answer"] for row in tasks.train}
    best_first = ["right", "letters_swapped", "last_letter_dropped", "copied", "malformed"]
    lists = ranked_demonstrations(tasks.train, 3, seed=0)
    seen = set()
    for row in lists:
        texts = [answer[0]["content"] for answer in row["ranked"]]
        assert len(set(texts)) == 3
        kinds = [kind_of(text, answers[row["prompt"][0]["content"]]) for text in texts]
        assert kinds[0] == "right"
        ranks = [best_first.index(kind) for kind in kinds]
        # swapped letters may give the copied word, and are then better than other errors
        assert ranks == sorted(ranks) or "copied" in kinds
        seen.add(tuple(kinds))
    assert {(best_first[0], best_first[i], best_first[j]) for i in (1, 2, 3) for j in (4,)} <= seen
    assert ranked_demonstrations(tasks.train, 3, seed=0) == lists
    assert ranked_demonstrations(tasks.train, 3, seed=1) != lists


def test_questions_without_enough_different_demonstrations_are_left_out():
    # copying a palindrome would be right, so that kind gives the answer without its last letter
    rows = [
        {"prompt": word, "question": f"... {word}", "answer": word[::-1], "task": "spell_backward"}
        for word in ("level", "lemon")
    ]
    (kept,) = ranked_demonstrations(rows, 5, seed=0)
    assert (kept["prompt"], len(kept["ranked"])) == ("lemon", 5)
    assert len(ranked_demonstrations(rows, 4, seed=0)) == 2


def test_ranked_lists_of_a_block_count_what_is_left_out():
    # of the three swaps in a word of three letters, one gives the copied word: four texts only
    short = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 3})
    config = RankedLists([short], size=400, eval_size=20, list_length=5, candidates=0)
    found = load_pairs_or_ranked(config, None, never)
    left_out = found.dropped["not 5 different demonstrations"]
    assert left_out == 400 - len(found.train)
    assert abs(left_out / 400 - 1 / 3) < 0.1  # four standard errors
    held_out = found.dropped_held_out["not 5 different demonstrations"]
    assert held_out == 20 - len(found.held_out) > 0
    assert all(len(row["ranked"]) == 5 for row in [*found.train, *found.held_out])


def test_ranked_lists_of_files(tmp_path):
    rows = [{"q": q, "ranked": ["x", "y", "z"]} for q in "abcd"]
    path = written(tmp_path, rows)
    block = {"source": "path", "path": path, "columns": {"prompt": "q"}}
    found = load_pairs_or_ranked(RankedFile(**block, eval_split="train[2:]"), 1, never)
    assert list(found.train) == [{"prompt": "a", "ranked": ["x", "y", "z"]}]
    assert [row["prompt"] for row in found.held_out] == ["c", "d"]
    assert found.candidates == []


def test_ranked_conversations_lose_the_prompt_that_they_repeat():
    ask = [{"role": "user", "content": "hi"}]
    answers = [[{"role": "assistant", "content": text}] for text in ("hello", "go")]
    row = {"prompt": "hi", "ranked": [ask + answer for answer in answers]}
    found, dropped = checked_ranked(Dataset.from_list([row]), "f", {}, 2)
    assert (list(found), dropped) == ([{"prompt": ask, "ranked": answers}], {})


def scored(*pairs):
    return [{"response": text, "overall_score": score} for text, score in pairs]


def test_scored_completions_are_ranked_by_score():
    rows = [
        {"instruction": "a", "completions": scored(("bad", 1), ("good", 9.0), ("so", 5), ("z", 0))},
        {"instruction": "b", "completions": scored(("x", 3), ("y", 3), ("z", 1))},
    ]
    rows = Dataset.from_list(rows)
    found, dropped = checked_ranked(rows, "f", {"prompt": "instruction"}, 3)
    assert list(found) == [{"prompt": "a", "ranked": ["good", "so", "bad"]}]
    assert dropped == {"not 3 different scores": [1]}
    assert checked_ranked(rows, "f", {"prompt": "instruction"}, 2)[0][1]["ranked"] == ["x", "z"]


# --- outcomes ------------------------------------------------------------------------------------


def test_outcomes_are_the_samples_of_both_sides():
    sample = Sampler()
    config = SampledAnswers(**GYM, samples_per_prompt=4, candidates=2)
    found = load_outcomes(config, 10, sample)
    assert sample.calls == [(10, 4, "train"), (20, 4, "held-out")]
    assert (len(found.train), len(found.held_out), len(found.candidates)) == (40, 80, 40)
    assert [float(row["label"]) for row in found.train] == right(list(found.train), "completion")
    assert found.train.column_names[:4] == ["prompt", "completion", "label", "finished"]


FLAT = [
    {"prompt": "a", "completion": "x", "label": True, "finished": True},
    {"prompt": "b", "completion": "y", "label": False, "finished": True},
    {"prompt": "a", "completion": "z", "label": False, "finished": False},
]


def test_outcomes_of_files(tmp_path):
    rows = [
        {"prompt": "a", "completion": "x", "label": 1, "finished": True, "answer": "x"},
        {"prompt": "b", "completion": "y", "label": 0, "finished": True, "answer": "v"},
        {"prompt": "a", "completion": "z", "label": 0.0, "finished": False, "answer": "x"},
    ]
    held_out = written(tmp_path, rows)
    other = [{**row, "prompt": "other " + row["prompt"]} for row in rows]
    train = written(tmp_path, other, "train.jsonl")
    found = load_outcomes(AnswersFile(source="path", path=train, eval_path=held_out), 2, never)
    answers = [{"answer": row["answer"]} for row in rows]
    whole = [{**a, **b} for a, b in zip(FLAT, answers, strict=True)]
    assert list(found.train) == [{**r, "prompt": "other " + r["prompt"]} for r in whole[:2]]
    assert list(found.held_out) == whole
    assert found.candidates == [whole[0], whole[2]]  # the only prompt with two completions
    bare = [{k: row[k] for k in ("prompt", "completion", "label")} for row in FLAT]
    bare, _ = checked_outcomes(Dataset.from_list(bare), "f", {})
    assert bare["finished"][:] == [True] * 3


def test_outcomes_in_lists(tmp_path):
    columns = {"prompt": "question", "labels": "correct"}
    texts = {"question": "a", "completions": ["x", "z"], "correct": [True, False]}
    messages = {"question": "b", "completions": [said("y")], "correct": [0]}
    expected = {
        "texts": [("a", "x", True), ("a", "z", False)],
        "messages": [([{"role": "user", "content": "b"}], said("y"), False)],
    }
    for name, row in (("texts", texts), ("messages", messages)):
        found, _ = checked_outcomes(
            read(written(tmp_path, [row], name + ".jsonl"))[0], "f", columns
        )
        assert [(r["prompt"], r["completion"], r["label"]) for r in found] == expected[name]
        assert found["question"][:] == [row["question"]] * len(found)  # a column may be read twice
    mixed, _ = read(written(tmp_path, [texts, messages]))
    with pytest.raises(InputError, match="f: a column holds values of different kinds"):
        checked_outcomes(mixed, "f", columns)


# --- traces --------------------------------------------------------------------------------------


def test_synthetic_traces_have_the_share_of_errors_asked_for():
    tasks = GymTasks(GymData(**{**GYM, "size": 1000}))
    rows = synthetic_traces(tasks.train, 0.6, seed=0)
    share = 1 - sum(right(rows, "completion")) / 1000
    assert abs(share - 0.6) < 0.062  # four standard errors
    repeated = 0
    for row in rows:
        text = row["completion"][0]["content"]
        word = text.removeprefix("<think></think><answer>").removesuffix("</answer>")
        repeated += len(word) == len(row["answer"]) + 1
    assert abs(repeated / 1000 - 0.6 / 5) < 0.042  # one of five errors
    assert sum(right(synthetic_traces(tasks.train, 0, seed=0), "completion")) == 1000
    assert sum(right(synthetic_traces(tasks.train, 1, seed=0), "completion")) == 0


def test_traces_of_a_block():
    config = SyntheticTraces(**GYM, step_split=LETTERS, candidates=0)
    found = load_traces(config, 30, never)
    assert (len(found.train), len(found.held_out), found.candidates) == (30, 20, [])
    for row, task in zip(found.train, found.tasks.train[:30], strict=True):
        whole = "".join(row["completions"])
        answer = f"<think></think><answer>{task['answer']}</answer>"
        assert (row["prompt"], len(row["labels"])) == (task["prompt"], len(row["completions"]))
        assert (set(row["labels"]) == {1}) == (whole == answer)
    assert {label for row in found.train for label in row["labels"]} == {-1, 0, 1}


def test_sampled_traces_are_the_samples_cut_into_letters():
    sample = Sampler()
    config = SampledTraces(**GYM, step_split=LETTERS, traces="sampled", samples_per_prompt=2)
    found = load_traces(config, 3, sample)
    assert sample.calls == [(3, 2, "train"), (20, 8, "held-out")]
    assert (len(found.train), len(found.held_out), len(found.candidates)) == (6, 40, 160)
    answer = found.tasks.train[0]["answer"]
    assert found.train[0]["completions"][1:] == [*answer[1:], "</answer>"]
    assert found.train[0]["labels"] == [1] * (len(answer) + 1)
    assert found.train[1]["labels"][-2:] == [-1, -1]
    with pytest.raises(InputError, match="the sampled traces has no label"):
        load_traces(config, 3, lambda *given: [r | {"completion": " "} for r in sample(*given)])


def test_long_traces_become_several_rows_with_the_same_prompt(tmp_path):
    row = {"prompt": "p", "completions": list("abcde"), "labels": [1, 1, 0, -1, -1]}
    parts = [
        {"prompt": "p", "completions": ["a", "b"], "labels": [1, 1]},
        {"prompt": "p", "completions": ["c", "d"], "labels": [0, -1]},
        {"prompt": "p", "completions": ["e"], "labels": [-1]},
    ]
    whole = Dataset.from_list([row])
    assert list(chunked(whole, 2)) == parts
    assert list(chunked(whole, None)) == list(chunked(whole, 5)) == [row]
    path = written(tmp_path, [row, row, {**row, "prompt": "q"}])
    block = {"source": "path", "path": path, "max_steps": 2}
    config = TracesFile(**block, split="train[:2]", eval_split="train[2:]")
    found = load_traces(config, 2, never)
    assert list(found.train) == parts[:2]
    assert list(found.held_out) == [{**part, "prompt": "q"} for part in parts]


def outcome(prompt, n):
    return {"prompt": prompt, "completion": f"c{n}", "label": n % 2}


def trace(prompt, n):
    return {"prompt": prompt, "completions": ["a", f"b{n}"], "labels": [1, -1]}


def ranking(prompt, n):
    return {"prompt": prompt, "ranked": [f"a{n}", "b"]}


def compared(prompt, n):
    return {"prompt": prompt, "chosen": f"a{n}", "rejected": "b"}


LOADERS = {
    "pairs": (RewardPairsFile, compared, lambda c: load_pairs_or_ranked(c, None, never)),
    "ranked": (RankedFile, ranking, lambda c: load_pairs_or_ranked(c, None, never)),
    "outcomes": (AnswersFile, outcome, lambda c: load_outcomes(c, None, never)),
    "traces": (TracesFile, trace, lambda c: load_traces(c, None, never)),
}


@pytest.mark.parametrize("name", LOADERS)
def test_no_held_out_prompt_of_a_file_is_trained_on(tmp_path, name):
    block, row, load = LOADERS[name]
    rows = [row(f"p{n // 2}", n) for n in range(12)]  # two rows of each of six prompts
    path = written(tmp_path, rows)
    config = block(source="path", path=path, split="train[:7]", eval_split="train[7:]", eval_size=2)
    found = load(config)
    # the slices share p3, which is trained on; p4 and p5 are the two prompts that are held out
    assert [row["prompt"] for row in found.train] == [*("p0", "p0", "p1", "p1", "p2", "p2"), "p3"]
    assert [row["prompt"] for row in found.held_out] == ["p4", "p4", "p5", "p5"]
    assert found.dropped["to evaluate on: the prompt is trained on"] == 1
    without = load(block(source="path", path=path, split="train[:7]"))
    assert (len(without.train), without.held_out) == (7, None)


@pytest.mark.parametrize("name", LOADERS)
def test_a_second_load_takes_what_the_first_kept(tmp_path, monkeypatch, name):
    from datasets import config

    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    block, row, load = LOADERS[name]
    rows = [row([{"role": "user", "content": f"p{n // 2}"}], n) for n in range(6)]
    given = {"max_steps": 1} if block is TracesFile else {}
    config = block(path=written(tmp_path, rows), split="train[:4]", eval_split="train[4:]", **given)
    found, kept = [], []
    for n in range(3):
        if n == 2:  # another version of this package must not take it
            for module in (columns, files):
                monkeypatch.setattr(module, "code", lambda: "changed")
        found.append(load(config).train.to_list())
        kept.append(sorted((tmp_path / "cache").rglob("*.arrow")))
    assert found[0] == found[1] == found[2]
    assert 1 < len(kept[0]) == len(kept[1]) < len(kept[2])


@pytest.mark.parametrize("listed", [False, True])
def test_eval_size_counts_prompts_so_no_group_of_outcomes_is_cut(tmp_path, listed):
    train = written(tmp_path, [outcome("t", n) for n in range(2)], "train.jsonl")
    rows = [outcome(f"p{n % 4}", n) for n in range(24)]  # six of each of four prompts, in turn
    if listed:
        rows = [
            {"prompt": f"p{k}", "completions": list("abcdef"), "labels": [0, 1] * 3}
            for k in range(4)
        ]
    held_out = written(tmp_path, rows)
    config = AnswersFile(source="path", path=train, eval_path=held_out, eval_size=3)
    found = load_outcomes(config, None, never)
    assert Counter(row["prompt"] for row in found.held_out) == {"p0": 6, "p1": 6, "p2": 6}
    assert Counter(row["prompt"] for row in found.candidates) == {"p0": 6, "p1": 6, "p2": 6}


@pytest.mark.parametrize("labels", [[True, False, 0], [True, False, False]])
def test_labels_of_files_may_be_boolean(tmp_path, labels):
    row = {"prompt": "p", "completions": ["a", "b", "c"], "labels": labels}
    (found,), dropped = checked_traces(read(written(tmp_path, [row]))[0], "f", {})
    assert found["labels"] == [1, -1, 0 if labels[2] is not False else -1]
    assert [type(label) for label in found["labels"]] == [int] * 3
    assert dropped == {}


# --- bad input -----------------------------------------------------------------------------------

TRACE = {"prompt": "p", "completions": ["a", "b"], "labels": [1, 0]}
RANKED = {"prompt": "p", "ranked": ["a", "b"]}
ASK = [{"role": "user", "content": "a"}]
BAD_ROWS = {
    "a label outside the set": (
        TracesFile,
        [{**TRACE, "labels": [1, 2]}],
        "line 1: .* label of step 1 is 2; write -1",
    ),
    "a label that is a word": (TracesFile, [{**TRACE, "labels": [1, "good"]}], "is 'good'"),
    "a label that is NaN": (TracesFile, [{**TRACE, "labels": [float("nan"), 1]}], "is nan"),
    "more steps than labels": (
        TracesFile,
        [TRACE, {**TRACE, "labels": [1]}],
        "line 2: .* has 2 completions and 1 labels",
    ),
    "an empty step": (TracesFile, [{**TRACE, "completions": ["a", " "]}], "step 1 is ' '"),
    "no steps": (TracesFile, [{**TRACE, "completions": [], "labels": []}], "not two lists"),
    "steps in one text": (TracesFile, [{**TRACE, "completions": "ab"}], "not two lists"),
    "only good steps": (
        TracesFile,
        [{**TRACE, "labels": [1, 1]}],
        "every label of .* is 1, but rows of both kinds are needed",
    ),
    "no prompt": (TracesFile, [{**TRACE, "prompt": ""}], "line 1: prompt is empty"),
    "columns of something else": (TracesFile, [PAIR], "lacks completions, labels; it needs"),
    "no rows": (TracesFile, [], "has no rows"),
    "an outcome that is a share": (
        AnswersFile,
        [{**FLAT[0], "label": 0.5}],
        "line 1: label is 0.5, which is neither boolean nor 0 or 1",
    ),
    "only right answers": (AnswersFile, FLAT[:1] * 2, "every label of .* is true"),
    "only wrong answers": (AnswersFile, FLAT[1:], "every label of .* is false"),
    "finished in words": (AnswersFile, [{**FLAT[0], "finished": "yes"}], "finished is 'yes'"),
    "an empty completion": (AnswersFile, [{**FLAT[0], "completion": ""}], "completion is empty"),
    "no column of labels": (
        AnswersFile,
        [{"prompt": "p", "completion": "a", "correct": True}],
        "lacks label; .* map them with dataset.columns",
    ),
    "more completions than labels": (AnswersFile, [{**TRACE, "labels": [1]}], "2 completions and"),
    "a list of one": (RankedFile, [{**RANKED, "ranked": ["a"]}], "list of two or more"),
    "no list": (RankedFile, [{**RANKED, "ranked": "ab"}], "list of two or more"),
    "lists of unequal length": (
        RankedFile,
        [RANKED, {**RANKED, "ranked": ["a", "b", "c"]}],
        "line 2: ranked has 3 completions and the rows before have 2",
    ),
    "a completion that the user ends": (
        AnswersFile,
        [{"prompt": "a", "completions": [said("x"), ASK], "labels": [1, 0]}],
        "line 1: the last message is not the assistant's; end every completion",
    ),
    "answers to two prompts": (
        RankedFile,
        [{"prompt": ASK, "ranked": [said("x"), [*said("y"), *ASK, *said("z")]]}],
        "line 1: the sides part before the last message in ranked",
    ),
    "an empty answer in a list": (
        RankedFile,
        [{**RANKED, "ranked": ["a", ""]}],
        r"line 1: ranked\[1\] is empty",
    ),
    "pairs for lists": (RankedFile, [PAIR], "lacks ranked; it needs prompt, ranked"),
    "scores that are missing": (
        RankedFile,
        [{"prompt": "p", "completions": [{"response": "a"}]}],
        "response and a number overall_score",
    ),
    "no different scores": (
        RankedFile,
        [{"prompt": "p", "completions": scored(("a", 1), ("b", 1))}],
        "no row of .* has 4 different scores",
    ),
}


def load(config, sample):
    if isinstance(config, RewardData):
        return load_pairs_or_ranked(config, None, sample)
    return (load_outcomes if isinstance(config, OutcomeData) else load_traces)(config, None, sample)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(tmp_path, name):
    block, rows, part = BAD_ROWS[name]
    with pytest.raises(InputError, match=part) as found:
        load(block(source="path", path=written(tmp_path, rows)), never)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (RankedLists(**GYM, list_length=6), "has 5 kinds of demonstrations"),
        (RankedLists(**{**GYM, "specs": [SUM]}, list_length=5), "chain_sum has 4 kinds"),
        (
            SampledAnswers(**GYM, samples_per_prompt=1),
            "every label of the answers that",
        ),
        (SyntheticTraces(**GYM, step_split="("), "not a regular expression"),
        (SyntheticTraces(**GYM), "does not cut '<think></think><answer>.* into letters"),
        (
            SyntheticTraces(**GYM, step_split=LETTERS, errors=0),
            "every label of the synthetic",
        ),
        (
            SyntheticTraces(**{**GYM, "specs": [SUM]}, step_split=LETTERS),
            "'chain_sum' have no",
        ),
    ],
)
def test_blocks_that_cannot_be(config, part):
    with pytest.raises(InputError, match=part) as found:
        load(config, Sampler())
    assert "\n" not in str(found.value)


def test_the_main_process_reads_a_file_before_the_others(monkeypatch):
    from rlhf_trl.run import preferences

    order = []

    @contextmanager
    def first(desc):
        order.append("first")
        yield
        order.append("others")

    def load(*_):
        order.append("read")
        return SimpleNamespace(dropped={}, notes=[], conversational=True, tasks=None)

    monkeypatch.setattr(preferences, "load_preferences", load)
    monkeypatch.setattr(preferences, "load_tokenizer", lambda *_: order.append("tokenizer"))
    own = SimpleNamespace(dataset=FileData("f"), max_samples=None, rollouts="off")
    preferences.prepare_preferences(own, SimpleNamespace(main_process_first=first), None)
    assert order == ["first", "read", "others", "tokenizer"]


# --- sampling ------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path):
    from trl import ModelConfig, RewardConfig

    args = RewardConfig(
        output_dir=str(tmp_path), use_cpu=True, bf16=False, per_device_eval_batch_size=64
    )
    args.max_completion_length = 20
    return args, ModelConfig(model_name_or_path="tiny", dtype="float32")


def test_samples_are_kept_and_read_again(tmp_path, run, monkeypatch):
    from rlhf_trl.run import reward_models as run_data

    args, model = run
    config = SampledAnswers(**GYM, samples_per_prompt=3, candidates=2)
    own = SimpleNamespace(dataset=config, max_samples=None, algorithm="orm", rollouts="off")
    data, tokenizer = run_data.prepare_rewards(own, args, model)
    kept = [json.loads(line) for line in (tmp_path / "samples-train.jsonl").open()]
    how = {"sampled_from": "tiny", "max_completion_length": 20}
    assert kept == [{**row, **how} for row in data.train]
    assert (len(kept), len(data.held_out), len(data.candidates)) == (120, 60, 40)
    assert [float(row["label"]) for row in kept] == right(kept, "completion")
    assert tokenizer.eos_token == "<|end|>"
    # such a file is a data set of its own
    from_file = AnswersFile(source="path", path=str(tmp_path / "samples-train.jsonl"))
    assert list(load_outcomes(from_file, None, never).train) == list(data.train)
    block = FileData(source="path", path=from_file.path)
    labeled = load_preferences(block, unpaired=True).train
    assert [row["label"] for row in labeled] == [row["label"] for row in kept]
    # a resumed run samples nothing
    monkeypatch.setattr(sampling, "sample_completions", never)
    assert run_data.prepare_rewards(own, args, model)[0].candidates == data.candidates
    config.samples_per_prompt = 4
    with pytest.raises(InputError, match="does not hold 4 answers to each of the 40 train"):
        run_data.prepare_rewards(own, args, model)
    config.samples_per_prompt, args.max_completion_length = 3, 19
    with pytest.raises(InputError, match="of at most 19 tokens and by tiny"):
        run_data.prepare_rewards(own, args, model)
    args.max_completion_length, config.sampled_from = 20, "other"
    with pytest.raises(InputError, match="of at most 20 tokens and by other"):
        run_data.prepare_rewards(own, args, model)


@pytest.mark.parametrize("pad", ["<|pad|>", "<|end|>"])
def test_completions_tell_whether_they_ended(run, monkeypatch, pad):
    from rlhf_trl.rollouts import sampling

    args, model = run
    load = sampling.load_tokenizer

    def padded(*given):
        tokenizer = load(*given)
        tokenizer.pad_token = pad
        return tokenizer

    monkeypatch.setattr(sampling, "load_tokenizer", padded)
    rows = GymTasks(GymData(**GYM)).train[:16]
    found = {}
    for limit in (20, 11):
        args.max_completion_length = limit
        found[limit] = sampling.sample_completions(model, args, rows, 2, 0, SAMPLED)
    assert [len(each) for each in found[20]] == [2] * 16
    flat = {limit: [one for each in found[limit] for one in each] for limit in found}
    assert all(one.finished for one in flat[20])
    # <think></think><answer>, letters, </answer> and the end: 11 tokens hold 6 letters
    assert {one.finished for one in flat[11]} == {True, False}
    for one in flat[11]:
        letters = one.text.removeprefix("<think></think><answer>").removesuffix("</answer>")
        if one.text.startswith("<think></think><answer>"):
            assert one.finished == (one.text.endswith("</answer>") and len(letters) <= 6)


def test_another_model_may_be_sampled(run, monkeypatch):
    from rlhf_trl.run import reward_models as run_data

    args, model = run
    asked = []

    def sample(model, args, rows, count, seed, sampling):
        from rlhf_trl.rollouts.sampling import Completion

        asked.append(model.model_name_or_path)
        return [[Completion("no", False)] * count for _ in rows]

    monkeypatch.setattr(sampling, "sample_completions", sample)
    config = SyntheticTraces(**GYM, step_split=LETTERS, sampled_from="elsewhere", candidates=2)
    given = {"algorithm": "prm", "formulation": "code", "rollouts": "off"}
    own = SimpleNamespace(dataset=config, max_samples=5, **given)
    data, _ = run_data.prepare_rewards(own, args, model)
    assert (asked, model.model_name_or_path) == (["elsewhere"], "tiny")
    assert len(data.train) == 5
    assert [(row["label"], row["finished"]) for row in data.candidates] == [(False, False)] * 40
