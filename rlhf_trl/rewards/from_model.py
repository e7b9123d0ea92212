"""A trained reward model as a reward function."""

import json
import re
import string
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.models import ADAPTER, loading
from rlhf_trl.policies import check_adapter, fitting_adapter, whole_weights
from rlhf_trl.reward_models.reader import Reader
from rlhf_trl.rewards.checked import checked

BATCH = 64  # texts scored at once
# The second: a chat template may have opened the block at the end of the prompt.
THOUGHTS = (r"(?s)<think>.*?(</think>\s*|\Z)", r"(?s)\A.*?</think>\s*")


def load_reward_model(
    path: str, tokenizer: Any, args: Any, aggregate: str | None = None, strip_think: bool = False
) -> Callable[..., list[float]]:
    """Return a reward function that scores prompt and completion with a trained reward model.

    The text is that of training (see `Reader.encode`), with the end-of-sequence token exactly where
    the policy, whose `tokenizer` this is, ended its completion, so that a cut-off answer does not
    look finished. With `strip_think`, completions are read `without_thoughts`.

    `path` is the folder or hub name of a sequence classifier with one label, or the folder of a
    model that was trained here; a LoRA adapter is merged. `aggregate` is which of `Reader.names` is
    the reward; None: the first.
    """
    reader = Reader.read(path)
    name = aggregate or reader.names[0]
    if name not in reader.names:
        raise InputError(
            f"reward_aggregate: {name!r} is not a score of {path!r}, which is a model of kind "
            f"{reader.algorithm}; write {' or '.join(reader.names)}, or leave it out."
        )
    model, own = _load(path, reader, args)
    _check_characters(path, own, tokenizer)
    model.eval().requires_grad_(False).to(args.device)
    checked_texts = False

    def reward_model(
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        finished: list[bool] | None = None,
        **_: Any,
    ) -> list[float]:
        nonlocal checked_texts
        if strip_think:
            completions = [without_thoughts(completion) for completion in completions]
        if not checked_texts:
            _check_fit(path, own, prompts, completions)
            checked_texts = True
        if finished is None:  # BookGRPOTrainer says it, and knows other end tokens as well
            finished = [ids[-1:] == [tokenizer.eos_token_id] for ids in completion_ids]
        rows = zip(prompts, completions, finished, strict=True)
        texts = [reader.encode(own, *row) for row in rows]
        logits = reader.outputs(model, own, texts, BATCH, args.device)
        return [reader.scores(each)[name] for each in logits]

    return checked(reward_model, "reward_model")


def without_thoughts(completion: Any) -> Any:
    """Return a completion, plain or one message, without its `<think>...</think>` blocks.

    A block that was never closed reaches to the end, so that thoughts are never read as an answer.
    """
    if not isinstance(completion, str):
        *before, last = completion
        return [*before, {**last, "content": without_thoughts(last["content"])}]
    for pattern in THOUGHTS:
        completion = re.sub(pattern, "", completion)
    return completion


def _load(path: str, reader: Reader, args: Any) -> tuple[Any, Any]:
    import transformers

    kind = "Token" if reader.per_token else "Sequence"
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    fault = "is neither a reward model's folder here nor a hub model that can be reached"
    remedy = (
        "name a sequence classifier, or what recipes/reward.py, orm.py or prm.py left in model/"
    )
    with loading(f"reward_model: {path!r}", remedy, fault, new_head=True), whole_weights(args):
        if (adapter := Path(path) / ADAPTER).is_file():
            model, missing = _with_adapter(path, adapter, auto)
        else:
            model, told = auto.from_pretrained(path, dtype="auto", output_loading_info=True)
            missing = told["missing_keys"]
        own = transformers.AutoTokenizer.from_pretrained(path)
    if model.config.num_labels != reader.num_labels:
        raise InputError(
            f"reward_model: {path!r} has num_labels {model.config.num_labels}; name a model with "
            f"num_labels {reader.num_labels}."
        )
    if missing:
        raise InputError(
            f"reward_model: {path!r} lacks {', '.join(sorted(missing))}; name a trained one."
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if len(own) > rows:
        raise InputError(
            f"reward_model: the tokenizer in {path!r} has {len(own)} tokens and the model {rows}, "
            "so it belongs to another model; save the right one beside it."
        )
    if own.pad_token is None:
        own.pad_token = own.eos_token
    if not reader.per_token:
        _choose_last_token(path, model.config.get_text_config(), own, args)
    return model, own


def _choose_last_token(path: str, config: Any, own: Any, args: Any) -> None:
    """Let the end token be read (see `reading_last_tokens`), unless training never read it."""
    if config.pad_token_id != own.eos_token_id:
        config.pad_token_id = None
    elif getattr(args, "process_index", 0) == 0:
        print(
            f"reward_model: {path} pads with its end token, so that it was not trained to read it: "
            "a finished answer scores like one that is cut off there",
            flush=True,
        )


def _with_adapter(path: str, file: Path, auto: Any) -> tuple[Any, set[str]]:
    """Return the base model that an adapter names, with the adapter merged, and what both lack."""
    from peft import PeftModel, load_peft_weights
    from transformers import AutoConfig

    base = json.loads(file.read_text())["base_model_name_or_path"]
    own = (Path(path) / "config.json").is_file()  # what is trained here says what its head is
    given = (path, {}) if own else (base, {"num_labels": 1})
    config = AutoConfig.from_pretrained(given[0], **given[1])
    how = {"config": config, "dtype": "auto", "output_loading_info": True}
    model, told = auto.from_pretrained(base, **how)
    saved = load_peft_weights(path, device="cpu")
    missing = {k for k in told["missing_keys"] if not any(s.endswith(k) for s in saved)}
    if missing:
        return model, missing  # PEFT would stop at them
    with fitting_adapter(path):
        adapted = PeftModel.from_pretrained(model, path)
        check_adapter(adapted, path)
    return adapted.merge_and_unload(), missing


def _check_characters(path: str, own: Any, tokenizer: Any) -> None:
    """Refuse a reward model that reads what the policy can write as something else."""

    def lost(kind: Any) -> set[str]:
        characters = string.ascii_letters + string.digits + string.punctuation
        read = {c: kind.decode(kind(c, add_special_tokens=False)["input_ids"]) for c in characters}
        return {c for c, found in read.items() if found.strip() != c}

    if only := sorted(lost(own) - lost(tokenizer)):
        raise InputError(
            f"reward_model: the tokenizer of {path!r} cannot write {''.join(only)!r}, which the "
            "policy's can; name a reward model whose tokenizer fits."
        )


def _check_fit(path: str, own: Any, prompts: list[Any], completions: list[Any]) -> None:
    """Refuse a reward model that could not read what the policy is given and writes."""
    if not isinstance(prompts[0], str) and own.chat_template is None:
        raise InputError(
            f"reward_model: prompts are conversations, and the tokenizer of {path!r} has no chat "
            "template; add that of its training, or name another."
        )
    for prompt, completion in zip(prompts, completions, strict=True):
        for text in (prompt, completion):
            text = text if isinstance(text, str) else text[-1]["content"]
            ids = own(text, add_special_tokens=False)["input_ids"]
            unknown = own.unk_token_id is not None and own.unk_token_id in ids
            if unknown or _plain(own.decode(ids)) != _plain(text):
                raise InputError(
                    f"reward_model: the tokenizer of {path!r} reads the policy's {text[:60]!r} "
                    f"as {own.decode(ids)[:60]!r}; name one whose tokenizer fits."
                )


def _plain(text: str) -> str:
    """Drop what a tokenizer may change without harm: Unicode form (NFKC) and white space."""
    return "".join(unicodedata.normalize("NFKC", text).split())
