"""Supervised fine-tuning on TRL's SFTTrainer."""

from trl import SFTTrainer

from rlhf_trl.trainers.evaluation import AnswersHeldOut


class AnsweringSFTTrainer(AnswersHeldOut, SFTTrainer):
    """SFTTrainer that is evaluated by answering."""

    streams = True
