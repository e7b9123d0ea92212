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
from rlhf_trl.evaluation.held_out import Score, Scores, answer_lines
from rlhf_trl.evaluation.probes import (
    Probe,
    passes,
    probe_file,
    probe_scores,
    read_probes,
    rows_of,
)
from rlhf_trl.evaluation.side_by_side import Numbers, Policy, Samples, compare, table
from rlhf_trl.evaluation.tables import SCORED_BY
from rlhf_trl.output import write_lines, write_whole
from rlhf_trl.reward_models.metrics import prompt_groups
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rewards.verifiers import task_metrics
from rlhf_trl.rollouts.generate import Completions
from rlhf_trl.run.chat import PROMPTS_READ, system_message
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.held_rows import HeldRows
from rlhf_trl.run.named import Named, config_of, load_run, named, with_checkpoints
from rlhf_trl.run.policy_gradients import load_reward_functions
from rlhf_trl.run.rejection_sampling import correctness_of


@dataclass
class _Run:
    """The run whose held-out prompts the models answer, or as whose prompts probes are asked."""

    path: str  # of its config
    loaded: Loaded
    data: Examples
    rows: Sequence[dict[str, Any]]  # held out, or the probes
    scores: dict[str, Score]  # of answers to them, beside rewards
    rewarded: bool = True  # whether the run's rewards score them

    def load(self, model: Named) -> Policy:
        """Load a model as the run's policy."""
        return model.load(self.loaded, self.data.conversational)


@dataclass
class _Results:
    """What the models answered, by the word for each; all lists are by held-out row."""

    texts: dict[str, list[dict[str, Any]]] = field(default_factory=dict)  # see `shown`
    samples: dict[str, list[list[dict[str, Any]]]] = field(default_factory=dict)  # see `_sampled`
    scores: dict[str, Scores] = field(default_factory=dict)
    # by model and score: how rows are weighted in its mean, where not all of them count alike
    weights: dict[str, dict[str, list[int]]] = field(default_factory=dict)

    def lines(self, rows: Sequence[dict[str, Any]], beside: Sequence[str]) -> list[dict[str, Any]]:
        """Return the file of answers: for each row its prompt, and by model what it answered.

        `beside` names columns of the rows that stand there, too.
        """
        lines = []
        for number, row in enumerate(rows):
            line: dict[str, Any] = {"prompt": row["prompt"]}
            for model, texts in self.texts.items():
                scores = {name: values[number] for name, values in self.scores[model].items()}
                samples = self.samples[model][number]
                columns = {name: row[name] for name in beside}
                line[model] = {**texts[number], **columns, "scores": scores, "samples": samples}
            lines.append(line)
        return lines

    def numbers(self, rows: Sequence[dict[str, Any]]) -> dict[str, Numbers]:
        """Return means, errors and differences, by model and score."""
        groups = prompt_groups([row["prompt"] for row in rows])
        samples = {model: _by_score(by_row) for model, by_row in self.samples.items()}
        return compare(self.scores, groups, self.weights, samples)


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
    probes: str | None = None,
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
        probes: a file of prompts to answer in place of the held-out ones (see
            `rlhf_trl.evaluation.probes`), scored by their own checks, not by the run's rewards.
    """
    if samples < 1:
        raise InputError(f"--samples is {samples}; write 1 or more.")
    models = with_checkpoints(models)
    if len(set(models)) < len(models):
        raise InputError(f"a model is named twice ({', '.join(models)}); name each once.")
    _check_new(answers, markdown)
    probe_lines = read_probes(probe_file(probes)) if probes else []
    policies = [named(model) for model in models]
    reference_model = named(reference) if reference else None
    judge = named(reward_model, reward_model=True) if reward_model else None
    run = run_of(policies, config, words, probe_lines)
    reference_policy = run.load(reference_model) if reference_model else None
    held = HeldRows(run.loaded, run.data, run.rows)
    start = run.loaded.model.model_name_or_path
    if held.compares_with_start:  # rewards of preference losses are relative to it
        held.read_by_start(run.load(Named(word=start, path=start)))
    results = _answer(policies, run, held, judge, reference_policy, samples)
    lines = results.lines(run.rows, ["category"] if probes else [])
    write_lines(answers, lines, ensure_ascii=False)
    numbers = results.numbers(run.rows)
    heading = f"{len(run.rows)} held-out {held.noun or 'prompts'} of {run.path}"
    notes = _notes(samples, start if held.compares_with_start else None, reference)
    if probes:
        heading = f"{len(run.rows)} probes of {probes}, asked like prompts of {run.path}"
        notes += _unchecked(run.rows)
    if markdown:
        write_whole(markdown, as_markdown(heading, numbers, notes, lines))
    if as_json:
        content = {
            "config": run.path,
            "held_out": len(run.rows),
            "reference": reference,
            "answers": answers,
            "samples": samples,
            "probes": probes,
            "models": numbers,
        }
        return json.dumps(content, indent=2)
    files = f"all answers, side by side, are in {answers}"
    if markdown:
        files += f", some of them in {markdown}"
    return f"{heading}\n\n{table(numbers)}{notes}\n{files}"


def _notes(samples: int, start: str | None, reference: str | None) -> str:
    """Return what follows the legend of the table.

    Args:
        samples: how many sampled answers each prompt got.
        start: the model that rewards of preference losses are relative to, if there are any.
        reference: the model that the KL is measured to, if any.
    """
    notes = ""
    if samples > 1:
        notes += f"; sampled: {samples} answers to each prompt"
    if start:
        notes += f"; rewards: relative to {start}, the run's start"
    if reference:
        notes += f"; sampled kl: to {reference}, nats per answer; kl k1: the answer's log-ratio"
    return notes


def _unchecked(rows: Sequence[dict[str, Any]]) -> str:
    """Return how many probes have no check, for the notes."""
    count = sum(passes("", row) is None for row in rows)
    return f"; without a check, for a judge: {count} of {len(rows)} probes" if count else ""


def _check_new(answers: str, markdown: str | None) -> None:
    """Refuse to write to files that exist, or both to one."""
    for option, path in (("--answers", answers), ("--markdown", markdown)):
        if path and Path(path).exists():
            raise InputError(f"{option}: {path} exists; name a new file.")
    if markdown and Path(markdown).resolve() == Path(answers).resolve():
        raise InputError(f"--markdown: {markdown} is the file of --answers; name another.")


def run_of(
    policies: Sequence[Named],
    config: str | None,
    words: Sequence[str],
    probes: Sequence[Probe] = (),
) -> _Run:
    """Load the run whose held-out rows the models answer.

    Args:
        policies: the models, of which none is loaded yet.
        config: the run's; None: that of the run that made the first policy.
        words: options of the recipe, which change the config.
        probes: prompts that take the place of the run's held-out rows, if there are any.

    Raises:
        InputError: the first policy comes from no run, or nothing is held out.
    """
    path = config_of(policies, config)
    if not path:
        raise InputError(
            f"{policies[0].word} is of no run here, whose prompts could be asked; name one with "
            "--config."
        )
    loaded, data = load_run(path, words)
    if probes:
        rows = _with_prompts_like(data, rows_of(probes))
        return _Run(path, loaded, data, rows, probe_scores(rows), rewarded=False)
    rows = data.tasks.held_out if data.tasks else list(data.held_out or [])
    if not rows:
        raise InputError(
            f"{path} holds no prompts out; name some with --dataset.eval_path or .eval_split."
        )
    return _Run(path, loaded, data, rows, _scores_of(loaded, data))


def _with_prompts_like(data: Examples, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows whose prompts are texts with prompts like those of a run's data.

    If the run's prompts are messages, these become messages, too, with the commonest system message
    of the training rows. The chat template gets the arguments that it gets for the first of them.
    """
    prompts = data.train["prompt"][:PROMPTS_READ]
    system = system_message(prompts)[0] if data.conversational else ""
    start = [{"role": "system", "content": system}] if system else []
    columns = {}
    if "chat_template_kwargs" in data.train.column_names:
        columns["chat_template_kwargs"] = data.train[0]["chat_template_kwargs"]
    rows_like_data = []
    for row in rows:
        prompt: Any = row["prompt"]
        if data.conversational:
            prompt = [*start, {"role": "user", "content": prompt}]
        rows_like_data.append({**row, **columns, "prompt": prompt})
    return rows_like_data


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
        # The first policy's tokenizer does for all policies, so rewards and judge are loaded once:
        # they read texts, and of the tokenizer they only check that it has the same characters.
        if rewards is None:
            tokenizer = policy.processing_class
            rewards = []
            if run.rewarded:
                rewards = load_reward_functions(run.loaded.own, run.loaded.trl, run.data, tokenizer)
            if judge:
                scorer = load_reward_model(judge.path, tokenizer, run.loaded.trl)
                scorers[f"{SCORED_BY}{judge.name}"] = scorer
        # what `Policy.all_scores` reads
        policy.held_out = run.rows
        policy.scores = run.scores
        policy.rewards = rewards
        policy.weights = getattr(run.loaded.trl, "reward_weights", None)
        policy.scorers = scorers
        policy.check(run.rows)  # refuses prompts that are too long for it
        greedy, first_sample = policy.complete(run.rows)
        scores = policy.all_scores(greedy)
        sampled = [first_sample, *(policy.draw(number) for number in range(1, samples))]
        samples_by_row = _sampled(policy, sampled, reference)
        for name, values_by_row in _by_score(samples_by_row).items():
            scores[name] = [_mean(values) for values in values_by_row]
        if held.noun:  # the rows have completions of their own, which the model reads
            scores_of_rows, weights = held.scores(policy)
            scores = scores_of_rows | scores  # those of the rows come first in the table
            results.weights[model.word] = weights
        results.scores[model.word] = scores
        results.samples[model.word] = samples_by_row
        results.texts[model.word] = answer_lines(run.rows, greedy, first_sample)
        del policy  # before the next one is loaded
    return results


def _sampled(
    policy: Policy, sampled: Sequence[Completions], reference: Policy | None
) -> list[list[dict[str, Any]]]:
    """Return the samples of each row with their scores, as they go into the file of answers.

    Args:
        policy: who answered.
        sampled: answers to all rows, once or several times.
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
                "finished": completion.finished,  # if not, it was cut off at the length limit
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


def _scores_of(loaded: Loaded, data: Examples) -> dict[str, Score]:
    """Return what scores answers in the run's own evaluation, beside its rewards."""
    if data.tasks:
        return task_metrics(data.tasks)
    correctness = correctness_of(loaded.own, data) if hasattr(loaded.own, "correctness") else None
    return {} if correctness is None else {correctness.__name__: correctness}
