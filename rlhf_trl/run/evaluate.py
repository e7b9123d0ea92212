"""What `rlhf-trl evaluate` does: models on the prompts and rewards of a run, in one table."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_trl.data.examples import Examples
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.answer_kl import kl_of_answers
from rlhf_trl.evaluation.answers_markdown import as_markdown
from rlhf_trl.evaluation.held_out import Score, Scores, shown
from rlhf_trl.evaluation.side_by_side import Policy, Samples, compare, table
from rlhf_trl.output import write_lines, write_whole
from rlhf_trl.reward_models.metrics import prompt_groups
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rewards.verifiers import task_metrics
from rlhf_trl.rollouts.generate import Completions
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.held_rows import HeldRows
from rlhf_trl.run.named import Named, config_of, load_run, named, with_checkpoints
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

    answers: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # as in the file
    scores: dict[str, Scores] = field(default_factory=dict)
    # by model and sampled score: the values of all samples of each row
    samples: dict[str, dict[str, Samples]] = field(default_factory=dict)
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
    samples: int = 1,
    markdown: str | None = None,
) -> str:
    """Let models answer the same held-out prompts, and return one table (or JSON) of their scores.

    Where the held-out rows have completions (pairs, or answers to learn), the models also read
    these, and get what training measures on them (`HeldRows`).

    Args:
        models: runs, checkpoints (also as a pattern: `with_checkpoints`), folders or hub names.
        answers: the JSONL file to write, with the answers of all models to each prompt.
        config: whose prompts and rewards are taken; None: the first run's.
        words: options of that config, as on a recipe's command line.
        reward_model: scores the answers, beside the rewards.
        reference: the model that the KL of sampled answers is measured to.
        as_json: return JSON in place of a table.
        samples: how many answers of each model to each prompt are sampled. The first one is that of
            the run's own evaluation; see `Policy.draw` for the others.
        markdown: a file to write with the table and some of the answers.
    """
    if samples < 1:
        raise InputError(f"--samples is {samples}; write 1 or more.")
    models = with_checkpoints(models)
    if len(set(models)) < len(models):
        raise InputError(f"a model is named twice ({', '.join(models)}); name each once.")
    _check_new(answers, markdown)
    policies = [named(model) for model in models]
    reference_model = named(reference) if reference else None
    judge = named(reward_model, reward_model=True) if reward_model else None
    run = _run_of(policies, config, words)
    reference_policy = run.load(reference_model) if reference_model else None
    held = HeldRows(run.loaded, run.data, run.rows)
    start = run.loaded.model.model_name_or_path
    if held.compares_with_start:  # rewards of preference losses are relative to it
        held.read_by_start(run.load(Named(start, start)))
    results = _answer(policies, run, held, judge, reference_policy, samples)
    lines = _lines(run.rows, results)
    write_lines(answers, lines, ensure_ascii=False)

    groups = prompt_groups([row["prompt"] for row in run.rows])
    numbers = compare(results.scores, groups, results.weights, results.samples)
    notes = ""  # what follows the legend of the table
    if samples > 1:
        notes += f"; sampled: {samples} answers to each prompt"
    if held.compares_with_start:
        notes += f"; rewards: relative to {start}, the run's start"
    if reference:
        notes += f"; sampled kl: to {reference}, nats per answer; k1: estimated by its log-ratio"
    heading = f"{len(run.rows)} held-out {held.noun or 'prompts'} of {run.path}"
    if markdown:
        write_whole(markdown, as_markdown(heading, numbers, notes, lines))
    if as_json:
        content = {
            "config": run.path,
            "held_out": len(run.rows),
            "reference": reference,
            "answers": answers,
            "samples": samples,
            "models": numbers,
        }
        return json.dumps(content, indent=2)
    files = f"all answers, side by side, are in {answers}"
    if markdown:
        files += f", some in {markdown}"
    return f"{heading}\n\n{table(numbers)}{notes}\n{files}"


def _check_new(answers: str, markdown: str | None) -> None:
    """Refuse to write to files that exist, or both to one."""
    for option, path in (("--answers", answers), ("--markdown", markdown)):
        if path and Path(path).exists():
            raise InputError(f"{option}: {path} exists; name a new file.")
    if markdown and Path(markdown).resolve() == Path(answers).resolve():
        raise InputError(f"--markdown: {markdown} is the file of --answers; name another.")


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
    samples: int,
) -> _Results:
    """Let one model after the other answer and be scored.

    Args:
        models: what to load.
        run: whose held-out rows they answer, and whose rewards score them.
        held: the same rows, where they have completions for the models to read.
        judge: a reward model that scores the answers, too.
        reference: the policy that the KL of sampled answers is measured to.
        samples: how many sampled answers each row gets.
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
                scorers[f"scored_by_{judge.name}"] = scorer
        # what `Policy.all_scores` reads
        policy.held_out = run.rows
        policy.scores = _scores_of(run.loaded, run.data)
        policy.rewards = rewards
        policy.weights = getattr(run.loaded.trl, "reward_weights", None)
        policy.scorers = scorers
        policy.check(run.rows)
        greedy, first_sample = policy.complete(run.rows)
        scores = policy.all_scores(greedy)
        sampled = [first_sample]
        sampled += [policy.draw(number) for number in range(1, samples)]
        by_row = _scored_samples(policy, sampled, reference)
        of_samples = _by_score(by_row)
        scores |= {name: [_mean(row) for row in rows] for name, rows in of_samples.items()}
        if held.noun:
            scores_of_rows, results.weights[model.word] = held.scores(policy)
            scores = scores_of_rows | scores  # they come first in the table
        results.scores[model.word] = scores
        results.samples[model.word] = of_samples
        texts = shown(run.rows, greedy, first_sample)
        results.answers[model.word] = [
            {
                **row_texts,
                "scores": {name: values[row] for name, values in scores.items()},
                "samples": by_row[row],
            }
            for row, row_texts in enumerate(texts)
        ]
        del policy  # before the next one is loaded
    return results


def _scored_samples(
    policy: Policy, sampled: Sequence[Completions], reference: Policy | None
) -> list[list[dict[str, Any]]]:
    """Return the samples of each row, with their scores, as they go into the file of answers.

    Args:
        policy: who answered.
        sampled: answers to all rows, several times.
        reference: the policy that their KL is measured to.
    """
    by_row: list[list[dict[str, Any]]] = [[] for _ in policy.held_out]
    for completions in sampled:
        scores = policy.all_scores(completions)
        if reference:
            scores |= kl_of_answers(policy, reference, completions)
        for row, completion in enumerate(completions):
            sample = {
                "text": completion.text,
                "finished": completion.finished,  # otherwise cut off at the length limit
                "tokens": len(completion.ids),
                "scores": {name: values[row] for name, values in scores.items()},
            }
            by_row[row].append(sample)
    return by_row


def _by_score(by_row: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, Samples]:
    """Return the values of the samples of each row, by the name that a score has in the table."""
    return {
        f"sampled_{name}": [[sample["scores"][name] for sample in row] for row in by_row]
        for name in by_row[0][0]["scores"]
    }


def _mean(values: Sequence[float | None]) -> float | None:
    """Return the mean of the values that are not None; that of a single one as it is."""
    applied = [value for value in values if value is not None]
    if len(values) == 1 or not applied:
        return values[0]
    return sum(applied) / len(applied)


def _lines(rows: Sequence[dict[str, Any]], results: _Results) -> list[dict[str, Any]]:
    """Return what the file of answers has for each row: its prompt, and each model's answers."""
    lines = []
    for number, row in enumerate(rows):
        answers = {model: by_row[number] for model, by_row in results.answers.items()}
        lines.append({"prompt": row["prompt"], **answers})
    return lines


def _scores_of(loaded: Loaded, data: Examples) -> dict[str, Score]:
    """Return what scores answers in the run's own evaluation, beside its rewards."""
    if data.tasks:
        return task_metrics(data.tasks)
    correctness = correctness_of(loaded.own, data) if hasattr(loaded.own, "correctness") else None
    return {} if correctness is None else {correctness.__name__: correctness}
