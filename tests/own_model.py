"""A model, a tokenizer, a chat template and data as a user of the recipes brings them."""

import json
from itertools import permutations

COLORS = ("red", "green", "blue", "yellow", "white", "black", "brown", "pink")
TEMPLATE = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}"
    "{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] + '<|end|>' }}{% endgeneration %}"
    "{% else %}{{ m['content'] + '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def said(role, content):
    """Return one message."""
    return {"role": role, "content": content}


def asked(first, second):
    """Return the question which of two colors comes first in the alphabet."""
    return f"Which comes first in the alphabet, {first} or {second}?"


def conversations():
    """Return conversations of two questions, each with the right answer."""
    pairs = list(permutations(COLORS, 2))
    return [
        {
            "messages": [
                said("user", asked(*one)),
                said("assistant", f"It is {min(one)}."),
                said("user", asked(*two)),
                said("assistant", f"It is {min(two)}."),
            ],
            "source": "written here",
        }
        for one, two in zip(pairs, pairs[1:] + pairs[:1], strict=True)
    ]


def preferences():
    """Return pairs of a right and a wrong answer, as messages."""
    return [
        {
            "prompt": [said("user", asked(*pair))],
            "chosen": [said("assistant", f"It is {min(pair)}.")],
            "rejected": [said("assistant", f"It is {max(pair)}.")],
        }
        for pair in permutations(COLORS, 2)
    ]


def transcripts():
    """Return pairs as Anthropic/hh-rlhf has them: transcripts that part at the last answer."""
    rows = []
    pairs = list(permutations(COLORS, 2))
    for number, (one, before) in enumerate(zip(pairs, pairs[1:] + pairs[:1], strict=True)):
        earlier = f"\n\nHuman: {asked(*before)}\n\nAssistant: It is {min(before)}."
        opening = earlier if number % 3 == 0 else ""  # every third has two turns
        asking = f"{opening}\n\nHuman: {asked(*one)}\n\nAssistant: It is "
        rows.append({"chosen": f"{asking}{min(one)}.", "rejected": f"{asking}{max(one)}."})
    return rows


def prompts():
    """Return questions with what `own_reward` reads, the name of the first color."""
    return [
        {"prompt": [said("user", asked(*pair))], "answer": min(pair), "likes": "It"}
        for pair in permutations(COLORS, 2)
    ]


def own_reward(completions, likes, answer, **kwargs):
    """Return how often a completion has the letters of a word, at most once per letter."""
    texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
    return [
        sum(letter in text for letter in word) / len(word)
        for text, word in zip(texts, likes, strict=True)
    ]


def judged():
    """Return right and wrong answers in turn, each to a question of its own."""
    rows = preferences()
    sides = [("chosen", "rejected")[n % 2] for n in range(len(rows))]
    return [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row, side in zip(rows, sides, strict=True)
    ]


def write_lines(path, rows):
    """Write JSON lines, and return where."""
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return path


def make_model(folder):
    """Write a Qwen2 of about 0.2M parameters with a tokenizer that is trained here."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [m["content"] for row in conversations() for m in row["messages"]]
    tokenizer.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|end|>",  # without one, Qwen2's class adds a token that the model does not have
        chat_template=TEMPLATE,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
