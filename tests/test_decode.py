"""Prompts that are read once for their whole group bring the tokens of transformers' `generate`."""

import pytest
import torch
from decode_processes import run
from peft import LoraConfig, PrefixTuningConfig, get_peft_model
from policy_gradient_cases import build, checkpoint, drift
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen2Config, Qwen2ForCausalLM

from rlhf_trl.errors import InputError
from rlhf_trl.rollouts.decode import decode, is_plain
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.tiny.tokenizer import build_tokenizer

WORDS = ["cat", "Mountain", "sun", "river", "ab"]
TOKENIZER = build_tokenizer()
END = TOKENIZER.eos_token_id


def model_of(*, lora=False, **changed):
    model = AutoModelForCausalLM.from_pretrained(checkpoint_path(), **changed)
    if lora:
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
        drift(model, 0.05, 7)  # so that the adapter says something
    return model


def prompts(group):
    """Return ids and mask of prompts of several lengths, each of them so often in a row."""
    texts = [
        TOKENIZER.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": f"Spell this word backward (example: sun -> nus): {word}",
                }
            ],
            tokenize=False,
            add_generation_prompt=True,
        )
        for word in WORDS
        for _ in range(group)
    ]
    batch = TOKENIZER(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    return {name: batch[name] for name in ("input_ids", "attention_mask")}


def settings(**changed):
    """Return what GRPOTrainer generates with."""
    plain = {
        "max_new_tokens": 20,
        "do_sample": True,
        "pad_token_id": TOKENIZER.pad_token_id,
        "bos_token_id": TOKENIZER.bos_token_id,
        "eos_token_id": [END],
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "cache_implementation": None,
        "disable_compile": True,
    }
    return GenerationConfig(**plain | changed)


CASES = {
    "temperature 1": {},
    "temperature .5": {"temperature": 0.5},
    "temperature 3": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_p": {"temperature": 2.0, "top_p": 0.7},
    "min_p": {"temperature": 2.0, "min_p": 0.2},
    "all of them": {"temperature": 1.7, "top_k": 9, "top_p": 0.9, "min_p": 0.05},
    "greedy": {"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
    "one token": {"max_new_tokens": 1},
    "every token ends": {"eos_token_id": [*range(len(TOKENIZER))]},
    "a letter ends, too": {"eos_token_id": [END, TOKENIZER.encode("a")[0]], "temperature": 2.0},
}


@pytest.mark.parametrize("group", [1, 4])
@pytest.mark.parametrize("case", CASES)
def test_tokens_of_generate(case, group):
    config, model = settings(**CASES[case]), model_of()
    assert is_plain(model, config)
    for seed in range(3):
        torch.manual_seed(seed)
        expected = model.generate(**prompts(group), generation_config=config)
        next_number = torch.rand(1)
        torch.manual_seed(seed)
        tokens = decode(model, **prompts(group), generation_config=config)
        assert torch.equal(tokens, expected)
        assert torch.equal(torch.rand(1), next_number)
    if case == "every token ends":
        assert tokens.shape[1] == prompts(1)["input_ids"].shape[1] + 1


def test_tokens_of_generate_with_an_adapter():
    config, model = settings(), model_of(lora=True)
    assert is_plain(model, config)
    torch.manual_seed(0)
    expected = model.generate(**prompts(4), generation_config=config)
    torch.manual_seed(0)
    assert torch.equal(decode(model, **prompts(4), generation_config=config), expected)
    torch.manual_seed(0)
    of_base = decode(model_of(), **prompts(4), generation_config=config)
    assert of_base.shape != expected.shape or not torch.equal(of_base, expected)


def test_equal_neighbors_are_read_once_and_ended_sequences_leave():
    model, rows = model_of(), []
    forward = model.forward

    def counted(input_ids, **kwargs):
        rows.append(tuple(input_ids.shape))
        return forward(input_ids=input_ids, **kwargs)

    model.forward = counted
    torch.manual_seed(0)
    batch = prompts(4)
    tokens = decode(model, **batch, generation_config=settings())
    assert rows[0] == (len(WORDS), batch["input_ids"].shape[1])
    assert rows[1] == (4 * len(WORDS), 1)
    sizes = [size for size, _ in rows[1:]]
    assert sizes == sorted(sizes, reverse=True)
    lengths = (tokens[:, batch["input_ids"].shape[1] :] != TOKENIZER.pad_token_id).sum(1)
    assert lengths.float().mean() < max(lengths)  # some end earlier
    assert sizes[-1] < sizes[0]


def sliding():
    small = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    window = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 0}
    return Qwen2ForCausalLM(Qwen2Config(**small, **heads, **window))


def prefixed():
    config = PrefixTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    return get_peft_model(model_of(), config)


LEFT_TO_GENERATE = {
    "beams": (model_of, {"num_beams": 2}),
    "penalty": (model_of, {"repetition_penalty": 1.1}),
    "typical_p": (model_of, {"typical_p": 0.9}),
    "static cache": (model_of, {"cache_implementation": "static"}),
    "sliding window": (sliding, {}),
    "prefix": (prefixed, {}),
    "eager attention": (lambda: model_of(attn_implementation="eager"), {}),
    "dropout": (lambda: model_of(attention_dropout=0.1).train(), {}),
}


@pytest.mark.parametrize("case", LEFT_TO_GENERATE)
def test_anything_else_stays_with_generate(case):
    make, changed = LEFT_TO_GENERATE[case]
    assert not is_plain(make(), settings(**changed))


@pytest.mark.parametrize("generations", [1, 4])
def test_a_run_is_bit_identical_and_reads_less(generations):
    name = "reinforce" if generations == 1 else "grpo"
    runs = [run(name, once, num_generations=generations) for once in (None, "exact", "always")]
    assert runs[0].weights.equal(runs[1].weights)
    assert runs[0].weights.equal(runs[2].weights)
    assert runs[0].prompts_tokenized == generations * runs[1].prompts_tokenized
    assert runs[0].generated == runs[0].generations
    assert runs[1].generated == 0


def test_formulation_trl_generates_as_trl():
    assert run("grpo", "exact", which="trl").generated > 0


def test_half_precision_is_rounded_by_the_batch():
    trainer = build("grpo", answer=None, model=AutoModelForCausalLM.from_pretrained(checkpoint()))
    assert trainer._reads_prompts_once()
    trainer.model.to(torch.bfloat16)
    assert not trainer._reads_prompts_once()
    trainer.args.read_prompts_once = "always"
    assert trainer._reads_prompts_once()


def test_another_word_is_refused():
    with pytest.raises(InputError, match="read_prompts_once is 'yes'; write one of exact, always"):
        build("grpo", read_prompts_once="yes")
