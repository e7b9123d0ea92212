"""Supervised fine-tuning on data of one's own: what is trained, packed, left out and refused."""

import json
from shutil import copytree

import pytest
import torch
from conftest import ROOT
from own_model import TEMPLATE, said, write_lines
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl.chat_template_utils import qwen2_5_chat_template

from rlhf_trl.data.answers import extract_answer
from rlhf_trl.data.gym import GymData, GymTasks, Spec
from rlhf_trl.data.made import demonstrations
from rlhf_trl.run import train
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.tiny.tokenizer import build_tokenizer

CONFIG = ROOT / "configs" / "own" / "sft"
SMALL = ["--use_cpu", "--bf16", "false", "--save_strategy", "no", "--max_steps", 4]
SPELLER = [*SMALL, "--model_name_or_path", "tiny", "--dataset.eval_size", "null"]


def talk(*texts):
    """Return messages of user and assistant in turn."""
    return [said(("user", "assistant")[n % 2], text) for n, text in enumerate(texts)]


@pytest.fixture
def built(run, monkeypatch, tmp_path):
    """Return the trainer that the recipe builds for rows, and what was printed; nothing trains."""
    found = []
    monkeypatch.setattr(train, "run", lambda trainer, *_: found.append(trainer))

    def built(rows, *words):
        path = write_lines(tmp_path / "rows.jsonl", rows)
        found.clear()
        folder = tmp_path / "built"
        _, out = run("sft", CONFIG, *SPELLER, "--dataset.path", path, *words, folder=folder)
        return found[0], out

    return built


# --- what is trained


# <|bos|><|user|>ab<|end|><|assistant|>ba<|end|><|user|>cd<|end|><|assistant|>dc<|end|>
TURNS = {"last": [14, 15, 16], "all": [6, 7, 8, 14, 15, 16]}


@pytest.mark.parametrize("turns", TURNS)
@pytest.mark.parametrize("shape", ["messages", "prompt and completion"])
def test_the_labels_of_two_turns_are_those_counted_by_hand(turns, shape, built):
    messages = talk("ab", "ba", "cd", "dc")
    row = {"messages": messages}
    if shape != "messages":
        row = {"prompt": messages[:3], "completion": messages[3:]}
    trainer, _ = built([row], "--dataset.turns", turns)
    (example,) = trainer.train_dataset
    assert len(example["input_ids"]) == 17
    trained = [n for n, label in enumerate(example["labels"]) if label != -100]
    assert trained == TURNS[turns]
    assert all(example["labels"][n] == example["input_ids"][n] for n in trained)
    said_then = trainer.processing_class.decode([example["labels"][n] for n in trained])
    assert said_then == {"last": "dc<|end|>", "all": "ba<|end|>dc<|end|>"}[turns]


def test_texts_are_trained_on_their_completion(built):
    trainer, _ = built([{"prompt": "ab", "completion": "ba"}])
    (example,) = trainer.train_dataset
    tokenizer = trainer.processing_class
    assert tokenizer.decode(example["input_ids"]).endswith("abba<|end|>")
    assert tokenizer.decode([n for n in example["labels"] if n != -100]) == "ba<|end|>"


def test_a_column_of_messages_may_have_another_name_and_a_text_beside_it(built):
    row = {"prompt": "ab", "talk": [said("system", "s"), *talk("ab", "ba")]}
    trainer, _ = built([row], "--dataset.columns.messages", "talk")
    ids = trainer.train_dataset[0]["input_ids"]
    assert trainer.processing_class.decode(ids).count("ab") == 1
    assert trainer.processing_class.decode(ids).endswith("<|assistant|>ba<|end|>")


def test_conversations_without_an_answer_at_their_end_are_left_out_and_counted(built):
    good = {"messages": talk("ab", "ba")}
    rows = [good, {"messages": talk("a", "b", "c")}, {"messages": [said("assistant", "a")]}, good]
    trainer, out = built(rows)
    assert len(trainer.train_dataset) == 2
    assert "left out 1 rows: the last message is not the assistant's" in out
    assert "left out 1 rows: nothing comes before the answer" in out


@pytest.mark.parametrize("packing", ["false", "true"])
def test_rows_whose_prompt_fills_the_length_are_left_out_and_counted(packing, built):
    # 1 + 1 + 12 + 1 + 1 tokens before the answer, and 1 + 1 + 2 + 1 + 1
    rows = [{"messages": talk("a" * 12, "ba")}, {"messages": talk("ab", "ba")}]
    trainer, out = built(rows, "--max_length", 16, "--packing", packing)
    assert len(trainer.train_dataset) == 1
    assert "left out 1 train rows: nothing to train on within max_length 16 (rows 1)" in out
    trainer, out = built(rows, "--max_length", 17, "--packing", packing)
    assert sum(label != -100 for row in trainer.train_dataset for label in row["labels"]) == 1 + 3
    assert "left out" not in out


@pytest.mark.parametrize("packing", ["false", "true"])
def test_answers_that_lose_their_end_are_counted(packing, built):
    # 6, 12 and 16 tokens before the answer, and 3, 5 and 3 in it: 9, 17 and 19 together
    rows = [talk("ab", "ba"), talk("abcdefgh", "abcd"), talk("a" * 12, "ba")]
    rows = [{"messages": messages} for messages in rows]
    trainer, out = built(rows, "--max_length", 16, "--packing", packing)
    assert (trainer.left_out, trainer.cut_off) == ({"train": [2]}, {"train": [1]})
    assert "1 train rows lose their end to max_length 16 (rows 2)" in out
    trainer, out = built(rows, "--max_length", 17, "--packing", packing)
    assert (trainer.left_out, trainer.cut_off) == ({"train": []}, {"train": [2]})
    trainer, out = built(rows, "--max_length", 19, "--packing", packing)
    assert (trainer.left_out, trainer.cut_off) == ({"train": []}, {"train": []})
    assert "lose their end" not in out


def test_packed_rows_have_the_loss_of_padded_ones_and_of_each_alone(built, tmp_path):
    words = ["spell", "a", "word", "backward", "abcdefgh", "of", "letters", "tree"]
    rows = [
        {"messages": talk(one, one[::-1], other, other[::-1])} for one in words for other in words
    ]
    given = ["--dataset.eval_path", write_lines(tmp_path / "held_out.jsonl", rows)]
    given += ["--max_length", 96, "--per_device_eval_batch_size", 64]
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    for turns in ("last", "all"):
        losses = []
        for packing in ("false", "true"):
            flags = ["--dataset.turns", turns, "--packing", packing]
            trainer, _ = built([{"messages": talk("another", "one")}], *given, *flags)
            losses.append(trainer.evaluate()["eval_loss"])
            assert len(trainer.eval_dataset) == {"false": 64, "true": 20}[packing]
            if packing == "false":
                losses.append(loss_of_each(model, trainer.eval_dataset))
        assert losses == pytest.approx([losses[0]] * 3, abs=1e-5)


def loss_of_each(model, rows):
    """Return the mean loss of the trained tokens, from a forward pass of every row alone."""
    nats, count = 0.0, 0
    for row in rows:
        ids, labels = torch.tensor(row["input_ids"]), torch.tensor(row["labels"])
        with torch.no_grad():
            logits = model(ids[None]).logits[0]
        nats += torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum").item()
        count += (labels[1:] != -100).sum().item()
    return nats / count


# --- chat templates


def test_a_template_that_is_lifted_is_trained_answered_and_exported(run, own_model, tmp_path):
    """The embedded model's tokenizer has another template."""
    marked = TEMPLATE.replace("<|end|>", "!<|end|>")
    (tmp_path / "marked.jinja").write_text(marked)
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": talk("ab", "ba", "cd", "dc")}] * 8)
    donor = tmp_path / "donor"
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    tokenizer.chat_template = marked
    tokenizer.save_pretrained(donor)
    for n, source in enumerate((tmp_path / "marked.jinja", donor)):
        folder, _ = run(
            *["sft", CONFIG, *SPELLER, "--dataset.path", path, "--chat_template_path", source],
            *["--learning_rate", "5e-3", "--samples.every", 40, "--samples.temperature", 0],
            *["--max_steps", 40],
            folder=tmp_path / str(n),
        )
        assert AutoTokenizer.from_pretrained(folder / "model").chat_template == marked
        (panel, *_) = json.loads((folder / "samples" / "step-000040.json").read_text())
        assert panel["greedy"] == panel["sampled"] == "dc!"


def test_a_base_model_without_a_template_takes_that_of_another(built, own_model, tmp_path):
    base = tmp_path / "base"
    copytree(own_model, base)
    (base / "chat_template.jinja").unlink()
    words = ["--model_name_or_path", base, "--chat_template_path", own_model]
    trainer, _ = built([{"messages": talk("red", "blue")}], *words)
    ids = trainer.train_dataset[0]["input_ids"]
    assert trainer.processing_class.decode(ids) == "<|user|>red<|end|><|assistant|>blue<|end|>"


@pytest.mark.parametrize("has_template", [True, False])
def test_a_fallback_is_taken_only_where_there_is_no_template(
    built, own_model, tmp_path, has_template
):
    base, donor = tmp_path / "base", tmp_path / "donor"
    copytree(own_model, base)
    if not has_template:
        (base / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    tokenizer.chat_template = "{{ messages[0]['content'] }}={{ messages[-1]['content'] }}"
    tokenizer.save_pretrained(donor)
    words = ["--model_name_or_path", base, "--chat_template_fallback", donor]
    trainer, _ = built([{"messages": talk("red", "blue")}], *words)
    text = trainer.processing_class.chat_template
    own = AutoTokenizer.from_pretrained(own_model).chat_template
    assert text == (own if has_template else tokenizer.chat_template)


def test_a_template_that_trl_knows_tells_turns_apart_without_marks(built, tmp_path):
    (tmp_path / "known.jinja").write_text(qwen2_5_chat_template)
    words = ["--chat_template_path", tmp_path / "known.jinja", "--dataset.turns", "all"]
    trainer, _ = built([{"messages": talk("ab", "ba", "cd", "dc")}], *words)
    labels = [label for label in trainer.train_dataset[0]["labels"] if label != -100]
    text = trainer.processing_class.decode(labels)
    assert "ba" in text and "dc" in text and "ab" not in text and "cd" not in text


# --- panels


def test_panels_are_written_at_the_start_and_on_time_and_differ(run, tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", [{"messages": talk("ab", "ba")}] * 8)
    given = [*SPELLER, "--dataset.path", path, "--learning_rate", "5e-3", "--max_steps", 5]
    words = ["--samples.every", 2, "--samples.count", 1, "--samples.temperature", 0]
    folder, _ = run("sft", CONFIG, *given, *words, folder=tmp_path / "with")
    panels = {p.stem: json.loads(p.read_text()) for p in (folder / "samples").iterdir()}
    assert sorted(panels) == ["step-000000", "step-000002", "step-000004"]
    first, last = panels["step-000000"][0], panels["step-000004"][0]
    assert first["prompt"] == last["prompt"] == talk("ab")
    assert first["greedy"] == first["sampled"] and first["greedy"].startswith("<think></think>")
    assert last["greedy"] == last["sampled"] != first["greedy"]

    late, out = run(
        *["sft", CONFIG, *given, *words, "--samples.start", "false", "--samples.max_tokens", 2],
        *["--samples.temperature", 1, "--samples.top_p", 1e-6],
        *["--logging_strategy", "no", "--logging_first_step", "false"],
        folder=tmp_path / "late",
    )
    assert out.splitlines()[-1] == "trained with seed 42; nothing is held out or logged"
    panels = {p.stem: json.loads(p.read_text()) for p in (late / "samples").iterdir()}
    assert sorted(panels) == ["step-000002", "step-000004"]
    assert panels["step-000004"][0]["sampled"] == panels["step-000004"][0]["greedy"]  # top_p
    without, out = run(*["sft", CONFIG, *given, "--logging_steps", 5], folder=tmp_path / "without")
    logged = json.loads((without / "log.json").read_text())
    first, last = (next(e for e in log if "loss" in e) for log in (logged, logged[::-1]))
    assert (first["step"], last["step"]) == (1, 5)
    assert out.splitlines()[-1] == (
        f"loss {first['loss']:.3f} -> {last['loss']:.3f} (of training; seed 42); nothing is held "
        "out, so nothing was evaluated"
    )
    assert weights(folder) == weights(late) == weights(without)


def weights(folder):
    return (folder / "model" / "model.safetensors").read_bytes()


@pytest.mark.parametrize("recipe", ["grpo", "ppo"])
def test_panels_of_policies_leave_training_as_it_was(recipe, run, tmp_path):
    small = ["--dataset.size", 40, "--dataset.eval_size", 8, "--max_steps", 2]
    small += ["--eval_strategy", "no", "--eval_on_start", "false"]
    small += ["--per_device_train_batch_size", 8, "--steps_per_generation", 1]
    if recipe == "grpo":
        small += ["--num_generations", 4]
    words = ["--samples.every", 1, "--samples.max_tokens", 3, "--samples.temperature", 0.7]
    folder, _ = run(recipe, recipe, *small, *words, folder=tmp_path / "with")
    panels = {p.stem: json.loads(p.read_text()) for p in (folder / "samples").iterdir()}
    assert sorted(panels) == ["step-000000", "step-000001", "step-000002"]
    answers = [row for panel in panels.values() for row in panel]
    assert len(answers) == 12
    for row in answers:
        for kind in ("greedy", "sampled"):
            ids = build_tokenizer()(row[kind], add_special_tokens=False)["input_ids"]
            assert len(ids) == 3  # an answer begins with three tags
    without, _ = run(recipe, recipe, *small, folder=tmp_path / "without")
    assert weights(folder) == weights(without)


# --- what is refused

PLAIN = [{"prompt": "ab", "completion": "ba"}] * 2
TALKS = [{"messages": talk("ab", "ba")}] * 2
REFUSED = {
    "texts alone": ([{"text": "ab"}] * 2, [], "has texts alone, which do not tell the prompt from"),
    "no columns": ([{"question": "ab"}] * 2, [], "lacks prompt, completion"),
    "no answers": ([{"messages": talk("a", "b", "c")}] * 2, [], "the last message is not the"),
    "answers alone": ([{"messages": [said("assistant", "a")]}] * 2, [], "nothing"),
    "other keys": (
        *(
            [{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}]
            * 2,
        ),
        *(["--dataset.columns.messages", "conversations"], "not of messages with role and content"),
    ),
    "all of texts": (PLAIN, ["--dataset.turns", "all"], "needs messages, not"),
    "no such turns": (
        TALKS,
        ["--dataset.turns", "first"],
        'dataset.turns is "first"; write',
    ),
    "all tokens": (
        *(TALKS, ["--completion_only_loss", "false"]),
        "completion_only_loss: false contradicts dataset.turns: last",
    ),
    "every turn": (
        *(TALKS, ["--assistant_only_loss", "true"]),
        "assistant_only_loss: true contradicts dataset.turns: last",
    ),
    "every turn's remedy": (
        *(TALKS, ["--assistant_only_loss", "true"]),
        "; write dataset.turns: all or remove assistant_only_loss.",
    ),
    "all tokens' remedy": (
        *(TALKS, ["--completion_only_loss", "false"]),
        "each of its turns); remove completion_only_loss.",
    ),
    "one turn of all": (
        *(TALKS, ["--dataset.turns", "all", "--completion_only_loss", "true"]),
        "completion_only_loss: true contradicts dataset.turns: all",
    ),
    "wrapped": (
        *(TALKS, ["--packing", "true", "--packing_strategy", "wrapped"]),
        "packing_strategy: wrapped cuts examples",
    ),
    "demonstrator": (TALKS, ["--demonstrator", "right"], "demonstrator is not read with"),
    "gym's": (TALKS, ["--dataset.size", 3], "dataset.size is not"),
    "no template": (
        *(TALKS, ["--chat_template_path", "none.jinja"]),
        "chat_template_path: there is no file 'none.jinja'",
    ),
    "two templates": (
        *(TALKS, ["--chat_template_path", "a.jinja", "--chat_template_fallback", "b.jinja"]),
        "chat_template_fallback is not read with chat_template_path",
    ),
    "no donor": (
        *(TALKS, ["--chat_template_path", "./nowhere"]),
        "chat_template_path: './nowhere' is neither a .jinja file nor",
    ),
    "a later row that the template refuses": (
        *([*TALKS, {"messages": [*talk("ab"), said("tool", "5"), said("assistant", "c")]}], []),
        f"the chat template refuses row {len(TALKS) + 1} of those that are left (The role of a",
    ),
    "too short": (TALKS, ["--max_length", 3], "max_length: 3 leaves no token to train on in any"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_in_one_sentence(case, refused, tmp_path):
    rows, words, part = REFUSED[case]
    path = write_lines(tmp_path / "rows.jsonl", rows)
    assert part in refused("sft", CONFIG, *SPELLER, "--dataset.path", path, *words)


def test_every_turn_needs_a_template_that_marks_it(refused, tmp_path):
    path = write_lines(tmp_path / "rows.jsonl", TALKS)
    bare = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    (tmp_path / "bare.jinja").write_text(bare)
    words = ["--dataset.turns", "all", "--chat_template_path", tmp_path / "bare.jinja"]
    sentence = refused("sft", CONFIG, *SPELLER, "--dataset.path", path, *words)
    assert "needs a chat template with {% generation %} around" in sentence


def test_a_donor_without_a_template_is_refused(refused, own_model, tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(own_model)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path / "donor")
    path = write_lines(tmp_path / "rows.jsonl", TALKS)
    words = ["--dataset.path", path, "--chat_template_path", tmp_path / "donor"]
    assert "has no chat template to take over" in refused("sft", CONFIG, *SPELLER, *words)
    words = ["--dataset.path", path, "--model_name_or_path", tmp_path / "donor"]
    assert "or write chat_template_path" in refused("sft", CONFIG, *SPELLER, *words)


def test_reward_models_have_no_panels(refused):
    assert "samples is not a known key" in refused("reward", "reward", "--samples.every", 1)


def test_hinted_demonstrations_copy_and_never_spell():
    rows = GymTasks(GymData([Spec("spell_backward")], size=200, eval_size=1)).train
    found = demonstrations(rows, "hinted", 3)
    plain, copied = found[:200], found[200:]
    assert plain == demonstrations(rows, "imperfect", 3) and len(copied) == 200
    own = right = 0
    for row, shown in zip(rows, copied, strict=True):
        (message,), (said,) = shown["prompt"], shown["completion"]
        question, _, hint = message["content"].rpartition("\n")
        assert question == row["question"] and hint == said["content"]
        answer = extract_answer(hint)
        assert len(answer) == len(row["answer"])
        own += sorted(answer) == sorted(row["answer"])
        right += answer == row["answer"]
    assert 0.2 < own / 200 < 0.4 and right / 200 < 0.1
    assert rows[0]["prompt"][0]["content"] == rows[0]["question"]  # which is left as it was
