"""Step time of our GRPO trainer against stock GRPOTrainer, on the same fixed completions.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/benchmark.py --pairs 200

One trainer runs its whole training loop with learning rate 0 and changes its class and its reward
functions between ours and stock from step to step, in random order within each pair: weights,
memory and data are the same, so what remains is the code. (Two trainers side by side differ by up
to 5 % even when both are stock.) Printed is the median ratio of CPU time, ours / stock, over the
pairs, with a 95 % bootstrap interval of the median.

With --ppo, "ours" is a step of PPO, and "stock" a step of stock GRPOTrainer plus one forward and
backward pass of the value model on the same batch.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/benchmark.py --demo --pairs 6

times whole runs of configs/tiny/grpo.yaml, generation included: stock GRPOTrainer, ours with
nothing on, with each part alone that saves time, and with all of them, in random order within each
of the rounds (`--pairs`), `--steps` each. What a part is worth is its ratio against "nothing on".
"""

import argparse
import os
import random
import statistics
import tempfile
import time
from dataclasses import fields
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlhf_trl import tiny
from rlhf_trl.data.gym import GymData, GymTasks, Spec
from rlhf_trl.rewards.loading import load_rewards
from rlhf_trl.rewards.verifiers import exact_match, format_reward
from rlhf_trl.run.stages import STAGES
from rlhf_trl.trainers.policy_gradient import BookGRPOConfig, BookGRPOTrainer
from rlhf_trl.trainers.ppo import BookPPOConfig, BookPPOTrainer

WARM_UP = 10  # pairs
PARTS = {"read_prompts_once": "exact", "skip_zero_advantage": True, "share_prompts": True}


class Alternate(TrainerCallback):
    """Changes the trainer between ours (True) and stock (False) every step, and keeps time."""

    def __init__(self, tasks: GymTasks, ours: type[GRPOTrainer]):
        self._class = ours
        self.rewards = {
            True: load_rewards(["exact_match", "format"], tasks),
            False: [exact_match, format_reward],
        }
        self.seconds: dict[bool, list[float]] = {True: [], False: []}
        self._random = random.Random(0)
        self._turns: list[bool] = []

    def _next(self) -> None:
        if not self._turns:
            self._turns = self._random.sample([True, False], 2)
        self._ours = self._turns.pop()
        self.trainer.__class__ = self._class if self._ours else GRPOTrainer
        self.trainer.reward_funcs = self.rewards[self._ours]
        self._started = time.process_time()

    def on_train_begin(self, *args, **kwargs):
        """Start with the first pair."""
        self._next()

    def on_step_end(self, *args, **kwargs):
        """Note this step's time and change over."""
        if self._class is BookPPOTrainer and not self._ours:
            self._value_pass()
        self.seconds[self._ours].append(time.process_time() - self._started)
        self._next()

    def _value_pass(self) -> None:
        """Run the value model forward and backward over what this step trained on."""
        for batch in self.trainer._buffered_inputs:
            parts = [
                torch.cat([batch[f"{side}_{kind}"] for side in ("prompt", "completion")], dim=1)
                for kind in ("ids", "mask")
            ]
            value_model = self.trainer.model.value_model
            trunk = value_model.base_model(input_ids=parts[0], attention_mask=parts[1])
            value_model.score(trunk.last_hidden_state).sum().backward()
        self.trainer.model.zero_grad()


def fixed_completions(tokenizer):
    """Return a stand-in for generation: the reversed word, every other time cut short."""

    def generate(prompt_ids, *args, **kwargs):
        words = [tokenizer.decode(p).split(": ")[-1].split("<")[0].strip() for p in prompt_ids]
        texts = [
            f"<think></think><answer>{word[::-1][: None if i % 2 else 3]}</answer><|end|>"
            for i, word in enumerate(words)
        ]
        return [tokenizer.encode(t, add_special_tokens=False) for t in texts], None

    return generate


def demo_seconds(settings: dict[str, Any] | None, steps: int, seed: int) -> float:
    """Return the CPU time of training the demo: by stock GRPOTrainer (None) or ours."""
    given = STAGES["grpo"].load(["--config", "configs/tiny/grpo.yaml"]).given
    names = {field.name for field in fields(GRPOConfig)}
    config = {name: value for name, value in given.items() if name in names}
    config |= {"max_steps": steps, "seed": seed, "eval_strategy": "no", "disable_tqdm": True}
    block = {name: value for name, value in given["dataset"].items() if name != "source"}
    block["specs"] = [Spec(**spec) for spec in block["specs"]]
    tasks = GymTasks(GymData(**block))
    with tempfile.TemporaryDirectory() as config["output_dir"]:
        if settings is None:
            trainer_class, args = GRPOTrainer, GRPOConfig(**config, loss_type="grpo")
            rewards = [exact_match, format_reward]
        else:
            trainer_class, args = BookGRPOTrainer, BookGRPOConfig(**config, **settings)
            rewards = load_rewards(["exact_match", "format"], tasks)
        trainer = trainer_class(
            model=tiny.checkpoint_path(),
            reward_funcs=rewards,
            args=args,
            train_dataset=Dataset.from_list(tasks.train),
            processing_class=AutoTokenizer.from_pretrained(tiny.checkpoint_path()),
        )
        trainer.log = lambda *args, **kwargs: trainer._metrics["train"].clear()  # no line a step
        started = time.process_time()
        trainer.train()
        return time.process_time() - started


def demo(rounds: int, steps: int) -> None:
    """Time the demo with every part, and print each against stock and against none."""
    known = {field.name for field in fields(BookGRPOConfig)}
    parts = {name: value for name, value in PARTS.items() if name in known}
    variants: dict[str, dict[str, Any] | None] = {"stock": None, "nothing on": {}}
    variants |= {name: {name: value} for name, value in parts.items()}
    if len(parts) > 1:
        variants["all on"] = parts
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    generator = random.Random(0)
    demo_seconds(None, steps=2, seed=0)  # what is done once for all runs
    for seed in range(rounds):
        for name in generator.sample([*variants], len(variants)):
            seconds[name].append(demo_seconds(variants[name], steps, seed))
    for name, values in seconds.items():
        line = f"{name}: {statistics.median(values):.1f} s"
        for base in ("stock", "nothing on"):
            ratios = [a / b for a, b in zip(values, seconds[base], strict=True)]
            low, high = median_interval(ratios)
            line += f"; / {base} {statistics.median(ratios):.3f} ({low:.3f} to {high:.3f})"
        print(line)


def median_interval(ratios: list[float]) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of a median."""
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000)
    )
    return medians[50], medians[-50]


def main() -> None:
    """Run the pairs and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--ppo", action="store_true", help="time PPO instead")
    parser.add_argument("--demo", action="store_true", help="time whole runs of the demo")
    parser.add_argument("--steps", type=int, default=100, help="of a run of the demo")
    options = parser.parse_args()
    pairs, ppo = options.pairs, options.ppo
    if options.demo:
        torch.set_num_threads(1)
        demo(pairs, options.steps)
        return
    ours_class, config_class = BookGRPOTrainer, BookGRPOConfig
    if ppo:
        ours_class, config_class = BookPPOTrainer, BookPPOConfig
    torch.set_num_threads(1)
    spec = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})
    tasks = GymTasks(GymData(specs=[spec], eval_size=1))
    alternate = Alternate(tasks, ours_class)
    with tempfile.TemporaryDirectory() as folder:
        config = config_class(
            output_dir=folder,
            max_steps=2 * (pairs + WARM_UP),
            learning_rate=0.0,
            per_device_train_batch_size=128,
            num_generations=8,
            max_completion_length=20,
            reward_weights=[1.0, 0.5],
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            bf16=False,
            activation_checkpointing=False,
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = ours_class(
            model=tiny.checkpoint_path(),
            reward_funcs=alternate.rewards[True],
            args=config,
            train_dataset=Dataset.from_list(tasks.train),
            processing_class=AutoTokenizer.from_pretrained(tiny.checkpoint_path()),
            callbacks=[alternate],
        )
        trainer._generate_single_turn = fixed_completions(trainer.processing_class)
        trainer.log = lambda *args, **kwargs: trainer._metrics["train"].clear()  # no line a step
        alternate.trainer = trainer
        trainer.train()

    ours, stock = (alternate.seconds[kind][WARM_UP:] for kind in (True, False))
    ratios = [a / b for a, b in zip(ours, stock, strict=True)]
    low, high = median_interval(ratios)
    print(
        f"{len(ratios)} pairs, stock {1000 * statistics.median(stock):.0f} ms a step; "
        f"ours / stock {statistics.median(ratios):.3f}, "
        f"95 % interval {low:.3f} to {high:.3f}"
    )


if __name__ == "__main__":
    main()
