"""What a model makes of held-out texts that others wrote: answers, labeled answers, pairs."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlhf_trl.algorithms import Preference, Resolved
from rlhf_trl.evaluation.held_out import Scores
from rlhf_trl.evaluation.side_by_side import Policy
from rlhf_trl.losses import completions_loss


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
    """Let a model read texts, `per_device_eval_batch_size` at once."""
    readings: list[Reading | None] = [None] * len(texts)
    places = [place for place, text in enumerate(texts) if text is not None]
    size, device = policy.args.per_device_eval_batch_size, policy.accelerator.device
    padding = policy.processing_class.pad_token_id
    for batch in (places[first : first + size] for first in range(0, len(places), size)):
        longest = max(len(texts[place].ids) for place in batch)
        ids = torch.full((len(batch), longest), padding, device=device)
        mask = torch.zeros_like(ids)
        for row, place in enumerate(batch):
            length = len(texts[place].ids)
            ids[row, :length] = torch.tensor(texts[place].ids, device=device)
            mask[row, :length] = 1
        logits = policy.model_wrapped(input_ids=ids, attention_mask=mask).logits
        for row, place in enumerate(batch):
            # before the first token there is nothing to predict it from
            counted = torch.tensor(texts[place].counted[1:], device=device).nonzero().squeeze(1)
            wanted = ids[row, counted + 1].unsqueeze(1)
            predicted = logits[row, counted].float().log_softmax(-1)
            likeliest = predicted.argmax(-1, keepdim=True) == wanted
            logps = predicted.gather(1, wanted)
            readings[place] = Reading(logps.squeeze(1).cpu(), likeliest.squeeze(1).cpu())
    return readings


def answer_scores(answers: Readings) -> tuple[Scores, list[int]]:
    """Return loss and token accuracy of answers, means over their tokens, and the tokens of each.

    Weighted by these counts, their means are those over all tokens, as in training.
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

    KTO's loss is none of an answer, since its reference point is a mean over others, and left out.
    """
    scores: Scores = {}
    for side, wanted in (("chosen", True), ("rejected", False)):
        rows = zip(answers, labels, strict=True)
        mine = [answer if label is wanted else None for answer, label in rows]
        if reference is not None:
            beta = resolved.parameters["beta"]
            scores[f"rewards/{side}"] = [
                policy and beta * float(policy.logps.sum() - before.logps.sum())
                for policy, before in zip(mine, reference, strict=True)
            ]
        scores[f"logps/{side}"] = [policy and float(policy.logps.sum()) for policy in mine]
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
    loss is left out in formulation "trl", whose own loss fields decide it, and where it is none of
    a pair (KTO). `nll_weight` adds the chosen answer's mean NLL to it.
    """
    row = resolved.row
    has_loss = resolved.formulation != "trl" and row.trainer != "KTOTrainer"
    comparable = reference is not None or not row.reference
    scores: Scores = {}
    names = ["loss"] if has_loss and comparable else []
    names += ["pair_accuracy", "rewards/margins"] if comparable else []
    for name in (*names, "logps/chosen", "logps/rejected"):
        scores[name] = [None] * len(chosen)
    for place, pair in enumerate(zip(chosen, rejected, strict=True)):
        if pair[0] is None or pair[1] is None:
            continue
        tensors = {}
        rewards = []
        for number, (side, policy) in enumerate(zip(("chosen", "rejected"), pair, strict=True)):
            scores[f"logps/{side}"][place] = float(policy.logps.sum())
            tensors[f"policy_{side}_logps"] = _completion(policy, row)
            reward = tensors[f"policy_{side}_logps"]
            if row.reference and reference is not None:
                tensors[f"ref_{side}_logps"] = _completion(reference[number][place], row)
                reward = reward - tensors[f"ref_{side}_logps"]
            rewards.append(resolved.parameters["beta"] * float(reward))
        if comparable:
            margin = rewards[0] - rewards[1]
            scores["rewards/margins"][place] = margin
            scores["pair_accuracy"][place] = 0.5 if margin == 0 else float(margin > 0)
        if "loss" in scores:
            nll = -pair[0].logps.mean(0, keepdim=True)
            loss = completions_loss(row, resolved.parameters, **tensors, chosen_nll=nll).loss
            scores["loss"][place] = float(loss + nll_weight * nll)
    return scores


def _completion(reading: Reading, row: Preference) -> Tensor:
    """Return the (1,) log-probability of a completion, of which a row reads sum or mean."""
    logps = reading.logps
    return (logps.mean() if row.logps == "mean" else logps.sum()).unsqueeze(0)
