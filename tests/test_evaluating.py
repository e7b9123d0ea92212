"""Evaluation measures each held-out example once: any batch size, the oracle one text at a time."""

import math

import pytest
import torch
from datasets import Dataset
from direct_alignment_cases import build as build_alignment
from direct_alignment_cases import pairs
from evaluating_processes import HELD_OUT, PAIRS, PARAMS, build, evaluated, supervised
from policy_gradient_cases import checkpoint
from reward_model_cases import outputs, texts
from transformers import AutoModelForCausalLM, IntervalStrategy

from rlhf_trl.reward_models.accuracy import pair_accuracy

NEAR = {"rel": 1e-5, "abs": 2e-6}


@pytest.mark.parametrize("case", PARAMS, ids="-".join)
def test_metrics_do_not_depend_on_the_batch_size(case):
    trainer = build(*case)
    whole = evaluated(trainer, 64)
    assert len(whole) >= 2
    for size in (1, 7):
        assert evaluated(trainer, size) == pytest.approx(whole, rel=1e-6, abs=1e-6)


# --- the oracle ----------------------------------------------------------------------------------


@torch.no_grad()
def token_logps(model, ids, start):
    """Return the log-probabilities of a text's tokens from `start` on, read alone."""
    logits = model(input_ids=torch.tensor([ids])).logits[0, :-1]
    tokens = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return tokens[start - 1 :]


def written(row):
    """Return the ids of both texts of a pair, and where their completions begin."""
    sides = [text for text, _, _ in texts("reward", row)]
    prompt = texts("orm", {**row, "completion": [{"content": ""}], "label": 1, "finished": False})
    return sides, len(prompt[0][0])


def start_and_moved(trainer):
    """Return the models that the trainer's reference and policy are."""
    return AutoModelForCausalLM.from_pretrained(checkpoint()), trainer.model.eval()


def logps_of_sides(model):
    """Return what the tokens of the chosen and of the rejected of each pair have, as lists."""
    sides = [], []
    for row in PAIRS:
        ids, start = written(row)
        for side, text in zip(sides, ids, strict=True):
            side.append(token_logps(model, text, start))
    return sides


def shares(chosen, rejected):
    """Return the share of pairs that are right, and the one that counts a tie as half a pair."""
    right = sum(c > r for c, r in zip(chosen, rejected, strict=True))
    ties = sum(c == r for c, r in zip(chosen, rejected, strict=True))
    return right / len(chosen), (right + ties / 2) / len(chosen)


@pytest.mark.parametrize("which", ["chapter", "trl"])
def test_dpo_against_every_pair_alone(which):
    trainer = build("dpo", which)
    found = evaluated(trainer, 4)
    reference, policy = start_and_moved(trainer)
    logps = [[float(t.sum()) for t in side] for side in logps_of_sides(policy)]
    starts = [[float(t.sum()) for t in side] for side in logps_of_sides(reference)]
    beta = trainer.args.beta
    chosen, rejected = (
        [beta * (now - then) for now, then in zip(*side, strict=True)]
        for side in zip(logps, starts, strict=True)
    )
    losses = [math.log1p(math.exp(r - c)) for c, r in zip(chosen, rejected, strict=True)]
    right, half = shares(chosen, rejected)
    wanted = {
        "eval_loss": sum(losses) / HELD_OUT,
        "eval_pair_accuracy": half,
        "eval_rewards/accuracies": right,
        "eval_rewards/chosen": sum(chosen) / HELD_OUT,
        "eval_rewards/rejected": sum(rejected) / HELD_OUT,
        "eval_rewards/margins": (sum(chosen) - sum(rejected)) / HELD_OUT,
        "eval_logps/chosen": sum(logps[0]) / HELD_OUT,
        "eval_logps/rejected": sum(logps[1]) / HELD_OUT,
    }
    assert 0 < half < 1
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, **NEAR)


@pytest.mark.parametrize("which", ["chapter", "trl"])
def test_orpo_against_every_pair_alone(which):
    trainer = build("orpo", which)
    found = evaluated(trainer, 4)
    _, policy = start_and_moved(trainer)
    means = [[t.double().mean() for t in side] for side in logps_of_sides(policy)]
    # TRL's likelihood is that of prompt and answer, a mean over all tokens
    tokens = torch.cat([token_logps(policy, written(row)[0][0], 1) for row in PAIRS])
    nll = torch.stack(means[0]).mean() if which == "chapter" else tokens.double().mean()
    odds = [m - torch.log1p(-m.exp()) for m in map(torch.stack, means)]
    ratio = torch.nn.functional.logsigmoid(odds[0] - odds[1]).mean()
    beta = trainer.args.beta
    right, half = shares(*(torch.stack(side).tolist() for side in means))
    wanted = {
        "eval_loss": float(-nll - beta * ratio),
        "eval_nll_loss": float(-nll),
        "eval_log_odds_chosen": float((odds[0] - odds[1]).mean()),
        "eval_pair_accuracy": half,
        "eval_rewards/accuracies": right,
        "eval_rewards/margins": float(beta * (sum(means[0]) - sum(means[1])) / HELD_OUT),
    }
    assert 0 < half < 1
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, **NEAR)


@pytest.mark.parametrize("which", ["chapter", "trl"])
def test_kto_has_one_reference_point_for_all(which):
    trainer = build("kto", which)
    found = evaluated(trainer, 4)
    reference, policy = start_and_moved(trainer)
    beta, gaps, mismatched = trainer.args.beta, {True: [], False: []}, []
    for row in trainer.eval_dataset:
        prompt = row["prompt_ids"]
        for own, column in ((True, "completion_ids"), (False, "KL_completion_ids")):
            logps = [
                float(token_logps(m, prompt + row[column], len(prompt)).sum())
                for m in (policy, reference)
            ]
            (gaps[row["label"]] if own else mismatched).append(logps[0] - logps[1])
    z = max(sum(mismatched) / len(mismatched), 0)
    losses = [1 / (1 + math.exp(beta * (gap - z))) for gap in gaps[True]]
    losses += [1 / (1 + math.exp(beta * (z - gap))) for gap in gaps[False]]
    rewards = [beta * sum(gaps[wanted]) / len(gaps[wanted]) for wanted in (True, False)]
    wanted = {
        "eval_loss": sum(losses) / len(losses),
        "eval_kl": z,
        "eval_rewards/chosen": rewards[0],
        "eval_rewards/rejected": rewards[1],
        "eval_rewards/margins": rewards[0] - rewards[1],
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, **NEAR)
    assert "eval_pair_accuracy" not in found  # there are no pairs


def test_a_reward_model_against_every_pair_alone():
    trainer = build("reward", "chapter")
    found = evaluated(trainer, 4)
    rewards = []
    for row in pairs(40)[-HELD_OUT:]:
        with torch.no_grad():
            each = [outputs(trainer.model, ids, places) for ids, places, _ in texts("reward", row)]
        rewards.append([float(reward) for reward in each])
    chosen, rejected = zip(*rewards, strict=True)
    right, half = shares(chosen, rejected)
    both = chosen + rejected
    wanted = {
        "eval_loss": sum(math.log1p(math.exp(r - c)) for c, r in rewards) / HELD_OUT,
        "eval_accuracy": right,
        "eval_pair_accuracy": half,
        "eval_min_reward": min(both),
        "eval_mean_reward": sum(both) / len(both),
        "eval_max_reward": max(both),
        "eval_margin": sum(c - r for c, r in rewards) / HELD_OUT,
    }
    assert 0 < right < 1
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, **NEAR)


@pytest.mark.parametrize("packed", [False, True])
def test_supervised_metrics_are_means_over_all_tokens(packed):
    trainer = build("sft", "packed" if packed else "padded")
    found = evaluated(trainer, 2)
    _, policy = start_and_moved(trainer)
    nats, right, entropies = [], [], []
    for row in PAIRS:
        (chosen, _), start = written(row)
        with torch.no_grad():
            logps = (
                policy(input_ids=torch.tensor([chosen])).logits[0, start - 1 : -1].log_softmax(-1)
            )
        answer = torch.tensor(chosen[start:])
        nats.append(-logps.gather(1, answer[:, None])[:, 0])
        right.append((logps.argmax(-1) == answer).float())
        entropies.append(-(logps.exp() * logps).sum(-1))
    wanted = {
        "eval_loss": float(torch.cat(nats).mean()),
        "eval_mean_token_accuracy": float(torch.cat(right).mean()),
        "eval_entropy": float(torch.cat(entropies).mean()),
    }
    assert {key: found[key] for key in wanted} == pytest.approx(wanted, **NEAR)


def test_a_tie_is_half_a_pair():
    chosen, rejected = torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 0.0, 3.0])
    assert pair_accuracy(chosen, rejected) == pair_accuracy(chosen.numpy(), rejected.numpy()) == 0.5
    assert pair_accuracy(chosen[:2], rejected[:2]) == 0.75


# --- while training, and with what a user may pass -----------------------------------------------


def test_an_evaluation_at_the_end_of_an_epoch_measures_all():
    """Training's loader then stands at its short last batch, by which accelerate would cut."""
    epoch = {"num_train_epochs": 1, "max_steps": -1, "learning_rate": 0.1, "logging_steps": 1}
    trainer = build_alignment("orpo", rows=PAIRS, **epoch)
    trainer.eval_dataset = trainer.train_dataset
    trainer.args.eval_strategy = IntervalStrategy.EPOCH
    trainer.train()
    (during,) = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    _, policy = start_and_moved(trainer)
    means = [[float(t.mean()) for t in side] for side in logps_of_sides(policy)]
    right, half = shares(*means)
    wanted = {
        "eval_rewards/chosen": trainer.args.beta * sum(means[0]) / HELD_OUT,
        "eval_rewards/accuracies": right,
        "eval_pair_accuracy": half,
    }
    assert 0 < right < 1
    assert {key: during[key] for key in wanted} == pytest.approx(wanted, **NEAR)


def test_another_evaluation_set_has_its_own_name():
    trainer = build("dpo", "chapter")
    found = trainer.evaluate(Dataset.from_list(PAIRS), metric_key_prefix="eval_other")
    assert found["eval_other_loss"] == pytest.approx(evaluated(trainer, 9)["eval_loss"])


def test_label_smoothing_is_left_to_the_trainer():
    """Its loss reads logits, which are not kept: a mean over batches, so right for one batch."""
    trainer = supervised(False, label_smoothing_factor=0.1, per_device_eval_batch_size=HELD_OUT)
    losses = []
    for row in PAIRS:
        (chosen, _), start = written(row)
        with torch.no_grad():
            logits = trainer.model(input_ids=torch.tensor([chosen])).logits[0, start - 1 : -1]
        answer = torch.tensor(chosen[start:])
        cross_entropy = torch.nn.functional.cross_entropy
        losses.append(cross_entropy(logits, answer, label_smoothing=0.1, reduction="none"))
    loss = float(torch.cat(losses).mean())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(loss, **NEAR)


@pytest.mark.parametrize("case", [("dpo", "trl"), ("sft", "padded"), ("orpo", "chapter")])
def test_metrics_of_the_users_own_are_computed_beside_ours(case):
    trainer = build(*case)
    wanted = evaluated(trainer, 4)
    trainer.compute_metrics = lambda prediction: {"own": 0.25}
    assert evaluated(trainer, 4) == {**wanted, "eval_own": 0.25}


@pytest.mark.parametrize("which", ["chapter", "trl"])
def test_the_reference_reads_batch_by_batch(which):
    trainer, rows = build("dpo", which), []

    def note(module, args, kwargs):
        rows.append(len(kwargs["input_ids"]))

    trainer.ref_model.register_forward_pre_hook(note, with_kwargs=True)
    evaluated(trainer, 4)
    assert rows == [8, 8, 2]  # both sides of four, four and one pair
