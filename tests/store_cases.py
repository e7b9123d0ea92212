"""Short runs that keep a record, and what their loss saw of the same completions."""

import json
import sqlite3
from collections import Counter
from contextlib import closing

import policy_gradient_cases
import ppo_cases
from policy_gradient_cases import CACHE, END, LIMIT, ROWS, WEIGHTS, is_right, is_shaped

from rlhf_trl.rollouts.store import Rollouts, Store
from rlhf_trl.tiny.tokenizer import build_tokenizer

BATCH, GENERATIONS = 16, 3
# those whose baseline is not the mean of the group
NOT_CENTERED = ("reinforce", "ppo")
KINDS = [*ROWS, ("ppo", "chapter"), ("ppo", "code"), ("dapo", "replaced")]
GRID = [(*kind, n, steps) for kind in KINDS for n in (1, 2) for steps in (1, 10)]


def record(name, which, iterations, logging_steps, folder, processes=1):
    """Train for three generations of two micro-batches; return what the loss saw.

    That is, for each completion and each time, its ids, those of its prompt and its advantage.
    """
    config = {
        "num_iterations": iterations,
        "logging_strategy": "steps",
        "logging_steps": logging_steps,
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": BATCH // 2 // processes,
        "max_steps": GENERATIONS * iterations,
        "optim": "sgd",
        "learning_rate": 1e-3,
    }
    if name == "ppo":
        trainer = ppo_cases.build(formulation=which, **config)
        ppo_cases.unsettle(trainer)
    else:
        if which == "replaced":
            which = "chapter"  # small groups often lack contrast
            config |= {"dynamic_sampling_rounds": 2, "num_generations": 2}
        trainer = policy_gradient_cases.build(name, which, **config)
    trainer.rollouts = Store(folder, Rollouts(), {"name": name})
    seen, compute = [], trainer._compute_loss

    def watched(model, inputs):
        loss = compute(model, inputs)
        advantages, mask = inputs["advantages"].double(), inputs["completion_mask"]
        if advantages.dim() == 2:
            advantages = (advantages * mask).sum(1) / mask.sum(1)
        for n, advantage in enumerate(advantages.tolist()):
            prompt, completion = (
                inputs[f"{part}_ids"][n][inputs[f"{part}_mask"][n].bool()].tolist()
                for part in ("prompt", "completion")
            )
            seen.append((prompt, completion, advantage))
        return loss

    trainer._compute_loss = watched
    trainer.train()
    trainer.rollouts.close()
    return seen


def rows_of(path, split="train"):
    """Return what a file holds of a split, in order, as dictionaries."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        found = connection.execute(
            "SELECT * FROM rollouts JOIN prompts ON id = prompt_id WHERE split = ? "
            "ORDER BY generation, sample",
            (split,),
        )
        return [{**row, "rewards": json.loads(row["rewards"])} for row in found]


def rounded(value):
    return None if value is None else round(value, 5)


def check(case, path, seen):
    """Compare a record with what the loss saw, over all processes, and with the rewards by hand."""
    name, which, iterations, _ = case
    rows = rows_of(path)
    places = [(row["generation"], row["sample"]) for row in rows]
    assert places == [(g, s) for g in range(GENERATIONS) for s in range(BATCH)]
    size = 1 if name == "ppo" else 2 if which == "replaced" else 4
    tokenizer = build_tokenizer()
    wanted = []
    for prompt, ids, advantage in seen:
        reward = WEIGHTS[0] * is_right(ids) + WEIGHTS[1] * is_shaped(ids)
        penalty = None
        if name.startswith("dapo") and which != "trl":
            penalty = -min(max((len(ids) - (LIMIT - CACHE)) / CACHE, 0), 1)
        text = tokenizer.decode(ids, skip_special_tokens=True)
        rewards = is_right(ids), is_shaped(ids)
        finished = int(ids[-1] == END)
        asked = tokenizer.decode(prompt, skip_special_tokens=True)
        told = asked, text, len(ids), finished, rewards, round(reward, 5)
        told += (penalty, rounded(None if penalty is None else reward + penalty))
        wanted.append((*told, round(advantage, 4) + 0.0))
    found = [
        (
            *(row["prompt"], row["completion"], row["tokens"], row["finished"]),
            *((row["rewards"]["right"], row["rewards"]["shaped"]), round(row["reward"], 5)),
            row["rewards"].get("overlong_penalty"),
            rounded(row["rewards"].get("reward_with_penalties")),
            round(row["advantage"], 4) + 0.0,
        )
        for row in rows
        for _ in range(iterations)
    ]
    assert len(wanted) == len(found)
    assert Counter(found) == Counter(wanted)
    assert any(row["advantage"] for row in rows)
    groups = {}
    for row in rows:
        assert row["step"] == row["generation"] * iterations
        assert row["group_id"] == row["sample"] // size
        groups.setdefault((row["generation"], row["group_id"]), []).append(row)
    for group in groups.values():
        assert len(group) == size and len({row["prompt"] for row in group}) == 1
        if name not in NOT_CENTERED:
            assert abs(sum(row["advantage"] for row in group)) < 1e-4
    replaced = rows_of(path, "train-replaced")
    assert bool(replaced) == (which == "replaced")
    for row in replaced:
        assert row["advantage"] is None and row["generation"] < GENERATIONS
    if which == "replaced":
        right = Counter()
        for row in replaced:
            right[row["generation"], row["group_id"]] += row["rewards"]["right"]
        assert {*right.values()} <= {0, 2}  # all wrong, or all right
