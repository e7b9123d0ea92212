"""Supervised fine-tuning (chapter 4) on TRL's SFTTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/sft.py \
    --config configs/tiny/sft.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["sft"].launch()
