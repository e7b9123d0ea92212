"""The KL of a policy to another along its answers, without ever holding all of their logits."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence
from trl.trainer.utils import selective_log_softmax

from rlhf_trl.book.kl import exact, k1
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import Completions, Scores
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.rollouts.generate import prompt_texts

LOGITS_AT_ONCE = 2**23  # 32 MiB of each policy; about eight times that is needed at a time


# Takes the (T, V) logits of a policy and of its reference, and (T,) tokens; returns (T,) values.
Measure = Callable[[Tensor, Tensor, Tensor], Tensor]


class _Text(NamedTuple):
    """The tokens of a prompt and of the answer to it."""

    prompt: list[int]
    answer: Sequence[int]


def _k1(logits: Tensor, ref_logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-ratio of each token."""
    logps = selective_log_softmax(logits, tokens)
    return k1(logps, selective_log_softmax(ref_logits, tokens))


KL: dict[str, Measure] = {"kl": lambda logits, ref, tokens: exact(logits, ref), "kl_k1": _k1}


def kl_of_answers(policy: Policy, reference: Policy, answers: Completions) -> Scores:
    """Return the KL of a policy to another along its answers, in nats per answer.

    `kl` is exact at each token (`book.kl.exact`), up to and with the one that ends the answer.
    `kl_k1` is the log-ratio of the answer itself: it has the same mean and more variance. Both are
    over all logits, as answers are sampled from all; a model may have more logits than its
    tokenizer has tokens.

    Args:
        policy: who answered.
        reference: the policy that the KL is to.
        answers: an answer to each of the held-out prompts of `policy`.

    Raises:
        InputError: the reference has another vocabulary, or fewer logits.
    """
    return along_answers(policy, reference, answers, KL)


@torch.no_grad()
def along_answers(
    policy: Policy, reference: Policy, answers: Completions, measures: Mapping[str, Measure]
) -> Scores:
    """Return the sums over each answer of what measures tell of its tokens, by name.

    The arguments are those of `kl_of_answers`, and the measures by name.
    """
    tokenizer = policy.processing_class
    if tokenizer.get_vocab() != reference.processing_class.get_vocab():
        raise InputError(
            f"--reference: {reference.name} has another vocabulary than {policy.name}, so there is "
            "no KL between them; name a model with the same tokenizer."
        )
    is_text = isinstance(policy.held_out[0]["prompt"], str)  # a chat template has special tokens
    texts = []
    for prompt, answer in zip(
        prompt_texts(tokenizer, policy.held_out, policy.template), answers, strict=True
    ):
        prompt_ids = tokenizer(prompt, add_special_tokens=is_text)["input_ids"]
        texts.append(_Text(prompt_ids, answer.ids))
    size = policy.args.per_device_eval_batch_size
    scores: Scores = {name: [] for name in measures}
    for first in range(0, len(texts), size):
        for name, sums in _read(policy, reference, texts[first : first + size], measures).items():
            scores[name] += sums
    return scores


def _read(
    policy: Policy, reference: Policy, batch: Sequence[_Text], measures: Mapping[str, Measure]
) -> dict[str, list[float]]:
    """Return the sums of the measures over each of the answers that both policies read at once."""
    device = policy.accelerator.device
    rows = [torch.tensor([*text.prompt, *text.answer], device=device) for text in batch]
    # Padded on the right by any token, since none before it sees it. It is read as well: masked, it
    # might have nothing to attend to in a sliding window, and its NaN would spread.
    ids = pad_sequence(rows, batch_first=True)
    predicts = torch.zeros_like(ids, dtype=torch.bool)  # the tokens that predict an answer's
    for row, text in enumerate(batch):
        start = len(text.prompt) - 1
        predicts[row, start : start + len(text.answer)] = True
    hidden = _head_inputs(policy, ids)[predicts]
    ref_hidden = _head_inputs(reference, ids)[predicts]
    tokens = ids.roll(-1, dims=1)[predicts]

    vocabulary = reference.model.config.get_text_config().vocab_size
    positions = max(1, LOGITS_AT_ONCE // vocabulary)
    chunks: dict[str, list[Tensor]] = {name: [] for name in measures}
    for first in range(0, len(tokens), positions):
        chunk = slice(first, first + positions)
        logits, ref_logits = _logits(policy, reference, hidden[chunk], ref_hidden[chunk])
        for name, measure in measures.items():
            chunks[name].append(measure(logits, ref_logits, tokens[chunk]))
    lengths = [len(text.answer) for text in batch]
    return {name: _sums(values, lengths) for name, values in chunks.items()}


def _logits(
    policy: Policy, reference: Policy, hidden: Tensor, ref_hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the (T, V) logits of both policies, of what their heads read, (T, H) each."""
    logits = _head_outputs(policy, hidden)
    ref_logits = _head_outputs(reference, ref_hidden)
    missing = ref_logits.shape[1] - logits.shape[1]
    if missing < 0:
        raise InputError(
            f"--reference: {reference.name} has {ref_logits.shape[1]} logits and {policy.name} "
            f"{logits.shape[1]}, of which some can be sampled from {policy.name} only, so "
            "that the KL is infinite; name a model with as many."
        )
    if missing:
        # what the policy has no logit for, it never samples; -inf would make 0 * inf = NaN
        logits = pad(logits, (0, missing), value=-1e9)
    return logits, ref_logits


def _head_inputs(policy: Policy, ids: Tensor) -> Tensor:
    """Return what the output layer reads at each of (B, S) tokens, (B, S, H)."""
    hidden: list[Tensor] = []

    def catch(_: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Keep the inputs, and let the layer compute as few logits as it can."""
        hidden.append(inputs[0])
        return (inputs[0][:, :1],)

    with _before_head(policy, catch):
        _forward(policy, ids)
    return hidden[0]


def _head_outputs(policy: Policy, hidden: Tensor) -> Tensor:
    """Return the (T, V) logits that a policy's own forward makes of (T, H) inputs of its head.

    What a model does with them behind its head (softcapping, scaling) is done thereby: the forward
    is that of a single token, in whose place the head reads the inputs.
    """
    with _before_head(policy, lambda *_: (hidden.unsqueeze(0),)):
        logits = _forward(policy, torch.zeros(1, 1, dtype=torch.long, device=hidden.device))[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 stays what it is


def _forward(policy: Policy, ids: Tensor) -> Tensor:
    """Return the logits of a policy that reads (B, S) tokens, all of them."""
    mask = torch.ones_like(ids)
    return policy.model_wrapped(input_ids=ids, attention_mask=mask, use_cache=False).logits


@contextmanager
def _before_head(
    policy: Policy, hook: Callable[[Any, tuple[Tensor]], tuple[Tensor]]
) -> Iterator[None]:
    """Let `hook` see and replace what a policy's output layer reads."""
    head = policy.model.get_output_embeddings()
    if head is None:
        raise InputError(
            f"--reference: {policy.name} has no output layer of its own, through which the KL is "
            "measured; leave --reference out."
        )
    handle = head.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _sums(chunks: list[Tensor], lengths: Sequence[int]) -> list[float]:
    """Return the sum over each answer of values by token, which come in chunks."""
    values = torch.cat(chunks).cpu().double()
    return [float(answer.sum()) for answer in values.split(lengths)]
