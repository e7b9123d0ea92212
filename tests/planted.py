"""Faults planted in the libraries, which recorded runs or losses have to show."""

import inspect
import json
import re
import sys
import textwrap
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

from rlhf_trl.compare.drift import surface

T, DPO = "transformers.trainer", "trl.trainer.dpo_trainer"
KWARGS = '**example.get("chat_template_kwargs", {})'

# a name: the trainer whose run shows it, module, function, old, new
ON_ONE = {
    "label smoothing under accumulation": (
        "SFTTrainer",
        "trl.trainer.sft_trainer",
        "SFTTrainer.compute_loss",
        'inputs["labels"], shift_labels=True, **kwargs)',
        'inputs["labels"], shift_labels=True)',
    ),
    "loss weights": (
        "DPOTrainer",
        DPO,
        "DPOTrainer._compute_loss",
        "zip(self.loss_types, self.loss_weights, strict=True)",
        "((name, 1.0) for name in self.loss_types)",
    ),
    "entropy quantile": (
        "GRPOTrainer",
        "trl.trainer.grpo_trainer",
        "GRPOTrainer.get_high_entropy_mask",
        "torch.quantile(gathered, threshold)",
        "torch.quantile(gathered, 1 - threshold)",
    ),
    "kwargs of SFT's template": (
        "SFTTrainer",
        "trl.trainer.sft_trainer",
        "SFTTrainer._prepare_dataset",
        KWARGS,
        "**{}",
    ),
    "kwargs of DPO's template": ("DPOTrainer", DPO, "DPOTrainer._prepare_dataset", KWARGS, "**{}"),
    "kwargs of KTO's template": (
        "KTOTrainer",
        "trl.trainer.kto_trainer",
        "KTOTrainer._prepare_dataset",
        KWARGS,
        "**{}",
    ),
    "warm-up": (
        "DPOTrainer",
        "transformers.optimization",
        "_get_linear_schedule_with_warmup_lr_lambda",
        "float(max(1, num_warmup_steps))",
        "float(max(1, num_warmup_steps + 1))",
    ),
    "decay groups": ("DPOTrainer", T, "Trainer.get_decay_parameter_names", r'r"_norm(?:$|\.)"', ""),
    "epoch seed": (
        "DPOTrainer",
        "accelerate.data_loader",
        "SeedableRandomSampler.__iter__",
        "seed = self.epoch + self.initial_seed",
        "seed = self.initial_seed",
    ),
    "evaluation mean": (
        "DPOTrainer",
        T,
        "Trainer.evaluation_loop",
        "losses.mean().item()",
        "losses.max().item()",
    ),
    "resumed schedule": (
        "DPOTrainer",
        T,
        "Trainer._load_optimizer_and_scheduler",
        "if self.is_deepspeed_enabled:",  # where DeepSpeed loads the schedule, and nothing here
        "self.lr_scheduler.load_state_dict = str\n    if self.is_deepspeed_enabled:",
    ),
    "logged learning rate": (
        "DPOTrainer",
        T,
        "Trainer._get_learning_rate",
        "return last_lr",
        "return last_lr / 2",
    ),
    "accuracy of ties": (
        "DPOTrainer",
        DPO,
        "DPOTrainer._compute_loss",
        "(chosen_rewards > rejected_rewards)",
        "(chosen_rewards >= rejected_rewards)",
    ),
    "clip metrics": (
        "GRPOTrainer",
        "trl.trainer.grpo_trainer",
        "GRPOTrainer._compute_loss",
        "(coef_1 < 1 - self.epsilon_low) & (advantages < 0)",
        "(coef_1 < 1 - self.epsilon_low)",
    ),
    "NaN batches": (
        "DPOTrainer",
        T,
        "Trainer._run_epoch",
        "torch.isnan(tr_loss_step) or torch.isinf(tr_loss_step)",
        "False",
    ),
}
ON_TWO = {
    "gather with a remainder": (
        "DPOTrainer",
        "accelerate.accelerator",
        "Accelerator.gather_for_metrics",
        "return tensor[: self.gradient_state.remainder]",
        "return tensor",
    ),
    "KTO's KL clamped before it is gathered": (
        "KTOTrainer",
        "trl.trainer.kto_trainer",
        "KTOTrainer._compute_loss",
        "self.accelerator.gather_for_metrics(kl).mean().clamp(min=0)",
        "self.accelerator.gather_for_metrics(kl.clamp(min=0)).mean()",
    ),
}
COPY = "ref_param.data.copy_(param.data)"
ON_LOSSES = {
    f"{name}'s continued adapter": (
        f"{name}Trainer",
        f"trl.trainer.{name.lower()}_trainer",
        f"{name}Trainer.__init__",
        COPY,
        "pass",
    )
    for name in ("DPO", "KTO", "GRPO", "RLOO")
} | {
    "Granite's logits_scaling": (
        "DistillationTrainer",
        "trl.trainer.distillation_trainer",
        "DistillationTrainer._compute_loss",
        "else 1 / logits_scaling",
        "else logits_scaling",
    ),
    "what a tool said": (
        "GRPOTrainer",
        "trl.trainer.grpo_trainer",
        "GRPOTrainer._tool_call_loop",
        "+= [0] * tool_length",
        "+= [1] * tool_length",
    ),
    "kwargs of the reward model's template": (
        "RewardTrainer",
        "trl.trainer.reward_trainer",
        "RewardTrainer._prepare_dataset",
        KWARGS,
        "**{}",
    ),
}


def written_down(name):
    """The faults of a fixture: by name trainer, module, function, old, new."""
    faults = json.loads((Path(__file__).parent / "fixtures" / name).read_text())
    keys = ("trainer", "module", "function", "old", "new")
    return {fault["name"]: tuple(fault[key] for key in keys) for fault in faults}


READER = written_down("planted_by_a_reader.json")
SECOND_READER = written_down("planted_by_a_second_reader.json")
"""Faults that people wrote down who had read TRL and transformers, and not what is recorded."""


@contextmanager
def planted(module_name, function_name, old, new):
    """Replace a function by its own source with one change."""
    module = import_module(module_name)
    owner_name, _, name = function_name.rpartition(".")
    owner = getattr(module, owner_name) if owner_name else module
    original = vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(original))
    assert old in source, f"{old!r} is not in {function_name}"
    source = source.replace(old, new, 1)
    source = re.sub(r"super\(\)", f"super({owner_name}, self)", source)
    made = {}
    exec(compile(source, f"<planted {name}>", "exec"), vars(module), made)
    with ExitStack() as stack:
        stack.enter_context(patch.object(owner, name, made[name]))
        for other in list(sys.modules.values()):  # which import a function by its name
            if owner is module and vars(other).get(name) is original:
                stack.enter_context(patch.object(other, name, made[name]))
        yield


if __name__ == "__main__":  # one of two processes
    fault = ON_TWO.get(sys.argv[2])
    if fault is None:
        surface.main(Path(sys.argv[1]))
    else:
        with planted(*fault[1:]):
            surface.main(Path(sys.argv[1]))
