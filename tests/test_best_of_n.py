"""The table of reward models side by side, on candidates small enough to work out by hand."""

import json
import re

import pytest

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.best_of_n import best_of_n, read_candidates

# Two prompts with four candidates each: answers, labels; None has no answer.
ANSWERS = [["nus", "nus", "sun", None], ["tac", "cat", "cat", "cat"]]
RIGHT = ["nus", "tac"]


def candidates(scores, answers=ANSWERS, task="spell_backward"):
    """Lines of a scores.jsonl; `scores` are lists of eight by name."""
    rows = []
    for prompt, (group, right) in enumerate(zip(answers, RIGHT, strict=True)):
        for answer in group:
            text = "<think></think>" if answer is None else f"<answer>{answer}</answer>"
            row = {"prompt": f"word {prompt}", "completion": text, "answer": right, "task": task}
            row |= {"label": answer == right, "finished": True}
            rows.append(row | {"scores": {k: v[len(rows)] for k, v in scores.items()}})
    return rows


def write(folder, rows):
    folder.mkdir(parents=True)
    (folder / "scores.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def cells(lines):
    """The table as cells by row; the head under `chosen by`."""
    table = {line["chosen by"]: list(line.values())[1:] for line in lines}
    return {"chosen by": list(lines[0])[1:], **table}


def test_every_row_by_hand(tmp_path, capsys, monkeypatch):
    one = {"score": [3.0, 1.0, 2.0, 0.0, 0.0, 1.0, 1.0, 2.0]}
    two = {"last": [9.0, 8.0, 1.0, 0.0, 9.0, 1.0, 1.0, 2.0], "min": [0.0] * 8}
    runs = write(tmp_path / "bt", candidates(one)), write(tmp_path / "prm", candidates(two))
    table = cells(best_of_n(runs))
    monkeypatch.setenv("COLUMNS", "100")
    main(["best-of-n", *runs])
    printed = capsys.readouterr().out.splitlines()
    assert [re.split("  +", line)[1:] for line in printed] == list(table.values())
    assert list(table) == [
        *["chosen by", "random", "majority of n", "bt (score)", "prm (last)", "prm (min)"],
        "oracle",
    ]
    assert table["chosen by"] == ["n = 1", "n = 2", "n = 4", "AUC", "pairwise"]
    # right: 2 of 4 and 1 of 4
    assert table["random"] == ["0.375", "0.375", "0.375", "0.500", "0.500"] == table["prm (min)"]
    # n = 2, first word: pairs nus nus: 1; nus sun, nus none: 1/2, four times; sun none: 0; second:
    # tac cat: 1/2, three of six. n = 4: nus has two votes of four; cat has three.
    assert table["majority of n"] == ["0.375", "0.375", "0.500", "-", "-"]
    # n = 2, first word: of 3 1 2 0 with 3 and 1 right: 3 in three pairs, 1 in one; second: never.
    # AUC: right 3 1 0 against wrong 2 0 1 1 2: 5 + (1 + .5 + .5) + .5 of 15 = .5, within prompts
    # 3 of 4 and 0 of 3.
    assert table["bt (score)"] == ["0.375", "0.333", "0.500", "0.500", "0.375"]
    assert table["prm (last)"] == ["0.375", "0.667", "1.000", "1.000", "1.000"]
    # n = 2 misses with the two wrong ones of four: 1/6; with three wrong ones of four: 1/2
    assert table["oracle"] == ["0.375", "0.667", "1.000", "1.000", "1.000"]


def test_equal_answers_vote_together_as_the_task_spells_them(tmp_path):
    rows = candidates({"score": [0.0] * 8}, [["7", "7.0", "8", "8"], ["7", "1", "2", "3"]])
    for row in rows:
        row["label"] = "7" in row["completion"]
    spelled = write(tmp_path / "spelled", rows)
    numbers = write(tmp_path / "numbers", [row | {"task": "chain_sum"} for row in rows])
    # first prompt: 8 8 outvotes "7" and "7.0" unless they are one answer; second: four ways
    assert cells(best_of_n([spelled]))["majority of n"][2] == "0.125"
    assert cells(best_of_n([numbers]))["majority of n"][2] == "0.375"


def test_chat_prompts_and_runs_without_answers(tmp_path):
    rows = candidates({"score": list(map(float, range(8)))})
    for row in rows:
        text = row["completion"].replace("answer>", "b>")
        row["completion"] = [{"role": "assistant", "content": text}]
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        del row["task"], row["answer"]
    table = cells(best_of_n([write(tmp_path / "run", rows)]))
    assert "majority of n" not in table  # nothing to vote on
    assert table["run (score)"][2] == "0.000"


def test_seeds_are_averaged_each_on_its_own_candidates(tmp_path):
    right = [1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    wrong = [-s for s in right]
    other = [ANSWERS[0], ["tac", "tac", "cat", "cat"]]
    for name, seed in (("orm", right), ("prm", wrong)):
        write(tmp_path / name / "seed-0", candidates({"mean": right}))
        write(tmp_path / name / "seed-1", candidates({"mean": seed}, other))
    table = cells(best_of_n([tmp_path / "orm", tmp_path / "prm"], seeds=True))
    # the second seed's second word has two right ones of four
    assert table["random"][0] == "0.438 ± 0.088"
    # -1 stands on the two right ones of the first word and one of the second word's
    assert table["orm (mean)"][2] == "1.000 ± 0.000"
    assert table["prm (mean)"][2] == "0.583 ± 0.589"  # 1, and (0 + 1/3) / 2
    assert table["oracle"][2] == "1.000 ± 0.000"


def test_runs_of_one_name_are_told_apart_by_their_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for side in "ab":
        write(tmp_path / side / "orm", candidates({"mean": [0.0] * 8}))
    table = cells(best_of_n(["a/orm", "b/orm"]))
    assert "a/orm (mean)" in table and "b/orm (mean)" in table


def test_the_smallest_prompt_decides_how_many_columns_there_are(tmp_path):
    rows = candidates({"mean": [0.0] * 8})[:-1]
    assert cells(best_of_n([write(tmp_path / "run", rows)]))["chosen by"][:3] == [
        *["n = 1", "n = 2", "AUC"]
    ]


def edited(rows, place, **changes):
    return [row | changes if i == place else row for i, row in enumerate(rows)]


def test_what_is_no_set_of_candidates_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = candidates({"score": [0.0] * 8})
    write(tmp_path / "good", rows)
    write(tmp_path / "other", edited(rows, 3, label=True))
    write(tmp_path / "shorter", rows[:-1])
    write(tmp_path / "two_kinds", edited(rows, 2, scores={"last": 1.0}))
    write(tmp_path / "unlabeled", edited(rows, 1, label=None))
    write(tmp_path / "unscored", edited(rows, 1, scores={}))
    write(tmp_path / "nan", edited(rows, 5, scores={"score": float("nan")}))
    write(tmp_path / "no_completion", [{"prompt": "x"}])
    write(tmp_path / "empty", [])
    write(tmp_path / "many/seed-0", rows)
    write(tmp_path / "others/seed-1", rows)
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut/scores.jsonl").write_text(json.dumps(rows[0]) + '\n{"prompt": "wo')
    (tmp_path / "nothing").mkdir()
    for runs, seeds, sentence in [
        (["good", "other"], False, "good/scores.jsonl and other/scores.jsonl hold other candidate"),
        (["good", "shorter"], False, "let both runs score the same samples-held-out.jsonl"),
        (["two_kinds"], False, "line 3 has other scores than line 1"),
        (["unlabeled"], False, "line 2 is not a scored candidate (ValueError: its label"),
        (["unscored"], False, "line 2 is not a scored candidate"),
        (["nan"], False, "nan/scores.jsonl, score: scores: number 5 of 8 is nan"),
        (["no_completion"], False, "line 1 is not a scored candidate (KeyError: 'completion')"),
        (["empty"], False, "empty/scores.jsonl is empty"),
        (["cut"], False, "cut/scores.jsonl: line 2 is not a scored candidate"),
        (["nothing"], False, "nothing holds no scores.jsonl; name a finished reward model run"),
        (["missing"], False, "missing holds no scores.jsonl"),
        (["many"], False, "add --seeds"),
        (["good"], True, "good holds no seed-* folders; leave --seeds out"),
        (["many", "others"], True, "many holds seed-0 and others seed-1"),
        (["good", "good"], False, "named twice"),
        ([], False, "no run is named"),
    ]:
        with pytest.raises(InputError) as error:
            best_of_n(runs, seeds)
        assert sentence in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(SystemExit) as stop:
        main(["best-of-n", "missing"])
    assert str(stop.value.code).startswith("error: missing holds no scores.jsonl")


def test_candidates_are_read_as_they_were_written(tmp_path):
    found = read_candidates(write(tmp_path / "run", candidates({"a": [0.0] * 8, "b": [1] * 8})))
    assert found.answers == ["nus", "nus", "sun", None, "tac", "cat", "cat", "cat"]
    assert found.labels == [True, True, False, False, True, False, False, False]
    assert found.scores == {"a": [0.0] * 8, "b": [1.0] * 8}
