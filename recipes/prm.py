"""Process reward models (chapter 5): is this step right, asked at the end of every step.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/prm.py \
    --config configs/tiny/prm.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["prm"].launch()
