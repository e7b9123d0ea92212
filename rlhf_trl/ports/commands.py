"""The commands of TRL whose configs are translated. It imports nothing: --help names them."""

# TRL's commands, and the config classes of their trainers.
COMMANDS = {
    "grpo": "GRPOConfig",
    "rloo": "RLOOConfig",
    "dpo": "DPOConfig",
    "kto": "KTOConfig",
    "orpo": "trl.experimental.orpo.ORPOConfig",
    "reward": "RewardConfig",
    "sft": "SFTConfig",
}
