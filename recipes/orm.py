"""Outcome reward models (chapter 5): is the answer going to be right, asked of every token.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/orm.py \
    --config configs/tiny/orm.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["orm"].launch()
