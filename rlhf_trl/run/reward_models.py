"""A reward-model run: its data are read, made or sampled once, and its scores are kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_trl.data import judgments
from rlhf_trl.data.examples import Examples
from rlhf_trl.data.judgment_blocks import OutcomeData, ProcessData
from rlhf_trl.errors import InputError
from rlhf_trl.models import UNTRAINED, load_tokenizer
from rlhf_trl.reward_models.reader import judged_class, probability_of_good
from rlhf_trl.reward_models.report import draw_reward_report, write_candidates
from rlhf_trl.rollouts.sampling import sampler
from rlhf_trl.run import train
from rlhf_trl.run.config import Loaded


@train.names_the_key
def train_reward_model(loaded: Loaded[Any, Any], trainer_class: Any) -> None:
    """Do what every reward-model recipe does: load, train, evaluate, save, report.

    Beside what `train.run` leaves, `<output_dir>` then holds `reward_report.png` where anything was
    scored and, where completions of one prompt were ranked, `scores.jsonl`.
    """
    own, args, model = loaded.own, loaded.trl, loaded.model
    task_type = "TOKEN_CLS" if own.algorithm in ("orm", "prm") else "SEQ_CLS"
    if model.use_peft and "lora_task_type" in loaded.given and model.lora_task_type != task_type:
        raise InputError(f"lora_task_type is {model.lora_task_type}, not {task_type}; remove it.")
    for key in ("step_separator", "step_split"):
        if key in loaded.given:  # the config has the trainer's field
            raise InputError(f"{key}: the data are cut by it, too; write dataset.{key}.")
    if model.model_name_or_path == UNTRAINED:
        raise InputError(
            f"model_name_or_path: a reward model starts from a language model; {UNTRAINED} is none."
        )
    train.begin(loaded, loaded.row.label)
    data, tokenizer = prepare_rewards(own, args, model)
    train.check_template(data, tokenizer, args, own.dataset)
    if isinstance(own.dataset, ProcessData):  # the trainer cuts steps as the data were cut
        args.step_separator = own.dataset.step_separator
        args.step_split = own.dataset.step_split
    trainer = train.build(loaded, trainer_class, data, tokenizer)
    trainer.candidates = data.candidates  # answers that evaluations rank, several to a prompt
    for side, count in trainer.left_out.items():
        if count and trainer.is_world_process_zero():
            reason = f"more than {args.max_length} tokens (`rlhf-trl preview` names them)"
            print(f"left out {count} {side} rows: {reason}", flush=True)
    train.run(trainer, loaded, data, loaded.row.label, write_more=write_scores)


def prepare_rewards(own: Any, args: Any, model: Any) -> tuple[Examples, Any]:
    """Return the examples of a run, which may be made of `saved_samples`, and the tokenizer."""
    load, arguments = loader_of(own, sampler(model, args, own.dataset, own.rollouts))
    data = train.read(args, load, *arguments)
    return data, load_tokenizer(model, args, data.conversational)


def loader_of(own: Any, sample: Any) -> tuple[Callable[..., Examples], list[Any]]:
    """Return the function that loads the examples of a run, and its arguments.

    `sample` returns outcomes of rows: see `judgments.load_pairs_or_ranked`.
    """
    config = own.dataset
    arguments = [config, own.max_samples, sample]
    if isinstance(config, OutcomeData):
        return judgments.load_outcomes, arguments
    if isinstance(config, ProcessData):
        has_neutral_class = own.formulation == "code"  # the chapter's loss has none
        return judgments.load_traces, [*arguments, has_neutral_class]
    has_margin = own.formulation != "code"  # the code has none
    return judgments.load_pairs_or_ranked, [*arguments, has_margin]


def write_scores(trainer: Any, folder: Path, title: str) -> None:
    """Write what the last evaluation judged, if it did: `scores.jsonl`, and its figure.

    `trainer.judged` has two entries. `scores` are those of the trainer's candidates (answers that
    are ranked, several to a prompt), a mapping by name for each; there may be none. `rows` are the
    held-out rows, each one of two kinds: the logits and labels of a text whose tokens are judged
    (ORM, PRM), or the scores of the answers to a prompt, which stand from best to worst.
    """
    if trainer.judged is None:
        return
    judged_rows, scores = trainer.judged["rows"], trainer.judged["scores"]
    reader = trainer.reader
    panels: dict[str, Any] = {}
    if scores:
        write_candidates(folder, trainer.candidates, scores)
        panels["candidates"] = trainer.ranking()
    if not reader.per_token:
        scores_of_best = [answer_scores[0] for answer_scores in judged_rows]
        scores_of_worst = [answer_scores[-1] for answer_scores in judged_rows]
        panels["pairs"] = (scores_of_best, scores_of_worst)
    elif reader.algorithm == "prm" and any(labels for _, labels in judged_rows):  # there are steps
        probabilities = [probability_of_good(logits).tolist() for logits, _ in judged_rows]
        predicted = [judged_class(logits) for logits, _ in judged_rows]
        labeled = [trainer.meaning(labels) for _, labels in judged_rows]
        panels["steps"] = (probabilities, predicted, labeled)
    # an ORM's rows have no panel: its candidates show how it ranks
    if panels:
        draw_reward_report(folder / "reward_report.png", title, **panels)
