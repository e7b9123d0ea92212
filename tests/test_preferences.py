"""Preference data: pairs, files, rules for length and order, and every broken input's sentence."""

import json
from pathlib import Path

import pytest
from datasets import Dataset

from rlhf_trl.data.blocks import FileData, OfflinePairs, SampledPairs, Spec
from rlhf_trl.data.files import read
from rlhf_trl.data.fitting import fit, kto_order, rotated, shortened
from rlhf_trl.data.made import offline_pairs
from rlhf_trl.data.pair_files import checked_pairs
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.data.sampled import on_policy_pairs, ranked_pairs
from rlhf_trl.errors import InputError
from rlhf_trl.rewards.verifiers import exact_match

SPELL = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})


def data(**given):
    kind = SampledPairs if given.get("pairs", "offline") != "offline" else OfflinePairs
    return kind(**{"specs": [SPELL], "size": 50, "eval_size": 20, **given})


def test_offline_pairs_hold_the_right_answer_and_an_error():
    found = load_preferences(data())
    assert (len(found.train), len(found.held_out), found.dropped) == (50, 20, {})
    for rows, tasks in ((found.train, found.tasks.train), (found.held_out, found.tasks.held_out)):
        for row, task in zip(rows, tasks, strict=True):
            both = {"answer": [task["answer"]] * 2, "task": [task["task"]] * 2}
            assert exact_match([row["chosen"], row["rejected"]], **both) == [1.0, 0.0]
            assert row["prompt"] == task["prompt"]
    again, other = (offline_pairs(found.tasks.train, seed) for seed in (0, 1))
    assert again == list(found.train) != other


def test_max_samples_takes_the_first_rows():
    whole, few = load_preferences(data()), load_preferences(data(), max_samples=7)
    assert list(few.train) == list(whole.train)[:7]


def said(text):
    return f"<think></think><answer>{text}</answer>"


def test_on_policy_pairs_are_a_right_and_a_wrong_sample():
    rows = [{"prompt": p, "task": "spell_backward", "answer": "nus"} for p in "abc"]
    samples = [[said("nus"), said("sun"), said("uns")], [said("nus")] * 3, [said("sun")] * 3]
    (pair,) = on_policy_pairs(rows, samples, seed=0)
    assert pair["prompt"] == "a"
    assert pair["chosen"][0]["content"] == said("nus")
    assert pair["rejected"][0]["content"] in (said("sun"), said("uns"))


def test_ranked_pairs_are_the_best_and_the_worst_sample_by_score_alone():
    def score(answers):
        return [float(answer["completion"][0]["content"][-1]) for answer in answers]

    def answers(*texts):
        return [{"completion": [{"role": "assistant", "content": text}]} for text in texts]

    rows = [{"prompt": prompt} for prompt in "abcd"]  # with no right answer to look up
    samples = [answers("x2", "x9", "x0"), answers("x3", "y3", "x3"), answers("x1")]
    samples.append(answers("x5", "y5", "x4", "y4"))
    pairs = ranked_pairs(rows, samples, score)
    # b's score alike; c has one answer; of d's equal ones, the first is best and the last is worst
    assert [
        (pair["prompt"], pair["chosen"][0]["content"], pair["rejected"][0]["content"])
        for pair in pairs
    ] == [("a", "x9", "x0"), ("d", "x5", "y4")]


def test_a_reward_model_ranks_the_pairs_to_train_on_and_no_others():
    def sample(rows, count, side):
        texts = ("no", "nono") if side == "train" else ("no", None)
        return [
            {"completion": said(text or row["answer"]), "finished": True, "prompt": row["prompt"]}
            for row in rows
            for text in texts
        ]

    def score(answers):
        return [float(len(answer["completion"])) for answer in answers]

    found = load_preferences(
        data(pairs="on_policy", samples_per_prompt=2), None, False, sample, score=score
    )
    assert {pair["chosen"] for pair in found.train} == {said("nono")}  # never right
    assert {pair["rejected"][0]["content"] for pair in found.held_out} == {said("no")}
    assert found.dropped == {"all 2 samples score alike": 0}
    with pytest.raises(InputError, match="no prompt two answers that score differently"):
        load_preferences(
            data(pairs="on_policy", samples_per_prompt=2),
            sample=sample,
            score=lambda answers: [0.0] * len(answers),
        )


def test_on_policy_data_samples_both_sides_and_counts_what_is_left_out():
    calls = []

    def sample(rows, count, side):  # right answers only, but for the first three questions
        calls.append((len(rows), count, side))
        return [
            {"completion": said("no" if i < 3 and n == 2 else row["answer"])}
            for i, row in enumerate(rows)
            for n in range(count)
        ]

    found = load_preferences(data(pairs="on_policy", samples_per_prompt=4), None, False, sample)
    assert calls == [(50, 4, "train"), (20, 4, "held-out")]
    assert [row["prompt"] for row in found.train] == [r["prompt"] for r in found.tasks.train[:3]]
    assert all(row["rejected"][0]["content"] == said("no") for row in found.train)
    assert found.dropped == {"right and wrong not both among 4 samples": 47}
    assert found.dropped_held_out == {"right and wrong not both among 4 samples": 17}
    none = data(pairs="on_policy", samples_per_prompt=2)  # the third answer is not asked for
    with pytest.raises(InputError, match="no on-policy pair"):
        load_preferences(none, None, False, sample)


# --- files ---------------------------------------------------------------------------------------

ROWS = [
    {"prompt": "one", "chosen": "yes", "rejected": "no"},
    {"prompt": "two", "chosen": "same", "rejected": "same"},
    {"prompt": "three", "chosen": "ja", "rejected": "nein"},
]


def written(path, rows):
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        getattr(Dataset.from_list(rows), f"to_{path.suffix[1:]}")(path)
    return str(path)


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv"])
def test_files_of_every_kind(tmp_path, kind):
    path = written(tmp_path / f"pairs.{kind}", ROWS)
    found = load_preferences(FileData(source="path", path=path))
    assert list(found.train) == [ROWS[0], ROWS[2]]
    assert {k: n for k, n in found.dropped.items() if n} == {"chosen identical to rejected": 1}
    assert (found.held_out, found.tasks, found.conversational) == (None, None, False)
    assert list(load_preferences(FileData(source="path", path=path), 1).train) == [ROWS[0]]
    both = FileData(source="path", path=path, eval_size=1)
    found = load_preferences(both)
    assert list(found.train) + list(found.held_out) in (ROWS[::2], ROWS[::-2])


TRAINED = "to evaluate on: the prompt is trained on"
TEN = [{"prompt": f"p{n}", "chosen": f"c{n}", "rejected": "r"} for n in range(10)]


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet"])
def test_slices_of_files(tmp_path, kind):
    path = written(tmp_path / f"pairs.{kind}", TEN)
    for split, rows in {
        "train": TEN,
        "train[:4]": TEN[:4],
        "train[80%:]": TEN[8:],
        "train[-3:-1]": TEN[7:9],
        "train[6:99]": TEN[6:],
        "train[:2]+train[9:]": [*TEN[:2], TEN[9]],
    }.items():
        assert list(read(path, split)[0]) == rows
        assert list(read(path, split, 1)[0]) == rows[:1]
    for split, part in {
        "train[10:20]": "cannot be read at split 'train[10:20]' (ValueError: Instruction",
        "test": "cannot be read at split 'test' (ValueError: Unknown split",
        "train[:x]": "cannot be read at split 'train[:x]' (ValueError: Unrecognized",
    }.items():
        with pytest.raises(InputError) as found:
            read(path, split)
        assert part in str(found.value) and "\n" not in str(found.value)


def test_held_out_rows_of_a_file_are_those_of_its_other_slice(tmp_path):
    path = written(tmp_path / "pairs.jsonl", TEN)
    block = {"source": "path", "path": path}
    found = load_preferences(FileData(**block, split="train[:7]", eval_split="train[7:]"))
    assert (list(found.train), list(found.held_out)) == (TEN[:7], TEN[7:])
    assert found.dropped[TRAINED] == 0
    # a slice is of one file, not of the other
    other = written(tmp_path / "other.jsonl", [{**row, "prompt": "o"} for row in TEN[:2]])
    found = load_preferences(FileData(**block, split="train[5:]", eval_path=other))
    assert (list(found.train), len(found.held_out)) == (TEN[5:], 2)


def test_the_slices_of_a_book_config_are_of_the_users_file_too(tmp_path):
    import yaml

    config = Path(__file__).parent.parent / "configs" / "book" / "reward.yaml"
    block = yaml.safe_load(config.read_text())["dataset"]
    rows = [{"prompt": f"p{n}", "chosen": "c", "rejected": "r"} for n in range(4600)]
    block |= {"path": written(tmp_path / "my.jsonl", rows), "reader": None}
    found = load_preferences(FileData(**block))
    assert (list(found.train), list(found.held_out)) == (rows[:4500], rows[4500:])
    written(tmp_path / "my.jsonl", rows[:400])
    with pytest.raises(
        InputError, match=r"my.jsonl cannot be read at .*slice that is not empty"
    ) as found:
        load_preferences(FileData(**block))
    assert "\n" not in str(found.value)


def asked(kind, names, unpaired=False):
    def row(prompt, n):
        prompt = prompt if kind == "texts" else chat(prompt)
        if unpaired:
            return {"prompt": prompt, "completion": f"c{n}", "label": n % 2 == 0}
        return {"prompt": prompt, "chosen": f"c{n}", "rejected": f"r{n}"}

    return [row(name, n) for n, name in enumerate(names)]


@pytest.mark.parametrize("unpaired", [False, True])
@pytest.mark.parametrize("kind", ["texts", "messages"])
def test_prompts_that_are_trained_on_are_not_evaluated_and_are_counted(tmp_path, kind, unpaired):
    rows = asked(kind, ["A", "b", "x", "b", "c"], unpaired)
    train = written(tmp_path / "train.jsonl", rows)
    # of nine rows, four have a prompt that is trained on; three prompts of the others are held out
    held = asked(kind, ["a", "b", "d", "a ", "D", "e", "B", "f", "g"], unpaired)
    held_out = written(tmp_path / "held-out.jsonl", held)
    config = FileData(source="path", path=train, eval_path=held_out, eval_size=3)
    found = load_preferences(config, unpaired=unpaired)
    prompts = [row["prompt"] for row in rows]
    assert [row["prompt"] for row in found.train] == prompts
    prompts = [held[n]["prompt"] for n in (2, 4, 5, 7)]
    assert [row["prompt"] for row in found.held_out] == prompts
    assert found.dropped[TRAINED] == 4
    config = FileData(source="path", path=train, eval_path=train)
    with pytest.raises(InputError, match=r"every prompt of .* to evaluate on is trained on"):
        load_preferences(config, unpaired=unpaired)


@pytest.mark.parametrize("unpaired", [False, True])
@pytest.mark.parametrize("kind", ["texts", "messages"])
def test_held_out_prompts_are_chosen_by_their_texts_alone(tmp_path, kind, unpaired):
    def held(names, size):
        path = written(tmp_path / "all.jsonl", asked(kind, names, unpaired))
        config = FileData(source="path", path=path, eval_size=size)
        found = load_preferences(config, unpaired=unpaired)
        sides = [
            [p if kind == "texts" else p[0]["content"] for p in side["prompt"]]
            for side in (found.train, found.held_out)
        ]
        assert sorted(sides[0] + sides[1]) == sorted(names)
        one, other = ({name.strip().lower() for name in side} for side in sides)
        assert not one & other
        return other

    names = [f"prompt {n}" for n in range(100)]
    found = held(names + [name.upper() for name in names[:50]], 20)
    assert len(found) == 20
    assert held(names[::-1], 20) == found  # whatever the order, and how often each is there
    assert found < held(names, 30)
    assert len(held([*names, "one more"], 20) - found) <= 1
    # a draw of 20 of 100, not the first or the last ones: expectation 49.5, deviation 5.8
    assert 26 < sum(int(name.split()[1]) for name in found) / 20 < 73
    told = r"eval_size: .* has 100 different prompts \(.* aside\), and 100 held"
    with pytest.raises(InputError, match=told):
        held(names, 100)


def test_a_data_set_of_the_hub_is_read_from_a_local_copy(tmp_path):
    (tmp_path / "data").mkdir()
    Dataset.from_list(ROWS).to_parquet(tmp_path / "data" / "test-00000-of-00001.parquet")
    for count, rows in ((2, ROWS[:2]), (9, ROWS), (None, ROWS)):
        assert list(read(str(tmp_path), "test", count)[0]) == rows
    with pytest.raises(InputError, match=r"at split 'train' .*Unknown split"):
        read(str(tmp_path), "train")


@pytest.mark.parametrize("kind", ["json", "jsonl", "parquet", "csv", "JSONL", "Parquet"])
def test_shards_of_a_folder_and_suffixes_in_capitals(tmp_path, kind):
    for n, rows in enumerate((TEN[:3], TEN[3:])):
        plain = Path(written(tmp_path / f"part-{n}.{kind.lower()}", rows))
        plain.rename(tmp_path / f"shard-{n}.{kind}")
    (tmp_path / "README.md").write_text("Ten rows.")
    for split, rows in {"train": TEN, "train[2:4]": TEN[2:4]}.items():
        assert list(read(str(tmp_path), split)[0]) == rows
    assert list(read(str(tmp_path / f"shard-1.{kind}"))[0]) == TEN[3:]


def test_folders_and_files_that_are_not_read(tmp_path):
    (tmp_path / "rows.tsv").write_text("prompt\tchosen\n")
    with pytest.raises(InputError, match=r"rows.tsv is a file of a kind that is not read; save it"):
        read(str(tmp_path / "rows.tsv"))
    written(tmp_path / "a.jsonl", TEN)
    written(tmp_path / "b.csv", TEN)
    with pytest.raises(InputError, match=r"has files of several kinds \(json and csv\)"):
        read(str(tmp_path))
    (tmp_path / "b.csv").unlink()
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n{"prompt": \n')
    with pytest.raises(InputError, match=r"b.jsonl, line 2 is not JSON") as found:
        read(str(tmp_path))
    assert "\n" not in str(found.value)


def test_messages_have_no_key_that_only_others_have_whatever_the_file(tmp_path):
    rows = [{"prompt": chat(f"p{n}"), "chosen": chat("", "c")[1:], "rejected": "r"} for n in (0, 1)]
    rows[1]["prompt"][0]["name"] = "Ann"
    expected = [{**row, "rejected": chat("", "r")[1:]} for row in rows]
    names = ("a.jsonl", "a.json", "a.parquet")
    paths = [written(tmp_path / name, rows) for name in names]
    lines = Path(paths[0]).read_text()
    (tmp_path / "blank.jsonl").write_text(lines.replace("\n", "\n\n"))  # read as other types
    for path in [*paths, str(tmp_path / "blank.jsonl")]:
        found = load_preferences(FileData(path=path)).train
        assert list(found) == expected, path
        assert [m.get("name") for row in found for m in row["prompt"]] == [None, "Ann"]


def test_a_column_of_dates_is_no_text(tmp_path):
    path = written(tmp_path / "a.jsonl", [{**row, "chosen": "2024-01-01"} for row in ROWS])
    with pytest.raises(InputError, match=r"a.jsonl: all of chosen looks like dates, .* as Parquet"):
        load_preferences(FileData(path=path))


def chat(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[n % 2], "content": text} for n, text in enumerate(turns)]


def rows_of(rows, columns=None, unpaired=False):
    return list(checked_pairs(Dataset.from_list(rows), "f", columns or {}, unpaired)[0])


def test_conversations_that_repeat_the_prompt_lose_it():
    # as UltraFeedback has them: a text prompt beside whole conversations
    row = {"prompt": "hi", "chosen": chat("hi", "hello"), "rejected": chat("hi", "go")}
    (found,) = rows_of([row])
    assert found["prompt"] == chat("hi")
    assert found["chosen"] == chat("hi", "hello")[1:]
    assert found["rejected"] == chat("hi", "go")[1:]
    assert rows_of([{k: v for k, v in row.items() if k != "prompt"}]) == [found]
    assert rows_of([found]) == [found]
    answers = {"prompt": "hi", "chosen": found["chosen"], "rejected": found["rejected"]}
    assert rows_of([answers]) == [found]


ASKED = chat("a", "b", "c")  # a context of three turns


@pytest.mark.parametrize("prompt", ["none", "repeated", "given", "part"])
def test_the_prompt_is_all_but_the_last_message_wherever_it_stands(prompt):
    sides = [chat("a", "b", "c", end) for end in "xy"]
    row = {"chosen": sides[0], "rejected": sides[1]}
    if prompt == "repeated":
        row["prompt"] = ASKED
    elif prompt == "given":
        row = {"prompt": ASKED, "chosen": sides[0][3:], "rejected": sides[1][3:]}
    elif prompt == "part":  # the turns that follow are the same on both sides
        row = {"prompt": ASKED[:1], "chosen": sides[0][1:], "rejected": sides[1][1:]}
    (found,) = rows_of([row])
    assert found == {"prompt": ASKED, "chosen": sides[0][3:], "rejected": sides[1][3:]}


def test_a_system_message_stays_before_a_prompt_that_is_a_text():
    before = [{"role": "system", "content": "s"}]
    row = {"prompt": "hi", "chosen": before + chat("", "x")[1:]}
    row["rejected"] = before + chat("", "y")[1:]
    (found,) = rows_of([row])
    assert found["prompt"] == before + chat("hi")


UNSPLIT = "the sides part before the last message, or the last message is not the assistant's"
UNFIT = {
    "they part earlier": {"chosen": chat("a", "b", "c", "x"), "rejected": chat("a", "B", "c", "y")},
    "one is longer": {"chosen": chat("a", "b", "c", "x"), "rejected": chat("a", "y")},
    "the user is last": {"chosen": chat("a", "b", "c"), "rejected": chat("a", "b", "C")},
    "one ends with the user": {"prompt": ASKED, "chosen": chat("x"), "rejected": chat("", "y")[1:]},
    "they part after the prompt": {
        "prompt": chat("a"),
        "chosen": chat("", "b", "c", "x")[1:],
        "rejected": chat("", "B", "c", "y")[1:],
    },
}


@pytest.mark.parametrize("name", UNFIT)
def test_conversations_without_one_answer_to_one_prompt_are_left_out_and_counted(name):
    bad = UNFIT[name]
    good = {"chosen": chat("a", "x"), "rejected": chat("a", "y")}
    if "prompt" in bad:
        good = {"prompt": chat("a"), **{side: messages[1:] for side, messages in good.items()}}
    found, dropped = checked_pairs(Dataset.from_list([good, bad, good]), "f", {})
    expected = {"prompt": chat("a"), "chosen": chat("a", "x")[1:], "rejected": chat("a", "y")[1:]}
    assert list(found) == [expected] * 2
    assert dropped[UNSPLIT] == [1]
    with pytest.raises(InputError, match=r"in all 2 rows of f the sides part .* nothing to train"):
        checked_pairs(Dataset.from_list([bad, bad]), "f", {})


def test_columns_are_mapped_and_others_left_out():
    row = {"q": "one", "better": "yes", "worse": "no", "score": 3}
    columns = {"prompt": "q", "chosen": "better", "rejected": "worse"}
    assert rows_of([row], columns) == [ROWS[0]]


def test_unpaired_rows():
    rows = [{"prompt": "a", "completion": "b", "label": label} for label in (True, False)]
    assert rows_of(rows, unpaired=True) == rows
    assert rows_of([ROWS[0]], unpaired=True) == [ROWS[0]]
    assert rows_of([{**ROWS[0], "label": 1.5}], unpaired=True) == [ROWS[0]]


LABELLED = {"prompt": "a", "completion": "b", "label": True}
BAD = {
    "missing columns": (
        [{"question": "a", "better": "b", "rejected": "c"}],
        {},
        False,
        "lacks prompt, chosen; it needs prompt, chosen, rejected and has question, "
        "better, rejected; map them with dataset.columns, perhaps "
        r"{prompt: question, chosen: better} \(a guess by the names: check that they mean this\)",
    ),
    "a column that nothing could be mapped to": (
        [{"prompt": "a", "chosen": "b"}],
        {},
        False,
        "lacks rejected; it needs .* and has prompt, chosen; add them",
    ),
    "a side that one example lacks": (
        [ROWS[0], {"prompt": "two", "chosen": "ja"}],
        {},
        False,
        "row 2 of pairs.jsonl: rejected is empty",
    ),
    "a column to map that is not there": (
        [ROWS[0]],
        {"chosen": "chosn"},
        False,
        r"has no 'chosn' \(did you mean 'chosen'\?\)",
    ),
    "a column that nothing reads": ([ROWS[0]], {"winner": "chosen"}, False, "'winner' is not"),
    "empty prompt": ([{**ROWS[0], "prompt": " "}], {}, False, "row 1 .* prompt is empty"),
    "empty completion": ([{**ROWS[0], "rejected": ""}], {}, False, "row 1 .* rejected is empty"),
    "no completion": ([{**ROWS[0], "rejected": None}], {}, False, "row 1 .* rejected is empty"),
    "a number": ([{**ROWS[0], "rejected": 3}], {}, False, "rejected is 3; write a text"),
    "not messages": ([{**ROWS[0], "prompt": ["a"]}], {}, False, "not of messages with role"),
    "all identical": ([ROWS[1]] * 2, {}, False, "the same in all 2 rows"),
    "a single class": ([LABELLED] * 2, {}, True, "label is true in all"),
    "labels that are numbers": ([{**LABELLED, "label": 1}], {}, True, "label is 1, .* not boolean"),
    "labels that are words": ([{**LABELLED, "label": "true"}], {}, True, "label is 'true', .* not"),
    "labels that are messages": (
        [{**LABELLED, "label": [{"role": "user", "content": "a"}]}],
        {},
        True,
        "label is .* which is not boolean",
    ),
    "booleans for texts": ([{**ROWS[0], "rejected": False}], {}, False, "rejected is False; write"),
    "a message for a list of them": (
        [{**ROWS[0], "chosen": {"role": "assistant", "content": "b"}}],
        {},
        False,
        "row 1 .* chosen is {.*; write a text or a list of messages",
    ),
    "labels for DPO": ([LABELLED], {}, False, "lacks chosen, rejected"),
}


@pytest.mark.parametrize("lacking", ["prompt", "chosen", "rejected"])
def test_a_cell_that_is_missing_where_texts_stand_beside_messages(lacking):
    plain = {"prompt": chat("a"), "chosen": "x", "rejected": "y"}
    whole = {"prompt": "a", "chosen": chat("a", "x"), "rejected": chat("a", "y")}
    for row in (plain, whole):
        rows = Dataset.from_list([row, row, {**row, lacking: None}])
        if row is whole and lacking == "prompt":  # which the conversations repeat
            assert [one["prompt"] for one in checked_pairs(rows, "f", {})[0]] == [chat("a")] * 3
            continue
        with pytest.raises(InputError, match=rf"row 3 of f: {lacking} is empty; fill it"):
            checked_pairs(rows, "f", {})


def test_what_is_wrong_with_the_rows_to_evaluate_on_names_their_key(tmp_path):
    path = written(tmp_path / "pairs.jsonl", TEN)
    for given, part in {
        ("eval_path", "none.jsonl"): r"^dataset.eval_path: there is no file 'none.jsonl'; write",
        ("eval_path", path): r"^dataset.eval_path: every prompt of .*pairs.jsonl to evaluate on is",
        (
            "eval_split",
            "test",
        ): r"^dataset.eval_split: .*pairs.jsonl cannot be read at split 'test'",
    }.items():
        with pytest.raises(InputError, match=part):
            load_preferences(FileData(path, **dict([given])))


def test_a_column_that_only_the_rows_to_evaluate_on_have_is_left_out(tmp_path):
    path = written(tmp_path / "train.jsonl", [{"prompt": "a", "answer": 1}])
    other = written(tmp_path / "other.jsonl", [{"prompt": "b", "answer": 2, "level": 5}])
    found = load_prompts(FileData(path, eval_path=other))
    assert list(found.held_out) == [{"prompt": "b", "answer": 2}]
    with pytest.raises(InputError, match=r"level is missing in row 1 .* and a value in the first"):
        load_prompts(FileData(other, eval_path=path))


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_shards_with_other_columns_are_named(tmp_path, kind):
    written(tmp_path / f"a.{kind}", TEN)
    written(tmp_path / f"b.{kind}", [{"prompt": "p", "chosen": "c", "worse": "r"}])
    with pytest.raises(InputError) as found:
        read(str(tmp_path))
    assert str(found.value) == (
        f"dataset.path: {tmp_path}/b.{kind} and {tmp_path}/a.{kind} differ in the columns "
        "rejected, worse; write the same in all files of the folder."
    )


@pytest.mark.parametrize("name", BAD)
def test_bad_rows(name):
    rows, columns, unpaired, part = BAD[name]
    with pytest.raises(InputError, match=part) as found:
        checked_pairs(Dataset.from_list(rows), "pairs.jsonl", columns, unpaired)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("a.jsonl", b'{"prompt": "a"}\n{"prompt": \n', "a.jsonl, line 2 is not JSON"),
        ("a.jsonl", b'{"prompt": "a"}\n\n{"prompt": "\xff"}\n', "line 3 is not UTF-8 text"),
        (
            "a.csv",
            b"prompt\ncaf\xe9\n",
            "a.csv, line 2 is not UTF-8 text .*; save the file as UTF-8",
        ),
        ("a.jsonl", b"[1]\n", "line 1 is not an object of columns"),
        ("a.jsonl", b"", "a.jsonl has no rows"),
        ("a.json", b"[]", "a.json has no rows"),
        ("a.json", b"[3]", "element 1 is not an object"),
        ("a.csv", b'"', "a.csv cannot be read .*EOF inside string"),
        ("a.parquet", b"no parquet", "a.parquet cannot be read .*magic bytes not found"),
        ("b.jsonl", None, "there is no file"),
        ("nobody/no-such-data", None, "Couldn't reach .* of a copy of a hub set"),
    ],
)
def test_files_that_cannot_be_read(tmp_path, monkeypatch, name, content, part):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=part) as found:
        read(name)
    assert "\n" not in str(found.value)


# --- token ids -----------------------------------------------------------------------------------


def test_rules_for_overlong_examples():
    prompt, sides = [1, 2, 3, 4], [[5, 6, 7], [8]]
    assert shortened(prompt, sides, 7, "drop") == (prompt, sides)
    assert shortened(prompt, sides, None, "drop") == (prompt, sides)
    assert shortened(prompt, sides, 6, "drop") is None
    assert shortened(prompt, sides, 5, "cut_prompt") == ([3, 4], sides)
    assert shortened(prompt, sides, 3, "cut_prompt") is None  # no prompt would be left
    assert shortened(prompt, sides, 6, "cut_completion") == (prompt, [[5, 6], [8]])
    assert shortened(prompt, sides, 4, "cut_completion") is None


def test_a_data_set_is_fitted_whole():
    rows = [
        {"prompt_ids": [1, 2, 3, 4], "chosen_ids": [5], "rejected_ids": [6, 7]},  # one too many
        {"prompt_ids": [1], "chosen_ids": [5], "rejected_ids": [6]},
        {"prompt_ids": [2], "chosen_ids": [5], "rejected_ids": [5]},  # nothing to prefer
        {"prompt_ids": [3], "chosen_ids": [5] * 5, "rejected_ids": [6]},  # longer than all there is
    ]
    sides = ("chosen_ids", "rejected_ids")
    found, numbers = fit(Dataset.from_list(rows), sides, 5, "cut_prompt")
    assert list(found) == [{**rows[0], "prompt_ids": [2, 3, 4]}, rows[1]]
    assert numbers == {"cut": [0], "over-long": [3], "identical": [2]}
    found, numbers = fit(Dataset.from_list(rows[:2]), sides, None, "drop")
    assert list(found) == rows[:2] and not any(numbers.values())


def neighbors(order, batch):
    """(example, the one whose completion it meets), spelled out from TRL's rotation."""
    for first in range(0, len(order), batch):
        part = order[first : first + batch]
        yield from zip(part, part[-1:] + part[:-1], strict=True)


@pytest.mark.parametrize("batch", [2, 3, 4, 64])
@pytest.mark.parametrize("wanted", [0.5, 0.2])
def test_kto_neighbors_never_share_a_prompt_and_labels_are_spread(batch, wanted):
    count = 201
    labels = [n % 10 < 10 * wanted for n in range(count)]
    prompts = [[n // 2] for n in range(count)]  # neighbors share one before they are ordered
    order = kto_order(labels, prompts, batch, seed=3)
    assert len(order) == count - (count % batch == 1)
    assert len(set(order)) == len(order)
    assert all(prompts[a] != prompts[b] for a, b in neighbors(order, batch))
    for first in range(len(order) - 20):
        share = sum(labels[i] for i in order[first : first + 20]) / 20
        assert abs(share - wanted) <= 0.1
    assert order != kto_order(labels, prompts, batch, seed=4)
    assert order == kto_order(labels, prompts, batch, seed=3)


def test_kto_alternates_as_many_of_each():
    labels = [True] * 30 + [False] * 30
    order = kto_order(labels, [[n % 30] for n in range(60)], 8, seed=0)
    assert [labels[i] for i in order] == [True, False] * 30


@pytest.mark.parametrize(
    ("labels", "batch", "part"),
    [
        ([True] * 4, 2, "label is true in all 4 examples"),
        ([False] * 4, 2, "label is false in all 4 examples"),
        ([True, False] * 2, 1, "per_device_train_batch_size is 1"),
        ([True, False] * 2, 4, "too few different prompts"),
    ],
)
def test_kto_orders_that_do_not_exist(labels, batch, part):
    with pytest.raises(InputError, match=part):
        kto_order(labels, [[1]] * 4, batch, seed=0)


def test_rotation_asserts_that_no_pair_is_of_one_prompt():
    rows = [{"prompt_ids": [n], "completion_ids": [10 + n]} for n in (0, 1, 2)]
    found = rotated(Dataset.from_list(rows), 3)
    assert found["KL_completion_ids"][:] == [[12], [10], [11]]
    with pytest.raises(InputError, match="two neighbors share a prompt"):
        rotated(Dataset.from_list([rows[0], rows[0]]), 2)
