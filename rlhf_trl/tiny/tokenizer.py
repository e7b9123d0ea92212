"""A character-level tokenizer of 113 tokens whose prompts stay verbatim and short."""

from tokenizers import AddedToken, Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

SPECIALS = ("<|pad|>", "<|bos|>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>")
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
# Constant parts of reasoning-gym questions: one token each, or a prompt would be 60 tokens long.
PHRASES = (
    "Spell this word backward (example: sun -> nus): ",
    "State the final answer to the following arithmetic problem: ",
    "Find the Greatest Common Divisor (GCD) of these numbers: ",
    ". Give only the GCD as your final answer.",
    "Solve the following multiplication: ",
    ". Give only the result as your final answer.",
)
CHARACTERS = ("\n", *map(chr, range(32, 127)))
UNKNOWN = "\ufffd"

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' }}"
    "{%- generation %}{{- message['content'] + '<|end|>' }}{%- endgeneration %}"
    "{%- elif message['role'] in ['system', 'user'] %}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{%- else %}"
    "{{- raise_exception('The role of a message is system, user or assistant, not '"
    " + message['role'] + '.') }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the embedded model, built from nothing.

    Printable ASCII and newline are one token per character, the book's four tags and the constant
    phrases of a few gym tasks one token each. Every other character becomes one U+FFFD (the
    replacement character), an ordinary token that decoding shows: the length is kept and the loss
    is visible, nothing is dropped.
    """
    tokens = (*SPECIALS, UNKNOWN, *CHARACTERS, *TAGS, *PHRASES)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    # without merges, what is none of the whole tokens below is read character by character
    model = models.BPE(vocab=vocabulary, merges=[], unk_token=UNKNOWN)
    backend = Tokenizer(model)
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    backend.add_tokens([AddedToken(t, special=False, normalized=False) for t in (*TAGS, *PHRASES)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|bos|>",
        eos_token="<|end|>",
        pad_token="<|pad|>",
        padding_side="left",
        model_max_length=256,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
