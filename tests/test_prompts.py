"""Prompts of one's own for recipes that learn from rewards."""

import pytest
from datasets import Dataset
from own_model import said, write_lines

from rlhf_trl.data.blocks import FileData
from rlhf_trl.data.columns import with_system_prompt
from rlhf_trl.data.prompt_files import checked_prompts
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.errors import InputError

ROWS = [{"prompt": f"p{n}", "answer": n, "day": f"2026-01-0{n + 1}"} for n in range(6)]


def loaded(tmp_path, rows, **given):
    path = str(write_lines(tmp_path / "prompts.jsonl", rows))
    return load_prompts(FileData(path, **given))


@pytest.mark.parametrize("chat", [False, True])
def test_prompts_keep_all_columns_beside_them(tmp_path, chat):
    rows = [{**r, "prompt": [said("user", r["prompt"])] if chat else r["prompt"]} for r in ROWS]
    found = loaded(tmp_path, rows, eval_size=2)
    assert found.conversational is chat
    assert (len(found.train), len(found.held_out), found.tasks) == (4, 2, None)
    both = sorted([*found.train, *found.held_out], key=lambda row: row["answer"])
    assert [(r["prompt"], r["answer"]) for r in both] == [(r["prompt"], r["answer"]) for r in rows]
    assert [str(row["day"])[:10] for row in both] == [row["day"] for row in rows]


def test_columns_are_read_under_other_names(tmp_path):
    rows = [{"question": "q", "prompt": "old", "solution": "s", "more": [1, 2]}]
    columns = {"prompt": "question", "answer": "solution"}
    (row,) = loaded(tmp_path, rows, columns=columns).train
    assert row == {"prompt": "q", "answer": "s", "more": [1, 2]}


def test_what_rewards_read_may_be_empty_null_or_of_several_kinds(tmp_path):
    more = [[], ["x"], None, [], ["y"], []]
    mixed = [1, "one", None, {"a": []}, [], 2.5]
    rows = [{**r, "more": a, "mixed": b} for r, a, b in zip(ROWS, more, mixed, strict=True)]
    assert [row["more"] for row in loaded(tmp_path, rows).train] == more
    found = loaded(tmp_path, rows[:1], eval_path=str(write_lines(tmp_path / "e.jsonl", rows[1:])))
    assert [row["mixed"] for row in [*found.train, *found.held_out]] == mixed


@pytest.mark.parametrize(
    ("rows", "columns", "part"),
    [
        ([{"question": "q"}], {}, "no column prompt, but question; map them"),
        ([{"prompt": "q"}], {"answer": "anser"}, "has no 'anser'"),
        ([{"prompt": "q", "a": 1}], {"b": "a", "c": "a"}, "maps two names to one column"),
        ([{"prompt": "q"}, {"prompt": " "}], {}, "row 2 of f: prompt is empty"),
        ([{"prompt": "q"}, {"prompt": '[{"role": "user"}]'}], {}, "row 2 of f: prompt is a text"),
        ([{"prompt": str([said("user", "q")])}], {}, "spells out messages"),
        ([{"prompt": "q", "completions": 1}], {}, "as in {my_completions: completions}"),
        ([{"prompt": "q", "image": "a.png"}], {}, "as in {my_image: image}"),
        ([{"prompt": "q", "trainer_state": 1}], {}, "as in {my_trainer_state: trainer_state}"),
    ],
)
def test_prompts_that_cannot_be_learned_from_are_refused_in_one_sentence(rows, columns, part):
    with pytest.raises(InputError) as found:
        checked_prompts(Dataset.from_list(rows), "f", columns)
    assert part in str(found.value) and "\n" not in str(found.value)


SYSTEM, USER, ANSWER = said("system", "Be brief."), said("user", "q"), said("assistant", "a")


@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        ({"prompt": "q"}, {"prompt": [SYSTEM, USER]}),
        ({"prompt": [USER]}, {"prompt": [SYSTEM, USER]}),
        (
            {"prompt": [said("system", "Be long."), USER]},
            {"prompt": [said("system", "Be long."), USER]},
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.5},
            {
                "prompt": [SYSTEM, USER],
                "chosen": [ANSWER],
                "rejected": [said("assistant", "b")],
                "margin": 0.5,
            },
        ),
        (
            {"prompt": [USER], "completion": [ANSWER], "label": True},
            {"prompt": [SYSTEM, USER], "completion": [ANSWER], "label": True},
        ),
        (
            {"prompt": "q", "ranked": ["a", "b"]},
            {"prompt": [SYSTEM, USER], "ranked": [[ANSWER], [said("assistant", "b")]]},
        ),
    ],
)
def test_a_system_prompt_is_put_before_prompts_that_have_none(row, wanted):
    dataset = Dataset.from_list([row])
    assert list(with_system_prompt(dataset, "Be brief.")) == [wanted]
    assert with_system_prompt(dataset, None) is dataset


def test_a_system_prompt_is_refused_with_traces():
    traces = Dataset.from_list([{"prompt": "q", "completions": ["a"], "labels": [1]}])
    with pytest.raises(InputError, match="system_prompt is not read with traces"):
        with_system_prompt(traces, "Be brief.")
