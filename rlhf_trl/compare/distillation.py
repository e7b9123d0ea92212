"""Distillation on fixed windows: TRL's trainer, and the book's functions on its token ids.

Student and teacher are two versions of one untrained model, and read the same texts; the student
wrote them. A batch's drift moves it further from the teacher.
"""

from collections.abc import Mapping
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
from rlhf_trl.losses import distillation_loss
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
        given = {"logits": leaf, "teacher_logits": self.teacher}
        if side.row.loss == sampled_reverse_kl.__name__:
            places = self.ids.unsqueeze(-1)
            logps = {k: v.log_softmax(-1).gather(-1, places).squeeze(-1) for k, v in given.items()}
            given = {name.replace("logits", "logps"): value for name, value in logps.items()}
        also = {"formulation": side.formulation, "num_generations": self.group, **side.params}
        loss = distillation_loss(side.algorithm, mask=self.mask, **given, **also)
        return float(loss.detach()), torch.autograd.grad(loss, leaf)[0]

    def norm(self, kind: str) -> Tensor:
        """Return the weight 1 / (B n) that an aggregation gives to a token, (B, 1, 1)."""
        lengths = self.mask.sum(1)
        of_prompts = lengths.view(-1, self.group).mean(1).repeat_interleave(self.group)
        ones = torch.ones_like(lengths)
        n = {"sequence_sum": ones, "sequence_mean": lengths, "per_prompt": of_prompts}
        n["token_mean"] = ones * lengths.mean()
        return 1 / (len(lengths) * n[kind].view(-1, 1, 1))

    def slope(self, top_k: int | None) -> Tensor:
        """Return the derivative of each token's divergence in the student's logits, (B, T, V)."""
        p, q = self.logits.softmax(-1), self.teacher.softmax(-1)
        apart = (p / q).log()
        if top_k is not None:
            kept = torch.zeros_like(p).scatter(-1, p.topk(top_k).indices, 1).bool()
            rest = [(each * ~kept).sum(-1, keepdim=True) for each in (p, q)]
            apart = torch.where(kept, apart, (rest[0] / rest[1]).log())
        return p * (apart - (p * apart).sum(-1, keepdim=True)) * self.mask.unsqueeze(-1)


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
        trainer.model.train()
        source = measure.batches(trainer)
        if own := hasattr(trainer, "teacher_context_builder"):  # its own teacher, a step later
            trainer._prepare_inputs(next(source))
            trainer._step = trainer.args.steps_per_generation
        trainer.model.load_state_dict(self.student)
        if own:
            policy.check_order(trainer)
            trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
            return measure.accumulate(trainer, source)
        order, count = [*trainer._get_train_sampler()], trainer.args.gradient_accumulation_steps
        size = ROWS * count * trainer.accelerator.num_processes
        if order[: size * count] != order[:size] * count:
            raise InputError("DistillationTrainer leaves out prompts")
        with policy.unmixed("trl.trainer.distillation_trainer", stock=True):
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

    In OPD the embedded model teaches, in SDPO the student that reads a right completion, too: the
    first one of the prompt, or of those with another text; without any, nothing counts.
    """
    view, row, ids = window.view(), side.row, dict(window.ids)
    student, mask = view.policy.model, view.mask.clone()
    if "teacher" in row.trainer_reads:
        teacher, tokenizer, prompts = student, build_tokenizer(), []
        for first in range(0, len(mask), view.batch.group):
            rows = range(first, first + view.batch.group)
            question = tokenizer.decode(ids["prompt_ids"][first], skip_special_tokens=True)
            completions = ids["completion_ids"][first : first + len(rows)]
            texts = tokenizer.batch_decode(completions, skip_special_tokens=True)
            right = [texts[place - first] for place in rows if view.binary_rewards[place]]
            for place, own in zip(rows, texts, strict=True):
                hints = [text for text in right if row.own_demonstrations or text != own]
                prompt = question
                if hints:
                    template = row.trainer_reads["demonstration_template"]
                    prompt += template.format(demonstration=hints[0])
                else:
                    mask[place] = 0
                prompts.append([{"role": "user", "content": prompt}])
        read = {"padding": True, "return_tensors": "pt", "return_dict": True}
        shown = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, **read)
        ids |= {"prompt_ids": shown["input_ids"], "prompt_mask": shown["attention_mask"]}
    else:
        from transformers import AutoModelForCausalLM

        teacher = AutoModelForCausalLM.from_pretrained(checkpoint_path()).double()
    graph, taught = _logits(student, window.ids), _logits(teacher, ids).detach()
    given = (Gradients(student, graph), graph.detach(), taught, view.ids, mask)
    return DistillationView(*given, view.batch.group)


def build_trainer(
    trainer: type, config: type, fields: Mapping[str, Any], batch: PolicyBatch, **also: Any
) -> Any:
    """Build TRL's DistillationTrainer for a window, its completions fixed."""
    own = config.__name__.startswith("SDPO")  # its own teacher
    window = {"per_device_train_batch_size": ROWS, "max_completion_length": policy.LIMIT}
    window |= {"gradient_accumulation_steps": batch.accumulation, "shuffle_dataset": False}
    words = policy.WORDS[: ROWS * batch.accumulation // GROUP]
    rows = [{"prompt": [{"role": "user", "content": w}]} for w in words]
    if own:
        window |= {"num_generations": GROUP, "num_iterations": 2}
        also = {"reward_funcs": [policy.right, policy.has_format]} | also
    else:
        rows = [row for row in rows for _ in range(GROUP)] * 2  # for each of two processes
        teacher = untrained()
        teacher.model.layers[0].self_attn.attention_dropout = 0.5  # which TRL must switch off
        also = {"teacher_model": teacher} | also
    ready = make_trainer(trainer, config, window | dict(fields), rows, **also)
    measure.check_generation(ready)
    measure.fix_completions(ready, policy.completion(batch.ragged), batch.rewards == "model")
    return ready
