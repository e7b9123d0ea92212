"""What TRL's stock losses give on fixed batches of the embedded model, in float32 on the CPU.

Weights, texts and completions come from the shipped checkpoint and from formulas, not from the
windows that `compare` draws: numbers recorded with one release are held against another's.
"""

import json
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlhf_trl.compare.measure import accumulate, batches, fix_completions
from rlhf_trl.compare.models import make_trainer, rows_for, trainer_fields
from rlhf_trl.tiny import checkpoint_path

# Rounding in float32 moves these sums over some hundred tokens by less than 1e-5 (measured: 9.4e-6)
# between AVX-512, AVX2 and plain kernels on one thread and two; a changed term moves them by more.
TOLERANCE = 1e-4
"""The relative difference of a loss or a gradient norm that is rounding."""

ONLINE = {
    "beta": 0.0,
    "epsilon_high": 0.2,
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "use_bias_correction_kl": False,
}
"""What a case of GRPO or RLOO leaves unsaid."""

_BUILT_WITH = {
    # two windows to a generation: the second is off-policy, where the losses differ
    "GRPO": {"steps_per_generation": 2, "num_generations": 4, "beta": 0.1},
    "RLOO": {"steps_per_generation": 2, "num_generations": 4, "beta": 0.1},
    "DPO": {"label_smoothing": 0.1},  # for the losses that need it
    "CPO": {"loss_type": "simpo"},
}
_WORDS = ["sun", "tree", "river", "stone", "cloud", "lights", "greenery", "be"]


def settings(case: str) -> dict[str, Any]:
    """Return a case as attributes and values."""
    return {name: _value(text) for name, text in (pair.split("=") for pair in case.split())}


def losses(
    family: str, trainer: type, config: type, defaults: Mapping[str, Any], cases: Sequence[str]
) -> list[list[float] | str]:
    """Compute a stock trainer's loss under several settings.

    Args:
        family: "GRPO", "RLOO", "DPO", "KTO", "Reward", "SFT", "ORPO" or "CPO".
        trainer: the trainer's class.
        config: its config's class.
        defaults: values of config fields, unless this harness needs another.
        cases: settings such as `"loss_type=grpo beta=0.1"`, of the trainer or its arguments, set
            before the loss is computed. All but `ONLINE` hold in the next case, too. `move` is how
            far and which way the policy moves (0.01).

    Returns:
        For each case: loss and gradient norm, or the sentence of the error with which it ended.
    """
    found: list[list[float] | str] = []
    with TemporaryDirectory() as folder:
        try:
            ours = {**trainer_fields(), "output_dir": folder, "per_device_train_batch_size": 8}
            given = {**defaults, **ours, **_BUILT_WITH.get(family, {})}
            ready = _build(family, trainer, config, given)
        except Exception as error:  # whatever another release breaks is what is reported
            return [sentence(error)] * len(cases)
        start = [p.detach().clone() for p in ready.model.parameters()]
        for case in cases:
            try:
                found.append(_measure(ready, start, settings(case)))
            except Exception as error:
                found.append(sentence(error))
    return found


def sentence(error: Exception) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _build(family: str, trainer: type, config: type, given: dict[str, Any]) -> Any:
    from transformers import AutoModelForSequenceClassification

    model: Any = checkpoint_path()
    if family in ("GRPO", "RLOO"):
        prompts = [{"prompt": word} for word in _WORDS[:4]]
        online = make_trainer(trainer, config, given, prompts, model=model, reward_funcs=_reward)
        fix_completions(online, _completion)
        return online
    if family == "Reward":
        model = AutoModelForSequenceClassification.from_pretrained(model, num_labels=1)
        torch.nn.init.zeros_(model.score.weight)  # a new head is drawn at random
    rows: list[dict[str, Any]] = [
        {"prompt": w, "chosen": w[::-1], "rejected": w + w[:2]} for w in _WORDS
    ]
    rows = rows_for(f"{family}Trainer", rows, [n % 2 == 1 for n in range(len(rows))])
    return make_trainer(trainer, config, given, rows, model=model)


def _completion(prompt_ids: tuple[int, ...], index: int, call: int) -> list[int]:
    """Ragged and unlike each other, without a random generator."""
    key = sum(prompt_ids) + 5 * index
    return [7 + (key * (place + 3)) % 105 for place in range(1 + key % 11)]


def _reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def _measure(trainer: Any, start: list[torch.Tensor], case: dict[str, Any]) -> list[float]:
    online, move = hasattr(trainer, "_buffered_inputs"), case.pop("move", 0.01)
    for name, value in {**(ONLINE if online else {}), **case}.items():
        if name == "loss_type" and hasattr(trainer, "loss_types"):  # DPO sums over several
            name, value = "loss_types", [value]
        owners = [owner for owner in (trainer, trainer.args) if hasattr(owner, name)]
        if not owners and name not in ONLINE:
            raise AttributeError(f"{type(trainer).__name__} has no {name}")
        for owner in owners:
            setattr(owner, name, value)
    for parameter, value in zip(trainer.model.parameters(), start, strict=True):
        parameter.data.copy_(value)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the shuffle of a generation batch
        source = batches(trainer)
        _move(trainer.model, move, torch.sin)  # away from the reference policy
        if online:
            trainer._step, trainer._buffered_inputs = 0, None
            accumulate(trainer, source)
            _move(trainer.model, move, torch.cos)  # away from the policy that generated
        measured, _ = accumulate(trainer, source)
    return [float(f"{x:.7g}") for x in (measured.loss, float(measured.gradient.norm()))]


def _move(model: Any, size: float, wave: Any) -> None:
    """Move all weights by a fixed pattern, which no random generator decides."""
    for parameter in model.parameters():
        steps = torch.arange(parameter.numel(), dtype=torch.float64)
        parameter.data += size * wave(steps).view_as(parameter).float()
