"""What `check-launch` trains on: a small model, fixed examples, and the config of a cell.

Every process makes the same in a folder of its own, and so does the reference.
"""

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from random import Random
from typing import Any

import torch

from rlhf_trl.algorithms import LOSS_FIELDS
from rlhf_trl.compare.measure import sentence
from rlhf_trl.compare.windows.batches import GROUP, LIMIT, WEIGHTS
from rlhf_trl.models import EMBEDDED, UNTRAINED
from rlhf_trl.run.stages import STAGES
from rlhf_trl.run.yaml_loader import dump_yaml
from rlhf_trl.tiny.model import PAD, build_model
from rlhf_trl.tiny.tokenizer import build_tokenizer

EXAMPLES, STEPS = 32, 3
"""Of an optimizer step at least; optimizer steps of SGD."""

KEPT_BESIDE_THE_LOSS = """
algorithm formulation expect seed use_cpu bf16 fp16 tf32 dtype gradient_accumulation_steps
steps_per_generation num_iterations max_grad_norm optim optim_args learning_rate adam_beta1
adam_beta2 adam_epsilon weight_decay value_model value_learning_rate activation_checkpointing
activation_checkpointing_kwargs average_tokens_across_devices cast_lm_head_to_fp32 temperature
router_aux_loss_coef use_peft lora_r lora_alpha lora_target_modules use_rslora
lora_target_parameters completion_only_loss assistant_only_loss mask_truncated_completions
"""
KEPT = LOSS_FIELDS | {*KEPT_BESIDE_THE_LOSS.split()}
"""The keys of a config that stay; the others are about data, rewards, models and reports."""

LOCAL = {
    *(("dapo", "code"), ("kto",), ("orpo", "trl"), ("orm", "code"), ("prm", "code")),
    ("loss_type", "bnpo"),
}
"""Rows with a mean, or a reference point, of the micro-batch of a process; see launchers.md."""

SIZES = """
hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim intermediate_size
max_position_embeddings vocab_size pad_token_id bos_token_id eos_token_id
"""
"""The fields of the embedded model's config that every small model takes."""

OF_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 4,  # all: which experts are best would depend on rounding
    "moe_intermediate_size": 96,
}


def small_model(given: Mapping[str, Any], folder: Path) -> str:
    """Save a small model of a config's architecture, and a tokenizer; return a line about it.

    Where no model of the embedded sizes can be built, it is the embedded one.
    """
    named = given.get("model_name_or_path", EMBEDDED)
    model, note = build_model(), "the embedded model, with random weights"
    if named not in (EMBEDDED, UNTRAINED):
        try:
            model = _of_architecture(str(named), model.config, given)
            note = f"a {model.config.model_type} of {model.num_parameters():,} weights for {named}"
        except Exception as error:  # whatever an architecture refuses
            note = f"{note}: {named} cannot be read or built so small ({sentence(error)})"
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1.5  # probabilities further from uniform
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)
    return note


def _of_architecture(named: str, embedded: Any, given: Mapping[str, Any]) -> Any:
    """Return an untrained model of a named one's architecture, of the sizes of a config."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    trust = given.get("trust_remote_code", False)
    original = AutoConfig.from_pretrained(named, trust_remote_code=trust).get_text_config()
    sizes = {name: getattr(embedded, name) for name in SIZES.split()}
    sizes |= {name: size for name, size in OF_EXPERTS.items() if hasattr(original, name)}
    sizes["tie_word_embeddings"] = original.tie_word_embeddings
    config = type(original)(**sizes)
    for name in vars(config):
        if "drop" in name and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)  # which is drawn, by each process for itself
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # not by an auto class, which shares the weights out where ZeRO-3 is on
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).float().eval()
    logits = []
    for padding in (0, 2):
        ids, mask = [PAD] * padding + [7, 8, 9], [0] * padding + [1, 1, 1]
        tensors = {"input_ids": torch.tensor([ids]), "attention_mask": torch.tensor([mask])}
        with torch.no_grad():
            logits.append(model(**tensors).logits[0, -1])
    if not torch.allclose(*logits, atol=1e-4):
        raise ValueError("its positions count padding, so what shares a micro-batch matters")
    return model


def write_examples(path: Path, stage: str, algorithm: str, count: int, seed: int) -> None:
    """Write random letters of many lengths: prompts, and answers where the stage learns from them.

    A letter is a token.
    """
    rng = Random(seed)

    def text() -> str:
        return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randint(1, LIMIT)))

    with path.open("w") as file:
        for number in range(count):
            row: dict[str, Any] = {"prompt": f"{text()}{text()}{text()}"}  # each is another
            if stage in ("sft", "kto", "orm"):
                row["completion"] = text()
            if stage in ("kto", "orm"):
                row["label"] = number % 2 == 0
            if stage == "prm":
                row["completions"] = [text(), text(), text()]
                row["labels"] = [True, number % 2 == 0, False]
            if algorithm == "kwise":
                row["ranked"] = [text() for _ in range(GROUP)]
            elif stage in ("dpo", "orpo", "reward"):
                row["chosen"] = text()
                row["rejected"] = text()
            file.write(dumps(row) + "\n")


@dataclass(frozen=True)
class Subject:
    """A config whose launch is checked."""

    row: tuple[str, str]  # algorithm and formulation; both "" where there is none
    given: Mapping[str, Any]  # what files and command line say
    stage: str  # the name of its recipe
    reads: frozenset[str]  # what its trainer reads beside the loss
    launched: int  # processes
    precision: str  # what the launch computes in: no, bf16 or fp16
    clips_at: float  # norm of a gradient; 0: none is clipped

    @property
    def accumulation(self) -> int:
        """Micro-batches of each process in an optimizer step."""
        return self.given.get("gradient_accumulation_steps", 1)

    @property
    def per_generation(self) -> int:
        """Micro-batches of each process that one generation feeds."""
        return self.given.get("steps_per_generation") or self.accumulation

    @property
    def depends_on(self) -> str:
        """Why the update depends on how examples are shared out, in any launch; "": it does not."""
        if STAGES[self.stage].prompted and self.accumulation % self.per_generation != 0:
            return "TRL's shuffle, local to a process, decides what shares an optimizer step"
        loss_type = "loss_type", self.given.get("loss_type")
        local = LOCAL & {self.row, self.row[:1], loss_type}
        if local:
            return f"the loss of {' '.join(min(local))} depends on what shares a micro-batch"
        return ""

    @property
    def reference_processes(self) -> int:
        """On how many processes the reference trains: one, or as many as the launch."""
        return self.launched if self.depends_on else 1

    def write(self, folder: Path, model: str, processes: int, seed: int) -> Path:
        """Write the config of a training and its examples; return the config's path.

        Args:
            folder: where to write.
            model: the folder of the model.
            processes: how many train; one alone has micro-batches as large as those of all.
            seed: of the examples and of the run.
        """
        stage = STAGES[self.stage]
        share = EXAMPLES // (self.launched * self.accumulation)
        batch_size = max(GROUP, share // GROUP * GROUP)  # whole groups, of each process launched
        of_all = batch_size * self.launched
        examples = folder / "examples.jsonl"
        count = of_all * max(STEPS * self.accumulation, self.per_generation)
        write_examples(examples, stage.name, self.row[0], count, seed)
        values = {key: copy(value) for key, value in self.given.items() if key in KEPT}
        values |= {
            "model_name_or_path": model,
            "output_dir": str(folder / "run"),
            "dataset": {"source": "path", "path": str(examples)},
            "per_device_train_batch_size": of_all // processes,
            "max_steps": STEPS,
            "lr_scheduler_type": "constant",
            "warmup_steps": 0,
            "eval_strategy": "no",
            "eval_on_start": False,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
            "logging_steps": 1,
            "rollouts": "off",
            "seed": self.given.get("seed", 42) + seed,
        }
        if processes != self.launched:
            values.pop("expect", None)
        if stage.prompted:
            values["max_completion_length"] = LIMIT
            values["num_generations"] = 1 if self.given.get("num_generations") == 1 else GROUP
            values["reward_funcs"] = [
                f"rlhf_trl.compare.windows.completions.{name}" for name in REWARDS
            ]
        if stage.prompted and stage.name != "distill":
            values["reward_weights"] = list(WEIGHTS)
        # no new ones are drawn where completions are fixed; the penalty is for longer ones
        fixed = {"dynamic_sampling_rounds": 0, "soft_punish_cache": LIMIT // 3}
        fixed |= dict(zip(("correctness_reward", "format_reward"), REWARDS, strict=True))
        values |= {key: value for key, value in fixed.items() if key in self.reads}
        if "teacher_models" in self.given:  # other ones than the model, which is untrained
            values["teacher_models"] = [EMBEDDED] * len(self.given["teacher_models"])
        if self.given.get("use_peft"):
            values["lora_dropout"] = 0.0  # which is drawn, by each process for itself
        path = folder / f"on-{processes}.yaml"
        path.write_text(dump_yaml(values), encoding="utf-8")
        return path


REWARDS = ("right", "has_format")
"""Functions of `windows.completions`, whose WEIGHTS stand in `windows.batches`."""
