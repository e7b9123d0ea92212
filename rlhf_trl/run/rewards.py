"""A reward-model run: its data are read, made or sampled once, and its scores are kept."""

import json
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.models import UNTRAINED, prepare_model
from rlhf_trl.output import write_whole
from rlhf_trl.reward_models.reader import good, judged_class
from rlhf_trl.reward_models.report import draw_reward_report
from rlhf_trl.run import train
from rlhf_trl.run.reward_data import prepare_rewards

CANDIDATE = ("prompt", "completion", "answer", "task", "label", "finished")


def train_reward_model(loaded: Any, trainer_class: Any, **arguments: Any) -> None:
    """Do what every reward-model recipe does: load, train, evaluate, save, report.

    Beside what `train.run` leaves, `<output_dir>` then holds `reward_report.png` where anything was
    scored and, where completions of one prompt were ranked, `scores.jsonl`.

    Args:
        loaded: what `load_config` returned.
        trainer_class: the trainer; it reads `algorithm` and `formulation`.
        **arguments: for the trainer.

    Raises:
        InputError: an algorithm, a field, data, tokenizer or model that is missing or does not fit.
    """
    from trl import get_peft_config, get_quantization_config

    own, args, model = loaded.own, loaded.trl, loaded.model
    task_type = "TOKEN_CLS" if own.algorithm in ("orm", "prm") else "SEQ_CLS"
    if model.use_peft and "lora_task_type" in loaded.given and model.lora_task_type != task_type:
        raise InputError(
            f"lora_task_type is {model.lora_task_type}, but {own.algorithm} trains a head of type "
            f"{task_type}; remove it."
        )
    if model.model_name_or_path == UNTRAINED:
        raise InputError(
            f"model_name_or_path: a reward model starts from a language model; {UNTRAINED} is none."
        )
    train.begin(loaded, loaded.row.label)
    data, tokenizer = prepare_rewards(own, args, model)
    train.check_held_out(args, data.held_out)
    trainer = trainer_class(
        model=prepare_model(model, args),
        args=args,
        train_dataset=data.train,
        eval_dataset=data.held_out,
        processing_class=tokenizer,
        peft_config=get_peft_config(model),
        quantization_config=get_quantization_config(model),
        algorithm=loaded.row,
        **arguments,
    )
    trainer.candidates = data.candidates
    for side, count in trainer.left_out.items():
        if count and trainer.is_world_process_zero():
            print(f"left out {count} {side} rows: more than {args.max_length} tokens", flush=True)
    train.run(trainer, loaded, None, loaded.row.label, extra=write_scores)


def write_scores(trainer: Any, folder: Path, title: str) -> None:
    """Write what the last evaluation judged, where it did: `scores.jsonl`, and its figure."""
    if trainer.judged is None:
        return
    rows, scores = trainer.judged["rows"], trainer.judged["scores"]
    panels: dict[str, Any] = {}
    if scores:
        lines = [
            json.dumps({**{k: row[k] for k in CANDIDATE if k in row}, "scores": each})
            for row, each in zip(trainer.candidates, scores, strict=True)
        ]
        text = "\n".join(lines) + "\n"
        write_whole(folder / "scores.jsonl", lambda part: part.write_text(text, encoding="utf-8"))
        panels["candidates"] = trainer.ranking()
    if trainer.reader.algorithm == "prm" and any(labels for _, labels in rows):
        right = [good(logits).tolist() for logits, _ in rows]
        predicted = [judged_class(logits) for logits, _ in rows]
        panels["steps"] = (right, predicted, [trainer.meaning(labels) for _, labels in rows])
    elif not trainer.reader.per_token:
        panels["pairs"] = ([row[0] for row in rows], [row[-1] for row in rows])
    if panels:
        draw_reward_report(folder / "reward_report.png", title, **panels)
