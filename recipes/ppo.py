"""PPO (chapter 6): a policy and a learned value function.

accelerate launch --config_file configs/accelerate/cpu.yaml recipes/ppo.py \
    --config configs/tiny/ppo.yaml
"""

from dataclasses import dataclass, field

from rlhf_trl.run.config import load_config
from rlhf_trl.run.launch import Expect, recipe
from rlhf_trl.tasks.gym import GymData, GymTasks
from rlhf_trl.tasks.rewards import load_rewards


@dataclass
class Run:
    """The fields of this recipe beside PPOConfig and TRL's ModelConfig."""

    dataset: GymData
    algorithm: str = "ppo"
    formulation: str = "chapter"
    reward_funcs: list[str] = field(default_factory=lambda: ["exact_match", "format"])
    expect: Expect | None = None


def main() -> None:
    """Parse, load, train, evaluate, save, report."""
    loaded = load_config(Run, "rlhf_trl.trainers.ppo.PPOConfig")
    own, args, model = loaded.own, loaded.trl, loaded.model

    from datasets import Dataset
    from trl import get_peft_config, get_quantization_config

    from rlhf_trl.run import train
    from rlhf_trl.run.model import check_prompts, load_tokenizer, prepare_model
    from rlhf_trl.trainers.policy_gradient import read_row
    from rlhf_trl.trainers.ppo import PPOTrainer

    name = f"{own.algorithm} ({own.formulation})"
    read_row(own.algorithm, own.formulation, args)
    train.begin(loaded, name)
    tasks = GymTasks(own.dataset)
    rewards = load_rewards(own.reward_funcs, tasks)
    train.check_reward_weights(args, rewards)
    train.check_generation_batch(args, tasks.train)
    tokenizer = load_tokenizer(model, args)
    check_prompts(tasks.train + tasks.held_out, tokenizer, model, args)

    trainer = PPOTrainer(
        model=prepare_model(model, args),
        reward_funcs=rewards,
        args=args,
        train_dataset=Dataset.from_list(tasks.train),
        eval_dataset=Dataset.from_list(tasks.held_out),
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model),
        peft_config=get_peft_config(model),
        algorithm=own.algorithm,
        formulation=own.formulation,
    )
    train.run(trainer, loaded, tasks, name)


if __name__ == "__main__":
    recipe(main)
