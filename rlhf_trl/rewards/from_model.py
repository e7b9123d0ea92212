"""A trained reward model as a reward function."""

import json
import string
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.models import ADAPTER, Quantization, loading
from rlhf_trl.policies import check_adapter, fitting_adapter, whole_weights
from rlhf_trl.reward_models.reader import Reader
from rlhf_trl.rewards.checked import checked
from rlhf_trl.rewards.thoughts import without_thoughts

BATCH = 64  # texts scored at once


def load_reward_model(
    path: str,
    tokenizer: Any,
    args: Any,
    aggregate: str | None = None,
    strip_think: bool = False,
    quantization: Quantization | None = None,
) -> Callable[..., list[float]]:
    """Return a reward function that scores prompt and completion with a trained reward model.

    The model reads the text as it was trained (see `Reader.encode`), with the end-of-sequence token
    exactly where the policy ended its completion, so that a cut-off answer does not look finished.

    Args:
        path: the folder or hub name of a sequence classifier with one label, or the folder of a
            model that was trained here; a LoRA adapter is merged.
        tokenizer: the policy's.
        args: the config of the trainer, for the device.
        aggregate: which of `Reader.names` is the reward; None: the first.
        strip_think: whether completions are read `without_thoughts`.
        quantization: how to quantize a whole model while it is loaded; None: not.
    """
    reader = Reader.read(path)
    name = aggregate or reader.names[0]
    if name not in reader.names:
        raise InputError(
            f"reward_aggregate: {name!r} is not a score of {path!r}, which is a model of kind "
            f"{reader.algorithm}; write {' or '.join(reader.names)}, or leave it out."
        )
    model, own_tokenizer = load_classifier(path, reader, args, quantization)
    _refuse_lossy_tokenizer(path, own_tokenizer, tokenizer)
    model.eval().requires_grad_(False).to(args.device)
    texts_were_checked = False  # the texts of the first call are

    def reward_model(
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        finished: list[bool] | None = None,
        **_: Any,
    ) -> list[float]:
        """Score completions, each with its prompt; both are texts or messages."""
        nonlocal texts_were_checked
        if strip_think:
            completions = [without_thoughts(completion) for completion in completions]
        if not texts_were_checked:
            _check_texts(path, own_tokenizer, prompts, completions)
            texts_were_checked = True
        # the trainers here pass `finished`, and know further end tokens; TRL's trainers do not
        if finished is None:
            finished = [ids[-1:] == [tokenizer.eos_token_id] for ids in completion_ids]
        rows = zip(prompts, completions, finished, strict=True)
        texts = [reader.encode(own_tokenizer, *row) for row in rows]
        logits = reader.outputs(model, own_tokenizer, texts, BATCH, args.device)
        return [reader.scores(text_logits)[name] for text_logits in logits]

    return checked(reward_model, "reward_model")


def load_classifier(
    path: str, reader: Reader, args: Any, quantization: Quantization | None = None
) -> tuple[Any, Any]:
    """Return a reward model, its adapter merged if it has one, and its own tokenizer.

    The arguments are those of `load_reward_model`, with the `reader` of the model.
    """
    import transformers

    kind = "Token" if reader.per_token else "Sequence"
    auto = getattr(transformers, f"AutoModelFor{kind}Classification")
    fault = "is neither a reward model's folder here nor a hub model that can be reached"
    remedy = (
        "name a sequence classifier, or what recipes/reward.py, orm.py or prm.py left in model/"
    )
    # new_head: no warning that a head is new, as the base of an adapter lacks it; weights that are
    # missing in the end are refused below. whole_weights: ZeRO-3 would split them over processes.
    with loading(f"reward_model: {path!r}", remedy, fault, new_head=True), whole_weights(args):
        adapter_config = Path(path) / ADAPTER
        if adapter_config.is_file():
            if quantization:
                raise InputError(
                    f"reward_quantization: {path!r} is an adapter; let rlhf-trl quantize merge and "
                    "quantize it, and name what that wrote as reward_model."
                )
            model, missing = _with_adapter(path, adapter_config, auto)
        else:
            options = _options(path, quantization, args)
            model, info = auto.from_pretrained(path, **options, output_loading_info=True)
            missing = info["missing_keys"]
        own_tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    if model.config.num_labels != reader.num_labels:
        raise InputError(
            f"reward_model: {path!r} has num_labels {model.config.num_labels}; name a model with "
            f"num_labels {reader.num_labels}."
        )
    if missing:  # transformers has drawn these weights at random
        raise InputError(
            f"reward_model: {path!r} lacks {', '.join(sorted(missing))}; name a trained one."
        )
    embeddings = model.get_input_embeddings().weight.shape[0]
    tokens = len(own_tokenizer)
    if tokens > embeddings:
        raise InputError(
            f"reward_model: the tokenizer in {path!r} has {tokens} tokens and the model "
            f"{embeddings}, so it belongs to another model; save the right one beside it."
        )
    if own_tokenizer.pad_token is None:  # padding is masked, so that any token will do
        own_tokenizer.pad_token = own_tokenizer.eos_token
    if not reader.per_token:  # a sequence classifier scores a text at its last token
        _read_end_token(path, model.config.get_text_config(), own_tokenizer, args)
    return model, own_tokenizer


def _options(path: str, quantization: Quantization | None, args: Any) -> dict[str, Any]:
    """Return the options of `from_pretrained` for a whole reward model."""
    if quantization is None:
        return {"dtype": "auto"}
    from rlhf_trl.quantized import quantized_options

    options = quantized_options(quantization, path, "reward_quantization", args.device)
    return {"dtype": "auto", **options}


def _read_end_token(path: str, config: Any, own_tokenizer: Any, args: Any) -> None:
    """Let a classifier score a finished text at its end token, unless training never read one.

    By `pad_token_id`, transformers looks for the last token that is no padding; with None,
    `reading_last_tokens` says where that is. A model that pads with its end token was trained to
    take end tokens for padding, so its config stays.
    """
    if config.pad_token_id != own_tokenizer.eos_token_id:
        config.pad_token_id = None
    elif getattr(args, "process_index", 0) == 0:  # only one process prints
        print(
            f"reward_model: {path} pads with its end token, so that it was not trained to read it: "
            "a finished answer scores like one that is cut off there",
            flush=True,
        )


def _with_adapter(path: str, adapter_config: Path, auto: Any) -> tuple[Any, set[str]]:
    """Return a base model with an adapter merged in, and the names of missing weights.

    These are the weights that neither base nor adapter has. If there are any, the base is returned
    without the adapter.

    Args:
        path: the folder of the adapter.
        adapter_config: its config, which names the base.
        auto: the class of transformers that loads the base.
    """
    from peft import PeftModel, load_peft_weights
    from transformers import AutoConfig

    base = json.loads(adapter_config.read_text())["base_model_name_or_path"]
    # an adapter that was trained here has a config.json, which describes its head; others have none
    if (Path(path) / "config.json").is_file():
        config = AutoConfig.from_pretrained(path)
    else:
        config = AutoConfig.from_pretrained(base, num_labels=1)
    options = {"config": config, "dtype": "auto", "output_loading_info": True}
    model, info = auto.from_pretrained(base, **options)
    # the base lacks the head; the adapter has it, with a prefix before its name
    saved_names = load_peft_weights(path, device="cpu").keys()
    missing = {
        name
        for name in info["missing_keys"]
        if not any(saved.endswith(name) for saved in saved_names)
    }
    if missing:  # PEFT would stop at them; the caller has a clearer error
        return model, missing
    with fitting_adapter(path):
        adapted = PeftModel.from_pretrained(model, path)
        check_adapter(adapted, path)
    return adapted.merge_and_unload(), missing


def _refuse_lossy_tokenizer(path: str, own_tokenizer: Any, tokenizer: Any) -> None:
    """Refuse a reward model whose tokenizer loses characters that the policy's `tokenizer` keeps.

    Reading an answer of the policy, the model would see something else in their place.
    """
    lost = sorted(_lost_characters(own_tokenizer) - _lost_characters(tokenizer))
    if lost:
        raise InputError(
            f"reward_model: the tokenizer of {path!r} cannot write {''.join(lost)!r}, which the "
            "policy's can; name a reward model whose tokenizer fits."
        )


def _lost_characters(tokenizer: Any) -> set[str]:
    """Return the ASCII characters that a tokenizer does not give back as they were."""
    characters = string.ascii_letters + string.digits + string.punctuation
    ids = {c: tokenizer(c, add_special_tokens=False)["input_ids"] for c in characters}
    return {c for c in characters if tokenizer.decode(ids[c]).strip() != c}


def _check_texts(path: str, own_tokenizer: Any, prompts: list[Any], completions: list[Any]) -> None:
    """Refuse a reward model whose tokenizer cannot encode these prompts and completions."""
    if not isinstance(prompts[0], str) and own_tokenizer.chat_template is None:
        raise InputError(
            f"reward_model: prompts are conversations, and the tokenizer of {path!r} has no chat "
            "template; add that of its training, or name another."
        )
    for prompt, completion in zip(prompts, completions, strict=True):
        for text in (prompt, completion):
            text = text if isinstance(text, str) else text[-1]["content"]
            ids = own_tokenizer(text, add_special_tokens=False)["input_ids"]
            decoded = own_tokenizer.decode(ids)
            unknown = own_tokenizer.unk_token_id
            has_unknown = unknown is not None and unknown in ids
            if has_unknown or _normalized(decoded) != _normalized(text):
                raise InputError(
                    f"reward_model: the tokenizer of {path!r} reads the policy's {text[:60]!r} "
                    f"as {decoded[:60]!r}; name one whose tokenizer fits."
                )


def _normalized(text: str) -> str:
    """Return a text without what a tokenizer may change: its Unicode form and white space."""
    return "".join(unicodedata.normalize("NFKC", text).split())
