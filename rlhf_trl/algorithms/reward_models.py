"""Reward models (chapter 5): one row per algorithm, its parts by name.

`code` and `trl` say what they change in their own algorithm's `chapter`, and nothing else.
"""

from dataclasses import replace

from rlhf_trl.algorithms.formulations import Algorithm, RewardModel

ROWS: dict[str, Algorithm] = {}
"""The rows of this family, in the order in which they are shown."""

_REWARD = RewardModel(
    loss="bradley_terry_margin",
    aggregation="none",
    reads={"center_rewards_coefficient": None},
    trl=True,
    differs="Margin (Llama 2) and centering (arXiv:2312.09244) are off unless they are given.",
)
ROWS["reward"] = Algorithm(
    name="reward",
    title="Bradley-Terry reward model",
    source="chapter 5, eq:rewardmodeling1 and eq:rewardmodelingmargin",
    paper="arXiv:2203.02155",
    chapter=_REWARD,
    code=replace(
        _REWARD,
        loss="bradley_terry",
        reads={},
        differs="No margin and no centering.",
    ),
    trl=replace(_REWARD, differs="Nothing; the margin is a column of the data set."),
)

_KWISE = RewardModel(
    loss="plackett_luce",
    aggregation="none",
    trl="TRL compares pairs only",
    differs="With two completions this is Bradley-Terry.",
)
ROWS["kwise"] = Algorithm(
    name="kwise",
    title="K-wise reward model",
    source="chapter 5, eq:kwise_rm",
    paper="arXiv:2301.11270",
    chapter=_KWISE,
    code="the book's code compares pairs only",
    trl="TRL compares pairs only",
)

_ORM = RewardModel(
    loss="outcome",
    aggregation="sequence_mean",
    trl="TRL has no outcome reward model",
    differs="Each completion counts the same; the chapter also prints a loss of the mean logit.",
)
ROWS["orm"] = Algorithm(
    name="orm",
    title="Outcome reward model",
    source="chapter 5, eq:orm_token_loss",
    paper="arXiv:2110.14168",
    chapter=_ORM,
    code=replace(
        _ORM,
        aggregation="token_mean",
        differs=(
            "Each token of the batch counts the same; the score of the last one is the answer's."
        ),
    ),
    trl="TRL has no outcome reward model",
)

_PRM = RewardModel(
    loss="outcome",
    aggregation="sequence_sum",
    trl="TRL removed its PRMTrainer in 1.14",
    differs="Steps are right or wrong (0, 1), and a solution's steps are summed.",
)
ROWS["prm"] = Algorithm(
    name="prm",
    title="Process reward model",
    source="chapter 5, eq:prm_loss",
    paper="arXiv:2305.20050",
    chapter=_PRM,
    code=replace(
        _PRM,
        loss="process",
        aggregation="token_mean",
        trainer_reads={"class_weights": None},
        differs="Steps are bad, neutral or good (0, 1, 2), and each step counts the same.",
    ),
    trl="TRL removed its PRMTrainer in 1.14",
)
