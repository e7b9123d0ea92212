"""What a model makes of held-out texts that others wrote: answers, labeled answers, pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlhf_trl.algorithms import Preference, Resolved
from rlhf_trl.evaluation.held_out import Scores
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.losses.preferences import completions_loss


class Text(NamedTuple):
    """The tokens of a prompt and a completion, and which of them are to be predicted."""

    ids: list[int]
    counted: list[bool]


class Reading(NamedTuple):
    """How a model predicts the T counted tokens of a text."""

    logps: Tensor  # (T,) log-probabilities, float32
    likeliest: Tensor  # (T,) whether the token is the likeliest one


Readings = Sequence[Reading | None]  # a row each; None: nothing of the row is left to read


@torch.no_grad()
def read(policy: Policy, texts: Sequence[Text | None]) -> list[Reading | None]:
    """Let a model read texts, `per_device_eval_batch_size` at once; None for a text stays None."""
    readings: list[Reading | None] = [None] * len(texts)
    places = [place for place, text in enumerate(texts) if text is not None]
    size = policy.args.per_device_eval_batch_size
    device = policy.accelerator.device
    for first in range(0, len(places), size):
        batch = places[first : first + size]
        ids = [torch.tensor(texts[place].ids, device=device) for place in batch]
        padding = policy.processing_class.pad_token_id
        inputs = pad_sequence(ids, batch_first=True, padding_value=padding)
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        logits = policy.model_wrapped(input_ids=inputs, attention_mask=mask).logits
        for place, row_ids, row_logits in zip(batch, ids, logits, strict=True):
            readings[place] = _reading(row_ids, texts[place].counted, row_logits)
    return readings


def _reading(ids: Tensor, counted: list[bool], logits: Tensor) -> Reading:
    """Return how the counted tokens of a text are predicted.

    Args:
        ids: (S,) tokens.
        counted: (S,) which of them count; the first never does, as nothing predicts it.
        logits: (S or more, V) the logits at each token, which predict the next one; those at the
            padding of the batch follow, and are not read.
    """
    # of the tokens before the counted ones, whose logits predict these
    places = torch.tensor(counted[1:], device=ids.device).nonzero().squeeze(1)
    targets = ids[places + 1].unsqueeze(1)
    predicted = logits[places].float().log_softmax(-1)
    is_likeliest = predicted.argmax(-1, keepdim=True) == targets
    logps = predicted.gather(1, targets)
    return Reading(logps.squeeze(1).cpu(), is_likeliest.squeeze(1).cpu())


def answer_scores(answers: Readings) -> tuple[Scores, list[int]]:
    """Return loss and token accuracy of each answer, and the number of its tokens.

    Both are means over the answer's tokens. Weighted by these numbers, the means over answers are
    those over all tokens, as in training.
    """
    scores = {
        "loss": [answer and -float(answer.logps.mean()) for answer in answers],
        "mean_token_accuracy": [
            answer and float(answer.likeliest.float().mean()) for answer in answers
        ],
    }
    return scores, [0 if answer is None else len(answer.logps) for answer in answers]


def labeled_scores(
    resolved: Resolved[Preference],
    answers: Readings,
    reference: Readings | None,
    labels: Sequence[bool],
) -> Scores:
    """Return implicit rewards and log-probabilities of labeled answers: `chosen` if desirable.

    KTO's loss is left out: its reference point is a mean over other answers, so that one answer by
    itself has no loss. A score is None for answers of the other label, and where no answer is left.

    Args:
        resolved: the row, whose beta scales the rewards.
        answers: how the policy predicts them.
        reference: how the reference does; without it there are no rewards.
        labels: whether each is desirable.
    """
    scores: Scores = {}
    for side, side_label in (("chosen", True), ("rejected", False)):
        rewards: list[float | None] = [None] * len(answers)
        logps: list[float | None] = [None] * len(answers)
        for place, (answer, label) in enumerate(zip(answers, labels, strict=True)):
            if answer is None or label is not side_label:
                continue
            logps[place] = float(answer.logps.sum())
            if reference is not None:
                log_ratio = float(answer.logps.sum() - reference[place].logps.sum())
                rewards[place] = resolved.parameters["beta"] * log_ratio
        if reference is not None:
            scores[f"rewards/{side}"] = rewards
        scores[f"logps/{side}"] = logps
    return scores


def pair_scores(
    resolved: Resolved[Preference],
    chosen: Readings,
    rejected: Readings,
    reference: tuple[Readings, Readings] | None,
    nll_weight: float = 0.0,
) -> Scores:
    """Return loss, accuracy, margin and log-probabilities of each pair, as a row computes them.

    The accuracy is 1 where the chosen answer has the larger implicit reward, and 1/2 in a tie.
    Loss, accuracy and margin are left out where the row reads a reference and there is none. The
    loss is left out in formulation "trl", where TRL's own loss fields decide it, and for KTO, whose
    loss is not one of a pair.

    Args:
        resolved: the row with its parameters.
        chosen: how the policy predicts the chosen answers.
        rejected: how it predicts the rejected ones.
        reference: how the reference predicts both, if there is one.
        nll_weight: adds the chosen answer's mean NLL, so weighted, to the loss.
    """
    row = resolved.row
    beta = resolved.parameters["beta"]
    comparable = reference is not None or not row.reference
    has_loss = comparable and resolved.formulation != "trl" and row.trainer != "KTOTrainer"
    names = ["logps/chosen", "logps/rejected"]
    if comparable:
        names = ["pair_accuracy", "rewards/margins", *names]
    if has_loss:
        names = ["loss", *names]
    scores: Scores = {name: [None] * len(chosen) for name in names}
    for place, pair in enumerate(zip(chosen, rejected, strict=True)):
        chosen_reading, rejected_reading = pair
        if chosen_reading is None or rejected_reading is None:
            continue
        scores["logps/chosen"][place] = float(chosen_reading.logps.sum())
        scores["logps/rejected"][place] = float(rejected_reading.logps.sum())
        if not comparable:
            continue
        reference_pair = None
        if row.reference:
            of_chosen, of_rejected = reference
            reference_pair = (of_chosen[place], of_rejected[place])
        logps = _logps_of_pair(row, pair, reference_pair)
        margin = _margin(logps, beta)
        scores["rewards/margins"][place] = margin
        scores["pair_accuracy"][place] = 0.5 if margin == 0 else float(margin > 0)
        if has_loss:
            nll = -chosen_reading.logps.mean(0, keepdim=True)  # (1,), read by ORPO's row
            loss = completions_loss(row, resolved.parameters, **logps, chosen_nll=nll).loss
            scores["loss"][place] = float(loss + nll_weight * nll)
    return scores


def _logps_of_pair(
    row: Preference, pair: tuple[Reading, Reading], reference: tuple[Reading, Reading] | None
) -> dict[str, Tensor]:
    """Return (1,) log-probabilities of chosen and rejected, by the names of `completions_loss`."""
    readings = {"policy": pair}
    if reference is not None:
        readings["ref"] = reference
    logps = {}
    for model, (chosen, rejected) in readings.items():
        logps[f"{model}_chosen_logps"] = _completion(chosen, row)
        logps[f"{model}_rejected_logps"] = _completion(rejected, row)
    return logps


def _margin(logps: dict[str, Tensor], beta: float) -> float:
    """Return the chosen answer's implicit reward less the rejected one's, as DPOTrainer logs it."""
    rewards = []
    for side in ("chosen", "rejected"):
        log_ratio = logps[f"policy_{side}_logps"]
        if f"ref_{side}_logps" in logps:
            log_ratio = log_ratio - logps[f"ref_{side}_logps"]
        rewards.append(beta * float(log_ratio))
    return rewards[0] - rewards[1]


def _completion(reading: Reading, row: Preference) -> Tensor:
    """Return the (1,) log-probability of a completion, of which a row reads sum or mean."""
    logps = reading.logps
    return (logps.mean() if row.logps == "mean" else logps.sum()).unsqueeze(0)
