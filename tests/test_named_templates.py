"""Chat templates by name: what they write, against texts by hand, and what of it is trained."""

import pytest
from conftest import ROOT
from own_model import said, write_lines
from transformers import AutoTokenizer
from trl.chat_template_utils import get_training_chat_template

from rlhf_trl.errors import InputError
from rlhf_trl.named_templates import TEMPLATES, family_of, template_file
from rlhf_trl.run.preview_report import report

TALK = [
    said("system", "S"),
    said("user", "U"),
    said("assistant", "A"),
    said("user", "V"),
    said("assistant", "B"),
]
# of a tokenizer whose end token is <|end|> and which has no other special token
WRITTEN = {
    "chatml": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\n[A<|im_end|>]\n<|im_start|>user\nV<|im_end|>\n"
    "<|im_start|>assistant\n[B<|im_end|>]\n",
    "zephyr": "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n[A<|end|>]\n"
    "<|user|>\nV<|end|>\n<|assistant|>\n[B<|end|>]\n",
    "mistral": "[INST] S\n\nU [/INST][ A<|end|>][INST] V [/INST][ B<|end|>]",
    "llama3": "<|start_header_id|>system<|end_header_id|>\n\nS<|eot_id|><|start_header_id|>user"
    "<|end_header_id|>\n\nU<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    "[A<|eot_id|>]<|start_header_id|>user<|end_header_id|>\n\nV<|eot_id|><|start_header_id|>"
    "assistant<|end_header_id|>\n\n[B<|eot_id|>]",
    "gemma": "<start_of_turn>user\nS\n\nU<end_of_turn>\n<start_of_turn>model\n[A<end_of_turn>\n]"
    "<start_of_turn>user\nV<end_of_turn>\n<start_of_turn>model\n[B<end_of_turn>\n]",
    "qwen3": "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n"
    "<|im_start|>assistant\n[<think>\n\n</think>\n\nA<|im_end|>\n]<|im_start|>user\n"
    "V<|im_end|>\n<|im_start|>assistant\n[<think>\n\n</think>\n\nB<|im_end|>\n]",
}

ASKED = "<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n"


def templated(own_model, name):
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    with open(template_file(name)) as file:
        tokenizer.chat_template = file.read()
    tokenizer.bos_token = ""
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_and_marks(name, own_model):
    tokenizer = templated(own_model, name)
    encoded = tokenizer.apply_chat_template(
        TALK,
        chat_template=get_training_chat_template(tokenizer),  # None: it has the marks itself
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    text, before = "", 0
    for token, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True):
        text += "[" * (mask > before) + "]" * (mask < before) + tokenizer.decode([token])
        before = mask
    assert text + "]" * before == WRITTEN[name]
    asked = tokenizer.apply_chat_template(TALK[:-1], tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(TALK, tokenize=False)
    assert whole.startswith(asked)
    assert family_of(tokenizer.chat_template) == ("chatml" if name == "qwen3" else name)


def test_all_turns_are_trained_with_a_named_template(own_model, tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": TALK}])
    config = str(ROOT / "configs" / "own" / "sft.yaml")
    words = ["--model_name_or_path", str(own_model), "--use_cpu", "--eval_strategy", "no"]
    words += ["--dataset.path", str(path), "--dataset.eval_size", "null"]
    words += ["--dataset.turns", "all", "--chat_template_path", "zephyr"]
    shown = report(config, words)
    ((text,),) = shown.examples
    trained = [i for i, t in zip(text.ids, text.trained, strict=True) if t]
    assert shown.tokenizer.decode(trained) == "A<|end|>B<|end|>"


def test_the_template_of_another_model_is_written_in_tokens_of_this_one(own_model, tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": TALK[1:3]}])
    words = ["--model_name_or_path", "tiny", "--use_cpu", "--eval_strategy", "no"]
    words += ["--dataset.path", str(path), "--dataset.eval_size", "null"]
    words += ["--chat_template_path", str(own_model)]
    shown = report(str(ROOT / "configs" / "own" / "sft.yaml"), words)
    ((text,),) = shown.examples
    assert shown.tokenizer.decode(text.ids) == "<|user|>U<|end|><|assistant|>A<|end|>"


PAIR = {
    "prompt": TALK[:2],
    "chosen": [said("assistant", "A")],
    "rejected": [said("assistant", "B")],
}


@pytest.mark.parametrize(
    ("recipe", "row", "written"),
    [
        ("dpo", PAIR, [f"{ASKED}A<|end|>\n", f"{ASKED}B<|end|>\n"]),
        ("orpo", PAIR, [f"{ASKED}A<|end|>\n", f"{ASKED}B<|end|>\n"]),
        ("reward", PAIR, [f"{ASKED}A<|end|>\n", f"{ASKED}B<|end|>\n"]),
        ("grpo", {"prompt": TALK[:2], "answer": "1"}, [ASKED]),
        ("rejection_sampling", {"prompt": TALK[:2], "answer": "1"}, [ASKED]),
    ],
)
def test_a_base_model_gets_a_named_template_in_every_recipe(
    recipe, row, written, own_model, tmp_path
):
    base = tmp_path / "base"
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(base)
    for file in ("config.json", "generation_config.json"):
        (base / file).write_text((own_model / file).read_text())
    path = write_lines(tmp_path / "rows.jsonl", [row, row | {"prompt": TALK[1:2]}])
    words = ["--model_name_or_path", str(base), "--use_cpu", "--eval_strategy", "no"]
    words += ["--dataset.path", str(path), "--dataset.eval_size", "null"]
    config = str(ROOT / "configs" / "own" / f"{recipe}.yaml")
    with pytest.raises(InputError, match=r"write chat_template_path: zephyr, or .*\(chatml, "):
        report(config, words)
    shown = report(config, [*words, "--chat_template_path", "zephyr"])
    assert [shown.tokenizer.decode(text.ids) for text in shown.examples[0]] == written


def test_a_template_without_marks_is_offered_the_one_of_its_family(own_model, tmp_path):
    other = tmp_path / "other.jinja"
    other.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + m['content'] + '<|im_end|>' }}"
        "{% endfor %}"
    )
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": TALK}])
    config = str(ROOT / "configs" / "own" / "sft.yaml")
    words = ["--model_name_or_path", str(own_model), "--use_cpu", "--eval_strategy", "no"]
    words += ["--dataset.path", str(path), "--dataset.eval_size", "null"]
    words += ["--dataset.turns", "all", "--chat_template_path", str(other)]
    with pytest.raises(InputError, match="write chat_template_path: chatml, the one of its family"):
        report(config, words)


def test_a_folder_of_the_users_is_not_taken_for_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert template_file("chatml") != "chatml" and template_file("me/model") == "me/model"
    (tmp_path / "chatml").mkdir()
    assert template_file("chatml") == "chatml"
