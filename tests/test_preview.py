"""What would be trained on: five files with planted faults, against counts by hand."""

import json

import pytest
from conftest import ROOT
from own_model import said, write_lines

from rlhf_trl.cli import main
from rlhf_trl.run.preview import preview

# The embedded model has a token for each letter, and a text to learn ends with one more.
TINY = ("--model_name_or_path", "tiny", "--use_cpu")


def numbers(tmp_path, recipe, rows, *words, **data):
    """Return the preview of an own config of a recipe on rows in a file."""
    path = write_lines(tmp_path / "rows.jsonl", rows)
    options = [word for key, value in data.items() for word in (f"--dataset.{key}", str(value))]
    held_out = () if data.keys() & {"eval_size", "eval_path"} else ("--dataset.eval_size", "null")
    config = str(ROOT / "configs" / "own" / f"{recipe}.yaml")
    options_of_run = ("--dataset.path", str(path), "--eval_strategy", "no", *held_out, *options)
    return preview(config, [*TINY, *options_of_run, *words])


def pair(prompt, chosen, rejected):
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def test_pairs_of_which_some_repeat_and_some_are_equal(tmp_path):
    rows = [
        pair("ab", "cccc", "d"),
        pair("ab", "cccc", "d"),  # the same again
        pair("AB ", "ef", "gh"),  # the same question in other letters
        pair("abcdef", "x", "yyyyyyy"),
        pair("abcd", "same", "same"),  # no contrast
    ]
    result = numbers(tmp_path, "dpo", rows)
    assert result["left_out"] == {"chosen identical to rejected": 1}
    assert result["train"] == {
        "rows": 4,
        "prompts": 2,
        "repeated_rows": 1,
        "chosen_longer": 2,
        "chosen_as_long": 1,
        "tokens": {
            "prompt": {"median": 2.5, "90%": 6, "longest": 6},  # 2 2 3 6
            "chosen": {"median": 4, "90%": 5, "longest": 5},  # 5 5 3 2
            "rejected": {"median": 2.5, "90%": 8, "longest": 8},  # 2 2 3 8
            "prompt and answer": {"median": 7, "90%": 14, "longest": 14},  # 7 7 6 14
        },
    }
    assert result["held_out"] is None and result["overlap"] == 0
    assert (result["recipe"], result["algorithm"]) == ("dpo", "dpo (chapter)")


LONG_PAIRS = [  # limit 10; tokens of prompt + longer answer
    pair("abcd", "x" * 7, "y"),  # 4 + 8
    pair("abcdef", "x", "yyyy"),  # 6 + 5
    pair("ab", "x" * 12, "y"),  # 2 + 13: the answer alone is too long
    pair("a" * 12, "x", "y"),  # 12 + 2: the prompt alone is
    pair("abcdefgh", "xxxx", "xxyy"),  # 8 + 5; the first two letters of both answers are equal
    pair("abcd", "x", "y"),  # 4 + 2
]


@pytest.mark.parametrize(
    ("rule", "counts"),
    [
        ("cut_prompt", {"cut": 4, "dropped": 1}),
        ("cut_completion", {"cut": 3, "dropped": 1, "identical": 1}),
        ("drop", {"dropped": 5}),
    ],
)
def test_pairs_that_a_limit_cuts_or_drops(tmp_path, rule, counts):
    result = numbers(tmp_path, "dpo", LONG_PAIRS, "--max_length", "10", "--overlong", rule)
    assert result["limit"] == f"max_length 10, overlong: {rule}"
    fates = {name: result["train"].get(name) for name in ("cut", "dropped", "identical")}
    assert {name: count for name, count in fates.items() if count} == counts


def test_conversations_that_a_limit_cuts_and_rows_without_an_answer(tmp_path):
    rows = [
        {"messages": [said("user", "ab"), said("assistant", "cd")]},
        {"messages": [said("user", "ab"), said("assistant", "c" * 20)]},  # loses its end
        {"messages": [said("user", "a" * 20), said("assistant", "c")]},  # nothing of it is left
        {"messages": [said("user", "ab"), said("assistant", "cd"), said("user", "e")]},
        {"messages": [said("assistant", "cd")]},
    ]
    result = numbers(tmp_path, "sft", rows, "--max_length", "16")
    assert sum(result["left_out"].values()) == 2
    train = result["train"]
    assert (train["rows"], train["cut"], train["dropped"]) == (3, 1, 1)
    # <|bos|><|user|>ab<|end|><|assistant|> and cd<|end|>
    assert train["tokens"]["prompt"] == {"median": 6, "90%": 24, "longest": 24}
    assert train["tokens"]["completion"] == {"median": 3, "90%": 21, "longest": 21}


def test_labeled_answers_with_repeated_ones(tmp_path):
    rows = [
        {"prompt": "ab", "completion": "c", "label": True},
        {"prompt": "ab", "completion": "c", "label": True},
        {"prompt": "ab", "completion": "c", "label": False},  # another label, another row
        {"prompt": "abc", "completion": "dd", "label": False},
    ]
    train = numbers(tmp_path, "kto", rows)["train"]
    assert (train["rows"], train["prompts"], train["repeated_rows"]) == (4, 2, 1)
    assert train["desirable"] == 2


def test_prompts_of_which_some_are_held_out_elsewhere(tmp_path):
    rows = [{"prompt": text, "answer": "7"} for text in ("ab", "abc", "abc", "a" * 300)]
    held_out = [{"prompt": text, "answer": "7"} for text in ("AB", "xyz", "xy", "ab  ")]
    path = write_lines(tmp_path / "held_out.jsonl", held_out)
    result = numbers(tmp_path, "grpo", rows, "--max_completion_length", "20", eval_path=path)
    assert result["left_out"] == {"to evaluate on: the prompt is trained on": 2}
    assert (result["train"]["rows"], result["train"]["prompts"]) == (4, 3)
    assert result["train"]["repeated_rows"] == 1
    assert result["train"]["too_long"] == 1  # 300 + 20 in a context of 256
    assert result["held_out"]["rows"] == result["held_out"]["prompts"] == 2
    assert result["overlap"] == 0


def test_a_reward_model_loses_pairs_over_the_limit(tmp_path):
    rows = [pair("ab", "c", "d"), pair("ab", "c" * 9, "d"), pair("ef", "c", "d" * 9)]
    train = numbers(tmp_path, "reward", rows, "--max_length", "10")["train"]
    assert (train["dropped"], train["chosen_longer"], train["chosen_as_long"]) == (2, 1, 1)


def test_answers_that_would_be_sampled_are_not(capsys, monkeypatch):
    config = str(ROOT / "configs" / "tiny" / "dpo.yaml")
    words = ["--dataset.size", "9", "--dataset.eval_size", "4", "--max_samples", "7"]
    main(["preview", config, "--json", *words])
    result = json.loads(capsys.readouterr().out)
    assert result["notes"] == [
        "the answers are sampled from tiny when the run begins; here are the prompts"
    ]
    assert (result["train"]["rows"], result["held_out"]["rows"]) == (7, 4)
    assert result["train"]["tokens"].keys() == {"prompt"}


def test_the_table_has_both_sides(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    path = write_lines(tmp_path / "rows.jsonl", [pair(f"q{n}", "ab", "c") for n in range(8)])
    words = ["--dataset.path", str(path), "--dataset.eval_size", "2", *TINY]
    main(["preview", str(ROOT / "configs" / "own" / "dpo.yaml"), *words])
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("dpo.yaml: dpo (chapter); max_length 1024, overlong: cut_prompt")
    assert lines[2].split() == ["train", "held", "out"]
    assert lines[3].split() == ["rows", "6", "2"]
    assert "chosen longer" in lines[6] and lines[6].split()[2:4] == ["6", "(100.0%)"]
    assert lines[-1] == "0 prompts are both trained on and held out"
