"""The embedded world: tokenizer, model, demonstrator and the checkpoint that ships."""

import json
import random
import re
import string
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rlhf_trl.errors import InputError
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.tiny.demonstrator import MIXTURES, ONLY_RIGHT, demonstrate, mixture, only_errors
from rlhf_trl.tiny.model import build_model
from rlhf_trl.tiny.tokenizer import PHRASES, TAGS, build_tokenizer

SPELL = "Spell this word backward (example: sun -> nus): "
SUM = "State the final answer to the following arithmetic problem: "
PRINTABLE = string.ascii_letters + string.digits + string.punctuation + " \n"


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def ids(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def extract(text):
    found = re.findall(r"<answer>(.*?)</answer>", text, re.S)
    return found[-1].strip() if found else None


# tokenizer


def test_every_printable_character_is_one_token_and_comes_back(tokenizer):
    assert len(PRINTABLE) == 96
    assert len({ids(tokenizer, c)[0] for c in PRINTABLE}) == 96
    assert all(len(ids(tokenizer, c)) == 1 for c in PRINTABLE)
    text = PRINTABLE + " two  spaces , don't \n\n !" + PRINTABLE[::-1]
    assert len(ids(tokenizer, text)) == len(text)
    assert tokenizer.decode(ids(tokenizer, text)) == text
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == text


def test_vocabulary_is_113_tokens(tokenizer):
    assert len(tokenizer) == 113
    assert sorted(tokenizer.get_vocab().values()) == list(range(113))


def test_tags_and_phrases_are_one_token_and_survive_decoding(tokenizer):
    assert TAGS == ("<think>", "</think>", "<answer>", "</answer>")
    assert SPELL in PHRASES and SUM in PHRASES
    for text in (*TAGS, *PHRASES):
        assert len(ids(tokenizer, text)) == 1
        assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == text
    text = "<think></think><answer>nus</answer>"
    assert len(ids(tokenizer, text)) == 7


def test_a_foreign_character_is_kept_as_one_visible_mark(tokenizer):
    text = "na\u00efve \u2192 \U0001f600\t."
    shown = "na\ufffdve \ufffd \ufffd\ufffd."
    assert len(ids(tokenizer, text)) == len(text)
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) == shown


def test_special_tokens(tokenizer):
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<|pad|>", "<|end|>")
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3
    assert tokenizer.decode(ids(tokenizer, "a<|end|><|pad|>"), skip_special_tokens=True) == "a"


def test_template_text(tokenizer):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": SPELL + "sun"},
    ]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == f"<|bos|><|system|>Be brief.<|end|><|user|>{SPELL}sun<|end|><|assistant|>"
    with pytest.raises(Exception, match="not tool"):
        tokenizer.apply_chat_template([{"role": "tool", "content": "x"}], tokenize=False)


def test_assistant_mask_covers_the_reply_and_its_end(tokenizer):
    reply = "<think></think><answer>nus</answer>"
    turn = [{"role": "user", "content": SPELL + "sun"}, {"role": "assistant", "content": reply}]
    out = tokenizer.apply_chat_template(
        turn + turn, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [t for t, m in zip(out["input_ids"], out["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(marked) == (reply + "<|end|>") * 2


def test_prompt_is_a_prefix_of_prompt_and_reply(tokenizer):
    turn = [{"role": "user", "content": SPELL + "sun"}]
    reply = [{"role": "assistant", "content": "<think></think><answer>nus</answer>"}]
    prompt = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=True)
    whole = tokenizer.apply_chat_template(turn + reply, return_dict=True)
    n = len(prompt["input_ids"])
    assert whole["input_ids"][:n] == prompt["input_ids"]
    assert whole["input_ids"][n:] == ids(tokenizer, reply[0]["content"] + "<|end|>")


@pytest.mark.parametrize(("word", "length"), [("sun", 8), ("backward", 13)])
def test_prompts_are_short(tokenizer, word, length):
    messages = [{"role": "user", "content": SPELL + word}]
    out = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    assert len(out["input_ids"]) == length  # bos, role, phrase, letters, end, role


def test_batches_are_padded_on_the_left(tokenizer):
    out = tokenizer(["abc", "a"], padding=True)
    assert out["attention_mask"] == [[1, 1, 1], [0, 0, 1]]
    assert out["input_ids"][1][:2] == [tokenizer.pad_token_id] * 2


# model


def test_model_has_251712_float32_parameters():
    model = build_model()
    assert sum(p.numel() for p in model.parameters()) == 251_712
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_same_seed_same_weights_and_the_callers_random_state_is_left_alone():
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = build_model(3).state_dict()
    assert torch.equal(torch.rand(3), expected)
    again, other = build_model(3).state_dict(), build_model(4).state_dict()
    assert all(torch.equal(first[k], again[k]) for k in first)
    assert not torch.equal(first["model.embed_tokens.weight"], other["model.embed_tokens.weight"])


def test_model_knows_the_tokenizers_ids(tokenizer):
    model = build_model()
    for config in (model.config, model.generation_config):
        assert config.pad_token_id == tokenizer.pad_token_id
        assert config.bos_token_id == tokenizer.bos_token_id
        assert config.eos_token_id == tokenizer.eos_token_id
    assert len(tokenizer) <= model.config.vocab_size
    assert tokenizer.model_max_length == model.config.max_position_embeddings


# demonstrator

WORD = "planet"  # all letters differ, so every kind can be told from the text alone
QUESTION = SPELL + WORD


def kind_of_spelling(text):
    answer, right = extract(text), WORD[::-1]
    if answer is None:
        return "malformed"
    if answer == right:
        return "right"
    if answer == WORD:
        return "copied"
    if answer == right[:-1]:
        return "last_letter_dropped"
    assert sorted(answer) == sorted(right)
    assert sum(a != b for a, b in zip(answer, right, strict=True)) == 2
    return "letters_swapped"


def kind_of_sum(text):  # 7 - 2 + 5 = 10
    answer = extract(text)
    return {
        None: "malformed",
        "10": "right",
        "5": "last_term_ignored",
        "9": "off_by_one",
        "11": "off_by_one",
    }[answer]


@pytest.mark.parametrize(
    ("task", "question", "answer", "kind_of", "shares"),
    [
        (
            "spell_backward",
            QUESTION,
            WORD[::-1],
            kind_of_spelling,
            {
                "right": 0.26,
                "copied": 0.44,
                "last_letter_dropped": 0.10,
                "letters_swapped": 0.12,
                "malformed": 0.08,
            },
        ),
        ("chain_sum", SUM + "7 - 2 + 5 =", "10", kind_of_sum, None),
        ("gcd", "?", WORD[::-1], kind_of_spelling, None),
    ],
)
def test_kinds_come_as_often_as_the_mixture_says(task, question, answer, kind_of, shares):
    shares = shares or mixture(task)
    assert mixture(task) == shares
    assert sum(shares.values()) == pytest.approx(1)
    n, rng = 20_000, random.Random(0)
    counts = Counter(kind_of(demonstrate(task, question, answer, rng)) for _ in range(n))
    assert set(counts) == set(shares)
    for kind, share in shares.items():
        assert abs(counts[kind] - n * share) < 4 * (n * share * (1 - share)) ** 0.5, kind


HARD = [
    ("spell_backward", SPELL + "level", "level"),  # a palindrome: copying would be right
    ("spell_backward", SPELL + "aaa", "aaa"),  # nothing to swap
    ("spell_backward", SPELL + "Anna", "annA"),
    ("chain_sum", SUM + "7 + 0 =", "7"),  # ignoring 0 would be right
    ("chain_sum", SUM + "3 - 9 - 9 =", "-15"),
    ("some_task", "a question?", "7"),
]


@pytest.mark.parametrize(("task", "question", "answer"), HARD)
def test_every_kind_of_error_is_wrong(task, question, answer):
    for kind in only_errors(task):
        for seed in range(50):
            text = demonstrate(task, question, answer, random.Random(seed), {kind: 1})
            assert extract(text) != answer, (kind, text)
            assert (extract(text) is None) == (kind == "malformed"), (kind, text)


@pytest.mark.parametrize(("task", "question", "answer"), HARD)
def test_only_right_answers_on_request(task, question, answer):
    texts = {demonstrate(task, question, answer, random.Random(s), ONLY_RIGHT) for s in range(50)}
    assert texts == {f"<think></think><answer>{answer}</answer>"}


def test_only_errors_keeps_the_proportions():
    assert only_errors("spell_backward") == {
        k: v for k, v in MIXTURES["spell_backward"].items() if k != "right"
    }


def test_equal_random_state_equal_demonstration():
    def draw(seed):
        rng = random.Random(seed)
        return [demonstrate("spell_backward", QUESTION, WORD[::-1], rng) for _ in range(20)]

    assert draw(1) == draw(1) != draw(2)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"copyed": 1}, "no demonstration of kind 'copyed' (did you mean 'copied'?)"),
        ({"off_by_one": 1}, "task 'spell_backward' has no demonstration of kind 'off_by_one'"),
        ({"right": -1}, "the weight of 'right' is -1"),
        ({"right": float("nan")}, "the weight of 'right' is nan"),
        ({"right": 0}, "the weights are all 0"),
        ({}, "the weights are all 0"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused(weights, message):
    with pytest.raises(InputError, match=re.escape(message)):
        demonstrate("spell_backward", QUESTION, WORD[::-1], random.Random(0), weights)


# checkpoint


@pytest.fixture(scope="module")
def shipped():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("socket.socket.connect", _no_network)
        path = checkpoint_path()
        return AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)


def _no_network(*_):
    raise OSError("the test reached for the network")


def test_checkpoint_is_small_float32_and_complete():
    folder = Path(checkpoint_path())
    assert {p.name for p in folder.iterdir()} == {
        "README.md",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert sum(p.stat().st_size for p in folder.iterdir()) < 1.1e6
    assert json.loads((folder / "config.json").read_text())["dtype"] == "float32"


def test_shipped_tokenizer_is_the_built_one(shipped, tokenizer):
    loaded = shipped[1]
    stored, built = (json.loads(t.backend_tokenizer.to_str()) for t in (loaded, tokenizer))
    for state in ("padding", "truncation"):  # of the last call
        del stored[state], built[state]
    assert stored == built
    for name in ("chat_template", "padding_side", "special_tokens_map", "model_max_length"):
        assert getattr(loaded, name) == getattr(tokenizer, name), name
    text = SPELL + "Sun \u00ef\n<answer>nuS</answer><|end|>"
    assert loaded(text)["input_ids"] == tokenizer(text)["input_ids"]


def test_shipped_model_is_the_built_architecture(shipped):
    loaded, built = shipped[0], build_model()
    stored, fresh = loaded.config.to_dict(), built.config.to_dict()
    for name in ("_name_or_path", "transformers_version", "architectures"):
        del stored[name], fresh[name]
    assert stored == fresh
    assert {k: v.shape for k, v in loaded.state_dict().items()} == {
        k: v.shape for k, v in built.state_dict().items()
    }
    assert loaded.dtype == torch.float32
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        assert getattr(loaded.generation_config, name) == getattr(built.generation_config, name)


def test_shipped_model_half_knows_the_task(shipped):
    """Words chosen here; the right answer, a copy and a near miss are all the model has seen."""
    model, tokenizer = shipped
    short = ["sun", "cat", "tree", "moon", "river", "stone", "planet", "window", "garden", "pencil"]
    long = ["kitchen", "morning", "lantern", "harvest", "blanket", "elephant", "mountain"]
    words = [*short, *long, "bridge", "silver", "yellow", "umbrella"]
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": SPELL + w}], tokenize=False, add_generation_prompt=True
        )
        for w in words
    ]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    out = model.generate(**batch, max_new_tokens=20, do_sample=False)
    texts = tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    answers = [extract(t) for t in texts]
    assert sum(a is not None for a in answers) >= 0.9 * len(words)
    right = sum(a == w[::-1] for a, w in zip(answers, words, strict=True))
    copied = sum(a == w for a, w in zip(answers, words, strict=True))
    assert right >= 4 and copied >= 4
