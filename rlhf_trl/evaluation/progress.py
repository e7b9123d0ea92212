"""The progress bar of a run, with its newest reward; no other one stays on the screen."""

from datasets import arrow_dataset, disable_progress_bars
from datasets.utils import tqdm as bar_of_data
from tqdm.auto import tqdm
from transformers.trainer_callback import ProgressCallback
from transformers.trainer_utils import has_length

from rlhf_trl.evaluation.measured import SCORES_OF_ANSWERS


def bars_of_data(shown: bool) -> None:
    """Let the bars of `datasets` vanish from the screen when they are done, or show none."""
    if shown:
        arrow_dataset.hf_tqdm = _VanishingBar
    else:
        disable_progress_bars()


class _VanishingBar(bar_of_data):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{"leave": False} | kwargs)


class RewardProgress(ProgressCallback):
    """The usual progress bar with the reward (or loss) behind it instead of a line per log.

    It is the only one in training: how far an evaluation is stands behind it, too.
    """

    def on_train_begin(self, args, state, control, **kwargs):
        """Begin the bar; no batch has been evaluated."""
        super().on_train_begin(args, state, control, **kwargs)
        self._evaluated = 0

    def on_prediction_step(self, args, state, control, eval_dataloader=None, **kwargs):
        """Show how many batches of an evaluation are done."""
        if not state.is_world_process_zero or not has_length(eval_dataloader):
            return
        if self.training_bar is None:  # it is the evaluation after training
            if self.prediction_bar is None:
                how = {"dynamic_ncols": True, "leave": False}
                self.prediction_bar = tqdm(total=len(eval_dataloader), desc="evaluating", **how)
            self.prediction_bar.update()
        else:
            self._evaluated += 1
            done = f"evaluating, {self._evaluated} of {len(eval_dataloader)}"
            self.training_bar.set_postfix_str(done)

    def on_evaluate(self, args, state, control, **kwargs):
        """Forget how far the evaluation was."""
        super().on_evaluate(args, state, control, **kwargs)
        if self.training_bar is not None and self._evaluated:
            self.training_bar.set_postfix_str("")
        self._evaluated = 0

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Show the newest reward on the bar, and each evaluation as one line above it."""
        if not state.is_world_process_zero or self.training_bar is None or logs is None:
            return
        for key in ("reward", "loss"):
            if logs.get(key) is not None:
                self.training_bar.set_postfix({key: f"{logs[key]:.3f}"}, refresh=False)
                break  # the loss stands there only where there is no reward
        for key, name in SCORES_OF_ANSWERS.items():
            if {f"eval_{key}", f"eval_sampled_{key}"} <= logs.keys():
                self.training_bar.write(
                    f"step {state.global_step:>5}  {name} {logs[f'eval_{key}']:.3f} greedy, "
                    f"{logs[f'eval_sampled_{key}']:.3f} sampled"
                )
                break
