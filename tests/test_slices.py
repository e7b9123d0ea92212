"""Slices of the prompts to train on: disjoint, of the right share, the same held out for all."""

import json
from collections import Counter
from itertools import chain

import pytest

from rlhf_trl.data.blocks import FileData, GymData, Spec
from rlhf_trl.data.gym import GymTasks, question_key
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.slices import Slice
from rlhf_trl.errors import InputError

SPELL = [Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})]


def words(**given):
    tasks = GymTasks(GymData(specs=SPELL, eval_size=20, **given))
    return [[row["question"].lower() for row in rows] for rows in (tasks.train, tasks.held_out)]


def test_slices_of_a_task_share_no_question_and_hold_the_same_out():
    (low, held), (high, held_too) = words(size=400, slice=":30%"), words(size=400, slice="30%:")
    assert not {*low} & {*high} and held == held_too
    whole, held_of_all = words(size=400)
    assert held_of_all == held
    # in its order, a slice draws what is drawn without one, less the others
    inside = [word for word in whole if word in {*low}]
    assert low[: len(inside)] == inside
    assert 0.2 < len(inside) / len(whole) < 0.4
    assert len(inside) + sum(word in {*high} for word in whole) == len(whole)


def test_the_terms_of_a_sum_may_stand_in_any_order():
    def entry(expression):
        metadata = {"source_dataset": "chain_sum", "expression": expression}
        return {"question": f"State {expression}.", "metadata": metadata}

    half = Slice(":50%")
    sums = [f"{a} + {b} - {a + b}" for a in range(9) for b in range(9)]
    turned = [f"{b} - {a + b} + {a}" for a in range(9) for b in range(9)]
    sides = [half.has_key(question_key(entry(one))) for one in sums]
    assert sides == [half.has_key(question_key(entry(one))) for one in turned]
    assert 20 < sum(sides) < 61


def rows_of(path, **given):
    data = load_preferences(FileData(path=str(path), **given))
    sides = [None if side is None else [*side["prompt"]] for side in (data.train, data.held_out)]
    return *sides, data.dropped


@pytest.fixture
def path(tmp_path):
    """Pairs of 200 prompts, the first 100 of which come twice, in other words."""
    prompts = [f"How far is star {n}?" for n in range(200)]
    prompts += [f"how far  is STAR {n}?" for n in range(100)]
    lines = [{"prompt": p, "chosen": f"{n} miles", "rejected": "no"} for n, p in enumerate(prompts)]
    (tmp_path / "pairs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return tmp_path / "pairs.jsonl"


def asked(prompts):
    return {" ".join(prompt.lower().split()) for prompt in prompts}


@pytest.mark.parametrize(
    "held",
    [{"eval_size": 30}, {"eval_split": "train[50%:60%]", "split": "train[:50%]+train[60%:]"}],
)
def test_slices_of_a_file_share_no_prompt_even_if_it_comes_twice(path, held):
    low, held_out, dropped = rows_of(path, slice=":40%", **held)
    high, held_out_too, _ = rows_of(path, slice="40%:", **held)
    whole, held_out_of_all, _ = rows_of(path, **held)
    assert held_out == held_out_too == held_out_of_all
    assert not asked(low) & asked(high) and not asked(low + high) & asked(held_out)
    assert Counter(low + high) == Counter(whole)
    assert 0.25 < len(low) / len(whole) < 0.55
    assert dropped["the prompt is in no slice to train on"] == len(whole) - len(low)


def test_thirds_are_all(path):
    parts = [rows_of(path, slice=part)[0] for part in (":33.3%", "33.3%:66.66%", "66.66%:")]
    assert Counter(chain(*parts)) == Counter(rows_of(path)[0])
    assert all(50 < len(part) < 150 for part in parts)


@pytest.mark.parametrize(
    "slice", ["50%", "half", "60%:40%", ":101%", "0.5:", ":0%", "50%:50%", "-1%:", ":"]
)
def test_what_is_no_slice_is_one_sentence(slice):
    if slice == ":":  # all of them
        assert Slice(slice).has(123)
        return
    with pytest.raises(InputError, match=r"dataset\.slice is '.*'; write shares of the prompts"):
        Slice(slice)


def test_a_slice_without_rows_is_refused(tmp_path):
    line = json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"})
    (tmp_path / "one.jsonl").write_text(line)
    kept = [part for part in (":50%", "50%:") if Slice(part).has_key("a")]
    (other,) = {":50%", "50%:"} - {*kept}
    with pytest.raises(InputError, match=r"dataset\.slice: none of the 1 rows to train on is in"):
        load_preferences(FileData(path=str(tmp_path / "one.jsonl"), slice=other))
