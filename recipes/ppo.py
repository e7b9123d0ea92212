"""PPO (chapter 6): a policy and a learned value function on TRL's GRPOTrainer.

accelerate launch --quiet --config_file configs/accelerate/cpu.yaml recipes/ppo.py \
    --config configs/tiny/ppo.yaml
"""

from rlhf_trl.run.stages import STAGES

if __name__ == "__main__":
    STAGES["ppo"].launch()
