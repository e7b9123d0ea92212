"""Supervised fine-tuning on TRL's SFTTrainer."""

from trl import SFTTrainer

from rlhf_trl.evaluation.held_out import AnswersHeldOut


class AnsweringSFTTrainer(AnswersHeldOut, SFTTrainer):
    """SFTTrainer that is evaluated by answering."""
