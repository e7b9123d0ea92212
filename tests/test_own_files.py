"""Files as people write them: answers, tools, columns under other names, and bad rows."""

import json
from types import SimpleNamespace

import pytest
from conftest import ROOT
from datasets import Dataset
from own_model import TEMPLATE, said, write_lines
from transformers import AutoTokenizer

from rlhf_trl.data.blocks import AnswersToLearn, FileData
from rlhf_trl.data.columns import with_template_columns
from rlhf_trl.data.demonstrations import load_demonstrations
from rlhf_trl.data.files import read
from rlhf_trl.data.judgment_blocks import AnswersFile, RankedFile, RewardPairsFile
from rlhf_trl.data.judgments import load_outcomes, load_pairs_or_ranked
from rlhf_trl.data.pairs import load_preferences
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.errors import InputError
from rlhf_trl.rewards.loading import answer_columns, load_rewards
from rlhf_trl.run import train

# --- right answers -------------------------------------------------------------------------------

# in a file, as between two commas or two colons of it, and the text that is the right answer
IN_CSV = {
    "true": "true",
    "false": "false",
    "02139": "02139",
    "007": "007",
    "1.50": "1.50",
    "0.00001": "0.00001",
    "NA": "NA",
    "None": "None",
    "null": "null",
    "nan": "nan",
    "2026-01-02": "2026-01-02",
    '"a\n""b"""': 'a\n"b"',
    "": None,
}
IN_JSON = {
    "true": "true",
    "false": "false",
    "1.50": "1.50",
    "0.00001": "0.00001",
    "12345678901234567890.5": "12345678901234567890.5",
    "12": "12",
    '"007"': "007",
    '"2026-01-02"': "2026-01-02",
    "null": None,
}


def json_lines(cells, name="answer"):
    """Return lines as they are written by hand."""
    return "".join(f'{{"prompt": "p{n}", "{name}": {cell}}}\n' for n, cell in enumerate(cells))


def answers(path, **given):
    return load_prompts(FileData(str(path), **given), ["answer"]).train["answer"][:]


@pytest.mark.parametrize("cell", [*IN_CSV, "all"])
def test_answers_of_a_csv_file_are_its_texts(cell, tmp_path):
    cells = list(IN_CSV) if cell == "all" else [cell, cell]
    path = tmp_path / "a.csv"
    path.write_text("prompt,answer\n" + "".join(f"p{n},{one}\n" for n, one in enumerate(cells)))
    assert answers(path) == [IN_CSV[one] for one in cells]


@pytest.mark.parametrize("layout", ["lines", "list", "folder", "slice"])
@pytest.mark.parametrize(
    "cells",
    [["true", "false"], ["1.50", "0.00001"], ["1.50", "12"], ['"2026-01-02"'] * 2, list(IN_JSON)],
)
def test_answers_of_a_json_file_are_its_texts(cells, layout, tmp_path):
    texts = [IN_JSON[cell] for cell in cells]
    path, given = tmp_path / "rows.jsonl", {}
    if layout == "list":
        path = tmp_path / "rows.json"
        path.write_text("[" + ",\n".join(json_lines(cells).splitlines()) + "]")
    elif layout == "folder":
        for n in range(2):
            (tmp_path / f"{n}.jsonl").write_text(json_lines(cells))
        path, texts = tmp_path, texts * 2
    else:
        path.write_text(json_lines(cells))
    if layout == "slice":
        given, texts = {"split": "train[1:]+train[:1]"}, [*texts[1:], texts[0]]
    assert answers(path, **given) == texts


def test_answers_of_a_parquet_file_are_its_values_but_for_booleans(tmp_path):
    for values, wanted in {
        (True, False): ["true", "false"],
        (7, 12): [7, 12],
        (1.5, 2.0): [1.5, 2.0],
        ("007", None): ["007", None],
    }.items():
        path = tmp_path / "rows.parquet"
        Dataset.from_dict({"prompt": ["a", "b"], "answer": values}).to_parquet(path)
        assert answers(path) == wanted


def test_whole_numbers_have_one_spelling_and_stay_numbers(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(json_lines(["12", "null", "-3"]))
    assert answers(path) == [12, None, -3]


@pytest.mark.parametrize("name", ["rows.csv", "rows.jsonl"])
def test_right_answers_score_one_under_the_rewards_that_read_them(name, tmp_path):
    texts = ["true", "1.50", "0.00001"]
    path = tmp_path / name
    if name == "rows.csv":
        path.write_text("".join(f"{a},{b}\n" for a, b in [("prompt", "truth"), *enumerate(texts)]))
    else:
        path.write_text(json_lines(texts, "truth"))
    own = SimpleNamespace(reward_funcs=["exact_match:truth", "tests.own_model.own_reward"])
    assert answer_columns(own) == ["truth"]
    data = load_prompts(FileData(str(path)), answer_columns(own)).train
    (reward,) = load_rewards(own.reward_funcs[:1], None, data.column_names)
    right = [f"<answer>{text}</answer>" for text in texts]
    assert reward(completions=right, truth=data["truth"][:]) == [1, 1, 1]


def test_what_only_own_rewards_read_keeps_the_types_of_json(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": 1.5, "level": True}])
    (row,) = load_prompts(FileData(str(path))).train
    assert row == {"prompt": "a", "answer": 1.5, "level": True}


def test_answers_that_are_empty_are_counted_and_said(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    path.write_text("prompt,answer\na,1\nb,\nc,\nd,NA\n")
    args = SimpleNamespace(process_index=0, main_process_first=lambda desc: train.nullcontext())
    train.read(args, load_prompts, FileData(str(path)), ["answer"])
    assert "answer is empty in 2 of 4 train rows: rewards that compare with it" in (
        capsys.readouterr().out
    )


def test_labels_and_margins_of_a_csv_file_are_values(tmp_path):
    path = tmp_path / "labels.csv"
    path.write_text("prompt,completion,label\na,007,True\nb,NA,FALSE\nc,true,true\n")
    assert list(load_preferences(FileData(str(path)), unpaired=True).train) == [
        {"prompt": "a", "completion": "007", "label": True},
        {"prompt": "b", "completion": "NA", "label": False},
        {"prompt": "c", "completion": "true", "label": True},
    ]
    path.write_text("prompt,completion,label,finished\na,x,1,true\nb,y,0,false\n")
    rows = load_outcomes(AnswersFile(str(path)), None, None).train
    assert [(r["label"], r["finished"]) for r in rows] == [(True, True), (False, False)]
    path.write_text("prompt,chosen,rejected,margin\na,x,y,1.50\nb,x,y,2\n")
    rows = load_pairs_or_ranked(RewardPairsFile(str(path)), None, None).train
    assert rows["margin"][:] == [1.5, 2.0]
    path.write_text("prompt,completion,label\na,b,yes\nb,c,true\nc,d,no\n")
    with pytest.raises(InputError, match=r"2 rows .* bad: line 2 \(label is 'yes'; write true or"):
        load_preferences(FileData(str(path)), unpaired=True)


def test_a_csv_row_of_more_cells_than_there_are_names_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("prompt,answer\nwhat, then,3\n")
    with pytest.raises(InputError, match=r"a.csv, line 2 has more cells than line 1 has names"):
        read(str(tmp_path / "a.csv"))


# --- columns of chat templates -------------------------------------------------------------------

TOOLS = "{% if tools %}{{ '<|tools|>' + tools | tojson + '<|end|>' }}{% endif %}"
CALLS = "{{ m['content'] + (m.tool_calls | tojson if m.tool_calls else '') + '<|end|>' }}"
TOOL_TEMPLATE = (
    "{% if brief %}Brief.{% endif %}"
    + TOOLS
    + TEMPLATE.replace(
        "{{ m['content'] + '<|end|>' }}{% endgeneration %}", CALLS + "{% endgeneration %}"
    )
)


def tool(name, **properties):
    """Return a function's schema."""
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ADD, SPELL = tool("add", a={"type": "integer"}), tool("spell", word={"type": "string"})
SPELL["function"]["description"] = "Spells a word."  # which the other has not
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
ASKED = [
    {"prompt": [said("user", "one")], "tools": [ADD]},
    {"prompt": [said("user", "two")], "tools": [SPELL, ADD]},
    {"prompt": [said("user", "three")], "chat_template_kwargs": {"brief": True}},
    {"prompt": [said("user", "four")], "tools": json.dumps([tool("say", word={"default": None})])},
]
YES, NO = [said("assistant", "yes")], [said("assistant", "no")]
CALLING = [{"role": "assistant", "tool_calls": [CALL]}]


@pytest.fixture
def built(run, monkeypatch, own_model, tmp_path):
    """Return the trainer that a recipe builds for rows; nothing trains."""
    trainers = []
    monkeypatch.setattr(train, "run", lambda trainer, *_, **__: trainers.append(trainer))
    model = tmp_path / "model"
    model.mkdir()
    for file in own_model.iterdir():
        (model / file.name).symlink_to(file)
    (model / "chat_template.jinja").unlink()
    (model / "chat_template.jinja").write_text(TOOL_TEMPLATE)

    def built(recipe, rows, *words):
        trainers.clear()
        path = write_lines(tmp_path / "rows.jsonl", rows)
        given = ["--use_cpu", "--bf16", "false", "--max_steps", 1]
        given += [] if recipe == "grpo" else ["--max_length", 4096]
        given += ["--model_name_or_path", model, "--dataset.path", path, *words]
        given += ["--dataset.eval_size", "null", "--eval_strategy", "no"]
        _, built.printed = run(recipe, ROOT / "configs" / "own" / recipe, *given)
        return trainers[0], AutoTokenizer.from_pretrained(model)

    return built


def with_template(tokenizer, row, answer):
    """Return the text of a conversation, by transformers from the row as it was written."""
    tools = row.get("tools")
    tools = json.loads(tools) if isinstance(tools, str) else tools
    more = row.get("chat_template_kwargs", {})
    answer = [{"content": "", **message} for message in answer]
    return tokenizer.apply_chat_template(
        row["prompt"] + answer, tools=tools, tokenize=False, **more
    )


def test_sft_trains_with_the_tools_and_template_arguments_of_each_row(built):
    some = [row for row in ASKED if not isinstance(row.get("tools"), str)]
    for rows in (some, ASKED[-1:]):  # a column has one type
        answered = [(row, CALLING if "tools" in row else YES) for row in rows]
        written = [{**row, "completion": answer} for row, answer in answered]
        trainer, tokenizer = built("sft", written)
        texts = [tokenizer.decode(example["input_ids"]) for example in trainer.train_dataset]
        assert texts == [with_template(tokenizer, *pair) for pair in answered]
        assert [text.count("<|tools|>") for text in texts] == ["tools" in row for row in rows]


def test_tools_of_a_parquet_file_have_no_keys_that_only_others_have():
    rows = Dataset.from_list([{"tools": [ADD]}, {"tools": [SPELL]}])
    assert "description" in rows[0]["tools"][0]["function"]  # Arrow's
    assert with_template_columns(rows, "f")["tools"][:] == [[ADD], [SPELL]]


@pytest.mark.parametrize("recipe", ["dpo", "kto", "orpo", "reward"])
def test_pairs_are_trained_with_the_tools_and_template_arguments_of_each_row(recipe, built):
    rows = [{**row, "chosen": YES, "rejected": NO} for row in ASKED[:3]]
    wanted = [(row, answer) for row in rows for answer in (YES, NO)]
    if recipe == "kto":
        rows = [
            {**row, "completion": side, "label": side is YES}
            for row in ASKED[:3]
            for side in (YES, NO)
        ]
    trainer, tokenizer = built(recipe, rows)
    texts = []
    for example in trainer.train_dataset:
        start = example.get("prompt_ids") or []
        names = ["completion_ids"] if recipe == "kto" else ["chosen_ids", "rejected_ids"]
        if recipe == "orpo":  # whose columns hold whole texts
            start, names = [], ["chosen_input_ids", "rejected_input_ids"]
        texts += [tokenizer.decode([*start, *example[name]]) for name in names]
    assert sorted(texts) == sorted(with_template(tokenizer, *pair) for pair in wanted)


def test_tools_are_refused_where_no_chat_template_gets_them(built, tmp_path):
    def refused(recipe, rows, *words):
        with pytest.raises(SystemExit) as stop:
            built(recipe, rows, *words)
        return str(stop.value.code)

    pair = {"prompt": [said("user", "a")], "chosen": YES, "rejected": NO, "tools": [ADD]}
    stock = refused("orpo", [pair], "--formulation", "trl")
    assert "ORPOTrainer does not hand the column tools" in stock
    words = ["--reward_funcs", "contains", "--max_completion_length", 8]
    asked = [{**ASKED[0], "answer": "a"}] * 8
    assert "has a column tools, which is not read here" in refused("grpo", asked, *words)
    texts = [{"prompt": "a", "completion": "b", "tools": [ADD]}]
    assert "and prompts that are texts; write messages" in refused("sft", texts)
    broken = [{**ASKED[0], "completion": YES, "tools": "add(a)"}]
    assert "line 1: tools is a text that is not JSON" in refused("sft", broken)
    path = str(write_lines(tmp_path / "r.jsonl", [{**ASKED[0], "ranked": [YES, NO]}]))
    with pytest.raises(InputError, match="has a column tools, which is not read here"):
        load_pairs_or_ranked(RankedFile(path), None, None)
    path = str(
        write_lines(
            tmp_path / "m.jsonl", [{"messages": [*ASKED[0]["prompt"], *YES], "tools": [ADD]}]
        )
    )
    with pytest.raises(InputError, match="has a column tools, which is not read here"):
        load_demonstrations(AnswersToLearn(path, reader="messages"), "imperfect")


BARE = {"role": "assistant", "content": "I add.", "tool_calls": [CALL]}


@pytest.mark.parametrize("recipe", ["sft", "dpo", "reward"])
def test_what_the_chat_template_leaves_out_is_counted(recipe, built, tmp_path):
    rows = [
        {"prompt": [said("user", "a")], "tools": [ADD], "chosen": YES, "rejected": NO},
        {"prompt": [said("user", "b")], "tools": [ADD], "chosen": [BARE], "rejected": NO},
        {"prompt": [said("user", "c")], "chosen": YES, "rejected": NO},
    ]
    words = ["--dataset.columns.completion", "chosen"] if recipe == "sft" else []
    built(recipe, rows, *words)
    assert "leaves out" not in built.printed
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    built(recipe, rows, *words)
    assert "the chat template leaves out tool_calls of 1 of 3 train rows\n" in built.printed
    assert "the chat template leaves out tools of 2 of 3 train rows\n" in built.printed


@pytest.mark.parametrize("recipe", ["sft", "dpo", "kto", "reward"])
def test_an_answer_of_calls_that_the_chat_template_leaves_out_is_refused(recipe, built, tmp_path):
    pair = {"prompt": [said("user", "a")], "chosen": CALLING, "rejected": NO}
    words = ["--dataset.columns.completion", "chosen"] if recipe == "sft" else []
    rows = [pair, {**pair, "chosen": YES}]
    if recipe == "kto":
        rows = [
            {"prompt": [said("user", asked)], "completion": answer, "label": answer is NO}
            for asked, answer in zip("abcd", (CALLING, NO, YES, NO), strict=True)
        ]
    built(recipe, rows, *words)
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    with pytest.raises(SystemExit, match=r"1 of [24] train rows of .* have an answer of tool_call"):
        built(recipe, rows, *words)


def test_calls_before_the_answer_are_trained_on_with_turns_all_only(built, tmp_path):
    called = [said("user", "a"), *CALLING, said("tool", "2"), *YES]
    (tmp_path / "model" / "chat_template.jinja").write_text(TEMPLATE)
    built("sft", [{"messages": called}])
    assert "the chat template leaves out tool_calls of 1 of 1 train rows\n" in built.printed
    with pytest.raises(SystemExit, match=r"1 of 1 train rows of .* have an answer of tool_calls a"):
        built("sft", [{"messages": called}], "--dataset.turns", "all")


def test_the_chat_template_that_is_taken_over_is_the_one_that_is_asked(built, tmp_path):
    (tmp_path / "bare.jinja").write_text(TEMPLATE)
    rows = [{**ASKED[0], "completion": YES}]
    built("sft", rows, "--chat_template_path", tmp_path / "bare.jinja")
    assert "the chat template leaves out tools of 1 of 1 train rows\n" in built.printed


def test_why_kto_leaves_an_example_over_is_printed(built):
    rows = [
        {"prompt": [said("user", asked)], "completion": YES, "label": asked != "b"}
        for asked in "abc"
    ]
    trainer, _ = built("kto", rows, "--per_device_train_batch_size", 2)
    assert len(trainer.train_dataset) == 2
    told = "left out 1 train rows: alone in the last batch of 2, where KTO has no other completion"
    assert told in built.printed
    assert "max_length" not in built.printed


# --- columns under other names -------------------------------------------------------------------

HINTS = {
    "almost Alpaca": (
        {"instruction": "add", "input": "1 and 2", "response": "3"},
        "it needs prompt, completion (or messages) and has instruction, input, response; map them "
        "with dataset.columns, perhaps {prompt: instruction, completion: response} (a guess by the "
        "names: check that they mean this and that input may go unread).",
    ),
    "questions": (
        {"id": 3, "Question": "1 + 2", "answer": "3"},
        "perhaps {prompt: Question, completion: answer} (a guess by the names: check that they "
        "mean this and that id may go unread).",
    ),
    "no known name": (
        {"context": "1 and 2", "input": "add"},
        "has context, input; map them with dataset.columns, as in {OURS: THEIRS}.",
    ),
    "two of one meaning": (
        {"question": "1 + 2", "answer": "3", "response": "three"},
        "perhaps {prompt: question} (a guess by the names: check that they mean this and that "
        "answer, response may go unread).",
    ),
    "a conversation": (
        {"dialogue": [said("user", "a"), said("assistant", "b")], "source": "web"},
        "perhaps {messages: dialogue} (a guess",
    ),
}


@pytest.mark.parametrize("name", HINTS)
def test_columns_are_suggested_by_their_meaning_and_not_by_their_place(name, tmp_path):
    row, part = HINTS[name]
    path = str(write_lines(tmp_path / "rows.jsonl", [row] * 2))
    with pytest.raises(InputError) as error:
        load_demonstrations(AnswersToLearn(path), "imperfect")
    assert part in str(error.value)
    assert f"dataset: {path} lacks prompt, completion; it needs" in str(error.value)


# --- bad rows ------------------------------------------------------------------------------------

PAIRS = [{"prompt": f"p{n}", "chosen": "yes", "rejected": "no"} for n in range(20)]


def spoiled(*numbers):
    return [{**row, "rejected": ""} if n in numbers else row for n, row in enumerate(PAIRS)]


def test_bad_rows_are_listed_at_once_by_the_line_that_they_stand_on(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", spoiled(2, 5, 7))
    path.write_text("\n" + path.read_text())  # the first row stands on the second line
    with pytest.raises(InputError) as error:
        load_preferences(FileData(str(path)))
    assert str(error.value) == (
        f"dataset: 3 rows of {path} are bad: line 4, line 7, line 9 (rejected is empty; fill it or "
        "remove the row); fix or remove them, or write dataset.skip_bad: 3 to leave them out."
    )
    write_lines(path, spoiled(2))
    with pytest.raises(InputError) as error:
        load_preferences(FileData(str(path)))
    assert str(error.value) == (
        f"dataset: {path}, line 3: rejected is empty; fill it or remove the row, or write "
        "dataset.skip_bad: 1 to leave it out."
    )
    write_lines(path, spoiled(*range(1, 15)))
    with pytest.raises(InputError) as error:
        load_preferences(FileData(str(path)))
    assert "14 rows of" in str(error.value) and "bad; the first 10: line 2," in str(error.value)
    assert "line 11 (" in str(error.value) and "line 12" not in str(error.value)


@pytest.mark.parametrize("layout", ["csv", "list", "folder", "slice", "parquet"])
def test_a_bad_row_is_named_whatever_the_file(layout, tmp_path):
    path, split, place = tmp_path / "rows.jsonl", "train", "rows.jsonl, line 5: "
    write_lines(path, spoiled(4))
    if layout == "csv":
        path, place = tmp_path / "rows.csv", "rows.csv, line 5: "
        path.write_text('prompt,chosen,rejected\n"a\nb",x,y\n\n"c\nd",x,\n')
    elif layout == "list":
        path, place = tmp_path / "rows.json", "rows.json, row 5: "
        path.write_text(json.dumps(spoiled(4)))
    elif layout == "folder":
        write_lines(tmp_path / "a.jsonl", PAIRS)
        path, place = tmp_path, f"{tmp_path}, rows.jsonl, line 5: "
    elif layout == "slice":
        split = "train[10:]+train[2:8]"
    elif layout == "parquet":
        path, place = tmp_path / "rows.parquet", "row 5 of "
        Dataset.from_list(spoiled(4)).to_parquet(path)
    with pytest.raises(InputError, match="rejected is empty") as error:
        load_preferences(FileData(str(path), split=split))
    assert place in str(error.value)


def test_rows_that_are_left_out_before_do_not_shift_the_lines(tmp_path):
    good = {"messages": [said("user", "a"), said("assistant", "b")]}
    unanswered = {"messages": [said("user", "a")]}
    empty = {"messages": [said("user", "a"), said("assistant", " ")]}
    path = str(write_lines(tmp_path / "rows.jsonl", [unanswered, good, unanswered, good, empty]))
    with pytest.raises(InputError, match=r"line 5: the last message of messages is empty"):
        load_demonstrations(AnswersToLearn(path), "imperfect")
    data = load_demonstrations(AnswersToLearn(path, skip_bad=1), "imperfect")
    assert len(data.train) == 2 and {*data.train.column_names} == {"prompt", "completion"}


def test_rows_that_are_left_out_do_not_shift_the_lines_of_rows_that_are_converted(tmp_path):
    row = {"prompt": [said("user", "a")], "completion": YES}
    wrong = {**row, "completion": [said("user", "b")]}
    rows = [{**wrong, "label": 1}, {**row, "label": 1}, {**row, "label": 2}]
    path = str(write_lines(tmp_path / "rows.jsonl", rows))
    with pytest.raises(InputError, match=r"rows.jsonl, line 3: label is 2, which is neither"):
        load_outcomes(AnswersFile(path), None, None)
    broken = {**row, "tools": "add(a)"}  # left out before the next is looked at
    empty = {**row, "completion": [said("assistant", " ")], "tools": "[]"}
    path = str(write_lines(tmp_path / "tools.jsonl", [broken, {**row, "tools": "[]"}, empty]))
    with pytest.raises(InputError, match=r"line 1 \(tools is .*, line 3 \(completion is e"):
        load_demonstrations(AnswersToLearn(path, skip_bad=1), "imperfect")


def test_empty_messages_and_rows_without_an_answer_are_named(tmp_path):
    good = {"messages": [said("user", "a"), *YES]}
    unanswered = {"messages": [said("user", "a")]}
    path = str(write_lines(tmp_path / "a.jsonl", [good, {"messages": []}]))
    with pytest.raises(InputError, match=r"line 2: messages is empty; fill it or remove the row"):
        load_demonstrations(AnswersToLearn(path), "imperfect")
    rows = [unanswered, good, *[unanswered] * 11, good]
    path = str(write_lines(tmp_path / "b.jsonl", rows))
    data = load_demonstrations(AnswersToLearn(path), "imperfect")
    numbers = [1, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    told = ", ".join(f"line {number}" for number in numbers)
    reason = "the last message is not the assistant's"
    assert data.dropped[reason] == 12
    assert data.first_places(reason) == f" ({told} and 2 more)"


@pytest.mark.parametrize("shape", ["messages", "completion", "pairs", "prompts"])
def test_messages_of_unknown_roles_are_bad_rows(shape, tmp_path):
    def row(role, last="assistant"):
        prompt = [said("developer", "d"), said(role, "a"), said("tool", "3"), said("user", "u")]
        answer = [said(last, "b")]
        return {
            "messages": {"messages": prompt + answer},
            "completion": {"prompt": prompt, "completion": answer},
            "pairs": {"chosen": prompt + answer, "rejected": [*prompt, said(last, "c")]},
            "prompts": {"prompt": prompt},
        }[shape]

    rows = [row("user"), row("human"), row("user", "gpt"), row("system")]
    path = str(write_lines(tmp_path / "rows.jsonl", rows))

    def load(skip_bad):
        if shape == "prompts":
            return load_prompts(FileData(path, skip_bad=skip_bad), [])
        if shape == "pairs":
            return load_preferences(FileData(path, skip_bad=skip_bad))
        return load_demonstrations(AnswersToLearn(path, skip_bad=skip_bad), "imperfect")

    bad = 1 if shape == "prompts" else 2  # prompts alone have no last message
    with pytest.raises(InputError, match=r"line 2.*the role 'human'; write system, developer, us"):
        load(0)
    if bad == 2:
        with pytest.raises(InputError, match=r"line 3 \(a message has the role 'gpt'; write"):
            load(1)
    assert len(load(bad).train) == 4 - bad


@pytest.mark.parametrize("kind", ["jsonl", "csv"])
def test_up_to_so_many_bad_rows_are_left_out_and_listed(kind, tmp_path):
    rows = spoiled(2, 5)
    rows[7] = {**rows[7], "prompt": " "}
    path = tmp_path / f"rows.{kind}"
    if kind == "csv":
        path.write_text("\n".join([",".join(rows[0]), *(",".join(r.values()) for r in rows)]))
    else:
        write_lines(path, rows)
    data = load_preferences(FileData(str(path), skip_bad=3))
    assert list(data.train) == [row for n, row in enumerate(PAIRS) if n not in (2, 5, 7)]
    first = 1 if kind == "jsonl" else 2
    assert {reason: n for reason, n in data.dropped.items() if n} == {
        f"dataset.skip_bad: {path}: line {2 + first}, line {5 + first} (rejected is empty; fill it "
        f"or remove the row), line {7 + first} (prompt is empty; fill it or remove the row)": 3
    }
    with pytest.raises(InputError, match=r"3 rows .* are bad.* dataset.skip_bad: 3 to leave"):
        load_preferences(FileData(str(path), skip_bad=2))


def test_bad_rows_to_evaluate_on_are_left_out_and_listed_too(tmp_path):
    path = str(write_lines(tmp_path / "rows.jsonl", PAIRS[:10]))
    other = str(write_lines(tmp_path / "other.jsonl", spoiled(12)[10:]))
    data = load_preferences(FileData(path, eval_path=other, skip_bad=1))
    assert len(data.held_out) == 9
    (reason,) = (reason for reason, count in data.dropped.items() if count)
    assert reason.startswith(f"dataset.skip_bad: {other}: line 3 (rejected is empty")
    assert reason.endswith("(to evaluate on)")


def test_rows_to_evaluate_on_that_make_no_example_are_told_with_their_places(tmp_path):
    path = str(write_lines(tmp_path / "rows.jsonl", PAIRS[:10]))
    rows = [*PAIRS[10:13], {**PAIRS[13], "rejected": PAIRS[13]["chosen"]}]
    other = str(write_lines(tmp_path / "other.jsonl", rows))
    data = load_preferences(FileData(path, eval_path=other))
    assert len(data.held_out) == 3
    ((reason, count),) = ((reason, n) for reason, n in data.dropped.items() if n)
    assert (reason, count) == ("chosen identical to rejected (to evaluate on)", 1)
    assert data.first_places(reason) == " (line 4)"


def test_rows_that_a_reader_refuses_are_listed_and_left_out(tmp_path):
    rows = [{"question": "a", "answer": "#### 1"}, {"question": "b", "answer": "two"}]
    path = str(write_lines(tmp_path / "rows.jsonl", [*rows, *rows]))
    with pytest.raises(InputError, match=r"2 rows of .* are bad: line 2, line 4 \(answer is 'two'"):
        load_prompts(FileData(path, reader="gsm8k"))
    data = load_prompts(FileData(path, reader="gsm8k", skip_bad=2))
    assert data.train["answer"][:] == ["1", "1"]
    assert data.train.column_names == ["prompt", "answer", "solution", "task"]


def test_lines_that_are_not_json_are_listed_at_once(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n{"prompt": "b"}\n[1]\n')
    with pytest.raises(InputError, match=r"line 2 is not JSON .*, line 4 is not an object of col"):
        read(str(path))
