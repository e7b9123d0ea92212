"""KTO (chapter 8) on TRL's KTOTrainer, from pairs or from labeled examples.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/kto.py \
    --config configs/tiny/kto.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["kto"].launch()
