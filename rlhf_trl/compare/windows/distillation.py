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
from rlhf_trl.compare import measure
from rlhf_trl.compare.measure import Book, Measured, Stock
from rlhf_trl.compare.models import Gradients, adapter, drifted, make_trainer, take, untrained
from rlhf_trl.compare.trainers import trainer_classes
from rlhf_trl.compare.windows.batches import GROUP, LIMIT, ROWS, PolicyBatch
from rlhf_trl.compare.windows.completions import WORDS, completion, has_format, right
from rlhf_trl.compare.windows.generation import check_generation, fix_completions
from rlhf_trl.compare.windows.order import check_order, unmixed
from rlhf_trl.compare.windows.policy import PolicyWindow, whole
from rlhf_trl.compare.windows.terms import Identity, Terms, apply
from rlhf_trl.compare.windows.window import Window
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

    def loss_and_gradient(self, side: Book) -> tuple[float, Tensor]:
        """Return the book's loss, and its gradient in the parameters, (N,)."""
        loss, slopes = self.book(side)
        return loss, self.gradient(slopes)  # by the chain rule

    def changed(self, side: Book, steps: Sequence[Identity]) -> Tensor:
        """Return the gradient after identities; a divergence is all surrogate, without a KL."""
        _, slopes = self.book(side)
        token_weight = self.token_weight(side.row.aggregation)
        terms = Terms(self, surrogate=slopes, kl=0 * slopes, token_weight=token_weight, beta=0.0)
        apply(steps, terms)
        return self.gradient(terms.surrogate)

    def _of_tokens(self, logits: Tensor) -> Tensor:
        """Return the log-probabilities of the completion tokens, (B, T)."""
        return logits.log_softmax(-1).gather(-1, self.ids.unsqueeze(-1)).squeeze(-1)

    def token_weight(self, aggregation: str) -> Tensor:
        """Return the factor by which an aggregation multiplies a token's loss, (B, 1, 1).

        It is 1 / (B n), where n is what the aggregation divides the sum over a completion by.
        """
        lengths = self.mask.sum(1)
        ones = torch.ones_like(lengths)
        prompt_lengths = lengths.view(-1, self.group).mean(1)  # a prompt's mean length, (P,)
        divisors = {
            "sequence_sum": ones,
            "sequence_mean": lengths,
            "per_prompt": prompt_lengths.repeat_interleave(self.group),
            "token_mean": ones * lengths.mean(),
        }
        return 1 / (len(lengths) * divisors[aggregation].view(-1, 1, 1))

    def slope(self, top_k: int | None) -> Tensor:
        """Return the derivative of each token's divergence in the student's logits, (B, T, V).

        With p of the student and q of the teacher it is p (l - sum p l), l = log p - log q. With
        `top_k`, all but the student's likeliest tokens count as one, which has one l.
        """
        p = self.logits.softmax(-1)
        q = self.teacher.softmax(-1)
        log_ratio = (p / q).log()
        if top_k is not None:
            is_likely = torch.zeros_like(p).scatter(-1, p.topk(top_k).indices, 1).bool()
            rest_p = (p * ~is_likely).sum(-1, keepdim=True)
            rest_q = (q * ~is_likely).sum(-1, keepdim=True)
            log_ratio = torch.where(is_likely, log_ratio, (rest_p / rest_q).log())
        return p * (log_ratio - (p * log_ratio).sum(-1, keepdim=True)) * self.mask.unsqueeze(-1)


class DistillationWindow(Window):
    """A window, prepared once by TRL's DistillationTrainer."""

    def __init__(self, batch: PolicyBatch) -> None:
        """Move the student's weights away from the teacher's by noise."""
        self.batch = batch
        self.student = drifted(untrained().state_dict(), 0.05 + batch.drift, seed=99)

    def build(self, side: Stock) -> Any:
        """Build the trainer of a stock side."""
        trainer, config = side.classes or trainer_classes(side.trainer)
        return build_trainer(trainer, config, side.config, self.batch, **side.trainer_arguments)

    def book(self, side: Book) -> tuple[float, Tensor]:
        """Return the book's loss and its gradient."""
        return self.view.loss_and_gradient(side)

    def changed(self, side: Book, steps: Sequence[Identity]) -> Tensor:
        """Return the gradient after identities."""
        return self.view.changed(side, steps)

    def measured(self, trainer: Any, double: bool = False) -> Measured:
        """Measure a trainer that `build_trainer` built for this window, as it computes."""
        measured, micro = self._run(trainer)
        if "view" in vars(self):  # the other side of a comparison
            measure.check_same(trainer, micro, self._micro, "completion_ids")
        return measured

    def _run(self, trainer: Any) -> tuple[Measured, list[measure.Batch]]:
        """Measure one accumulation window with the student's moved weights.

        Returns:
            Loss and gradient, and the micro-batches as the loss saw them.
        """
        trainer.model.train()
        if hasattr(trainer, "teacher_context_builder"):  # only SDPOTrainer has one
            return self._run_sdpo(trainer)
        trainer.model.load_state_dict(self.student)
        # For a generation of `size` prompts TRL's sampler yields the numbers of these prompts, in
        # one order, `count` times: once for each micro-batch into which it splits the generation.
        # A sampler with any other order would train on other prompts than the book's side.
        order = list(trainer._get_train_sampler())
        count = trainer.args.gradient_accumulation_steps
        size = ROWS * count * trainer.accelerator.num_processes
        if order[: size * count] != order[:size] * count:
            raise InputError("DistillationTrainer leaves out prompts")
        # TRL shuffles a generation before it splits it; `unmixed` switches that off
        with unmixed("trl.trainer.distillation_trainer", stock=True):
            return measure.accumulate(trainer, measure.batches(trainer))

    def _run_sdpo(self, trainer: Any) -> tuple[Measured, list[measure.Batch]]:
        """Measure SDPOTrainer on the second use of a generation, when its student has moved.

        The teacher starts as a copy of the student. The student generates first and is moved
        afterwards: otherwise old and new log-probabilities would be the same, and the window would
        not be off-policy.
        """
        source = measure.batches(trainer)
        trainer._prepare_inputs(next(source))  # generates, and keeps the generation
        # TRL generates at step 0, and uses the generation again from this step on
        trainer._step = trainer.args.steps_per_generation
        take(trainer.model, self.student)
        check_order(trainer)
        # what follows an optimizer step: a teacher that is a moving average of the student is moved
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


class GeneratedWindow(Window):
    """A window of our trainer of distillation, which generates as a GRPOTrainer does."""

    def __init__(self, generated: PolicyWindow) -> None:
        """Take the completions and the student's weights of a window of policy gradients."""
        self.batch = generated.batch
        self._generated = generated

    def build(self, side: Stock) -> Any:
        """Build the trainer of a stock side."""
        return self._generated.build(side)

    def measured(self, trainer: Any, double: bool = False) -> Measured:
        """Measure a trainer that `build` built, as it computes."""
        return self._generated.measured(trainer)

    def book(self, side: Book) -> tuple[float, Tensor]:
        """Return the book's loss and its gradient."""
        return of_policy(self._generated, side).loss_and_gradient(side)

    def changed(self, side: Book, steps: Sequence[Identity]) -> Tensor:
        """Return the gradient after identities."""
        return of_policy(self._generated, side).changed(side, steps)


_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")


def _logits(model: Module, ids: Mapping[str, Tensor]) -> Tensor:
    """Return (B, T, V) logits before each completion token from a plain forward."""
    tokens, attention = whole(ids)
    keep = ids["completion_ids"].shape[1]
    return model(input_ids=tokens, attention_mask=attention).logits[:, -keep - 1 : -1]


def of_policy(window: PolicyWindow, side: Book) -> DistillationView:
    """Return what the book's functions see of completions that our trainer generated.

    In OPD the embedded model is the teacher. In SDPO the student is its own teacher, but reads a
    prompt that also shows a right completion, see `_demonstrations`; a completion of a prompt
    without a right one does not count.

    Args:
        window: the completions, and the student's weights.
        side: the algorithm, its formulation and parameters.
    """
    view = window.view()
    student = view.policy.model
    mask = view.mask.clone()
    teacher_ids = dict(window.ids)
    is_sdpo = "teacher" in side.row.trainer_reads  # the field that says which student teaches
    if is_sdpo:
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


def _demonstrations(window: PolicyWindow, side: Book) -> list[str | None]:
    """Return the right completion that the teacher reads for each of B completions, or None.

    It is the first right completion of the prompt. Where the row says that a completion must not be
    its own demonstration, it is the first right one with another text.
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
    window: PolicyWindow, demonstrations: Sequence[str | None], template: str
) -> dict[str, Tensor]:
    """Return `prompt_ids` and `prompt_mask`, (B, S), of prompts that show the demonstrations.

    A completion without a demonstration keeps its prompt: each completion needs a row here, and the
    caller masks the loss of that one.
    """
    tokenizer = build_tokenizer()
    chats = []
    for prompt_ids, demonstration in zip(window.ids["prompt_ids"], demonstrations, strict=True):
        # roles are special tokens, so what is left of the chat is the text of its one message
        prompt = tokenizer.decode(prompt_ids, skip_special_tokens=True)
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

    SDPOTrainer samples GROUP completions of each prompt by itself. DistillationTrainer samples one,
    so for that trainer each prompt stands GROUP times in the data.

    Args:
        trainer: the class.
        config: its config class.
        fields: those of the config, which override the fields that make the window.
        batch: the window.
        arguments: further ones of the trainer.
    """
    words = WORDS[: ROWS * batch.accumulation // GROUP]  # each is a prompt
    examples = [{"prompt": [{"role": "user", "content": word}]} for word in words]
    window_fields = {
        "per_device_train_batch_size": ROWS,
        "max_completion_length": LIMIT,
        "gradient_accumulation_steps": batch.accumulation,
        "shuffle_dataset": False,
    }
    if config.__name__.startswith("SDPO"):
        # the second use of a generation is measured, see `_run_sdpo`
        window_fields |= {"num_generations": GROUP, "num_iterations": 2}
        arguments.setdefault("reward_funcs", [right, has_format])
        if batch.name == "adapter":  # a teacher that is a second adapter, moved after the first
            arguments |= adapter()
    else:
        examples = [example for example in examples for _ in range(GROUP)]
        # Twice the data that one process reads: on two processes, as which `models.at_scale` lets
        # it run, each reads half. A single process leaves the second half unread.
        examples *= 2
        arguments.setdefault("teacher_model", _teacher_with_dropout())
    config_fields = window_fields | dict(fields)
    built = make_trainer(trainer, config, config_fields, examples, **arguments)
    check_generation(built)
    # The batch with a reward model is otherwise nothing special here, since distillation reads no
    # rewards. So it is the one in which DistillationTrainer has to mask a tool's tokens.
    fix_completions(built, completion(batch.ragged), tools=batch.reward_model)
    if batch.reward_model and config.__name__ == "DistillationConfig":
        # so is it for models whose config scales their logits, as Granite's
        built.model.config.logits_scaling = 1.25
        built.teacher_model.config.logits_scaling = 0.8
    return built


def _teacher_with_dropout() -> Module:
    """Return a teacher whose dropout shows in the loss unless TRL puts it into evaluation mode."""
    teacher = untrained()
    teacher.model.layers[0].self_attn.attention_dropout = 0.5
    return teacher
