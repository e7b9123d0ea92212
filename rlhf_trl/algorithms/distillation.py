"""On-policy distillation (chapter 12): one row per algorithm, its parts by name.

`code` and `trl` say what they change in their own algorithm's `chapter`, and nothing else.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlhf_trl.algorithms.formulations import REQUIRED, Algorithm, Distillation

ROWS: dict[str, Algorithm] = {}
"""The rows of this family, in the order in which they are shown."""


def _top_k(values: Mapping[str, Any]) -> int | None:
    """kl_top_k"""
    return values["kl_top_k"]


_OPD = Distillation(
    loss="sampled_reverse_kl",
    aggregation="sequence_sum",
    window="micro_batch",
    trl="TRL compares the whole vocabulary, and averages over the tokens of the window",
    trainer_reads={"teacher_models": REQUIRED, "teacher_weights": None},
    differs="Its expected gradient at the visited states is that of the summed reverse KL.",
)
ROWS["opd"] = Algorithm(
    name="opd",
    title="On-policy distillation",
    source="chapter 12, eq:opd_kl_advantage and eq:opd_reverse_kl",
    paper="arXiv:2306.13649",
    chapter=_OPD,
    code="the book's code has self-distillation (sdpo) only",
    trl=replace(
        _OPD,
        loss="reverse_kl",
        aggregation="token_mean",
        window="window",
        trl=True,
        differs="The divergence over the whole vocabulary, averaged over all tokens.",
    ),
)

_SDPO = Distillation(
    loss="reverse_kl",
    aggregation="sequence_sum",
    window="micro_batch",
    reads={"kl_top_k": None},
    trainer="SDPOTrainer",
    trl="TRL averages over the tokens of each completion",
    trainer_reads={
        "correctness_reward": REQUIRED,
        "format_reward": None,
        "teacher": "live",
        "teacher_rate": 0.05,
        "demonstration": "random",
        "demonstration_template": (
            "\n\nCorrect solution:\n\n{demonstration}\n\nCorrectly solve the original question."
        ),
        "dynamic_sampling_rounds": 100,
    },
    own_demonstrations=False,
    differs=(
        "This is the paper's equation, over the whole vocabulary unless kl_top_k is given. A "
        "demonstration is never the completion's own text."
    ),
)
ROWS["sdpo"] = Algorithm(
    name="sdpo",
    title="SDPO",
    source="chapter 12 prints no equation",
    paper="arXiv:2601.20802",
    chapter=_SDPO,
    code=replace(
        _SDPO,
        aggregation="per_prompt",
        reads={"kl_top_k": 20},
        own_demonstrations=True,
        differs=(
            "The student's kl_top_k likeliest tokens and one bucket; each prompt counts the same "
            "and each token of its completions. Its demonstration is the first right one, for "
            "that one itself, too."
        ),
    ),
    trl=replace(
        _SDPO,
        aggregation="sequence_mean",
        reads={"kl_top_k": 20},
        own_demonstrations=True,
        settings={
            "distillation_mode": "topk_logits",
            "distillation_topk": _top_k,
            "distillation_add_tail": True,
            "distillation_alpha": 1.0,
            "distillation_is_clip": None,
        },
        trl=True,
        differs="As the code, but each completion counts the same.",
    ),
)
