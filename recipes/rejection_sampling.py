"""Rejection sampling (chapter 9): sample, score, select, and fine-tune on TRL's SFTTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/rejection_sampling.py \
    --config configs/tiny/rejection_sampling.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["rejection_sampling"].launch()
