"""ORPO (chapter 8) on the ORPOTrainer of TRL's experimental package.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/orpo.py \
    --config configs/tiny/orpo.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["orpo"].launch()
