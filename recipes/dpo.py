"""DPO and its relatives (chapter 8) on TRL's DPOTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/dpo.py \
    --config configs/tiny/dpo.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["dpo"].launch()
