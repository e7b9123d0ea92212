"""Evaluation by answering beside that of a trainer's own loss."""

from typing_extensions import override

from rlhf_trl.evaluation.held_out import AnswersHeldOut


class AnswersBesideLoss(AnswersHeldOut):
    """`AnswersHeldOut` for trainers whose own evaluation, on an `eval_dataset`, is of use, too.

    Both end in one set of metrics; where there is no `held_out`, nothing is answered.
    """

    # Replaces AnswersHeldOut.evaluate by the next class's, whose evaluation_loop is extended.
    @override
    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix="eval"):
        """Evaluate as the trainer does, and answer; without an `eval_dataset`, only answer."""
        if eval_dataset is None and self.eval_dataset is None:
            return super().evaluate(None, ignore_keys, metric_key_prefix)
        self._answers = []  # `evaluation_loop` below fills it
        metrics = super(AnswersHeldOut, self).evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        scores = [*getattr(self, "scores", ()), "length", "cut_off"]
        sampled_scores = [f"sampled_{name}" for name in scores]
        # prefixes of what is told; the Trainer's own metrics, such as runtimes, are not
        known = ("loss", "pair_accuracy", "rewards/", "logps/", *scores, *sampled_scores)
        reported = {}
        for key, value in metrics.items():
            if key.removeprefix(f"{metric_key_prefix}_").startswith(known):
                reported[key] = value
        self._tell(reported, self._answers)
        return metrics

    # Extends Trainer.evaluation_loop, whose metrics `evaluate` logs: adds those of the answers.
    @override
    def evaluation_loop(self, *args, metric_key_prefix="eval", **kwargs):
        """Run the loop, then answer."""
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        if self.held_out:
            metrics, self._answers = self._scored_answers(metric_key_prefix)
            output.metrics.update(metrics)
        return output
