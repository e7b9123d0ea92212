"""What `rlhf-trl evaluate` does: models on the prompts and rewards of a run, in one table."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_trl.data.verifiers import task_metrics
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import shown
from rlhf_trl.evaluation.side_by_side import compare, table
from rlhf_trl.output import write_whole
from rlhf_trl.reward_models.as_reward import load_reward_model
from rlhf_trl.reward_models.metrics import prompt_groups
from rlhf_trl.run.named import config_of, load, load_run, named
from rlhf_trl.run.train import load_reward_functions


def evaluate(
    models: Sequence[str],
    answers: str,
    *,
    config: str | None = None,
    words: Sequence[str] = (),
    reward_model: str | None = None,
    reference: str | None = None,
    as_json: bool = False,
) -> str:
    """Let models answer the same held-out prompts, and return one table of their scores.

    Args:
        models: see `named`; differences are from the first.
        answers: JSONL file to write: every prompt with all answers and scores.
        config: of which run the prompts and rewards are; None: that of the first model.
        words: options that change it, as on a recipe's command line.
        reward_model: scores the answers, too.
        reference: what the KL of sampled answers is measured to.
        as_json: whether to return JSON.

    Raises:
        InputError: a name that names no model, a config or data that cannot be read, nothing held
            out, or a file of answers that exists.
    """
    if len(set(models)) < len(models):
        raise InputError(f"a model is named twice ({', '.join(models)}); name each once.")
    if Path(answers).exists():
        raise InputError(f"--answers: {answers} exists; name a new file.")
    found = [named(word) for word in models]
    other = named(reference) if reference else None
    judge = named(reward_model, reward_model=True) if reward_model else None
    path = config_of(found, config)
    loaded, data = load_run(path, words)
    rows = data.tasks.held_out if data.tasks else (data.held_out or [])
    if not rows:
        raise InputError(
            f"{path} holds nothing out; name prompts that were not trained on with "
            "--dataset.eval_path FILE or --dataset.eval_split SPLIT."
        )
    rows, rewards, scorers = list(rows), None, {}
    base = load(other, loaded, data.conversational) if other else None
    scores, said = {}, {}
    for model in found:
        policy = load(model, loaded, data.conversational)
        if rewards is None:  # they are the same for all
            tokenizer, args = policy.processing_class, loaded.trl
            rewards = load_reward_functions(loaded.own, args, data, tokenizer)
            if judge:
                scorer = load_reward_model(judge.path, tokenizer, args)
                scorers = {f"scored_by_{Path(judge.word).name}": scorer}
        policy.held_out, policy.scores = rows, task_metrics(data.tasks) if data.tasks else {}
        policy.rewards, policy.weights = rewards, getattr(loaded.trl, "reward_weights", None)
        policy.scorers = scorers
        policy.check(rows)
        completions, scores[model.word] = policy.scored()
        if base:
            scores[model.word]["sampled_kl"] = policy.kl(base, completions[1])
        said[model.word] = shown(rows, *completions)
    _write(answers, rows, said, scores)
    numbers = compare(scores, prompt_groups([row["prompt"] for row in rows]))
    if as_json:
        told = {"config": path, "held_out": len(rows), "reference": reference, "answers": answers}
        return json.dumps({**told, "models": numbers}, indent=2)
    kl = f"\nsampled kl: to {reference}, in nats per answer" if reference else ""
    return (
        f"{len(rows)} held-out prompts of {path}\n\n{table(numbers)}{kl}\n"
        f"all answers, side by side, are in {answers}"
    )


def _write(
    path: str,
    rows: Sequence[dict[str, Any]],
    said: dict[str, list[dict[str, Any]]],
    scores: dict[str, Any],
) -> None:
    """Write a line for each row: prompt, right answer, and what each model says and gets."""
    lines = []
    for n, row in enumerate(rows):
        first = next(iter(said.values()))[n]
        each = {
            word: {
                "greedy": answers[n]["greedy"],
                "sampled": answers[n]["sampled"],
                "scores": {name: values[n] for name, values in scores[word].items()},
            }
            for word, answers in said.items()
        }
        told = {"prompt": row["prompt"], "answer": first["answer"], "models": each}
        lines.append(json.dumps(told, ensure_ascii=False))
    text = "".join(f"{line}\n" for line in lines)
    write_whole(path, lambda part: part.write_text(text, encoding="utf-8"))
