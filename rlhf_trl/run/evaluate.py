"""What `rlhf-trl evaluate` does: models on the prompts and rewards of a run, in one table."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_trl.data.examples import Examples
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import Score, Scores, shown
from rlhf_trl.evaluation.side_by_side import Policy, compare, table
from rlhf_trl.output import write_lines
from rlhf_trl.reward_models.metrics import prompt_groups
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rewards.verifiers import task_metrics
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.held_rows import HeldRows
from rlhf_trl.run.named import Named, config_of, load_run, named
from rlhf_trl.run.policy_gradients import load_reward_functions
from rlhf_trl.run.rejection_sampling import correctness_of


@dataclass
class _Run:
    """The run whose held-out prompts the models answer."""

    path: str  # of its config
    loaded: Loaded
    data: Examples
    rows: Sequence[dict[str, Any]]  # held out

    def load(self, model: Named) -> Policy:
        """Load a model as the run's policy."""
        return model.load(self.loaded, self.data.conversational)


@dataclass
class _Results:
    """What the models answered, by the word for each; values are by held-out row."""

    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # greedy, sampled
    scores: dict[str, Scores] = field(default_factory=dict)
    # by model and score: how rows are weighted in its mean, where not all of them count alike
    weights: dict[str, dict[str, list[int]]] = field(default_factory=dict)


def evaluate(
    models: Sequence[str],
    answers: str,
    config: str | None = None,
    words: Sequence[str] = (),
    reward_model: str | None = None,
    reference: str | None = None,
    as_json: bool = False,
) -> str:
    """Let models answer the same held-out prompts, and return one table (or JSON) of their scores.

    Where the held-out rows have completions (pairs, or answers to learn), the models also read
    these, and get what training measures on them (`HeldRows`).

    Args:
        models: runs, checkpoints, folders or hub names.
        answers: the JSONL file to write, with the answers of all models to each prompt.
        config: whose prompts and rewards are taken; None: the first run's.
        words: options of that config, as on a recipe's command line.
        reward_model: scores the answers, beside the rewards.
        reference: the model that the KL of sampled answers is measured to.
        as_json: return JSON in place of a table.
    """
    if len(set(models)) < len(models):
        raise InputError(f"a model is named twice ({', '.join(models)}); name each once.")
    if Path(answers).exists():
        raise InputError(f"--answers: {answers} exists; name a new file.")
    policies = [named(model) for model in models]
    reference_model = named(reference) if reference else None
    judge = named(reward_model, reward_model=True) if reward_model else None
    run = _run_of(policies, config, words)
    reference_policy = run.load(reference_model) if reference_model else None
    held = HeldRows(run.loaded, run.data, run.rows)
    start = run.loaded.model.model_name_or_path
    if held.compares_with_start:  # rewards of preference losses are relative to it
        held.read_by_start(run.load(Named(start, start)))
    results = _answer(policies, run, held, judge, reference_policy)
    _write_answers(answers, run.rows, results)

    groups = prompt_groups([row["prompt"] for row in run.rows])
    numbers = compare(results.scores, groups, results.weights)
    if as_json:
        content = {
            "config": run.path,
            "held_out": len(run.rows),
            "reference": reference,
            "answers": answers,
            "models": numbers,
        }
        return json.dumps(content, indent=2)
    legend = ""  # further parts of the line that `table` ends with
    if held.compares_with_start:
        legend += f"; rewards: relative to {start}, the run's start"
    if reference:
        legend += f"; sampled kl: to {reference}, nats per answer"
    heading = f"{len(run.rows)} held-out {held.noun or 'prompts'} of {run.path}"
    return f"{heading}\n\n{table(numbers)}{legend}\nall answers, side by side, are in {answers}"


def _run_of(policies: Sequence[Named], config: str | None, words: Sequence[str]) -> _Run:
    """Load the run of a config, by default the first policy's; refuse one without held-out rows."""
    path = config_of(policies, config)
    if not path:
        raise InputError(
            f"{policies[0].word} is of no run here, whose prompts could be asked; name one with "
            "--config."
        )
    loaded, data = load_run(path, words)
    rows = data.tasks.held_out if data.tasks else list(data.held_out or [])
    if not rows:
        raise InputError(
            f"{path} holds no prompts out; name some with --dataset.eval_path or .eval_split."
        )
    return _Run(path, loaded, data, rows)


def _answer(
    models: Sequence[Named],
    run: _Run,
    held: HeldRows,
    judge: Named | None,
    reference: Policy | None,
) -> _Results:
    """Let one model after the other answer and be scored.

    Args:
        models: what to load.
        run: whose held-out rows they answer, and whose rewards score them.
        held: the same rows, where they have completions for the models to read.
        judge: a reward model that scores the answers, too.
        reference: the policy that the KL of sampled answers is measured to.
    """
    results = _Results()
    rewards, scorers = None, {}
    for model in models:
        policy = run.load(model)
        if rewards is None:  # loaded once, with the first model, and used for all
            tokenizer = policy.processing_class
            rewards = load_reward_functions(run.loaded.own, run.loaded.trl, run.data, tokenizer)
            if judge:
                scorer = load_reward_model(judge.path, tokenizer, run.loaded.trl)
                scorers[f"scored_by_{Path(judge.word).name}"] = scorer
        # what `Policy.scored` reads
        policy.held_out = run.rows
        policy.scores = _scores_of(run.loaded, run.data)
        policy.rewards = rewards
        policy.weights = getattr(run.loaded.trl, "reward_weights", None)
        policy.scorers = scorers
        policy.check(run.rows)
        (greedy, sampled), scores = policy.scored()
        if reference:
            scores["sampled_kl"] = policy.kl(reference, sampled)
        if held.noun:
            scores_of_rows, results.weights[model.word] = held.scores(policy)
            scores = scores_of_rows | scores  # they come first in the table
        results.scores[model.word] = scores
        results.answers[model.word] = shown(run.rows, greedy, sampled)
        del policy  # before the next one is loaded
    return results


def _write_answers(path: str, rows: Sequence[dict[str, Any]], results: _Results) -> None:
    """Write one line of JSON for each row: its prompt, and by model the answers and scores."""
    lines = []
    for number, row in enumerate(rows):
        line: dict[str, Any] = {"prompt": row["prompt"]}
        for model, answers in results.answers.items():
            scores = {name: values[number] for name, values in results.scores[model].items()}
            line[model] = {**answers[number], "scores": scores}
        lines.append(line)
    write_lines(path, lines, ensure_ascii=False)


def _scores_of(loaded: Loaded, data: Examples) -> dict[str, Score]:
    """Return what scores answers in the run's own evaluation, beside its rewards."""
    if data.tasks:
        return task_metrics(data.tasks)
    correctness = correctness_of(loaded.own, data) if hasattr(loaded.own, "correctness") else None
    return {} if correctness is None else {correctness.__name__: correctness}
