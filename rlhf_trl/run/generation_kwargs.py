"""What a config may not hand to `generate` beside its own fields."""

from typing import Any

from transformers import GenerationConfig

from rlhf_trl.errors import InputError, instead, nearest
from rlhf_trl.run.config import RULES

DECIDED = {  # what of `generation_kwargs` is decided elsewhere
    "max_new_tokens": "max_completion_length",
    "max_length": "max_completion_length",
    "num_return_sequences": "num_generations",
    "do_sample": "temperature",
}


def check_generation_kwargs(loaded: Any) -> None:
    """Refuse options of `generate` that do not exist, are out of range or contradict a field."""
    known = vars(GenerationConfig())
    for key, value in loaded.trl.generation_kwargs.items():
        name = f"generation_kwargs.{key}"
        if key in DECIDED:
            raise InputError(f"{name} is what {DECIDED[key]} decides; remove it.")
        number = isinstance(value, int | float)
        if number and (wanted := instead(value, RULES.get(key, {}))):
            raise InputError(f"{name} is {value}; write {wanted}.")
        # two temperatures are no contradiction: this one is for sampling alone, and TRL divides
        # the logits of log-probabilities by the field's
        if key != "temperature" and loaded.given.get(key, value) != value:
            raise InputError(f"{name} is {value}, and {key} {loaded.given[key]}; remove one.")
        if key not in known and not loaded.trl.use_vllm:  # vLLM has options of its own
            raise InputError(f"{name} is no option of generate{nearest(key, known)}; remove it.")
