"""What would be trained on: five files with planted faults, against counts by hand."""

import json
import re

import pytest
from conftest import ROOT
from own_model import said, write_lines

from rlhf_trl.cli import main
from rlhf_trl.errors import InputError
from rlhf_trl.run.preview import preview
from rlhf_trl.tiny.tokenizer import build_tokenizer

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
    assert "0 prompts are both trained on and held out" in lines


# --- what stands on the first screen

SCREEN = 24  # lines
TEMPLATE_WITHOUT_END = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def screen(tmp_path, capsys, recipe, path, *words, model="tiny"):
    """Return the first screen that `preview` prints of a file."""
    config = str(ROOT / "configs" / "own" / f"{recipe}.yaml")
    options = ["--model_name_or_path", str(model), "--use_cpu", "--eval_strategy", "no"]
    main(["preview", config, *options, "--dataset.path", str(path), *HELD_OUT_NONE, *words])
    return "\n".join(capsys.readouterr().out.splitlines()[:SCREEN])


HELD_OUT_NONE = ("--dataset.eval_size", "null")
LONG = "Which of the two rivers is longer?"
TALKS = [
    {"messages": [said("user", LONG), said("assistant", "the first")]},
    {"messages": [said("user", LONG + " And why?"), said("assistant", "x" * 90)]},
    {"messages": [said("user", "abc"), said("assistant", "d")]},
]
PLANTED = {
    "an answer that is cut": (
        "sft",
        TALKS,
        ["--max_length", "80"],
        "! 1 of 3 training rows lose the end of their answer to max_length 80; raise it, or "
        "shorten them (rows 2)",
    ),
    "a text beyond the context": (
        "dpo",
        [pair("ab", "c", "d" * 300), pair("ab", "c", "d")],
        [],
        "! 1 of 2 training rows are longer than the model's context of 256 tokens; lower "
        "max_length (rows 1)",
    ),
    "a prompt inside the completion": (
        "sft",
        [{"prompt": LONG, "completion": f"{LONG} The first."}, {"prompt": "a", "completion": "b"}],
        [],
        "! 1 of 2 training rows have an answer that begins with the whole prompt; remove it there "
        "(rows 1)",
    ),
    "marks spelled out": (
        "dpo",
        [
            {
                "prompt": [said("user", "<|im_start|>user\nHi<|im_end|>")],
                "chosen": [said("assistant", "a")],
                "rejected": [said("assistant", "b")],
            }
        ],
        [],
        "! 1 of 1 training rows spell out chat marks, which the template writes itself",
    ),
    "an equal pair": (
        "dpo",
        [pair("ab", "c", "c"), pair("ab", "c", "d")],
        [],
        "left out 1 training rows: chosen identical to rejected (line 1)",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_on_the_first_screen(name, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    recipe, rows, words, part = PLANTED[name]
    assert part in screen(
        tmp_path, capsys, recipe, write_lines(tmp_path / "rows.jsonl", rows), *words
    )


def test_an_empty_answer_is_an_error(tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [pair("a", "b", "c"), pair("ab", "", "d")])
    with pytest.raises(SystemExit) as error:
        screen(tmp_path, None, "dpo", path)
    assert f"dataset: {path}, line 2: chosen is empty; fill it or remove the row" in str(
        error.value
    )


@pytest.mark.parametrize(
    ("template", "parts"),
    [
        (TEMPLATE_WITHOUT_END, ["! EOS is missing: 3 of the first 3 texts do not train the model"]),
        (
            CHATML,
            [
                "! EOS is missing: 3 of the first 3 texts",
                "! the tokenizer splits marks of a chat template: <|im_end|> (",
            ],
        ),
    ],
)
def test_a_template_of_another_model(template, parts, tmp_path, capsys, own_model):
    file = tmp_path / "other.jinja"
    file.write_text(template)
    path = write_lines(tmp_path / "rows.jsonl", TALKS)
    words = ["--chat_template_path", str(file)]
    first = screen(tmp_path, capsys, "sft", path, *words, model=own_model)
    assert all(part in first for part in parts)


def test_a_template_that_refuses_a_row_names_it(tmp_path):
    turns = [said("user", "a"), said("tool", "5"), said("assistant", "b")]
    path = write_lines(tmp_path / "rows.jsonl", [TALKS[2], {"messages": turns}])
    with pytest.raises(SystemExit, match="the chat template refuses row 2 of those that are left"):
        screen(tmp_path, None, "sft", path)


PUBLISHED = {
    "gsm8k": ("grpo", "gsm8k", "2"),
    "gsm8k_rollouts": ("../tiny/orm", "gsm8k_rollouts", "4"),
    "hh": ("dpo", "hh", "1"),
    "no_robots": ("sft", "messages", "2"),
    "prm800k_phase2": ("../tiny/prm", "prm800k", "1"),
    "tulu": ("sft", "messages", "1"),
    "ultrafeedback": ("reward", "ultrafeedback", "1"),  # one of the two is a tie
    "ultrafeedback_h4": ("dpo", "ultrafeedback", "2"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_rows_are_previewed(name, tmp_path, capsys):
    recipe, reader, count = PUBLISHED[name]
    path = ROOT / "tests" / "fixtures" / "hub-rows" / f"{name}.jsonl"
    words = ["--dataset.reader", reader, "--max_length", "200"][: 2 if recipe == "grpo" else 4]
    if recipe.startswith(".."):
        words += ["--dataset.source", "path"]
    first = screen(tmp_path, capsys, recipe, path, *words)
    assert ["rows", count] in [line.split() for line in first.splitlines()]
    if name == "hh":
        assert "left out 1 training rows: an empty prompt or answer (line 2)" in first


def test_traces_without_a_bad_step_are_an_error(tmp_path):
    path = ROOT / "tests" / "fixtures" / "hub-rows" / "prm800k_phase1.jsonl"
    words = ["--dataset.reader", "prm800k", "--dataset.source", "path"]
    with pytest.raises(SystemExit, match=r"every label of .*prm800k_phase1\.jsonl is 1, but rows"):
        screen(tmp_path, None, "../tiny/prm", path, *words)


def test_examples_stand_side_by_side_with_marks(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    path = write_lines(tmp_path / "rows.jsonl", [pair("ab", "cd", "efg")])
    page = tmp_path / "page.html"
    monkeypatch.setattr("test_preview.SCREEN", 99)
    lines = screen(tmp_path, capsys, "dpo", path, "--html", str(page)).splitlines()
    start = lines.index("prompt:")
    assert lines[start + 1] == "ab"
    assert lines[start + 2].split() == ["chosen:", "|", "rejected:"]
    assert lines[start + 3].split() == ["[[cd<|end|>]]", "|", "[[efg<|end|>]]"]
    content = page.read_text()
    assert "<mark>cd&lt;|end|&gt;</mark>" in content and "ab<mark>efg" in content
    page.write_text("mine")
    with pytest.raises(SystemExit, match="exists and is no page of a preview"):
        screen(tmp_path, capsys, "dpo", path, "--html", str(page))
    assert page.read_text() == "mine"


def test_colors_take_the_place_of_brackets():
    from rlhf_trl.run.fed import Fed
    from rlhf_trl.run.preview_page import as_lines

    tokenizer = build_tokenizer()
    ids = tokenizer("abcdef", add_special_tokens=False)["input_ids"]
    text = Fed("text", ids, [False] * 2 + [True] * 4)
    green, plain = "\x1b[1;32m", "\x1b[0m"
    colored = as_lines([text], tokenizer, 4, in_color=True)
    assert colored == ["text:", f"ab{green}cd{plain}", f"{green}ef{plain}"]
    assert as_lines([text], tokenizer, 12, in_color=False) == ["text:", "ab[[cdef]]"]


def test_rewards_and_what_comes(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    rows = [{"prompt": [said("user", f"{n} + 1?")], "answer": str(n + 1)} for n in range(40)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    words = ["--max_completion_length", "9", "--algorithm", "sapo", "--save_steps", "5"]
    first = screen(tmp_path, capsys, "grpo", path, *words)
    assert "one update per generation: every ratio is 1, so sapo is grpo here" in first
    assert "16 completions per generation: 2 prompts x 8; 1 optimizer step on them" in first
    assert "20 optimizer steps, on at most " in first  # 40 prompts x 8 / 16
    assert "checkpoints: 4, every 5 steps, and one at the end" in first
    assert "reward number: 1, 1, 1 for the column answer to the first 3 rows, in " in first
    wrong = screen(tmp_path, capsys, "grpo", path, "--completion", "It is 2.", *words)
    assert "reward number: 0, 1, 0 for --completion to the first 3 rows, in " in wrong


def test_sampled_answers_are_shown_and_judged(tmp_path, capsys):
    words = ["--dataset.size", "9", "--dataset.eval_size", "4", "--sample"]
    main(["preview", "tiny/grpo", "--json", "--max_completion_length", "25", *words])
    shown = json.loads(capsys.readouterr().out)
    tokenizer = build_tokenizer()
    right, ended = [], []
    for (text,) in shown["examples"]:
        first = text["trained"].index(True)
        assert all(text["trained"][first:])
        prompt, answer = (
            tokenizer.decode(text["ids"][:first]),
            tokenizer.decode(text["ids"][first:]),
        )
        word = prompt.rpartition(": ")[2].removesuffix("<|end|><|assistant|>")
        right.append(f"{float(f'<answer>{word[::-1]}</answer>' in answer):g}")
        ended.append(answer.endswith("<|end|>"))
    assert len(right) == 3 and any(ended)
    reward = f"reward exact_match: {', '.join(right)} for sampled answers to the shown 3 rows, in "
    assert any(line.startswith(reward) for line in shown["rewards"])


@pytest.mark.parametrize("words", [["tiny/sft", "--sample"], ["tiny/grpo", "--completion", "a"]])
def test_an_answer_is_sampled_where_the_run_samples_and_none_is_written(words):
    size = ["--dataset.size", "9", "--dataset.eval_size", "4"]
    with pytest.raises(SystemExit, match="error: --sample"):
        main(["preview", *dict.fromkeys([*words, "--sample"]), *size])


def test_unbalanced_labels_are_told_as_of_all_rows(tmp_path, capsys, caplog):
    labels = [True] * 90 + [False] * 10  # of which the preview shows 3, and prepares 64
    rows = [{"prompt": f"q{n}", "completion": "c", "label": y} for n, y in enumerate(labels)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    first = screen(tmp_path, capsys, "kto", path)
    assert "! 90 of 100 training rows are desirable, which count 9.00 times as much" in first
    # 10 / 90 and 4 / 3 as much, as TRL rounds them: [0.11, 0.15] by KTOTrainer on all rows
    assert "write a desirable_weight from 0.11 to 0.15" in first
    assert "different amounts" not in caplog.text
    balanced = screen(tmp_path, capsys, "kto", path, "--desirable_weight", "0.12")
    assert "desirable_weight" not in balanced


def test_a_name_that_no_config_has_gets_a_hint(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["preview", "own/gropo"])
    assert "did you mean 'own/grpo'" in str(stop.value) and "`rlhf-trl configs`" in str(stop.value)


def test_a_mixture_and_a_limit_from_the_command_line(tmp_path, capsys):
    rows = [{"prompt": f"a {n}", "completion": "b"} for n in range(30)]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    other = write_lines(tmp_path / "other.jsonl", [{**row, "prompt": "c"} for row in rows])
    mix = f"[{{path: {other}, weight: 0.5}}]"
    first = screen(tmp_path, capsys, "sft", path, "--dataset.mix", mix, "--dataset.limit", "12")
    shares = f"mixture: 8 of 30 examples of {path} (66.7%), 4 of 30 examples of {other} (33.3%)"
    assert shares in first
    assert ["rows", "12"] in [line.split() for line in first.splitlines()]


def test_the_folder_of_a_run_is_told_where_its_model_is(tmp_path):
    model = tmp_path / "run" / "model"
    model.mkdir(parents=True)
    with pytest.raises(InputError, match=f"; write {re.escape(str(model))}.$"):
        numbers(tmp_path, "dpo", LONG_PAIRS, "--model_name_or_path", str(model.parent))


def test_texts_are_said_to_get_no_chat_template(tmp_path, capsys):
    path = write_lines(tmp_path / "rows.jsonl", LONG_PAIRS)
    words = ["--dataset.path", str(path), "--eval_strategy", "no", "--dataset.eval_size", "null"]
    main(["preview", str(ROOT / "configs" / "own" / "dpo.yaml"), *TINY, *words])
    assert "prompts are texts: no chat template is applied" in capsys.readouterr().out
