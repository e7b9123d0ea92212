"""Step time of our GRPO trainer against stock GRPOTrainer, on the same fixed completions.

    OMP_NUM_THREADS=1 .venv/bin/python scripts/benchmark.py --pairs 150

Both trainers run their whole training loop with learning rate 0 in one process and take turns
after every optimizer step, so noise of the machine hits both alike. Printed is the median ratio of
CPU time, ours / stock, over the pairs of steps, with a 95 % bootstrap interval of the median.
"""

import argparse
import os
import random
import statistics
import tempfile
import threading
import time

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from rlhf_trl import tiny
from rlhf_trl.run.report import Watch
from rlhf_trl.tasks.gym import GymData, GymTasks, Spec
from rlhf_trl.tasks.rewards import exact_match, format_reward, load_rewards
from rlhf_trl.trainers.policy_gradient import PolicyGradientTrainer

WARM_UP = 5


class TakeTurns(TrainerCallback):
    """Lets the other trainer go after every step, and times this one's steps in CPU seconds."""

    def __init__(self, mine: threading.Semaphore, other: threading.Semaphore):
        self.mine, self.other, self.seconds = mine, other, []

    def on_train_begin(self, *args, **kwargs):
        """Wait for the first turn."""
        self.mine.acquire()
        self._started = time.process_time()

    def on_step_end(self, *args, **kwargs):
        """Note the time, hand over, wait."""
        self.seconds.append(time.process_time() - self._started)
        self.other.release()
        self.mine.acquire()
        self._started = time.process_time()

    def on_train_end(self, *args, **kwargs):
        """Leave the other trainer its last turn."""
        self.other.release()


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


def build(ours: bool, tasks: GymTasks, steps: int, folder: str):
    """Return a trainer on the embedded model that makes `steps` steps of learning rate 0."""
    config = GRPOConfig(
        output_dir=folder,
        max_steps=steps,
        learning_rate=0.0,
        per_device_train_batch_size=128,
        num_generations=8,
        max_completion_length=20,
        loss_type="grpo",
        reward_weights=[1.0, 0.5],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        disable_tqdm=True,
    )
    rewards = [exact_match, format_reward]
    trainer = (PolicyGradientTrainer if ours else GRPOTrainer)(
        model=tiny.checkpoint_path(),
        reward_funcs=load_rewards(["exact_match", "format"], tasks) if ours else rewards,
        args=config,
        train_dataset=Dataset.from_list(tasks.train),
        processing_class=AutoTokenizer.from_pretrained(tiny.checkpoint_path()),
    )
    trainer._generate_single_turn = fixed_completions(trainer.processing_class)
    trainer.log = lambda *args, **kwargs: trainer._metrics["train"].clear()  # keeps stdout readable
    if ours:
        trainer.add_callback(Watch())
    return trainer


def main() -> None:
    """Run the pairs and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=150)
    pairs = parser.parse_args().pairs
    torch.set_num_threads(1)
    spec = Spec("spell_backward", config={"min_word_len": 3, "max_word_len": 8})
    tasks = GymTasks(GymData(specs=[spec], eval_size=1))

    ours_turn, stock_turn = threading.Semaphore(1), threading.Semaphore(0)
    turns = {
        True: TakeTurns(ours_turn, stock_turn),
        False: TakeTurns(stock_turn, ours_turn),
    }
    threads = []
    with tempfile.TemporaryDirectory() as folder:
        for ours, turn in turns.items():
            trainer = build(ours, tasks, pairs + WARM_UP, folder)
            trainer.add_callback(turn)
            threads.append(threading.Thread(target=trainer.train))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    ours, stock = turns[True].seconds[WARM_UP:], turns[False].seconds[WARM_UP:]
    ratios = [a / b for a, b in zip(ours, stock, strict=True)]
    generator = random.Random(0)
    medians = sorted(
        statistics.median(generator.choices(ratios, k=len(ratios))) for _ in range(2000)
    )
    print(
        f"{len(ratios)} pairs, stock {1000 * statistics.median(stock):.0f} ms a step; "
        f"ours / stock {statistics.median(ratios):.3f}, "
        f"95 % interval {medians[50]:.3f} to {medians[-50]:.3f}"
    )


if __name__ == "__main__":
    main()
