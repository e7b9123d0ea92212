"""Reward models of whole texts (chapter 5) on TRL's RewardTrainer: Bradley-Terry and K-wise.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/reward.py \
    --config configs/tiny/reward.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["reward"].launch()
