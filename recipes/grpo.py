"""Policy-gradient algorithms (chapter 6) on TRL's GRPOTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/grpo.py \
    --config configs/tiny/grpo.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["grpo"].launch()
