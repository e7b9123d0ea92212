"""What `rlhf-trl evaluate` does: models on the prompts and rewards of a run, in one table."""

import json
from collections.abc import Sequence
from pathlib import Path

from rlhf_trl.data.examples import Examples
from rlhf_trl.errors import InputError
from rlhf_trl.evaluation.held_out import Score, shown
from rlhf_trl.evaluation.side_by_side import compare, table
from rlhf_trl.output import write_lines
from rlhf_trl.reward_models.metrics import prompt_groups
from rlhf_trl.rewards.from_model import load_reward_model
from rlhf_trl.rewards.verifiers import task_metrics
from rlhf_trl.run.config import Loaded
from rlhf_trl.run.held_rows import HeldRows
from rlhf_trl.run.named import Named, config_of, load_run, named
from rlhf_trl.run.rejection_sampling import correctness_of
from rlhf_trl.run.train import load_reward_functions


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

    Prompts and rewards are those of `config` (None: of the first run's), with `words` as on a
    recipe's command line. Pairs and answers of one's own are read, too: see `HeldRows`. A
    `reward_model` scores the answers, too, and the KL of sampled ones is measured to a `reference`.
    `answers` is the JSONL file that gets them all.
    """
    if len(set(models)) < len(models):
        raise InputError(f"a model is named twice ({', '.join(models)}); name each once.")
    if Path(answers).exists():
        raise InputError(f"--answers: {answers} exists; name a new file.")
    found, other = [named(word) for word in models], reference and named(reference)
    judge = reward_model and named(reward_model, reward_model=True)
    if not (path := config_of(found, config)):
        raise InputError(
            f"{models[0]} is of no run here, whose prompts could be asked; name one with --config."
        )
    loaded, data = load_run(path, words)
    rows = data.tasks.held_out if data.tasks else list(data.held_out or [])
    if not rows:
        raise InputError(
            f"{path} holds no prompts out; name some with --dataset.eval_path or .eval_split."
        )
    base = other and other.load(loaded, data.conversational)
    held = HeldRows(loaded, data, rows)
    if held.needs_reference:
        start = loaded.model.model_name_or_path
        held.set_reference(Named(start, start).load(loaded, data.conversational))
    scores, weights, said, rewards, scorers = {}, {}, {}, None, {}
    for model in found:
        policy = model.load(loaded, data.conversational)
        if rewards is None:  # the same for all
            given = (policy.processing_class, loaded.trl)
            rewards = load_reward_functions(loaded.own, loaded.trl, data, given[0])
            if judge:
                name = f"scored_by_{Path(reward_model).name}"
                scorers[name] = load_reward_model(judge.path, *given)
        policy.held_out, policy.scores = rows, _scores_of(loaded, data)
        policy.rewards, policy.scorers = rewards, scorers
        policy.weights = getattr(loaded.trl, "reward_weights", None)
        policy.check(rows)
        completions, scores[model.word] = policy.scored()
        if base:
            scores[model.word]["sampled_kl"] = policy.kl(base, completions[1])
        if held.noun:
            own, weights[model.word] = held.scores(policy)
            scores[model.word] = own | scores[model.word]
        said[model.word] = shown(rows, *completions)
        del policy  # before the next one is loaded
    lines = []
    for n, row in enumerate(rows):
        each = {word: {name: v[n] for name, v in told.items()} for word, told in scores.items()}
        told = {word: {**texts[n], "scores": each[word]} for word, texts in said.items()}
        lines.append({"prompt": row["prompt"], **told})
    write_lines(answers, lines, ensure_ascii=False)
    numbers = compare(scores, prompt_groups([row["prompt"] for row in rows]), weights)
    if as_json:
        told = {"config": path, "held_out": len(rows), "reference": reference, "answers": answers}
        return json.dumps({**told, "models": numbers}, indent=2)
    kl = f"; sampled kl: to {reference}, nats per answer" if reference else ""
    if held.needs_reference:
        kl = f"; rewards: relative to {loaded.model.model_name_or_path}, the run's start{kl}"
    count = f"{len(rows)} held-out {held.noun or 'prompts'} of {path}"
    return f"{count}\n\n{table(numbers)}{kl}\nall answers, side by side, are in {answers}"


def _scores_of(loaded: Loaded, data: Examples) -> dict[str, Score]:
    """Return what scores answers in the run's own evaluation, beside its rewards."""
    if data.tasks:
        return task_metrics(data.tasks)
    correctness = correctness_of(loaded.own, data) if hasattr(loaded.own, "correctness") else None
    return {} if correctness is None else {correctness.__name__: correctness}
