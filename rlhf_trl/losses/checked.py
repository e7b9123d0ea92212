"""The four public losses: what is given is checked, then computed as the row says.

A name that does not exist, a tensor or parameter that the formulation does not read, one that it
needs and does not get, and a shape or value that is impossible are an InputError.
"""

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from rlhf_trl import algorithms, book
from rlhf_trl.algorithms import Distillation, PolicyGradient, Preference, RewardModel
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.losses.calling import call, look_up, promoted
from rlhf_trl.losses.distillation import distilled_loss, student_name
from rlhf_trl.losses.policy_gradients import estimate_advantages, shaped_rewards, surrogate_loss
from rlhf_trl.losses.preferences import PreferenceLoss, completions_loss
from rlhf_trl.losses.reward_models import scores_loss


@dataclass(frozen=True)
class PolicyGradientLoss:
    """What `policy_gradient_loss` returns."""

    loss: Tensor  # the scalar to minimize; differentiable in `logps` (and `values`)
    advantages: Tensor  # (B,), or (B, T) where each token has its own; constants


def policy_gradient_loss(
    algorithm: str,
    *,
    logps: Tensor,
    mask: Tensor,
    rewards: Tensor,
    old_logps: Tensor | None = None,
    ref_logps: Tensor | None = None,
    values: Tensor | None = None,
    old_values: Tensor | None = None,
    binary_rewards: Tensor | None = None,
    num_generations: int | None = None,
    prompt_tokens: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    formulation: str = "chapter",
    **params: Any,
) -> PolicyGradientLoss:
    """Compute the loss of a policy-gradient algorithm on one batch.

    What stands on masked positions never matters, not even a NaN. The result has the precision of
    `logps`: float64 in, float64 out.

    Args:
        algorithm: "reinforce", "rloo", "ppo", "grpo", "drgrpo", "gspo", "cispo", "cispo_window",
            "sapo", "dapo", "dapo_per_prompt" or "maxrl".
        logps: (B, T) log-probabilities of the completion tokens under the policy, in nats.
        mask: (B, T) 1 on tokens that count, 0 elsewhere.
        rewards: (B,) rewards of the completions.
        old_logps: (B, T) log-probabilities at rollout time; None: on-policy.
        ref_logps: (B, T) log-probabilities under the reference policy, with `beta`.
        values: (B, T) values of the critic that is trained (PPO).
        old_values: (B, T) values at rollout time (PPO).
        binary_rewards: (B,) 1 for a success, 0 for a failure (MaxRL; code: or partial credit).
        num_generations: completions per prompt, standing next to each other; None: the batch is one
            group.
        prompt_tokens: (B,) for each completion, the tokens of all completions of its prompt, for a
            formulation that averages over these, where `mask` holds only a part of them; None:
            those of this mask. Micro-batches that split prompts go to `surrogate_loss`.
        normalizer: tokens of the whole accumulation window, for a formulation that is normalized
            over it; None: those of this mask.
        formulation: "chapter", "code" or "trl".
        **params: the parameters that the formulation reads, under TRL's names where it has one.
            `epsilon_high` always means an upper bound of 1 + epsilon_high.
    """
    row = algorithms.formulation(algorithm, formulation, PolicyGradient)
    parameters = row.parameters(params)
    row = row.chosen(parameters)  # where `baseline` or `importance_cap` changes its parts
    optional = {"old_logps": old_logps, "ref_logps": ref_logps, "values": values}
    optional |= {"old_values": old_values, "binary_rewards": binary_rewards}
    optional |= {"prompt_tokens": prompt_tokens}
    optional = {name: tensor for name, tensor in optional.items() if tensor is not None}
    _check_reads(row, parameters, set(optional), has_beta="beta" in params)
    _check_window(row, normalizer)
    tensors = {"logps": logps, "mask": mask, "rewards": rewards, **optional}
    tensors = _prepared(row.label, tensors)
    _check_groups(row.label, num_generations, len(tensors["rewards"]))

    # each of the three steps takes from these what its arguments name, `params` among them
    arguments = {**tensors, "row": row, "params": parameters}
    arguments |= {"num_generations": num_generations, "normalizer": normalizer}
    arguments["rewards"] = call(shaped_rewards, params={}, tensors=arguments)
    arguments["advantages"] = call(estimate_advantages, params={}, tensors=arguments)
    loss = call(surrogate_loss, params={}, tensors=arguments)
    return PolicyGradientLoss(loss, arguments["advantages"])


def preference_loss(
    algorithm: str,
    *,
    policy_chosen_logps: Tensor,
    policy_rejected_logps: Tensor,
    ref_chosen_logps: Tensor | None = None,
    ref_rejected_logps: Tensor | None = None,
    policy_kl_logps: Tensor | None = None,
    ref_kl_logps: Tensor | None = None,
    chosen_nll: Tensor | None = None,
    formulation: str = "chapter",
    **params: Any,
) -> PreferenceLoss:
    """Compute the loss of a direct-alignment algorithm on one batch.

    Log-probabilities are of whole completions, in nats: summed over their tokens or averaged, as
    `logps` of the formulation says ("mean" for simpo, orpo, dpo_norm and TRL's ipo, "sum"
    elsewhere). The result has the precision of `policy_chosen_logps`.

    Args:
        algorithm: "dpo", "cdpo", "ipo", "simpo", "orpo", "kto", "dpo_norm", "apo_zero" or
            "apo_down".
        policy_chosen_logps: (B,) of the chosen under the policy.
        policy_rejected_logps: (B,) of the rejected under the policy. KTO needs no pairs: there
            the rejected may be more or fewer than the chosen.
        ref_chosen_logps: (B,) of the chosen under the reference policy.
        ref_rejected_logps: (B,) of the rejected under the reference policy.
        policy_kl_logps: (M,) of mismatched pairs of prompt and completion under the policy (KTO).
        ref_kl_logps: (M,) of the same pairs under the reference policy (KTO).
        chosen_nll: (B,) or scalar negative log-likelihood of the chosen, per token (ORPO).
        formulation: "chapter", "code" or "trl".
        **params: the parameters that the formulation reads: beta, label_smoothing (cDPO),
            gamma_beta_ratio (SimPO's margin over beta), desirable_weight and undesirable_weight
            (KTO).
    """
    row = algorithms.formulation(algorithm, formulation, Preference)
    parameters = row.parameters(params)
    tensors = {
        "policy_chosen_logps": policy_chosen_logps,
        "policy_rejected_logps": policy_rejected_logps,
        "ref_chosen_logps": ref_chosen_logps,
        "ref_rejected_logps": ref_rejected_logps,
        "policy_kl_logps": policy_kl_logps,
        "ref_kl_logps": ref_kl_logps,
        "chosen_nll": chosen_nll,
    }
    tensors = _read_tensors(row.label, look_up(book.preference, row.loss), tensors)
    _check_floating(row.label, tensors, "policy_chosen_logps")
    _check_completions(row, tensors)
    return completions_loss(row, parameters, **tensors)


_REWARD_ROWS = {"bradley_terry": "reward", "kwise": "kwise", "orm": "orm", "prm": "prm"}


def reward_loss(
    kind: str,
    *,
    chosen: Tensor | None = None,
    rejected: Tensor | None = None,
    margin: Tensor | float | None = None,
    rewards: Tensor | None = None,
    logits: Tensor | None = None,
    labels: Tensor | None = None,
    mask: Tensor | None = None,
    class_weights: Tensor | None = None,
    formulation: str = "chapter",
    **params: Any,
) -> Tensor:
    """Compute the loss of a reward model on one batch.

    The result has the precision of the rewards or logits. What stands on positions that do not
    count never matters, not even a NaN.

    Args:
        kind: "bradley_terry", "kwise", "orm" or "prm".
        chosen: (B,) rewards of the preferred completions (bradley_terry).
        rejected: (B,) rewards of the others (bradley_terry).
        margin: (B,) or one number: how much better the preferred is (bradley_terry).
        rewards: (B, K) rewards of the completions of each prompt, the best first (kwise).
        logits: (B, T) of the tokens (orm); (B, S) of the steps (prm, chapter), or (B, S, 3) of the
            classes bad, neutral, good (prm, code).
        labels: 1 for right and 0 for wrong (orm; prm, chapter), or 0, 1, 2 for bad, neutral, good
            (prm, code); shaped like the tokens or steps with -100 where there is nothing to learn,
            or for orm (B,), one for each completion.
        mask: 1 on tokens or steps that count; None: those whose label is not -100.
        class_weights: (3,) weights of the classes (prm, code).
        formulation: "chapter", "code" or "trl".
        **params: center_rewards_coefficient (bradley_terry).
    """
    if kind not in _REWARD_ROWS:
        hint, known = nearest(kind, _REWARD_ROWS), ", ".join(_REWARD_ROWS)
        raise InputError(f"unknown reward model {kind!r}{hint}; known: {known}")
    row = algorithms.formulation(_REWARD_ROWS[kind], formulation, RewardModel)
    parameters = row.parameters(params)
    function = look_up(book.reward_models, row.loss)
    if isinstance(margin, Real):
        margin = torch.tensor(float(margin), dtype=torch.float64)  # so that it loses no digit
    tensors = {"chosen": chosen, "rejected": rejected, "margin": margin, "rewards": rewards}
    tensors |= {"logits": logits, "labels": labels, "class_weights": class_weights, "mask": mask}
    per_token = row.aggregation != "none"  # a model of tokens or steps, not of comparisons
    # no argument of the function is the mask, which the aggregation reads
    tensors = _read_tensors(row.label, function, tensors, {"mask"} if per_token else ())
    # the first one above that is there (chosen, rewards or logits) sets the precision of all
    _check_floating(row.label, tensors, next(iter(tensors)))
    check = _check_tokens if per_token else _check_comparisons
    check(row, tensors)
    return scores_loss(row, parameters, **tensors)


def distillation_loss(
    algorithm: str,
    *,
    mask: Tensor,
    logps: Tensor | None = None,
    teacher_logps: Tensor | None = None,
    logits: Tensor | None = None,
    teacher_logits: Tensor | None = None,
    teacher_weights: Tensor | None = None,
    num_generations: int | None = None,
    normalizer: Tensor | float | None = None,
    formulation: str = "chapter",
    **params: Any,
) -> Tensor:
    """Compute the loss of on-policy distillation on one batch.

    The result has the precision of the student's `logps` or `logits`. What stands on masked
    positions never matters, not even a NaN.

    Args:
        algorithm: "opd" or "sdpo".
        mask: (B, T) 1 on tokens that count, 0 elsewhere.
        logps: (B, T) log-probabilities of the completion tokens under the student (opd, chapter).
        teacher_logps: (B, T) the same under the teacher, or (K, B, T) under K teachers.
        logits: (B, T, V) the student's, which predict the completion tokens (all but opd, chapter).
        teacher_logits: (B, T, V) the same of the teacher, or (K, B, T, V) of K teachers.
        teacher_weights: (K,) or (K, B) weights of the teachers; None: all the same.
        num_generations: completions per prompt, standing next to each other, where each prompt
            counts the same (sdpo, code); None: the batch is one group.
        normalizer: tokens of the whole accumulation window (opd, trl); None: those of this mask.
        formulation: "chapter", "code" or "trl".
        **params: kl_top_k (sdpo).
    """
    row = algorithms.formulation(algorithm, formulation, Distillation)
    parameters = row.parameters(params)
    tensors = {"logps": logps, "logits": logits}
    tensors |= {"teacher_logps": teacher_logps, "teacher_logits": teacher_logits, "mask": mask}
    tensors = _read_tensors(row.label, look_up(book.distillation, row.loss), tensors, {"mask"})
    name = student_name(row)  # "logps" or "logits"
    tensors = promoted(tensors, name)
    _check_distilled(row, name, tensors, num_generations, normalizer)
    mask = tensors["mask"]
    student = tensors[name]
    teachers = tensors[f"teacher_{name}"].reshape(-1, *student.shape)  # (K, ...), also for K = 1
    count = len(teachers)
    weights = torch.ones(count) / count if teacher_weights is None else teacher_weights
    shape = tuple(weights.shape)
    if shape not in ((count,), (count, len(mask))):
        wanted = f"({count},) or ({count}, B)"
        raise InputError(f"{row.label}: teacher_weights must have shape {wanted}, not {shape}")
    counts = {"num_generations": num_generations, "normalizer": normalizer}
    weighted_teachers = zip(teachers, weights.to(student), strict=True)
    return distilled_loss(row, parameters, student, weighted_teachers, mask, **counts)


def _check_distilled(
    row: Distillation,
    name: str,
    tensors: Mapping[str, Tensor],
    num_generations: int | None,
    normalizer: Tensor | float | None,
) -> None:
    """Refuse impossible shapes or values of the student's `name` and of `teacher_{name}`."""
    student, mask = tensors[name], tensors["mask"]
    form = "BT" if name == "logps" else "BTV"
    shapes = {name: form, f"teacher_{name}": f"{form}|K{form}", "mask": "BT"}
    # the student comes first, so that it sets the sizes
    _check_shapes(row.label, {name: student, **tensors}, shapes)
    _check_mask(row.label, mask)
    _check_window(row, normalizer)
    _check_groups(row.label, num_generations, len(mask))
    _check_finite(row.label, name, student, mask.bool())
    for teacher in tensors[f"teacher_{name}"].reshape(-1, *student.shape):
        _check_finite(row.label, f"teacher_{name}", teacher, mask.bool())


def _check_tokens(row: RewardModel, tensors: Mapping[str, Tensor]) -> None:
    """Refuse logits and labels of tokens or steps whose shapes or values are impossible."""
    label = row.label
    logits = tensors["logits"]
    labels = tensors["labels"]
    classes = 3 if row.loss == "process" else 2
    # (B,) labels are of whole completions, and only a mask says which tokens these have
    shapes = {"logits": "BT", "labels": "BT|B" if "mask" in tensors else "BT", "mask": "BT"}
    if classes == 3:
        shapes = {"logits": "BS3", "labels": "BS", "mask": "BS", "class_weights": "3"}
    _check_shapes(label, tensors, shapes)
    if labels.dim() == 1:
        labels = labels.unsqueeze(1).expand(logits.shape)
    mask = tensors.get("mask", torch.ones_like(labels))
    _check_mask(label, mask)
    counted = (mask * (labels != -100)).bool()
    if unknown := sorted(set(labels[counted].unique().tolist()) - {*range(classes)}):
        wanted = ", ".join(map(str, range(classes)))
        raise InputError(f"{label}: labels must be {wanted} or -100, not {unknown[0]:g}")
    _check_finite(label, "logits", logits, counted)
    if "class_weights" in tensors and not (tensors["class_weights"] > 0).all():
        raise InputError(f"{label}: class_weights must be 3 numbers above 0")


def _read_tensors(
    label: str, function: Callable[..., Tensor], tensors: Mapping[str, Any], further: Iterable = ()
) -> dict[str, Tensor]:
    """Return the tensors that are not None; refuse those that nobody reads, and missing ones.

    A function reads what its arguments name; names in `further` are read elsewhere, if at all.
    """
    parameters = inspect.signature(function).parameters
    known = [name for name in tensors if name in parameters or name in further]
    for name, tensor in tensors.items():
        if tensor is not None and name not in known:
            raise InputError(f"{label} does not read {name}; it reads {', '.join(known)}")
        is_needed = name in parameters and parameters[name].default is inspect.Parameter.empty
        if tensor is None and is_needed:
            raise InputError(f"{label} needs {name}")
    read = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    _check_types(label, read)
    return read


def _check_types(label: str, tensors: Mapping[str, Any]) -> None:
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise InputError(f"{label}: {name} must be a torch tensor, not {type(tensor).__name__}")


def _check_shapes(
    label: str, tensors: Mapping[str, Tensor], shapes: Mapping[str, str], empty: str = ""
) -> None:
    """Refuse tensors of other shapes than their letters say: "BT", or "B|" where a scalar will do.

    A letter has one size for all of them, above 0 unless it stands in `empty`.
    """
    sizes = {"3": 3}  # by letter; the first tensor that has a letter sets its size
    first = next(iter(tensors))
    for name, tensor in tensors.items():
        forms, shape = shapes[name].split("|"), tuple(tensor.shape)
        fitting = [form for form in forms if _has_form(shape, form, sizes, empty)]
        if not fitting:
            wanted = " or ".join(_written(form, sizes) for form in forms)
            beside = "" if name == first else f" to go with {first}"
            raise InputError(f"{label}: {name} must have shape {wanted}{beside}, not {shape}")
        sizes.update(zip(fitting[0], shape, strict=True))


def _has_form(shape: Sequence[int], form: str, sizes: Mapping[str, int], empty: str) -> bool:
    """Tell whether a shape has the letters of a form, whose `sizes` are known or free."""
    return len(shape) == len(form) and all(
        sizes.get(letter, size) == size and (size > 0 or letter in empty)
        for letter, size in zip(form, shape, strict=True)
    )


def _written(form: str, sizes: Mapping[str, int]) -> str:
    """Return "BT" as "(8, T)" where the size of B is known to be 8."""
    parts = [str(sizes.get(letter, letter)) for letter in form]
    return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"


def _check_mask(label: str, mask: Tensor) -> None:
    if not ((mask == 0) | (mask == 1)).all():
        raise InputError(f"{label}: mask must hold only 0 and 1")


def _check_floating(label: str, tensors: Mapping[str, Tensor], first: str) -> None:
    """Refuse a tensor of whole numbers whose precision all others would get."""
    if not tensors[first].is_floating_point():
        kind = tensors[first].dtype
        raise InputError(f"{label}: {first} must hold floating-point numbers, not {kind}")


def _check_finite(label: str, name: str, tensor: Tensor, counted: Tensor | None = None) -> None:
    """Refuse what is not finite, anywhere or where it is counted."""
    if counted is not None and not tensor[counted].isfinite().all():
        raise InputError(f"{label}: {name} must be finite on the positions that count")
    broken = (~tensor.isfinite()).reshape(-1).nonzero().flatten().tolist()
    if counted is None and broken:
        raise InputError(f"{label}: {name} must be finite, but at positions {broken} it is not")


def _check_completions(row: Preference, tensors: Mapping[str, Tensor]) -> None:
    """Refuse log-probabilities of completions whose shapes or values are impossible."""
    unpaired = "policy_kl_logps" in tensors
    rejected = "R" if unpaired else "B"  # KTO's may be more or fewer than the chosen, or none
    shapes = dict.fromkeys(tensors, "B")
    shapes |= {"policy_rejected_logps": rejected, "ref_rejected_logps": rejected}
    shapes |= {"policy_kl_logps": "M", "ref_kl_logps": "M", "chosen_nll": "B|"}
    _check_shapes(row.label, tensors, shapes, empty="BR" if unpaired else "")
    for name, tensor in tensors.items():
        _check_finite(row.label, name, tensor)
        # ORPO's row of the code has a constant, `max_logp`, that keeps them below 0
        has_odds = row.loss == "orpo" and not row.constants and name != "chosen_nll"
        if has_odds and (tensor >= 0).any():
            why = "a probability of 1 has infinite odds"
            raise InputError(f"{row.label}: {name} must be below 0: {why}")
    if not any(tensors[f"policy_{side}_logps"].numel() for side in ("chosen", "rejected")):
        raise InputError(f"{row.label}: there is neither a chosen nor a rejected completion")


def _check_comparisons(row: RewardModel, tensors: Mapping[str, Tensor]) -> None:
    shapes = dict.fromkeys(tensors, "B") | {"margin": "B|", "rewards": "BK"}
    _check_shapes(row.label, tensors, shapes)
    for name, tensor in tensors.items():
        _check_finite(row.label, name, tensor)
    if "rewards" in tensors and tensors["rewards"].shape[1] < 2:
        raise InputError(f"{row.label}: rewards must have shape (B, K) with K of 2 or more")


def _check_reads(
    row: PolicyGradient, params: Mapping[str, Any], tensors: set[str], has_beta: bool
) -> None:
    """Refuse optional `tensors`, by name, that the row does not read; ask for those it needs.

    With `has_beta`, the caller gives beta, and so may give what a KL reads, even if beta is 0.
    """
    reads: set[str] = set()  # what the row can use, by name
    needs: dict[str, str] = {}  # what it cannot do without, and what for
    # a KL in the reward is that of the policy of the rollout
    if row.ratio != "none" or (row.kl == "reward" and has_beta):
        reads.add("old_logps")
    if row.kl != "none" and has_beta:
        reads.add("ref_logps")
    aggregate = look_up(book.aggregation, row.aggregation)
    if "prompt_tokens" in inspect.signature(aggregate).parameters:
        reads.add("prompt_tokens")
    if row.kl != "none" and params["beta"] > 0:
        needs["ref_logps"] = f"beta={params['beta']}"
    if row.value_loss != "none":
        needs |= {"values": "its critic", "old_values": "its critic (on-policy: values.detach())"}
    if "binary_rewards" in inspect.signature(look_up(book.advantages, row.advantage)).parameters:
        needs["binary_rewards"] = "its advantages"
    for name in sorted(tensors - reads - needs.keys()):
        hint = ""
        if name == "ref_logps" and row.kl != "none":
            hint = " unless beta is given"
        if name == "old_logps" and "importance_cap" in params:
            hint = " unless importance_cap is given"
        known = ", ".join(sorted(reads | needs.keys())) or "none of the optional tensors"
        raise InputError(f"{row.label} does not read {name}{hint}; it reads {known}")
    for name, purpose in needs.items():
        if name not in tensors:
            raise InputError(f"{row.label} needs {name} for {purpose}")


def _check_window(row: PolicyGradient | Distillation, normalizer: Tensor | float | None) -> None:
    """Refuse a normalizer that is not a positive number, or that the row does not divide by."""
    if normalizer is None:
        return
    if row.window != "window":
        why = "it is normalized over the micro-batch"
        raise InputError(f"{row.label} does not read normalizer: {why}")
    scalar = isinstance(normalizer, Tensor) and normalizer.dim() == 0
    if not (scalar or isinstance(normalizer, Real)) or not normalizer > 0:
        raise InputError(f"{row.label}: normalizer must be a number above 0, not {normalizer!r}")


def _check_groups(label: str, num_generations: int | None, batch: int) -> None:
    if num_generations is None:
        return
    if not isinstance(num_generations, int) or num_generations < 1 or batch % num_generations:
        raise InputError(
            f"{label}: num_generations must divide the batch of {batch}, not {num_generations!r}"
        )


def _prepared(label: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Check types, shapes and the mask; bring all to one precision; cut old tensors' gradients."""
    _check_types(label, tensors)
    _check_floating(label, tensors, "logps")
    of_completions = dict.fromkeys(("rewards", "binary_rewards", "prompt_tokens"), "B")
    _check_shapes(label, tensors, dict.fromkeys(tensors, "BT") | of_completions)
    mask = tensors["mask"]
    _check_mask(label, mask)
    for name, tensor in tensors.items():
        if name not in of_completions:
            _check_finite(label, name, tensor, mask.bool())
    _check_finite(label, "rewards", tensors["rewards"])
    if not (tensors.get("prompt_tokens", mask.sum(1)) >= mask.sum(1)).all():
        raise InputError(f"{label}: prompt_tokens must hold at least the tokens of each completion")
    return promoted(tensors, "logps", learned=("logps", "values"))
