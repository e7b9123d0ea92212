"""On-policy distillation on TRL's GRPOTrainer: teachers read what the student writes."""

import inspect
import itertools
import operator
import random
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from accelerate.utils import gather_object, is_peft_model
from torch import Tensor
from transformers import TrainerCallback
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from trl import GRPOTrainer
from trl.models import prepare_deepspeed, prepare_fsdp
from trl.trainer.utils import pad
from typing_extensions import override

from rlhf_trl.algorithms import Distillation, Resolved, of_the_row
from rlhf_trl.data.answers import completion_text
from rlhf_trl.errors import InputError
from rlhf_trl.losses.distillation import distilled_loss
from rlhf_trl.models import EMBEDDED, loading
from rlhf_trl.policies import load_language_model
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.trainers.on_trl import Batch, with_signature_of
from rlhf_trl.trainers.policy_gradient import BookGRPOConfig, BookGRPOTrainer, loss_mask
from rlhf_trl.value_models import check_vocabulary

MOVED = "teacher.pt"  # in checkpoints, where the teacher follows the student
HINT = "{demonstration}"
FIELD = "teacher_models"


@dataclass
class BookDistillationConfig(BookGRPOConfig):
    """BookGRPOConfig with what distillation adds; None is the row's own.

    `teacher_models` and their weights are OPD's, the other fields SDPO's. The version "ema" follows
    the student at `teacher_rate` per optimizer step; "live" is the student as it is.
    """

    kind = Distillation
    default_row: ClassVar[str] = "opd"

    kl_top_k: int | None = of_the_row("kl_top_k")
    teacher_models: list[str] | None = of_the_row("teacher_models")  # noqa: RUF009
    teacher_weights: list[float] | None = of_the_row("teacher_weights")  # noqa: RUF009
    teacher: str | None = of_the_row("teacher")
    teacher_rate: float | None = of_the_row("teacher_rate")
    demonstration: str | None = of_the_row("demonstration")
    demonstration_template: str | None = of_the_row("demonstration_template")

    def checked(self, resolved: Resolved) -> Resolved:
        """Return what was resolved, or refuse what could not be computed."""
        if "teacher" not in resolved.row.trainer_reads:  # OPD, whose teachers are other models
            weights, models = self.teacher_weights, self.teacher_models
            good = weights is None or (min(weights) >= 0 and abs(sum(weights) - 1) < 1e-6)
            if not models or not good or len(weights or models) != len(models):
                raise InputError(
                    f"teacher_weights is {weights} for {len(models)} teacher_models; write a "
                    "weight for each of at least one, none below 0, that add up to 1."
                )
            return resolved
        template = self.demonstration_template
        if HINT not in template:
            raise InputError(f"demonstration_template is {template!r}; write {HINT} in it.")
        return resolved


class BookDistillationTrainer(BookGRPOTrainer):
    """BookGRPOTrainer whose signal is a teacher's, at every token that the student wrote.

    Rewards are logged, and say which completions are right. Logged beside TRL's metrics:
    `teacher/kl`, the mean over the tokens of log pi - log pi_T where the row reads sampled tokens;
    `teacher/demonstrated`, the share of completions with a demonstration (others train nothing);
    and `teacher/own_demonstration`, the share whose demonstration is their own text.

    The formulation "trl" is computed here, too.
    """

    config_class = BookDistillationConfig

    @with_signature_of(GRPOTrainer.__init__)
    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self._row: Distillation
        self._own = "teacher" in self._row.trainer_reads  # the student's own versions teach
        self._reads_logits = self._row.loss == "reverse_kl"
        self._scoring = False  # whether the forward that runs is that of the loss
        self._logits: Tensor | None = None  # (B, T, V) that this forward gave, until it is used
        if self._reads_logits and self.aux_loss_enabled:
            raise InputError(
                f"{self._row.label} needs logits, of which TRL gives no auxiliary loss for a "
                "mixture of experts; set router_aux_loss_coef: 0."
            )
        if self._own:
            self._teachers = [self._version()]
        else:
            self._teachers = [self._ready(self._loaded(name)) for name in self.args.teacher_models]
        count = len(self._teachers)
        self._weights = self.args.teacher_weights or [1 / count] * count

    # Extends OnTRL's: GRPOTrainer has no such loss.
    def _take(self, args: Any, model: Any) -> Any:
        args = super()._take(args, model)
        self._stock = False
        return args

    def _version(self) -> Any:
        """Return the version of the student that teaches; None: the student as it is."""
        version = self.args.teacher
        if version == "live":
            return None
        if is_deepspeed_zero3_enabled() or (version == "ema" and self.is_fsdp_enabled):
            raise InputError(
                f"teacher: {version} needs a whole copy of the student, which is shared out here; "
                "write teacher: live, or launch without FSDP or ZeRO-3."
            )
        teacher = deepcopy(self.model)
        bare = teacher.get_base_model() if is_peft_model(teacher) else teacher
        bare.__dict__.pop("forward", None)  # TRL's fused one, which calls the student's
        if version == "ema":
            self.add_callback(_Follow(self))
        return self._ready(teacher)

    def _loaded(self, name: str) -> Any:
        """Load a teacher that can read the student's tokens."""
        source = checkpoint_path() if name == EMBEDDED else name
        remote = {"trust_remote_code": self.args.trust_remote_code}
        fault = "is neither a language model's folder here nor a hub model that can be reached"
        with loading(f"{FIELD}: {name!r}", "name another", fault):
            teacher = load_language_model(source, dtype=self.model.dtype, **remote)
        size = teacher.config.get_text_config().vocab_size
        check_vocabulary(FIELD, source, size, self.model, self.processing_class, remote)
        return teacher

    def _ready(self, teacher: Any) -> Any:
        """Freeze a teacher, and place it as TRL places its reference model."""
        teacher.eval().requires_grad_(False)
        if self.is_deepspeed_enabled:
            return prepare_deepspeed(teacher, self.accelerator)
        if self.is_fsdp_enabled:
            return prepare_fsdp(teacher, self.accelerator)
        return self.accelerator.prepare_model(teacher, evaluation_mode=True)

    # Extends BookGRPOTrainer's: keeps what is read, for the demonstrations.
    @override
    def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
        self._read = prompts, completions
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    # Extends DynamicSampling's: replaced are prompts without a right completion.
    def _without_contrast(self, rewards: Tensor) -> list[int]:
        right = rewards[:, self._correctness].view(-1, self.num_generations) == 1
        return (~right.any(1)).nonzero().flatten().tolist()

    def _advantages(self, output: Batch, rewards: Tensor, training: bool) -> Tensor:
        """Return none: the loss reads the teachers."""
        return torch.zeros_like(rewards[self._mine(output)])

    # Extends BookGRPOTrainer's: adds what the teacher reads in the place of the prompt.
    def _generation(self, inputs: list[dict[str, Any]]) -> Batch:
        output = super()._generation(inputs)
        if not self._own:
            return output
        prompts, completions = self._read
        hints = self._hints(completions)[self._mine(output)]
        texts = [self._hinted(*pair) for pair in zip(prompts, hints, strict=True)]
        ids = [torch.tensor(prompt_ids) for prompt_ids in self._tokenize_prompts(texts)[0]]
        masks = [torch.ones_like(prompt_ids) for prompt_ids in ids]
        ids = pad(ids, padding_value=self._tokenizer.pad_token_id, padding_side="left")
        masks = pad(masks, padding_value=0, padding_side="left")
        output["teacher_prompt_ids"] = ids.to(self.args.device)
        output["teacher_prompt_mask"] = masks.to(self.args.device)
        has_hint = [hint is not None for hint in hints]
        return output | {"demonstrated": torch.tensor(has_hint, device=self.args.device)}

    def _hints(self, completions: list[Any]) -> list[str | None]:
        """Return the demonstration for each completion of all processes; None: there is none.

        `completions` are those of this process. Logged are the share of all that have one, and the
        share of all whose demonstration is their own text.
        """
        texts = [completion_text(completion) for completion in gather_object(completions)]
        is_right = self._binary_rewards().bool().tolist()
        size = self._group()
        hints: list[str | None] = []
        for group, first in enumerate(range(0, len(texts), size)):
            rows = slice(first, first + size)
            hints += self._demonstrations(group, texts[rows], is_right[rows])
        own = [hint == text for hint, text in zip(hints, texts, strict=True)]
        demonstrated = len(hints) - hints.count(None)
        self._logged["teacher/demonstrated"].append(demonstrated / len(hints))
        self._logged["teacher/own_demonstration"].append(sum(own) / len(own))
        return hints

    def _demonstrations(self, group: int, texts: list[str], right: list[bool]) -> list[str | None]:
        """Return the demonstration for each completion of a group; None: there is none.

        All have the same one. Where the row excludes their own text, completions of that very text
        have another right one.
        """
        candidates = list(itertools.compress(texts, right))
        if not candidates:
            return [None] * len(texts)
        choose = operator.itemgetter(0)  # "first"
        if self.args.demonstration == "random":
            # the same on all processes, each of which chooses for all groups
            choose = random.Random(f"{self.args.seed} {self.state.global_step} {group}").choice
        shared = choose(candidates)
        if self._row.own_demonstrations:
            return [shared] * len(texts)
        others = [text for text in candidates if text != shared]
        second = choose(others) if others else None
        return [second if text == shared else shared for text in texts]

    def _hinted(self, prompt: Any, hint: str | None) -> Any:
        """Return the prompt that the teacher reads; without a demonstration, the student's."""
        if hint is None:
            return prompt
        end = self.args.demonstration_template.replace(HINT, hint)
        if isinstance(prompt, str):
            return prompt + end
        return [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + end}]

    def _read_on(self, model: Any, ids: Tensor, attention: Tensor, keep: int) -> Any:
        """Return (B, T, V) logits before each of the last `keep` tokens."""
        bare = self.accelerator.unwrap_model(model)
        bare = bare.get_base_model() if is_peft_model(bare) else bare
        known = inspect.signature(bare.forward).parameters
        kept = {"logits_to_keep": keep + 1} if "logits_to_keep" in known else {}
        with self.accelerator.autocast():
            logits = model(input_ids=ids, attention_mask=attention, use_cache=False, **kept).logits
        return logits[:, -keep - 1 : -1].float() / self.temperature

    def _taught(self, model: Any, inputs: Batch) -> list[Tensor]:
        """Return what each teacher says of the completions: logits, or those of the tokens."""
        prefix = "teacher_" if self._own else ""  # whose prompts show demonstrations
        ids = inputs["completion_ids"]
        texts = torch.cat([inputs[f"{prefix}prompt_ids"], ids], 1)
        attention = torch.cat([inputs[f"{prefix}prompt_mask"], inputs["completion_mask"]], 1)
        results = []
        for teacher in self._teachers:
            with torch.no_grad():
                logits = self._read_on(teacher or model, texts, attention, ids.shape[1])
                results.append(logits if self._reads_logits else _of_tokens(logits, ids))
        return results

    # Extends BookGRPOTrainer's: for the loss, the same forward gives logits where needed.
    @override
    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
    ):
        if not (self._scoring and self._reads_logits):
            return super()._get_per_token_logps_and_entropies(
                model, input_ids, attention_mask, logits_to_keep, *args, **kwargs
            )
        self._logits = self._read_on(model, input_ids, attention_mask, logits_to_keep)
        with torch.no_grad():
            logps = self._logits.log_softmax(-1)
            entropies = -(logps.exp() * logps).sum(-1)
        self._scored = _of_tokens(self._logits, input_ids[:, -logits_to_keep:]), entropies, None
        return self._scored

    # Extends BookGRPOTrainer's: teachers read first, as the student's forward must be the last.
    @override
    def _compute_loss(self, model, inputs):
        self._teacher_outputs = self._taught(model, inputs)
        self._scoring = True
        try:
            return super()._compute_loss(model, inputs)
        finally:
            self._teacher_outputs = self._logits = None
            self._scoring = False

    # Replaces BookGRPOTrainer's: the teachers' signal in place of advantages.
    def row_loss(self, inputs: Batch, logps: Tensor, tokens: Tensor | None) -> Tensor:
        """Return the loss of a micro-batch: see `BookGRPOTrainer.row_loss`."""
        mask = loss_mask(inputs)
        teachers = list(zip(self._teacher_outputs, self._weights, strict=True))
        if not self._reads_logits:  # student and teachers give log-probabilities of sampled tokens
            gap = sum(weight * (logps - teacher_logps) for teacher_logps, weight in teachers)
            (mean_gap,) = self._mean_over_tokens(mask.sum(), (gap.detach() * mask).sum())
            self._logged["teacher/kl"].append(mean_gap)
        if self._own:
            mask = mask * inputs["demonstrated"].unsqueeze(1)
        return distilled_loss(
            self._row,
            self._parameters,
            self._logits if self._reads_logits else logps,
            teachers,
            mask,
            token_weights=inputs.get("importance_sampling_ratio"),
            normalizer=tokens,
            num_generations=self._group(),
            prompt_tokens=inputs.get("prompt_tokens"),
        )

    def _save_state(self, folder: Path) -> None:
        super()._save_state(folder)
        if self._own and self.args.teacher == "ema" and self.args.should_save:
            teacher = self.accelerator.unwrap_model(self._teachers[0])
            torch.save(teacher.state_dict(), folder / MOVED)

    # Extends BookGRPOTrainer's: the counterpart.
    @override
    def _load_optimizer_and_scheduler(self, checkpoint):
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None and self._own and self.args.teacher == "ema":
            state = torch.load(Path(checkpoint, MOVED), map_location="cpu", weights_only=True)
            self.accelerator.unwrap_model(self._teachers[0]).load_state_dict(state)


class _Follow(TrainerCallback):
    """Move the teacher toward the student after each optimizer step."""

    def __init__(self, trainer: Any):
        self._trainer = trainer

    def on_step_end(self, args, state, control, **kwargs):
        unwrap = self._trainer.accelerator.unwrap_model
        teacher, student = unwrap(self._trainer._teachers[0]), unwrap(self._trainer.model)
        with torch.no_grad():
            for weight, target in zip(teacher.parameters(), student.parameters(), strict=True):
                weight.lerp_(target.to(weight), args.teacher_rate)


def _of_tokens(logits: Tensor, ids: Tensor) -> Tensor:
    """Return (B, T) log-probabilities of tokens from (B, T, V) logits."""
    return logits.log_softmax(-1).gather(-1, ids.unsqueeze(-1)).squeeze(-1)
