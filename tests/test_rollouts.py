"""Answers of evaluation, data, rollouts: from the model's distribution, to training's prompts."""

import json
import math
import re
from collections import Counter
from functools import cache, partial
from types import SimpleNamespace

import direct_alignment_cases
import policy_gradient_cases
import pytest
import torch
from datasets import Dataset
from direct_alignment_cases import message, pairs
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3ForCausalLM
from trl import ModelConfig, SFTConfig, SFTTrainer

from rlhf_trl.compare import measure
from rlhf_trl.data.blocks import Samples
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.samples import add_panels
from rlhf_trl.rollouts import sampling
from rlhf_trl.rollouts.generate import (
    GREEDY,
    SAMPLED,
    check_prompts,
    end_tokens,
    generate,
    prompt_texts,
    seeded,
    without_generation_config,
)
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.tiny.model import build_model
from rlhf_trl.tiny.tokenizer import CHAT_TEMPLATE, build_tokenizer
from rlhf_trl.trainers.sft import BookSFTTrainer

END, LIMIT = 5, 20
CPU = torch.device("cpu")
WORDS = ["sun", "tree", "banana", "letter", "cloud", "mouse", "bread", "stones"]
ROWS = [{"prompt": message("user", word), "word": word} for word in WORDS]
LETTER_E = build_tokenizer().convert_tokens_to_ids("e")
# What published checkpoints bring along: Qwen2.5-Instruct's first, then whatever else there is.
QWEN = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
SPOILED = {
    "Qwen2.5-Instruct": {"do_sample": True, **QWEN},
    "repetition_penalty": {"repetition_penalty": 2.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "num_beams": {"num_beams": 4},
    "bad_words_ids": {"bad_words_ids": [[LETTER_E]]},
    "suppress_tokens": {"suppress_tokens": [LETTER_E]},
    "sequence_bias": {"sequence_bias": [[[LETTER_E], -9.0]]},
    "min_new_tokens": {"min_new_tokens": LIMIT},
    "exponential_decay": {"exponential_decay_length_penalty": (1, 3.0)},
    "min_p": {"do_sample": True, "min_p": 0.5},
    "typical_p": {"do_sample": True, "typical_p": 0.5},
    "epsilon_cutoff": {"do_sample": True, "epsilon_cutoff": 0.3},
    "top_h": {"do_sample": True, "top_h": 0.3},
}
ALL = {
    **QWEN,
    "do_sample": True,
    "no_repeat_ngram_size": 2,
    "min_p": 0.2,
    "num_beams": 2,
    "suppress_tokens": [9],
}


@cache
def speller():
    return AutoModelForCausalLM.from_pretrained(checkpoint_path())


def spoiled(**values):
    """The embedded speller with a generation_config of this kind."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path())
    model.generation_config.update(**values)
    return model


def saved(folder, **values):
    spoiled(**values).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return str(folder)


def answers(model, do_sample, rows=ROWS):
    with seeded(0, CPU):
        found = generate(
            *(model, build_tokenizer(), rows),
            sampling=SAMPLED if do_sample else GREEDY,
            max_new_tokens=LIMIT,
            device=CPU,
        )
    return [one.text for one in found]


def letters(text):
    """What is left of an answer without its tags."""
    return re.sub("</?(think|answer)>", "", text)


def by_hand(row, ends=(END,), limit=LIMIT):
    """The most probable token, again and again, until one of `ends`."""
    tokenizer, model, found = build_tokenizer(), speller(), []
    ids = tokenizer.apply_chat_template(
        row["prompt"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )["input_ids"]
    while len(found) < limit and not (found and found[-1] in ends):
        with torch.no_grad():
            found.append(model(input_ids=ids).logits[0, -1].argmax().item())
        ids = torch.cat([ids, torch.tensor([found[-1:]])], dim=1)
    return tokenizer.decode(found, skip_special_tokens=True)


@pytest.mark.parametrize("kind", SPOILED)
def test_a_checkpoints_generation_config_shapes_nothing(kind):
    model = spoiled(**SPOILED[kind])
    kept = model.generation_config.to_dict()
    samples = SPOILED[kind].get("do_sample", False)
    assert answers(model, samples) == answers(speller(), samples)
    assert model.generation_config.to_dict() == kept
    # transformers would fill from it what a config of one's own leaves open
    tokenizer = build_tokenizer()
    inputs = tokenizer(
        prompt_texts(tokenizer, ROWS), return_tensors="pt", padding=True, add_special_tokens=False
    )
    own = {"max_new_tokens": LIMIT, "do_sample": samples, "eos_token_id": END, "pad_token_id": 0}
    with seeded(0, CPU):
        ids = model.generate(**inputs, generation_config=GenerationConfig(**own))
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    assert texts != answers(speller(), samples)


def policy_gradient(model, **config):
    config = {"per_device_eval_batch_size": 16, "max_completion_length": LIMIT, **config}
    return policy_gradient_cases.build("grpo", model=model, answer=None, **config)


def aligned(name, model, **config):
    config = {"per_device_eval_batch_size": 4, "max_completion_length": LIMIT, **config}
    return direct_alignment_cases.build(name, model=model, **config)


def sft(model, trainer_class=BookSFTTrainer, rows=None, **config):
    demonstrations = [{**row, "completion": message("assistant", "no")} for row in rows or ROWS]
    config = {"per_device_eval_batch_size": 8, "seed": 0} | config
    trainer = trainer_class(
        model,
        SFTConfig(
            output_dir="/nonexistent",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            disable_tqdm=True,
            save_strategy="no",
            **config,
        ),
        train_dataset=Dataset.from_list(demonstrations),
        eval_dataset=Dataset.from_list(demonstrations),
        processing_class=build_tokenizer(),
    )
    trainer.max_completion_length = LIMIT
    return trainer


TRAINERS = {
    "grpo": policy_gradient,
    "sft": sft,
    **{name: partial(aligned, name) for name in ("dpo", "kto", "orpo")},
}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_trainer_answers_by_itself_and_ends_at_any_end_token(name, tmp_path):
    folder = saved(tmp_path, **ALL, eos_token_id=[LETTER_E, END])
    trainer = TRAINERS[name](folder)
    found = trainer.answer(ROWS)
    assert [one["greedy"] for one in found] == [by_hand(row, (END, LETTER_E)) for row in ROWS]
    for kind in ("greedy", "sampled"):
        assert {letters(one[kind]).count("e") for one in found} == {0, 1}
        assert all("e" not in letters(one[kind])[:-1] for one in found)
    plain = TRAINERS[name](saved(tmp_path / "plain", eos_token_id=[LETTER_E, END])).answer(ROWS)
    assert found == plain
    # the checkpoint's own choice is exported again
    assert trainer.model.generation_config.min_p == 0.2


def test_under_lora_too(tmp_path):
    from peft import LoraConfig

    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    trainer = aligned("dpo", saved(tmp_path, **ALL), peft=lora)
    assert [a["greedy"] for a in trainer.answer(ROWS)] == [by_hand(row) for row in ROWS]
    assert trainer.model.get_base_model().generation_config.num_beams == 2


def test_rollouts_are_the_models_own_and_end_where_evaluation_ends(tmp_path):
    found = []
    for values in ({}, ALL):
        folder = saved(tmp_path / str(len(found)), **values, eos_token_id=[LETTER_E, END])
        # of what ALL has, these are fields of GRPOConfig, neutral by default
        trainer = policy_gradient(folder)
        assert set(trainer.eos_token_ids) == {LETTER_E, END}
        assert end_tokens(trainer.model, trainer.processing_class) == sorted(trainer.eos_token_ids)
        ids, _, _ = trainer._tokenize_prompts([row["prompt"] for row in ROWS])
        torch.manual_seed(0)
        found.append(trainer._generate_single_turn(ids, None, {}, 1)[0])
        assert trainer.model.generation_config.min_p == values.get("min_p")
    assert found[0] == found[1]
    asked = policy_gradient(folder, generation_kwargs={"suppress_tokens": [LETTER_E]})
    torch.manual_seed(0)
    ids = asked._generate_single_turn(ids, None, {}, 1)[0]
    assert any(LETTER_E in each for each in found[0])
    assert not any(LETTER_E in each for each in ids)  # as the run asks


def test_rewards_learn_which_completions_are_finished(tmp_path):
    told = []

    def reward(completion_ids, finished, **_):
        told.extend(zip(completion_ids, finished, strict=True))
        return [0.0] * len(finished)

    folder = saved(tmp_path, eos_token_id=[LETTER_E, END])
    found = ([75, END], [75, LETTER_E], [75, 76], [LETTER_E, 75])
    trainer = policy_gradient_cases.build(
        "grpo",
        model=folder,
        rewards=[reward],
        reward_weights=[1.0],
        answer=lambda prompt, index, call: list(found[index]),
    )
    trainer._prepare_inputs(next(measure.batches(trainer)))
    assert told == list(zip(map(list, found), (True, True, False, False), strict=True)) * 2


def test_sampled_data_are_the_models_own(tmp_path, monkeypatch):
    found = []
    args = SimpleNamespace(
        device=CPU,
        process_index=0,
        world_size=1,
        per_device_eval_batch_size=16,
        max_completion_length=LIMIT,
        model_init_kwargs=None,
    )
    for values in ({}, ALL):
        folder = saved(tmp_path / str(len(found)), **values, eos_token_id=[LETTER_E, END])
        model = ModelConfig(model_name_or_path=folder, dtype="float32")
        found.append(sampling.sample_completions(model, args, ROWS, 4, 0, SAMPLED))
    assert found[0] == found[1]
    flat = [one for each in found[0] for one in each]
    assert [one.finished for one in flat] == [one.text.endswith(("e", ">")) for one in flat]
    assert {one.text[-1] for one in flat} == {"e", ">"}


def test_sampled_answers_have_the_models_own_probabilities():
    model = build_model(0)
    with torch.no_grad():
        model.model.norm.weight *= 4  # between uniform and certain
        tokenizer = build_tokenizer()
        ids = tokenizer.apply_chat_template(
            ROWS[0]["prompt"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )["input_ids"]
        logits = model(input_ids=ids).logits[0, -1].double()
    trainer = policy_gradient(model, max_completion_length=1, per_device_eval_batch_size=1000)
    drawn = Counter(one["sampled"] for one in trainer.answer(ROWS[:1] * 4000))
    words = [tokenizer.decode([i], skip_special_tokens=True) for i in range(len(logits))]

    def distance(temperature):
        expected = Counter()
        for word, share in zip(words, torch.softmax(logits / temperature, -1), strict=True):
            expected[word] += share.item()
        return sum(abs(drawn[word] / 4000 - expected[word]) for word in expected) / 2

    assert distance(1.0) < 0.06 < 0.12 < min(distance(0.7), distance(1.3))


# --- prompts -------------------------------------------------------------------------------------

TEMPLATE = (
    "{%- for tool in tools or [] %}{{ tool['function']['name'] }}{% endfor %}"
    "{{ preamble | default('') }}"
) + CHAT_TEMPLATE.replace(
    "{{- '<|assistant|>' }}",
    "{{- '<|assistant|>' + ('' if enable_thinking | default(true) else '<think></think>') }}",
)


def look_up(word: str) -> str:
    """Look a word up.

    Args:
        word: the word.
    """
    return word


TOOL = {"type": "function", "function": {"name": "find", "description": "", "parameters": {}}}
OFF = {"enable_thinking": False}


@pytest.fixture
def asked(monkeypatch):
    """What the model is given, as text; it answers with nothing."""
    found = []

    def generate(self, input_ids, attention_mask, **_):
        pairs = zip(input_ids, attention_mask, strict=True)
        found.extend(build_tokenizer().decode(ids[mask.bool()]) for ids, mask in pairs)
        return torch.nn.functional.pad(input_ids, (0, 1), value=END)

    monkeypatch.setattr(Qwen3ForCausalLM, "generate", generate)
    return found


def test_policy_gradients_evaluate_on_the_prompts_that_they_train_on(asked, monkeypatch):
    trainer = policy_gradient(checkpoint_path(), chat_template_kwargs=OFF)
    trainer.processing_class.chat_template = TEMPLATE
    trainer.tools = [look_up]
    trainer.answer(ROWS[:2])
    trained = trainer._tokenize_prompts([row["prompt"] for row in ROWS[:2]])[0]
    assert asked == trainer.processing_class.batch_decode(trained) * 2  # greedy and sampled
    assert asked[0].startswith("look_up<|bos|>") and asked[0].endswith("<think></think>")


@pytest.mark.parametrize("name", ["dpo", "kto", "sft"])
def test_the_others_evaluate_on_the_prompts_of_their_rows(name, asked, monkeypatch):
    module = {"sft": __name__}.get(name, "direct_alignment_cases")
    build = build_tokenizer

    def thoughtful():
        tokenizer = build()
        tokenizer.chat_template = TEMPLATE
        return tokenizer

    monkeypatch.setattr(f"{module}.build_tokenizer", thoughtful)
    own = {"tools": json.dumps([TOOL]), "chat_template_kwargs": OFF}
    rows = [{**row, **own} for row in pairs(4)]
    trainer = TRAINERS[name](checkpoint_path(), rows=rows)
    ids = trainer.train_dataset["input_ids" if name == "sft" else "prompt_ids"]
    trained = {build().decode(each) for each in ids}
    trainer.answer(rows)
    assert len(asked) == 8 and all("<think></think>" in text for text in asked)
    if name == "sft":  # whose rows hold prompt and completion
        assert all(any(text.startswith(prompt) for text in trained) for prompt in asked)
    else:
        assert set(asked) == trained


def test_data_are_sampled_on_the_prompts_of_their_rows(asked, monkeypatch):
    load = sampling.load_tokenizer

    def thoughtful(*given):
        tokenizer = load(*given)
        tokenizer.chat_template = TEMPLATE
        return tokenizer

    monkeypatch.setattr(sampling, "load_tokenizer", thoughtful)
    args = SimpleNamespace(
        device=CPU,
        process_index=0,
        world_size=1,
        per_device_eval_batch_size=8,
        max_completion_length=4,
        model_init_kwargs=None,
    )
    rows = [{**ROWS[0], "tools": [TOOL], "chat_template_kwargs": OFF}, ROWS[1]]
    model = ModelConfig(model_name_or_path="tiny", dtype="float32")
    sampling.sample_completions(model, args, rows, 1, 0, SAMPLED)
    assert asked == [
        "find<|bos|><|user|>sun<|end|><|assistant|><think></think>",
        "<|bos|><|user|>tree<|end|><|assistant|>",
    ]


def test_sample_panels_are_of_whole_rows():
    given = []

    def answer(rows, *sampling):
        given.extend(rows)
        return [{"greedy": "", "sampled": ""}] * len(rows)

    model = SimpleNamespace(eval=lambda: None, train=lambda mode: None, training=True)
    trainer = SimpleNamespace(model=model, answer=answer, add_callback=None)
    trainer.add_callback = lambda callback: setattr(trainer, "panels", callback)
    rows = [{**row, "chat_template_kwargs": OFF} for row in ROWS]
    add_panels(trainer, Samples(every=1, count=2), rows)
    trainer.panels.on_step_end(None, SimpleNamespace(global_step=1, is_world_process_zero=False), 0)
    assert given == rows[:2]


def test_a_prompt_is_measured_with_what_the_template_adds(tmp_path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    model = ModelConfig(model_name_or_path=saved(tmp_path))
    rows = [{**row, "question": row["word"]} for row in ROWS]
    args = SimpleNamespace(max_completion_length=LIMIT, chat_template_kwargs={"preamble": "a" * 99})
    check_prompts(rows, tokenizer, model, args)
    args.chat_template_kwargs = {"preamble": "a" * 240}
    # 240 and <|bos|><|user|>banana<|end|><|assistant|>
    with pytest.raises(InputError, match="has 250 tokens and with max_completion_length 20 needs"):
        check_prompts(rows, tokenizer, model, args)


@pytest.mark.parametrize("length", [235, 236])
def test_a_text_is_measured_with_the_token_that_begins_it(tmp_path, length):
    tokenizer = build_tokenizer()
    begin = ("<|bos|>", tokenizer.convert_tokens_to_ids("<|bos|>"))
    post = TemplateProcessing(single="<|bos|> $A", special_tokens=[begin])
    tokenizer.backend_tokenizer.post_processor = post
    model = ModelConfig(model_name_or_path=saved(tmp_path))  # has a context of 256
    args = SimpleNamespace(max_completion_length=LIMIT)
    rows = [{"prompt": "a" * length}]
    if length == 235:  # 1 + 235 + 20
        check_prompts(rows, tokenizer, model, args)
        return
    with pytest.raises(
        InputError, match="has 237 tokens and with max_completion_length 20 needs 257"
    ):
        check_prompts(rows, tokenizer, model, args)


# --- what else an evaluation meets ---------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cuda:1", "mps", "xpu"])
def test_the_random_state_of_any_device_is_left_alone(kind, monkeypatch):
    device, restored = torch.device(kind), []
    module = torch.get_device_module(device)
    monkeypatch.setattr(module, "get_rng_state", lambda where: f"state of {where}")
    monkeypatch.setattr(module, "set_rng_state", lambda state, where: restored.append(state))
    before = torch.get_rng_state()
    with seeded(7, device):
        drawn = torch.rand(2)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(7)))
    assert restored == [f"state of {kind}"] and torch.equal(before, torch.get_rng_state())


def test_without_held_out_rows_the_trainers_own_evaluation_runs():
    ours = sft(checkpoint_path())
    stock = sft(checkpoint_path(), SFTTrainer)
    assert ours.evaluate()["eval_loss"] == stock.evaluate()["eval_loss"]
    ours.held_out, ours.scores = ROWS, {"one": lambda completions, **_: [1.0] * len(completions)}
    found = ours.evaluate()
    assert (found["eval_one"], found["eval_sampled_one"], "eval_loss" in found) == (1, 1, False)
    assert "eval_loss" in ours.evaluate(ours.eval_dataset)  # which is asked for
    aligning = aligned("dpo", checkpoint_path())
    with pytest.raises(ValueError, match="evaluation requires an eval_dataset"):
        aligning.evaluate()
    aligning.eval_dataset = aligning.train_dataset
    assert aligning.evaluate()["eval_loss"] == pytest.approx(math.log(2))  # the reference still


def test_policy_gradients_without_held_out_rows_score_fresh_samples():
    trainer = policy_gradient_cases.build(
        "grpo", rewards=[lambda completions, **_: [0.5] * len(completions)], reward_weights=[1.0]
    )
    trainer.eval_dataset = Dataset.from_list(ROWS)
    assert "eval_loss" in trainer.evaluate()
    assert trainer.state.log_history[-1]["eval_reward"] == 0.5


def test_a_score_is_averaged_over_the_answers_to_which_it_applies():
    trainer = policy_gradient(checkpoint_path(), max_completion_length=1)
    trainer.held_out = ROWS[:4]
    trainer.scores = {
        "some": lambda completions, **_: [1, None, 0, 1],
        "none": lambda completions, **_: [None] * 4,
    }
    found = trainer.evaluate()
    assert (found["eval_some"], found["eval_sampled_some"]) == (2 / 3, 2 / 3)
    assert not [key for key in found if key.endswith("none")]
    trainer.scores = {"broken": lambda completions, **_: [1, math.nan, 0, 1]}
    with pytest.raises(InputError, match="'broken' returned nan"):
        trainer.evaluate()


def test_the_generation_config_comes_back_after_an_error():
    model = spoiled(**ALL)
    with pytest.raises(KeyError), without_generation_config(model):
        assert model.generation_config.min_p is None
        raise KeyError
    assert model.generation_config.min_p == 0.2
