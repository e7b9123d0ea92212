"""On-policy distillation (chapter 12) on TRL's GRPOTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/distill.py \
    --config configs/tiny/opd.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["distill"].launch()
