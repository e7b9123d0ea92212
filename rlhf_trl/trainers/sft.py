"""Supervised fine-tuning on TRL's SFTTrainer."""

from trl import SFTTrainer

from rlhf_trl.evaluation.held_out import AnswersHeldOut
from rlhf_trl.trainers.on_trl import OnTRL


class AnsweringSFTTrainer(OnTRL, AnswersHeldOut, SFTTrainer):
    """SFTTrainer that is evaluated by answering."""

    streams = True
