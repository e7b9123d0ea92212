"""A translated config plans the run that the book's code makes of it, or says where it does not.

`book_loops` tells what the code's loops do with each of its 27 configs. The other side is derived
from the config that a recipe resolves the translation to, by the rules of transformers' and TRL's
loops. What differs has a comment at its field that names both sides.
"""

import math
import re
from typing import Any

import pytest
import torch
from book_loops import BookConfig, book_configs, comment, dapo_steps, quantities
from transformers import TrainerState

from rlhf_trl.ports.book_code import translate
from rlhf_trl.run.stages import STAGES
from rlhf_trl.run.warmup import WarmupFromFirstStep

BOOK = book_configs()
# rows that a run trains on, where the config does not tell: see `quantities`
ROWS = {
    "instruction_tuning/sft_olmo2_1b": 9500,  # of HuggingFaceH4/no_robots
    "reward_models/orm": 180_000,  # 1,800 questions, 100 answers each, none of them overlong
    "reward_models/preference_rm": 4500,
    "reward_models/prm": 1800,
}


def rows_of(key: str, config: BookConfig) -> int:
    """Return how many rows are trained on where a config's data set has enough of them."""
    if key in ROWS:
        return ROWS[key]
    if config.folder == "direct_alignment":
        return config["max_samples"]
    if config.folder == "rejection_sampling":
        # one answer of each question, or the k of all answers
        return config.fields["data"]["max_train_samples"]
    return config.fields["data"]["size"]


class Recipe:
    """What a recipe makes of a translated config."""

    def __init__(self, config: BookConfig, folder: Any):
        source = folder / f"{config.name}.yaml"
        source.write_text(config.text)
        self.text = translate(source)
        path = folder / "ours.yaml"
        path.write_text(self.text)
        name = re.search(r"recipes/(\w+)\.py --config", self.text)[1]
        self.stage = STAGES[name]
        self.loaded = self.stage.load(["--config", str(path), "--use_cpu", "--bf16", "false"])
        self.args = self.loaded.trl

    def rates(self, steps: int) -> list[float]:
        """Return the learning rate of every optimizer step, by the trainer's own schedule."""
        cls = self.stage.part("trainer")
        trainer = object.__new__(cls)
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=self.args.learning_rate)
        trainer.args, trainer.optimizer, trainer.lr_scheduler = self.args, optimizer, None
        if not hasattr(self.args, "value_warmup_steps"):
            trainer.create_scheduler(num_training_steps=steps)
        else:  # TRL's, before the value model's part of it
            super(cls, trainer).create_scheduler(num_training_steps=steps)
        if not self.loaded.own.warmup_from_zero:
            state = TrainerState(max_steps=steps)
            begin = WarmupFromFirstStep(self.args).on_train_begin
            begin(self.args, state, None, lr_scheduler=trainer.lr_scheduler)
        [factor] = trainer.lr_scheduler.lr_lambdas
        return [self.args.learning_rate * factor(step) for step in range(steps)]

    def comment(self, field: str) -> str:
        """Return the comment at a field."""
        return comment(self.text, field)


def ours(recipe: Recipe, config: BookConfig, rows: int) -> dict[str, Any]:
    """Return the same quantities of the translated recipe as `quantities` does of the code."""
    args = recipe.args
    planned: dict[str, Any] = {
        "betas": (args.adam_beta1, args.adam_beta2),
        "epsilon": args.adam_epsilon,
        "weight decay": args.weight_decay,
        "gradient norm clipped at": args.max_grad_norm or None,
        "examples per micro-batch": args.per_device_train_batch_size,
        "examples per optimizer step": args.per_device_train_batch_size
        * args.gradient_accumulation_steps,
    }
    if config.folder in ("policy_gradients", "distillation"):
        planned |= _of_phases(args, rows, config)
    else:
        planned |= _of_rows(recipe, rows, config)
    steps = planned["optimizer steps"]
    return planned | {"learning rates": recipe.rates(steps)}


def _of_phases(args: Any, rows: int, config: BookConfig) -> dict[str, Any]:
    """Return what GRPOTrainer's loop over generations makes of a config."""
    completions = args.per_device_train_batch_size * args.steps_per_generation
    assert completions == args.generation_batch_size
    prompts = completions // args.num_generations
    batches = args.steps_per_generation * args.num_iterations
    phases = rows // prompts  # RepeatSampler drops the prompts that do not fill a generation
    steps = math.ceil(phases * batches / args.gradient_accumulation_steps)
    planned = {
        "sampling": args.generation_kwargs,
        "longest completion": args.max_completion_length,
        "prompts per phase": prompts,
        "completions per phase": completions,
        "optimizer steps per phase": batches / args.gradient_accumulation_steps,
        "optimizer steps": args.max_steps if args.max_steps > 0 else steps * args.num_train_epochs,
        "temperature of log-probabilities": args.temperature,
    }
    if config.folder == "policy_gradients":
        planned["beta"] = args.beta
    planned["optimizer steps"] = int(planned["optimizer steps"])
    return planned


def _of_rows(recipe: Recipe, rows: int, config: BookConfig) -> dict[str, Any]:
    """Return what transformers' loop over rows makes of a config."""
    args, own = recipe.args, recipe.loaded.own
    rows = min(rows, getattr(own, "max_samples", None) or rows)
    size = args.per_device_train_batch_size
    if config.name == "kto":  # whose examples are completions, two of a pair
        size /= 2
    batches = math.ceil(rows / size)
    accumulation = args.gradient_accumulation_steps
    steps = int(math.ceil(batches / accumulation) * args.num_train_epochs)
    leftover = batches % accumulation
    rates = recipe.rates(steps)
    planned = {
        "examples per micro-batch": size,
        "examples per optimizer step": size * accumulation,
        "optimizer steps": steps,
        "warm-up steps": rates.index(max(rates)),
        "weight of a leftover micro-batch": 1 / leftover if leftover else None,
        "longest sequence": args.max_length,
    }
    if config.folder == "reward_models":
        planned["weights without decay"] = "biases and norms" if args.weight_decay else "none"
    if config.folder == "rejection_sampling":
        del planned["warm-up steps"]
        names = ("temperature", "top_p", "top_k", "min_p")
        planned["sampling"] = {name: getattr(own, name) for name in names}
        planned["longest completion"] = own.max_completion_length
        planned["completions per prompt"] = own.num_generations
    return planned


def different(config: BookConfig, recipe: Recipe, rows: int) -> dict[str, tuple[Any, Any]]:
    """Return the quantities that differ, as (the code's, ours)."""
    book = quantities(config, rows)
    here = ours(recipe, config, rows)
    assert book.keys() == here.keys()
    return {name: (book[name], here[name]) for name in book if not same(book[name], here[name])}


def same(one: Any, other: Any) -> bool:
    """Tell whether two quantities are equal, numbers to rounding."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and other is not None:
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-18)
    return one == other


# The field whose comment explains a quantity that differs, and what the comment says of both sides.
BOTH = r"the book's code .*; here "
WARM_UP = "warm-up steps"
EXPLAINED = {
    WARM_UP: ("warmup_steps", r"the book's code rounds .* down; here up"),
    "learning rates": ("warmup_steps", r"the book's code rounds .* down; here up"),
    "optimizer steps": (
        "gradient_accumulation_steps",
        r"the book's code drops the micro-batches that are left .*; here they make one more",
    ),
    "weight of a leftover micro-batch": (
        "gradient_accumulation_steps",
        r"the book's code (drops|.*divides a smaller last step).*; here (they|.*divided by the)",
    ),
    "weights without decay": (
        "weight_decay",
        r"the book's code decays all weights .*; here all but biases and norms",
    ),
}


@pytest.fixture(scope="module")
def recipes(tmp_path_factory) -> dict[str, Recipe]:
    """Return what becomes of the 27 configs."""
    folder = tmp_path_factory.mktemp("translated")
    return {key: Recipe(config, folder) for key, config in BOOK.items()}


def test_there_are_27_configs():
    kinds = [config.folder for config in BOOK.values()]
    assert [kinds.count(kind) for kind in dict.fromkeys(kinds)] == [8, 1, 1, 10, 4, 3]


@pytest.mark.parametrize("key", BOOK)
def test_a_recipe_plans_what_the_code_does_or_says_what_differs(key, recipes):
    config, recipe = BOOK[key], recipes[key]
    rows = rows_of(key, config)
    apart = different(config, recipe, rows)
    if "optimizer steps" in apart:  # of as many steps, the rates are the same
        book = quantities(config, rows)["learning rates"]
        assert same(book, recipe.rates(len(book)))
        apart = {name: apart[name] for name in apart if name not in ("learning rates", WARM_UP)}
    for name, sides in apart.items():
        field, pattern = EXPLAINED[name]
        assert re.search(pattern, recipe.comment(field)), (name, sides, recipe.comment(field))


def test_the_quantities_are_those_worked_by_hand():
    grpo = quantities(BOOK["policy_gradients/grpo"], 3000)
    assert (grpo["completions per phase"], grpo["optimizer steps per phase"]) == (32, 4)
    assert (grpo["optimizer steps"], grpo["examples per optimizer step"]) == (3000, 8)
    ppo = quantities(BOOK["policy_gradients/ppo"], 10_000)
    assert (ppo["prompts per phase"], ppo["optimizer steps"]) == (16, 1250)
    dpo = quantities(BOOK["direct_alignment/dpo"], 60_000)  # of which 6,400 are taken
    assert (dpo["optimizer steps"], dpo["warm-up steps"]) == (300, 30)
    assert dpo["learning rates"][0] == pytest.approx(5e-6 / 31)
    assert dpo["learning rates"][29:31] == pytest.approx([5e-6 * 30 / 31, 5e-6])
    assert dpo["learning rates"][-1] == pytest.approx(5e-6 / 270)
    sft = quantities(BOOK["instruction_tuning/sft_olmo2_1b"], 9500)
    assert (sft["optimizer steps"], sft["warm-up steps"]) == (888, 88)  # 3 x (2,375 // 8)
    pairs = quantities(BOOK["reward_models/preference_rm"], 4500)
    assert (pairs["optimizer steps"], pairs["warm-up steps"]) == (564, 56)  # 2 x ceil(2,250 / 8)
    steps = quantities(BOOK["reward_models/prm"], 1800)
    assert steps["learning rates"][0] == pytest.approx(5e-6)  # a tenth
    assert steps["learning rates"][-1] == pytest.approx(5e-5)


PAIRED = [key for key in BOOK if key.startswith("direct_alignment/")]


def test_dapo_makes_a_step_of_each_group_with_contrast_and_the_recipe_says_what_it_makes(recipes):
    config, recipe = BOOK["policy_gradients/dapo"], recipes["policy_gradients/dapo"]
    half = [number % 2 == 0 for number in range(3000)]
    assert dapo_steps(config, [True] * 3000) == 3000
    assert dapo_steps(config, half) == 1500  # 375 phases of 4 steps
    assert dapo_steps(config, [*[True] * 5, *[False] * 5]) == 5  # a phase of one group has 1 step
    assert ours(recipe, config, 3000)["optimizer steps"] == 3000
    named = re.search(
        r"the book's code .*: (\d+) optimizer steps? for each of these; here (\d+) for each group",
        recipe.comment("num_train_epochs"),
    )
    assert named.groups() == ("1", "1")


def test_bfloat16_has_the_steps_that_comments_name(recipes):
    def step(value: float) -> float:
        """Return how far the next number in bfloat16 is."""
        number = torch.tensor(value, dtype=torch.bfloat16)
        return (torch.nextafter(number, torch.tensor(torch.inf).to(number)) - number).item()

    assert (step(256.0), step(1024.0), step(1.0)) == (2, 8, 0.0078125)
    summed = "in bfloat16, in steps of 2 from 256 nats on and of 8 from 1,024 on; here in float32"
    mean = "in bfloat16, in steps of 0.008 between 1 and 2 nats per token; here in float32"
    for key in PAIRED:
        is_mean = BOOK[key].name in ("simpo", "orpo", "dpo_norm")
        assert (mean if is_mean else summed) in recipes[key].comment("bf16")
