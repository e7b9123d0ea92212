"""BookRLOOTrainer: the row rloo on TRL's RLOOTrainer, against the equation written out here."""

import pytest
import torch
from library_cases import length, train

import rlhf_trl
from rlhf_trl.errors import InputError

FIELDS = {"eval_strategy": "no", "max_steps": 1, "gradient_accumulation_steps": 2}
CHAPTER = {**FIELDS, "formulation": "chapter"}


def leave_one_out(rewards, size):
    """Return each reward less the mean of the others of its group."""
    groups = rewards.view(-1, size)
    return (groups - (groups.sum(1, keepdim=True) - groups) / (size - 1)).flatten()


@pytest.mark.parametrize(
    ("formulation", "beta"), [("chapter", 0.0), ("chapter", 0.3), ("code", 0.3)]
)
def test_advantages_and_loss_are_the_rows(formulation, beta, tmp_path, monkeypatch):
    seen = []
    row_loss = rlhf_trl.BookRLOOTrainer.row_loss

    def noting(self, inputs, logps, tokens):
        loss = row_loss(self, inputs, logps, tokens)
        seen.append((inputs, logps.detach(), loss.detach()))
        return loss

    def moved(self, inputs):  # a reference that is not the policy
        for weight in self.model.parameters():
            weight.data.mul_(1.02)
        return generate(self, inputs)

    generate = rlhf_trl.BookRLOOTrainer._generate_and_score_completions
    monkeypatch.setattr(rlhf_trl.BookRLOOTrainer, "row_loss", noting)
    monkeypatch.setattr(rlhf_trl.BookRLOOTrainer, "_generate_and_score_completions", moved)
    judged = []

    def reward(completions, **kwargs):
        judged.append(torch.tensor(length(completions)))
        return judged[-1].tolist()

    fields = {**FIELDS, "formulation": formulation, "beta": beta, "shuffle_dataset": False}
    monkeypatch.setattr("trl.trainer.rloo_trainer.shuffle_sequence_dict", lambda batch: batch)
    run = train("rloo", True, tmp_path, fields=fields, reward_funcs=reward)
    assert len(seen) == 2
    whole = {
        name: torch.cat([batch[name] for batch, _, _ in seen])
        for name in seen[0][0]
        if isinstance(seen[0][0][name], torch.Tensor)
    }
    mask, rewards = whole["completion_mask"], judged[0]
    if beta:
        log_ratio = whole["old_per_token_logps"] - whole["ref_per_token_logps"]
        assert log_ratio.abs().max() > 1e-3
        if formulation == "chapter":
            kl = (log_ratio * mask).sum(1)
        else:  # the code's k3 has the other sign, and is averaged
            kl = ((torch.exp(log_ratio) - 1 - log_ratio) * mask).sum(1) / mask.sum(1)
        rewards = rewards - beta * kl
    torch.testing.assert_close(whole["advantages"], leave_one_out(rewards, 4))
    losses = []
    for batch, logps, loss in seen:
        per_sequence = (logps * batch["completion_mask"]).sum(1)
        if formulation == "code":
            per_sequence = per_sequence / batch["completion_mask"].sum(1)
        expected = -(batch["advantages"] * per_sequence).mean()
        torch.testing.assert_close(loss, expected)
        losses.append(expected.item())
    assert run.logs[0]["loss"] == pytest.approx(sum(losses) / 2, rel=1e-4)


def test_on_policy_the_chapters_update_is_trls(tmp_path):
    fields = {**FIELDS, "beta": 0.0, "gradient_accumulation_steps": 1, "max_grad_norm": 1e9}
    ours, stock = (
        train("rloo", mine, tmp_path / str(mine), fields=CHAPTER | fields if mine else fields)
        for mine in (True, False)
    )
    assert ours.logs[0]["grad_norm"] == pytest.approx(stock.logs[0]["grad_norm"], rel=1e-5)
    assert not [name for name in ours.logs[0] if name.startswith("clip_ratio")]


def test_a_run_resumed_inside_a_generation_ends_as_one_never_stopped(tmp_path):
    fields = {
        "formulation": "chapter",
        "num_iterations": 2,
        "importance_cap": 2.0,
        "eval_strategy": "no",
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_strategy": "no",
    }
    straight = train("rloo", True, tmp_path / "run", fields=fields)
    resumed = train(
        "rloo", True, tmp_path / "run", fields=fields, resume=tmp_path / "run" / "checkpoint-3"
    )
    for name, weight in straight.weights.items():
        assert torch.equal(resumed.weights[name], weight), name


def test_rows_and_trainers_that_do_not_belong_together_are_named():
    settings = {"use_cpu": True, "bf16": False, "report_to": "none"}
    args = rlhf_trl.BookRLOOConfig(**settings, algorithm="grpo")
    with pytest.raises(InputError, match="whose only row is rloo: use BookGRPOTrainer"):
        rlhf_trl.BookRLOOConfig.resolve(args)
    args = rlhf_trl.BookGRPOConfig(**settings, algorithm="rloo", formulation="trl")
    with pytest.raises(InputError, match="is TRL's RLOOTrainer, not GRPOTrainer: use BookRLOO"):
        rlhf_trl.BookGRPOConfig.resolve(args)
    args = rlhf_trl.BookRLOOConfig(**settings, normalize_advantages=True)
    with pytest.raises(InputError, match=r"normalize_advantages is not read by rloo \(chapter\)"):
        rlhf_trl.BookRLOOConfig.resolve(args)
