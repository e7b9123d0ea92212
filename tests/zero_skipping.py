"""Train GRPO under ZeRO-2 and 3 on the completions with an advantage alone: see zero.py."""

from zero import train_all

STAGES = {"skipping": (2, 3)}

if __name__ == "__main__":
    train_all(STAGES)
