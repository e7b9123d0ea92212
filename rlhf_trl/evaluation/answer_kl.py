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


# A value for each token of an answer: takes the (T, V) logits of a policy and of its reference, and
# the (T,) tokens; returns (T,) values.
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

    `kl` is the sum of the exact KL at each token (`book.kl.exact`), the end token included.
    `kl_k1` is the log-ratio of the answer itself: it has the same mean and more variance. Both are
    over all logits, as answers are sampled from all; a model may have more logits than its
    tokenizer has tokens.

    Args:
        policy: the policy that answered.
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
    """Return, by the name of a measure, the sum of its values over the tokens of each answer.

    Args:
        policy: the policy that answered; its held-out prompts come before the answers.
        reference: another policy, which reads the same answers.
        answers: an answer to each of the held-out prompts of `policy`.
        measures: functions of the logits of both policies and the tokens (see `Measure`), by name.

    Raises:
        InputError: the reference has another vocabulary, or fewer logits.
    """
    tokenizer = policy.processing_class
    if tokenizer.get_vocab() != reference.processing_class.get_vocab():
        raise InputError(
            f"--reference: {reference.name} has another vocabulary than {policy.name}, so there is "
            "no KL between them; name a model with the same tokenizer."
        )
    # the chat template has written special tokens already; to a plain text, the tokenizer adds them
    is_plain_text = isinstance(policy.held_out[0]["prompt"], str)
    texts = []
    for prompt, answer in zip(
        prompt_texts(tokenizer, policy.held_out, policy.template), answers, strict=True
    ):
        prompt_ids = tokenizer(prompt, add_special_tokens=is_plain_text)["input_ids"]
        texts.append(_Text(prompt_ids, answer.ids))
    size = policy.args.per_device_eval_batch_size
    scores: Scores = {name: [] for name in measures}
    for first in range(0, len(texts), size):
        batch = texts[first : first + size]
        for name, sums in _measure_batch(policy, reference, batch, measures).items():
            scores[name] += sums
    return scores


def _measure_batch(
    policy: Policy, reference: Policy, batch: Sequence[_Text], measures: Mapping[str, Measure]
) -> dict[str, list[float]]:
    """Return, for each measure, its sums over the B answers of a batch.

    Both policies read the batch at once, but only `LOGITS_AT_ONCE` logits are made at a time.
    """
    device = policy.accelerator.device
    rows = [torch.tensor([*text.prompt, *text.answer], device=device) for text in batch]
    # Padded on the right with any token, which no token before it sees. Padding is not masked:
    # in a sliding window, it might have nothing to attend to, and its NaN would spread.
    ids = pad_sequence(rows, batch_first=True)  # (B, S)
    predicts_answer = torch.zeros_like(ids, dtype=torch.bool)  # whether the next token is answer
    for row, text in enumerate(batch):
        start = len(text.prompt) - 1
        predicts_answer[row, start : start + len(text.answer)] = True
    hidden = _head_inputs(policy, ids)[predicts_answer]  # (T, H): T answer tokens in all
    ref_hidden = _head_inputs(reference, ids)[predicts_answer]
    tokens = ids.roll(-1, dims=1)[predicts_answer]  # (T,)

    # the larger of the two, as `_logits` has it: a policy may lack tokens, a reference may not
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
        # the policy never samples tokens for which it has no logit; -inf would make 0 * inf = NaN
        logits = pad(logits, (0, missing), value=-1e9)
    return logits, ref_logits


def _head_inputs(policy: Policy, ids: Tensor) -> Tensor:
    """Return what the output layer reads at each of (B, S) tokens, (B, S, H)."""
    hidden: list[Tensor] = []

    def catch(_: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
        """Keep the inputs, and pass on one token of each text: its logits are not needed."""
        hidden.append(inputs[0])
        return (inputs[0][:, :1],)

    with _before_head(policy, catch):
        _forward(policy, ids)
    return hidden[0]


def _head_outputs(policy: Policy, hidden: Tensor) -> Tensor:
    """Return the (T, V) logits that a policy makes of (T, H) inputs of its output layer.

    The model's whole forward runs, on a single token, and its output layer reads the inputs in
    place of that token: so what the model does with logits (softcapping, scaling) is done.
    """
    with _before_head(policy, lambda *_: (hidden.unsqueeze(0),)):
        logits = _forward(policy, torch.zeros(1, 1, dtype=torch.long, device=hidden.device))[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))  # float64 stays what it is


def _forward(policy: Policy, ids: Tensor) -> Tensor:
    """Return the logits of a policy that reads (B, S) tokens, none of them masked."""
    mask = torch.ones_like(ids)
    return policy.model_wrapped(input_ids=ids, attention_mask=mask, use_cache=False).logits


@contextmanager
def _before_head(
    policy: Policy, hook: Callable[[Any, tuple[Tensor]], tuple[Tensor]]
) -> Iterator[None]:
    """Let `hook` see and replace the inputs of a policy's output layer, in the block."""
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
    """Return the sum over each answer; `chunks` hold a value for each token of all answers."""
    values = torch.cat(chunks).cpu().double()
    return [float(answer.sum()) for answer in values.split(lengths)]
