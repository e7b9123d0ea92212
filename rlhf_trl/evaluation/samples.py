"""Sample panels: what the model answers to a few prompts while it trains."""

from importlib import import_module
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from rlhf_trl.data.blocks import Samples
from rlhf_trl.output import write_json
from rlhf_trl.rollouts.generate import Sampling

WITH_TABLES = ("wandb", "trackio")  # trackers that show tables


def add_panels(trainer: Any, config: Samples, rows: list[dict[str, Any]]) -> None:
    """Let a trainer write `<output_dir>/samples/step-N.json`, and a table to its trackers.

    `config.every` says after how many steps, 1 or more.
    """
    if config.file is not None:
        from rlhf_trl.data.files import read_prompts

        chat = bool(rows) and isinstance(rows[0]["prompt"], list)
        rows = [
            {"prompt": [{"role": "user", "content": text}] if chat else text}
            for text in read_prompts(Path(config.file))
        ]
    trainer.add_callback(_Panels(trainer, config, rows))


class _Panels(TrainerCallback):
    """Writes a panel every so many steps."""

    def __init__(self, trainer: Any, config: Samples, rows: list[dict[str, Any]]):
        self._trainer, self._config, self._rows = trainer, config, rows

    def on_train_begin(self, args, state, control, **kwargs):
        """Answer before the first update, unless the run goes on from a checkpoint."""
        if self._config.start and state.global_step == 0:
            self.on_step_end(args, state, control)

    def on_step_end(self, args, state, control, **kwargs):
        """Answer where it is time to, and write the panel; all processes take part."""
        step = state.global_step
        if step % self._config.every:
            return
        rows = self._rows_of_panel(step)
        answers = self._answers(rows)
        if not state.is_world_process_zero:
            return
        panel = [
            {"prompt": row["prompt"], "greedy": answer["greedy"], "sampled": answer["sampled"]}
            for row, answer in zip(rows, answers, strict=True)
        ]
        write_json(Path(args.output_dir) / "samples" / f"step-{step:06d}.json", panel)
        for name in WITH_TABLES:
            if name not in args.report_to:
                continue
            tracker = import_module(name)
            data = [[step, *map(str, line.values())] for line in panel]  # in order of `columns`
            table = tracker.Table(columns=["step", "prompt", "greedy", "sampled"], data=data)
            tracker.log({"samples": table, "train/global_step": step})

    def _rows_of_panel(self, step: int) -> list[dict[str, Any]]:
        """Return the rows with the prompts of a step's panel."""
        config = self._config
        first = 0
        if config.choice == "round_robin":
            # counted from the step, so that a resumed run goes on alike; the panel before training
            # has the prompts of the first one
            first = max(step // config.every - 1, 0) * config.count
        return [self._rows[(first + n) % len(self._rows)] for n in range(config.count)]

    def _answers(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the model's answers; it trains on as before."""
        config, trainer = self._config, self._trainer
        was_training = trainer.model.training
        trainer.model.eval()
        sampling = Sampling(config.temperature, config.top_p)
        answers = trainer.answer(rows, sampling, config.max_tokens)
        trainer.model.train(was_training)
        return answers
