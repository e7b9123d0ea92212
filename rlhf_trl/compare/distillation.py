"""Distillation on fixed windows: TRL's trainer, and the book's functions on its token ids.

Student and teacher are two versions of one untrained model, and read the same texts; the student
wrote them. A batch's drift moves it further from the teacher.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from rlhf_trl.book.distillation import sampled_reverse_kl
from rlhf_trl.compare import measure, policy
from rlhf_trl.compare.measure import Book, Measured
from rlhf_trl.compare.models import Gradients, drifted, make_trainer, untrained
from rlhf_trl.compare.policy import GROUP, ROWS, PolicyBatch
from rlhf_trl.errors import InputError
from rlhf_trl.losses.checked import distillation_loss
from rlhf_trl.tiny import checkpoint_path
from rlhf_trl.tiny.tokenizer import build_tokenizer


@dataclass
class DistillationView:
    """What the book's functions see of a window, in float64."""

    gradient: Gradients  # of the student's logits
    logits: Tensor  # (B, T, V) the student's, before the completion tokens
    teacher: Tensor  # (B, T, V) the teacher's
    ids: Tensor  # (B, T) the completion tokens
    mask: Tensor  # (B, T) 1 on tokens that count
    group: int = GROUP  # completions per prompt

    def book(self, side: Book) -> tuple[float, Tensor]:
        """Return the book's loss of the window, and d loss / d logits, (B, T, V)."""
        leaf = self.logits.clone().requires_grad_()
        # this estimate takes the sampled tokens alone, the other losses the whole vocabulary
        if side.row.loss == sampled_reverse_kl.__name__:
            inputs = {
                "logps": self._of_tokens(leaf),
                "teacher_logps": self._of_tokens(self.teacher),
            }
        else:
            inputs = {"logits": leaf, "teacher_logits": self.teacher}
        loss = distillation_loss(
            side.algorithm,
            mask=self.mask,
            **inputs,
            formulation=side.formulation,
            num_generations=self.group,
            **side.params,
        )
        return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]

    def _of_tokens(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the completion tokens, (B, T)."""
        return logits.log_softmax(-1).gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)

    def norm(self, kind: str) -> Tensor:
        """Return the weight 1 / (B n) that an aggregation gives to a token, (B, 1, 1)."""
        lengths = self.mask.sum(1)
        ones = torch.ones_like(lengths)
        counts = {
            "sequence_sum": ones,
            "sequence_mean": lengths,
            "per_prompt": lengths.view(-1, self.group).mean(1).repeat_interleave(self.group),
            "token_mean": ones * lengths.mean(),
        }
        return 1 / (len(lengths) * counts[kind].view(-1, 1, 1))

    def slope(self, top_k: int | None) -> Tensor:
        """Return the derivative of each token's divergence in the student's logits, (B, T, V)."""
        p = self.logits.softmax(-1)
        q = self.teacher.softmax(-1)
        log_ratio = (p / q).log()
        if top_k is not None:  # all other tokens count as a single one
            kept = torch.zeros_like(p).scatter(-1, p.topk(top_k).indices, 1).bool()
            rest_p = (p * ~kept).sum(-1, keepdim=True)
            rest_q = (q * ~kept).sum(-1, keepdim=True)
            log_ratio = torch.where(kept, log_ratio, (rest_p / rest_q).log())
        return p * (log_ratio - (p * log_ratio).sum(-1, keepdim=True)) * self.mask.unsqueeze(-1)


class DistillationWindow:
    """A window, prepared once by TRL's DistillationTrainer."""

    def __init__(self, batch: PolicyBatch) -> None:
        """Move the student."""
        self.batch = batch
        self.student = drifted(untrained().state_dict(), 0.05 + batch.drift, seed=99)

    def stock(self, trainer: Any) -> Measured:
        """Measure a trainer that `build_trainer` built for this window."""
        measured, micro = self._run(trainer)
        if "view" in vars(self):  # the other side of a comparison
            measure.check_same(trainer, micro, self._micro, "completion_ids")
        return measured

    def _run(self, trainer: Any) -> tuple[Measured, list[measure.Batch]]:
        """Measure one accumulation window with the moved student.

        Returns:
            Loss and gradient, and the micro-batches as the loss saw them.
        """
        trainer.model.train()
        if hasattr(trainer, "teacher_context_builder"):  # only SDPOTrainer has one
            return self._run_sdpo(trainer)
        trainer.model.load_state_dict(self.student)
        # TRL makes one generation of `size` prompts and splits it into `count` micro-batches. For
        # that its sampler repeats the numbers of these prompts `count` times.
        order = list(trainer._get_train_sampler())
        count = trainer.args.gradient_accumulation_steps
        size = ROWS * count * trainer.accelerator.num_processes
        if order[: size * count] != order[:size] * count:
            raise InputError("DistillationTrainer leaves out prompts")
        # TRL shuffles a generation before it splits it. `unmixed` switches that off, and with
        # `stock` refuses a TRL that does not shuffle: that one is not the TRL compared here.
        with policy.unmixed("trl.trainer.distillation_trainer", stock=True):
            return measure.accumulate(trainer, measure.batches(trainer))

    def _run_sdpo(self, trainer: Any) -> tuple[Measured, list[measure.Batch]]:
        """Measure SDPOTrainer on the second use of a generation, when its student has moved.

        Its teacher starts as a copy of the student. If that were moved before, old and new
        log-probabilities would be the same; so it generates first, then it is moved, and the window
        is measured off-policy.
        """
        source = measure.batches(trainer)
        trainer._prepare_inputs(next(source))  # generates, and keeps the generation
        # TRL generates at step 0, and uses the generation again from this step on
        trainer._step = trainer.args.steps_per_generation
        trainer.model.load_state_dict(self.student)
        policy.check_order(trainer)
        # as after an optimizer step: an averaged teacher takes its share of the moved student
        trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
        return measure.accumulate(trainer, source)

    @cached_property
    def view(self) -> DistillationView:
        """The book's side of the window, as the stock trainer prepares it."""
        from trl import DistillationConfig, DistillationTrainer

        built = build_trainer(DistillationTrainer, DistillationConfig, {}, self.batch)
        _, self._micro = self._run(built)
        ids = {key: torch.cat([part[key] for part in self._micro]) for key in _KEYS}
        student = untrained().double()
        student.load_state_dict(self.student)
        of_teacher = _logits(untrained().double(), ids).detach()
        graph, mask = _logits(student, ids), ids["completion_mask"].double()
        return DistillationView(
            Gradients(student, graph), graph.detach(), of_teacher, ids["completion_ids"], mask
        )


_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def _logits(model: Module, ids: Mapping[str, Tensor]) -> Tensor:
    """Return (B, T, V) logits before each completion token from a plain forward."""
    tokens, attention = policy.whole(ids)
    keep = ids["completion_ids"].shape[1]
    return model(input_ids=tokens, attention_mask=attention).logits[:, -keep - 1 : -1]


def of_policy(window: policy.PolicyWindow, side: Book) -> DistillationView:
    """Return what the book's functions see of completions that our trainer generated.

    In OPD the embedded model teaches; in SDPO the student itself, whose prompt also shows a right
    completion, see `_demonstrations`. A completion without one does not count.
    """
    view = window.view()
    student = view.policy.model  # `policy` has the gradients in this model's parameters
    mask = view.mask.clone()
    teacher_ids = dict(window.ids)
    if "teacher" in side.row.trainer_reads:  # SDPO, whose teacher is a version of the student
        teacher = student
        demonstrations = _demonstrations(window, side)
        for place, demonstration in enumerate(demonstrations):
            if demonstration is None:
                mask[place] = 0
        template = side.row.trainer_reads["demonstration_template"]
        teacher_ids |= _teacher_prompts(window, demonstrations, template)
    else:
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(checkpoint_path()).double()
    student_logits = _logits(student, window.ids)
    return DistillationView(
        gradient=Gradients(student, student_logits),
        logits=student_logits.detach(),
        teacher=_logits(teacher, teacher_ids).detach(),
        ids=view.ids,
        mask=mask,
        group=view.batch.group,
    )


def _demonstrations(window: policy.PolicyWindow, side: Book) -> list[str | None]:
    """Return the right completion that the teacher reads for each completion, (B,), or None.

    It is the first right one of the prompt; where a completion must not be its own demonstration,
    the first with another text.
    """
    view = window.view()
    tokenizer = build_tokenizer()
    demonstrations: list[str | None] = []
    for first in range(0, len(view.mask), view.batch.group):
        group = slice(first, first + view.batch.group)
        completions = window.ids["completion_ids"][group]
        texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
        is_right = view.binary_rewards[group]
        right_texts = [text for text, right in zip(texts, is_right, strict=True) if right]
        for own_text in texts:
            candidates = right_texts
            if not side.row.own_demonstrations:
                candidates = [text for text in right_texts if text != own_text]
            demonstrations.append(candidates[0] if candidates else None)
    return demonstrations


def _teacher_prompts(
    window: policy.PolicyWindow, demonstrations: Sequence[str | None], template: str
) -> dict[str, Tensor]:
    """Return `prompt_ids` and `prompt_mask`, (B, S), of prompts that show the demonstrations.

    A completion without a demonstration keeps its prompt: its row must be there, and its loss is
    masked by the caller.
    """
    tokenizer = build_tokenizer()
    group_size = window.batch.group
    chats = []
    for place, demonstration in enumerate(demonstrations):
        first = place // group_size * group_size  # whose prompt the whole group shares
        # roles are special tokens, so what is left of the chat is the text of its one message
        prompt = tokenizer.decode(window.ids["prompt_ids"][first], skip_special_tokens=True)
        if demonstration is not None:
            prompt += template.format(demonstration=demonstration)
        chats.append([{"role": "user", "content": prompt}])
    encoded = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    return {"prompt_ids": encoded["input_ids"], "prompt_mask": encoded["attention_mask"]}


def build_trainer(
    trainer: type, config: type, fields: Mapping[str, Any], batch: PolicyBatch, **arguments: Any
) -> Any:
    """Build TRL's DistillationTrainer or SDPOTrainer for a window, its completions fixed.

    `fields` are those of its config, which override the window's; `arguments` are further ones of
    the trainer. SDPOTrainer samples GROUP completions of each prompt by itself; for
    DistillationTrainer, which samples one, each prompt stands GROUP times in the data.
    """
    words = policy.WORDS[: ROWS * batch.accumulation // GROUP]  # each is a prompt
    examples = [{"prompt": [{"role": "user", "content": word}]} for word in words]
    window_fields = {
        "per_device_train_batch_size": ROWS,
        "max_completion_length": policy.LIMIT,
        "gradient_accumulation_steps": batch.accumulation,
        "shuffle_dataset": False,
    }
    if config.__name__.startswith("SDPO"):
        # the second use of a generation is measured, see `_run_sdpo`
        window_fields |= {"num_generations": GROUP, "num_iterations": 2}
        arguments.setdefault("reward_funcs", [policy.right, policy.has_format])
    else:
        examples = [example for example in examples for _ in range(GROUP)]
        # `models.at_scale` makes this one of two processes, which share the data; alone, it reads
        # the first half. SDPO is not measured at scale.
        examples *= 2
        arguments.setdefault("teacher_model", _teacher_with_dropout())
    config_fields = window_fields | dict(fields)
    built = make_trainer(trainer, config, config_fields, examples, **arguments)
    measure.check_generation(built)
    # DistillationTrainer masks the tokens of a tool, and no other batch that it is measured on has
    # any. It reads no rewards, so `scored`, the batch with those of a model, has such tokens here.
    has_tools = batch.rewards == "model"
    measure.fix_completions(built, policy.completion(batch.ragged), tools=has_tools)
    return built


def _teacher_with_dropout() -> Module:
    """Return a teacher whose dropout shows in the loss unless TRL puts it into evaluation mode."""
    teacher = untrained()
    teacher.model.layers[0].self_attn.attention_dropout = 0.5
    return teacher
