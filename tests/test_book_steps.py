"""An optimizer step of the book's code and of the translated recipe, on the same completions.

`book_steps` tells the code's loops anew, one sequence at a time and without padding. The recipe is
the translation of the same config (in sizes of the embedded model), built as its script builds it.
Compared is what the weights have moved by: `distance` is the norm of the difference over the norm
of the code's movement, over all weights. Equal is below `EQUAL`; what is not has its comment in the
translation.

All is float64, log-probabilities and rotary positions too, which TRL and transformers round to
float32: Adam's first step divides by the gradient's size, so that rounding of 1e-7 in a gradient
near 0 would make 1e-4 of a movement.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
import trl.trainer.utils
from book_loops import BookConfig, book_configs, comment, quantities
from book_steps import (
    Answer,
    Critic,
    TokenCritic,
    Weights,
    correctness,
    distillation_steps,
    encode,
    has_contrast,
    kto_loss,
    orpo_loss,
    outcome_ids,
    pair_loss,
    policy_gradient_steps,
    ppo_steps,
    reward_steps,
    row_steps,
    selected_steps,
    sft_steps,
    token_reward_steps,
    trace_ids,
)
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.models.qwen3 import modeling_qwen3

from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.data.demonstrations import load_demonstrations
from rlhf_trl.data.examples import examples
from rlhf_trl.data.prompts import load_prompts
from rlhf_trl.ports.book_code import translate
from rlhf_trl.rewards.loading import answer_columns
from rlhf_trl.run import supervised, train
from rlhf_trl.run.policy_gradients import load_reward_functions
from rlhf_trl.run.preferences import prepare_preferences
from rlhf_trl.run.rejection_sampling import FIXED, Rollouts, _example
from rlhf_trl.run.reward_models import prepare_rewards
from rlhf_trl.run.stages import STAGES

EMBEDDED = Path(__file__).parent.parent / "rlhf_trl" / "tiny" / "checkpoint"
BOOK = book_configs()
EQUAL = 1e-5
LONGEST = 18  # tokens of a completion
SMALL = f"""
    --model_name_or_path {EMBEDDED} --dtype float32 --use_cpu --bf16 false --report_to none
    --disable_tqdm --save_strategy no --eval_strategy no
""".split()
GYM = ["--dataset.system_prompt", "none", "--dataset.eval_size", "1"]  # the model reads 256 tokens


# --- both sides in float64 ------------------------------------------------------------------------


class PlainHead:
    """In place of TRL's kernel, which computes in float32."""

    @staticmethod
    def apply(hidden, weight, bias, labels, temperature, *_):
        logps = (hidden @ weight.T / temperature).log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1).detach()
        unread = torch.zeros_like(entropy)  # log_sum_sq_probs, mean_logits and is_top1: for metrics
        return logps.gather(-1, labels[:, None])[:, 0], entropy, unread, unread, unread.bool()


def rotary_positions(self, x, position_ids):
    """In place of transformers', which rounds to float32, so that padding on the left matters."""
    angles = position_ids[..., None].double() * self.inv_freq.double()
    angles = torch.cat([angles, angles], -1)
    return angles.cos(), angles.sin()


@pytest.fixture(autouse=True)
def _in_float64(monkeypatch) -> Iterator[None]:
    monkeypatch.setattr(trl.trainer.utils, "_ChunkedLogProbFunction", PlainHead)
    monkeypatch.setattr(modeling_qwen3.Qwen3RotaryEmbedding, "forward", rotary_positions)
    yield
    torch.set_default_dtype(torch.float32)


def embedded() -> Any:
    """Return the embedded model."""
    return AutoModelForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float64)


def move(model: Any) -> None:
    """Move a model, as earlier steps would have: so it is not its own reference."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
                weight += 0.05 * weight.std() * noise


# --- the translated recipe ------------------------------------------------------------------------


def named_as_there(name: str, is_reward_model: bool = False) -> str:
    """Return the name of a weight in `Weights`: the model's number, and the name in it."""
    if name.startswith("value_model."):
        return "1." + of_critic(name.removeprefix("value_model."))
    return "0." + (of_critic(name) if is_reward_model else name)


def of_critic(name: str) -> str:
    """Return the name in a `Critic` of a weight of transformers' sequence classifier."""
    return name.replace("score", "head") if name.startswith("score") else f"backbone{name[5:]}"


@dataclass
class Trained(TrainerCallback):
    """A recipe's trainer with what it did: its micro-batches, and the weights after each step."""

    trainer: Any
    text: str  # the translation
    answers: list[Answer] = field(default_factory=list)
    batches: list[list[Any]] = field(default_factory=list)
    after: list[Weights] = field(default_factory=list)

    def weights(self) -> Weights:
        """Return a copy of the weights, named as the book's side names them."""
        model = self.trainer.model
        is_reward_model = hasattr(model, "score")
        return {
            named_as_there(name, is_reward_model): weight.detach().clone()
            for name, weight in model.named_parameters()
        }

    def on_step_end(self, args, state, control, **kwargs):
        """Keep the weights."""
        self.after.append(self.weights())

    def train(self) -> None:
        """Train from `before` on."""
        self.before = self.weights()
        self.trainer.add_callback(self)
        torch.set_default_dtype(torch.float64)  # of rewards and advantages
        self.trainer.train()
        torch.set_default_dtype(torch.float32)


def edited(key: str, **changes: Any) -> BookConfig:
    """Return one of the book's configs with other values."""
    book = BOOK[key]
    return BookConfig(book.folder, book.name, book.fields | changes)


def translated(config: BookConfig, folder: Path) -> str:
    """Return the translation of a config."""
    source = folder / f"{config.name}.yaml"
    source.write_text(config.text)
    return translate(source)


def load(config: BookConfig, folder: Path, *options: str) -> tuple[Any, Any, str]:
    """Return the stage of a config's translation, what the stage reads of it, and its text."""
    text, path = translated(config, folder), folder / "ours.yaml"
    path.write_text(text)
    stage = STAGES[re.search(r"recipes/(\w+)\.py --config", text)[1]]
    argv = ["--config", str(path), "--output_dir", str(folder / "out"), *SMALL, *options]
    return stage, stage.load(argv), text


TOKENIZER = AutoTokenizer.from_pretrained(EMBEDDED)
END = TOKENIZER.eos_token_id


def answer_text(word: str, number: int) -> str:
    """Return one of eight answers: right, in part right, without tags or too long."""
    right = word[::-1]
    swapped = right[1] + right[0] + right[2:]
    tagged = "<think></think><answer>{}</answer>"
    return [
        tagged.format(right),
        tagged.format(word),
        f"<answer>{right}</answer>",
        tagged.format(swapped),
        tagged.format(right[:-1]),
        right,
        f"<think>{word}</think>{right}",
        tagged.format(right.upper()),
    ][number % 8]


def rollout(config: BookConfig, folder: Path, *options: str, say: Any = answer_text) -> Trained:
    """Train a policy-gradient recipe on fixed completions; keep them and their micro-batches."""
    stage, loaded, text = load(config, folder, *GYM, *options)
    args, own = loaded.trl, loaded.own
    data = train.read(args, load_prompts, own.dataset, answer_columns(own))
    rewards = load_reward_functions(own, args, data, TOKENIZER)
    trainer = train.build(loaded, stage.part("trainer"), data, TOKENIZER, reward_funcs=rewards)
    trainer.model.double()
    trained = Trained(trainer, text)

    def answer(prompt_ids: Sequence[int], index: int, call: int) -> list[int]:
        question = TOKENIZER.decode(prompt_ids, skip_special_tokens=True)
        word = question.rpartition(": ")[2]
        number = index if args.num_generations > 1 else len(trained.answers)
        ids = TOKENIZER(say(word, number + len(word)), add_special_tokens=False)["input_ids"]
        ids = [*ids, END][:LONGEST]
        entry = ("question", question), ("answer", word[::-1])
        read = TOKENIZER.decode(ids, skip_special_tokens=True)
        trained.answers.append(Answer(tuple(prompt_ids), tuple(ids), read, entry))
        return ids

    fix_completions(trainer, answer)
    compute = trainer._compute_loss

    def recorded(model: Any, inputs: Any) -> Any:
        keys = zip(kept(inputs, "prompt"), kept(inputs, "completion"), strict=True)
        by_key = {answer.key: answer for answer in trained.answers}
        trained.batches.append([by_key[key] for key in keys])
        return compute(model, inputs)

    trainer._compute_loss = recorded
    return trained


def kept(inputs: Any, name: str) -> list[tuple[int, ...]]:
    """Return the token ids of a padded tensor that its mask keeps."""
    rows = zip(inputs[f"{name}_ids"], inputs[f"{name}_mask"], strict=True)
    return [tuple(ids[mask.bool()].tolist()) for ids, mask in rows]


# --- the comparison -------------------------------------------------------------------------------


def distance(before: Weights, book: Weights, ours: Weights) -> float:
    """Return the norm of the difference of two movements over that of the book's."""
    assert book.keys() == ours.keys()
    there = torch.cat([(book[name] - before[name]).flatten() for name in book])
    here = torch.cat([(ours[name] - before[name]).flatten() for name in book])
    return ((there - here).norm() / there.norm()).item()


def distances(trained: Trained, book: Sequence[Weights]) -> list[float]:
    """Return the distance after each step."""
    assert len(book) == len(trained.after)
    pairs = zip(book, trained.after, strict=True)
    return [distance(trained.before, there, here) for there, here in pairs]


def groups(answers: Sequence[Answer], size: int = 8) -> list[Sequence[Answer]]:
    """Return the answers by question."""
    return [answers[start : start + size] for start in range(0, len(answers), size)]


def gym(name: str, size: int = 4, **changes: Any) -> BookConfig:
    """Return a policy-gradient config for a few questions and short completions.

    Its rate is so high that the ratios of a phase's later steps are clipped.
    """
    changes = {"lr": 1e-3} | changes
    data = BOOK[f"policy_gradients/{name}"].fields["data"] | {"size": size}
    if name == "dapo":
        changes = {"l_max": LONGEST, "l_cache": 8} | changes
    return edited(f"policy_gradients/{name}", data=data, max_new_tokens=LONGEST, **changes)


def says(trained: Trained, field: str, pattern: str) -> bool:
    """Tell whether the comment at a field of the translation says something."""
    return re.search(pattern, comment(trained.text, field)) is not None


@pytest.mark.parametrize("name", ["grpo", "maxrl", "dapo"])
def test_a_phase_of_a_policy_gradient_moves_the_weights_as_the_codes(name, tmp_path):
    config = gym(name)
    trained = rollout(config, tmp_path)
    trained.train()
    book = policy_gradient_steps(config, embedded(), groups(trained.answers), trained.batches)
    assert len(book) == 4
    assert max(distances(trained, book)) < EQUAL


OTHERS = {
    **{name: {"beta": 0.1} for name in ("drgrpo", "gspo", "cispo", "sapo")},
    "grpo": {"beta": 0.1, "kl_estimator": "kl2"},
    "reinforce": {"beta": 0.1, "kl_estimator": "kl1"},
    "rloo": {"beta": 0.1, "kl_estimator": "kl1"},
}


@pytest.mark.promise
@pytest.mark.parametrize("name", OTHERS)
def test_a_phase_with_a_reference_moves_the_weights_as_the_codes(name, tmp_path):
    size = 8 if name == "reinforce" else 4
    config = gym(name, size, **OTHERS[name])
    trained = rollout(config, tmp_path)
    trained.trainer.ref_model.double()
    move(trained.trainer.model)
    trained.train()
    policy = embedded()
    move(policy)
    given = groups(trained.answers, config["num_rollouts"]), trained.batches, embedded()
    book = policy_gradient_steps(config, policy, *given)
    assert len(book) == {"reinforce": 1}.get(name, 4)
    assert max(distances(trained, book)) < EQUAL


def test_dapo_leaves_groups_without_contrast_out_of_its_steps(tmp_path):
    config = gym("dapo")

    def say(word: str, number: int) -> str:
        """Answer questions of short words always wrongly, all in the same way but for the form."""
        wrong = ["<think></think><answer>{}</answer>", "<answer>{}</answer>"][number % 2]
        return wrong.format("?") if len(word) < 8 else answer_text(word, number)

    trained = rollout(config, tmp_path, say=say)
    trained.train()
    asked = groups(trained.answers)
    kept = [group for group in asked if has_contrast(config, group)]
    assert len(asked) == 4 > len(kept) > 0
    there = {answer.key for group in kept for answer in group}
    batches = [[a for a in batch if a.key in there] for batch in trained.batches]
    # the code's phase, of these groups alone, has fewer steps, and no gaps
    full = [group[n : n + 2] for group in kept for n in range(0, 8, 2)]
    assert len(policy_gradient_steps(config, embedded(), kept, full)) == len(kept)
    assert len(trained.after) == len(asked)
    assert says(trained, "num_train_epochs", r"for each of these; here .*, on what is left")
    # which is the whole difference
    book = policy_gradient_steps(config, embedded(), kept, batches)
    assert max(distances(trained, book)) < EQUAL


def test_a_phase_of_ppo_moves_policy_and_value_model_as_the_codes(tmp_path):
    config = gym("ppo", 16)
    trained = rollout(config, tmp_path)
    score = trained.trainer._policy.value_model.score
    del score.forward  # which computes in float32
    assert not score.weight.any()
    assert says(
        trained, "vf_coef", r"the book's code .*at random in bfloat16.*; here it starts at 0"
    )
    with torch.no_grad():
        score.weight.copy_(random_head(3))
    trained.train()
    policy = embedded()
    critic = Critic(policy, trained.before["1.head.weight"])
    book = ppo_steps(config, policy, critic, trained.answers, trained.batches)
    assert len(book) == 2
    assert max(distances(trained, book)) < EQUAL


def random_head(seed: int) -> torch.Tensor:
    """Return the weights with which torch starts a linear layer, as the code's critic has them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return torch.nn.Linear(96, 1, bias=False).weight.detach()


def test_a_random_head_starts_with_values_of_0_6_times_the_hidden_states(tmp_path):
    text = translated(BOOK["policy_gradients/ppo"], tmp_path)
    assert "about 0.6 times the size of the hidden states" in comment(text, "vf_coef")
    hidden = torch.randn(1000, 96, generator=torch.Generator().manual_seed(0))
    values = torch.cat([hidden @ random_head(seed).T for seed in range(100)])
    assert values.std() / hidden.std() == pytest.approx(0.6, abs=0.05)  # 1 / sqrt(3)


# --- pairs and conversations ----------------------------------------------------------------------

WORDS = ["sun", "tree", "river", "stone", "cloud", "light", "green", "house"]
WORDS += [first + second for first, second in zip(WORDS, reversed(WORDS), strict=True)]
TOY = {"batch_size": 4, "gradient_accumulation_steps": 2, "max_length": 96, "warmup_ratio": 0.5}


def question(word: str) -> str:
    return f"Say {word}"


def pairs() -> list[tuple[str, str, str]]:
    """Return sixteen pairs of ragged answers."""
    return [
        (question(word), answer_text(word, n), answer_text(word[:3], n + 3))
        for n, word in enumerate(WORDS)
    ]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def ids_of(asked: str, answer: str) -> tuple[int, ...]:
    """Return the tokens of a question with an answer, as the code encodes them."""
    first, rest = encode(TOKENIZER, asked, answer)
    return (*first, *rest)


def write_pairs(folder: Path) -> str:
    """Write the pairs in the form of UltraFeedback."""
    rows = [
        {
            "prompt": asked,
            "chosen": [message("user", asked), message("assistant", good)],
            "rejected": [message("user", asked), message("assistant", bad)],
            "chosen-rating": 5.0,
            "rejected-rating": 1.0,
        }
        for asked, good, bad in pairs()
    ]
    return write_rows(folder / "ultrafeedback.jsonl", rows)


def aligned(name: str, folder: Path, moved: bool = True, **changes: Any) -> tuple[Any, Trained]:
    """Build a direct-alignment recipe on the pairs, its policy moved away from its reference."""
    path = write_pairs(folder)
    toy = TOY | {"num_epochs": 1, "max_samples": 16, "dataset_name": path}
    config = edited(f"direct_alignment/{name}", **toy | changes)
    stage, loaded, text = load(config, folder)
    unpaired = stage.name == "kto"
    data, tokenizer = prepare_preferences(loaded.own, loaded.trl, loaded.model, unpaired)
    trainer = train.build(loaded, stage.part("trainer"), data, tokenizer)
    trainer.model.double()
    if getattr(trainer, "ref_model", None) is not None:
        trainer.ref_model.double()
    if moved:
        move(trainer.model)
    trained = Trained(trainer, text)
    record_rows(trained)
    return config, trained


def pairs_run(folder: Path) -> Path:
    """Do a run of one step on the pairs, as the recipe does; return its folder."""
    toy = TOY | {"num_epochs": 1, "max_samples": 4, "dataset_name": write_pairs(folder)}
    config = edited("direct_alignment/simpo", **toy)
    stage, loaded, _ = load(config, folder, "--max_steps", "1", "--samples.every", "0")
    stage.part("run")(loaded, stage.part("trainer"), **stage.options)
    return folder / "out"


def record_rows(trained: Trained) -> None:
    """Keep the token ids of each micro-batch."""
    step = trained.trainer.training_step

    def recorded(model: Any, inputs: Any, *rest: Any) -> Any:
        trained.batches.append(sequences(inputs))
        return step(model, inputs, *rest)

    trained.trainer.training_step = recorded


def sequences(inputs: Any) -> list[tuple[int, ...]]:
    """Return the token ids of a batch without its padding."""
    rows = []
    for name in ("input_ids", "chosen_input_ids", "rejected_input_ids"):
        if name in inputs:
            masks = inputs[name.replace("input_ids", "attention_mask")]
            padded = zip(inputs[name], masks, strict=True)
            rows += [tuple(ids[mask.bool()].tolist()) for ids, mask in padded]
    return rows


def pairs_of(batch: list[tuple[int, ...]]) -> list[tuple[str, str, str]]:
    """Return the pairs of a micro-batch."""
    first = set(batch)
    return [pair for pair in pairs() if ids_of(pair[0], pair[1]) in first]


RELATIVES = ["ipo", "simpo", "dpo_norm", "apo_zero", "apo_down"]
SLOW = [pytest.param(name, marks=pytest.mark.promise) for name in RELATIVES]


@pytest.mark.parametrize("name", ["dpo", "orpo", *SLOW])
def test_a_step_on_pairs_moves_the_weights_as_the_codes(name, tmp_path):
    config, trained = aligned(name, tmp_path)
    trained.train()
    policy, reference = embedded(), embedded()
    move(policy)

    def loss(batch: list[tuple[str, str, str]]) -> torch.Tensor:
        if name == "orpo":
            return orpo_loss(policy, TOKENIZER, config["beta"], batch)
        return pair_loss(config, policy, reference, TOKENIZER, batch)

    batches = [pairs_of(batch) for batch in trained.batches]
    losses = [lambda batch=batch: loss(batch) for batch in batches]
    rates = quantities(config, len(pairs()))["learning rates"]
    book = row_steps(config, policy, losses, rates)
    assert len(book) == 2
    assert [len(batch) for batch in batches] == [4, 4, 4, 4]
    assert max(distances(trained, book)) < EQUAL


def test_a_smaller_last_step_has_rate_0_there_and_is_divided_otherwise_here(tmp_path):
    rows = 12  # three micro-batches, of which a step takes two
    config, trained = aligned("dpo", tmp_path, max_samples=rows, warmup_ratio=0.0)
    trained.train()
    batches = [pairs_of(batch) for batch in trained.batches]
    assert [len(batch) for batch in batches] == [4, 4, 4]

    def steps(rates: list[float], mean_of_leftovers: bool = False) -> list[Weights]:
        policy, reference = embedded(), embedded()
        move(policy)
        given = config, policy, reference, TOKENIZER
        losses = [lambda batch=batch: pair_loss(*given, batch) for batch in batches]
        return row_steps(config, policy, losses, rates, mean_of_leftovers)

    rates = quantities(config, rows)["learning rates"]
    assert rates == [config["learning_rate"], 0.0]
    apart = distances(trained, steps(rates))
    assert apart[0] < EQUAL < 0.3 < apart[1]
    assert says(
        trained, "gradient_accumulation_steps", r"the book's code .*; here by the micro-bat"
    )
    # which is the whole difference
    ours = [config["learning_rate"], config["learning_rate"] / 2]
    assert max(distances(trained, steps(ours, mean_of_leftovers=True))) < EQUAL


def test_a_step_of_kto_moves_the_weights_as_the_codes(tmp_path):
    config, trained = aligned("kto", tmp_path)
    trained.train()
    policy, reference = embedded(), embedded()
    move(policy)
    chosen = {ids_of(asked, good): (asked, good) for asked, good, _ in pairs()}
    rejected = {ids_of(asked, bad): (asked, bad) for asked, _, bad in pairs()}

    def loss(batch: list[tuple[int, ...]]) -> torch.Tensor:
        rows = [[side[ids] for ids in batch if ids in side] for side in (chosen, rejected)]
        return kto_loss(policy, reference, TOKENIZER, config["beta"], *rows)

    losses = [lambda batch=batch: loss(batch) for batch in trained.batches]
    book = row_steps(config, policy, losses, quantities(config, len(pairs()))["learning rates"])
    assert len(book) == 2
    assert max(distances(trained, book)) < EQUAL


def test_kto_parts_pairs_in_one_order_for_all_epochs_and_says_so(tmp_path):
    _, trained = aligned("kto", tmp_path, num_epochs=2)
    trained.train()
    first, second = trained.batches[:4], trained.batches[4:]
    assert first == second
    rejected = {ids_of(asked, bad) for asked, _, bad in pairs()}
    assert [sum(ids in rejected for ids in batch) for batch in first] == [4] * 4
    of_pairs = [{ids_of(asked, good), ids_of(asked, bad)} for asked, good, bad in pairs()]
    whole = sum(pair <= set(batch) for pair in of_pairs for batch in first)
    assert whole < len(of_pairs) / 2
    assert says(
        trained,
        "per_device_train_batch_size",
        r"the book's code trains 4 pairs at a time, whole ones, in another order each epoch; here "
        r"8 completions, half of them rejected, in one order that parts most pairs",
    )


def conversations(folder: Path, *options: str, **changes: Any) -> tuple[BookConfig, Trained]:
    """Build the recipe of supervised fine-tuning on the chosen answers."""
    rows = [
        {"messages": [message("user", asked), message("assistant", good)]}
        for asked, good, _ in pairs()
    ]
    path = write_rows(folder / "conversations.jsonl", rows)
    toy = TOY | {"num_epochs": 1, "dataset_name": path, "chat_template_source": None}
    config = edited("instruction_tuning/sft_olmo2_1b", **toy | changes)
    stage, loaded, text = load(config, folder, *options)
    supervised.decide_what_is_trained(loaded)
    own = loaded.own
    data = train.read(loaded.trl, load_demonstrations, own.dataset, own.demonstrator)
    trainer = train.build(loaded, stage.part("trainer"), data, TOKENIZER)
    trainer.model.double()
    trained = Trained(trainer, text)
    record_rows(trained)
    return config, trained


def test_a_step_of_sft_takes_its_mean_over_more_tokens_and_says_so(tmp_path):
    config, trained = conversations(tmp_path)
    trained.train()
    rows = {ids_of(asked, good): (asked, good) for asked, good, _ in pairs()}
    batches = [[rows[ids] for ids in batch] for batch in trained.batches]
    given = TOKENIZER, batches, quantities(config, len(rows))["learning rates"]
    apart = distances(trained, sft_steps(config, embedded(), *given))
    assert len(apart) == 2
    assert 0.2 < apart[0] < 0.3
    assert says(
        trained,
        "per_device_train_batch_size",
        r"the book's code averages over the tokens of each micro-batch, .*; here over all tokens",
    )
    # which is the whole difference
    book = sft_steps(config, embedded(), *given, over_the_step=True)
    assert max(distances(trained, book)) < EQUAL


def test_a_token_of_twice_as_many_weighs_half_as_much_there_and_the_same_here():
    """Compare what one token of each of two micro-batches adds to a step's loss."""
    tokens = [10, 20]
    there = [1 / (len(tokens) * count) for count in tokens]
    here = [1 / sum(tokens) for _ in tokens]
    assert there[1] / there[0] == 0.5
    assert here[1] / here[0] == 1


def test_a_reward_model_decays_other_weights_and_divides_its_last_step_otherwise(tmp_path):
    toy = {"batch_size": 2, "grad_accum_steps": 2, "epochs": 1, "max_length": 96, "val_ratio": 0.0}
    toy |= {"samples": 14, "dataset_name": write_pairs(tmp_path), "warmup_ratio": 0.0, "lr": 1e-3}
    config = edited("reward_models/preference_rm", **toy)
    stage, loaded, text = load(config, tmp_path)
    data, tokenizer = prepare_rewards(loaded.own, loaded.trl, loaded.model)
    trainer = train.build(loaded, stage.part("trainer"), data, tokenizer)
    trainer.model.double()
    trained = Trained(trainer, text)
    record_rows(trained)
    trained.train()
    batches = [pairs_of(batch) for batch in trained.batches]
    assert [len(batch) for batch in batches] == [2] * 7  # so the last of four steps has one

    def steps(**options: bool) -> list[Weights]:
        critic = Critic(embedded(), trained.before["0.head.weight"])
        rates = quantities(config, 14)["learning rates"]
        return reward_steps(config, critic, TOKENIZER, batches, rates, **options)

    apart = distances(trained, steps())
    assert 1e-4 < apart[0] < 1e-3 < 1e-2 < apart[3] < 1e-1
    assert says(
        trained, "weight_decay", r"the book's code decays all weights .*; here all but .*nor"
    )
    assert says(
        trained, "gradient_accumulation_steps", r"a smaller last step .*; here .*divided by"
    )
    assert distances(trained, steps(mean_of_leftovers=True))[3] < 1e-3
    # which is the whole difference
    book = steps(mean_of_leftovers=True, decays_norms=False)
    assert max(distances(trained, book)) < EQUAL


# --- reward models of tokens ----------------------------------------------------------------------

SYSTEM = (
    "Solve the math problem step by step. End with exactly one line in the form "
    "#### <number>. Do not write anything after that line."
)
OF_TOKENS = {"batch_size": 2, "grad_accum_steps": 2, "epochs": 1, "val_ratio": 0.0, "lr": 1e-3}
OF_TOKENS |= {"warmup_ratio": 0.0}


def token_reward_model(config: BookConfig, folder: Path) -> Trained:
    """Build the recipe of an outcome or process reward model."""
    stage, loaded, text = load(config, folder)
    data, tokenizer = prepare_rewards(loaded.own, loaded.trl, loaded.model)
    for name in ("step_separator", "step_split"):  # as the run of a process reward model does
        if hasattr(loaded.own.dataset, name):
            setattr(loaded.trl, name, getattr(loaded.own.dataset, name))
    trainer = train.build(loaded, stage.part("trainer"), data, tokenizer)
    trainer.model.double()
    trained = Trained(trainer, text)
    record_rows(trained)
    return trained


def moves_as_the_codes(config: BookConfig, trained: Trained, rows: dict[Any, Any]) -> None:
    """Assert what a reward model of tokens shares with the code, and that it says what differs."""
    trained.train()
    batches = [[rows[ids] for ids in batch] for batch in trained.batches]
    assert sum(map(len, batches)) == len(rows)

    def steps(**options: bool) -> list[Weights]:
        weight, bias = (trained.before.get(f"0.head.{part}") for part in ("weight", "bias"))
        critic = TokenCritic(embedded(), weight, bias)
        rates = quantities(config, len(rows))["learning rates"]
        return token_reward_steps(config, critic, batches, rates, **options)

    apart = distances(trained, steps())
    assert 1e-4 < apart[0] < 1e-2
    assert says(trained, "weight_decay", r"the book's code decays all weights .*; here all but")
    assert says(trained, "model_name_or_path", r"the book's code starts the head evenly .*; here")
    # which is the whole difference, once the head is the same
    assert max(distances(trained, steps(decays_norms=False))) < EQUAL


def test_a_step_of_an_outcome_reward_model_moves_the_weights_as_the_codes(tmp_path):
    data = [
        {
            "prompt": question(word),
            "completions": [answer_text(word, number + n) for n in range(2)],
            "rewards": [1, 0],
        }
        for number, word in enumerate(WORDS[:4])
    ]
    path = write_rows(tmp_path / "rollouts.jsonl", data)
    toy = OF_TOKENS | {"samples": 4, "max_length": 256, "dataset_name": path}
    config = edited("reward_models/orm", **toy)
    trained = token_reward_model(config, tmp_path)
    rows = {}
    for row in data:
        for text, right in zip(row["completions"], row["rewards"], strict=True):
            first, rest = outcome_ids(TOKENIZER, SYSTEM, row["prompt"], text)
            places = range(len(first), len(first) + len(rest))
            rows[*first, *rest] = ([*first, *rest], places, [right] * len(rest))
    moves_as_the_codes(config, trained, rows)


def test_a_step_of_a_process_reward_model_moves_the_weights_as_the_codes(tmp_path):
    ratings = [[1, -1, 0], [0, 1], [1, 1, -1], [-1, 0]]
    data = [
        {
            "question": {"problem": question(word)},
            "label": {
                "steps": [
                    {
                        "completions": [{"text": word[: n + 1], "rating": rating}],
                        "chosen_completion": 0,
                    }
                    for n, rating in enumerate(rated)
                ]
            },
        }
        for word, rated in zip(WORDS[:4], ratings, strict=True)
    ]
    path = write_rows(tmp_path / "traces.jsonl", data)
    toy = OF_TOKENS | {"samples": 4, "max_tokens": 256, "dataset_name": path}
    config = edited("reward_models/prm", **toy)
    trained = token_reward_model(config, tmp_path)
    rows = {}
    for word, rated in zip(WORDS[:4], ratings, strict=True):
        steps = [word[: n + 1] for n in range(len(rated))]
        ids, places = trace_ids(TOKENIZER, question(word), steps, "\n<step>\n")
        rows[tuple(ids)] = (ids, places, [rating + 1 for rating in rated])
    moves_as_the_codes(config, trained, rows)


# --- rejection sampling and self-distillation -----------------------------------------------------


def test_a_step_of_rejection_samplings_tuning_takes_its_mean_over_more_tokens_and_says_so(tmp_path):
    # ten selected answers: two steps of two micro-batches of two, and one of one
    toy = {"train_batch_size": 2, "batch_acc": 2, "num_epochs": 1, "max_seq_length": 96, "lr": 1e-4}
    config = edited("rejection_sampling/top_per_prompt", **toy)
    stage, loaded, text = load(config, tmp_path)
    supervised.fix_fields(loaded, FIXED, "rejection_sampling")
    rows = [{"prompt": [message("user", question(word))]} for word in WORDS[:10]]
    texts = [answer_text(word, number) for number, word in enumerate(WORDS[:10])]
    answers = [[*TOKENIZER(text, add_special_tokens=False)["input_ids"], END] for text in texts]
    sampled = [[SimpleNamespace(ids=ids)] for ids in answers]
    rollouts = Rollouts(rows, sampled, [[1.0]] * 10, None)
    learned = [_example(rollouts, TOKENIZER, (number, 0)) for number in range(10)]
    sides = {"train_dataset": datasets.Dataset.from_list(learned), "eval_dataset": None}
    data = examples(rows, [], None)
    trainer = train.build(loaded, stage.part("trainer"), data, TOKENIZER, **sides)
    trainer.model.double()
    trained = Trained(trainer, text)
    record_rows(trained)
    trained.train()

    parts = {}
    for word, said, ids in zip(WORDS[:10], texts, answers, strict=True):
        first, rest = encode(TOKENIZER, question(word), said)
        assert rest[: len(ids)] == ids  # what the template has behind the end is in the code alone
        parts[*first, *ids] = (first, ids)
    batches = [[parts[ids] for ids in batch] for batch in trained.batches]
    assert [len(batch) for batch in batches] == [2] * 5

    def steps(**ours: bool) -> list[Weights]:
        return selected_steps(config, embedded(), batches, **ours)

    apart = distances(trained, steps())
    assert len(apart) == 3
    assert 0.01 < apart[0] < 0.5
    mean = r"the book's code averages over the tokens of each micro-batch, .*; here over all tokens"
    assert says(trained, "per_device_train_batch_size", mean)
    # which is the whole difference, but for the division of the last step
    ours = {"over_the_step": True, "mean_of_leftovers": True}
    assert max(distances(trained, steps(**ours))) < EQUAL


def shown(asked: str, answer: str) -> tuple[int, ...]:
    """Return the tokens of the prompt that shows the teacher a right answer."""
    parts = [asked, f"Correct solution:\n\n{answer}", "Correctly solve the original question."]
    messages = [message("user", "\n\n".join(parts))]
    text = TOKENIZER.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return tuple(TOKENIZER(text, add_special_tokens=False)["input_ids"])


def test_a_step_of_self_distillation_moves_the_weights_as_the_codes(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # to which logits are rounded
    data = BOOK["distillation/sdpo"].fields["data"] | {"size": 4}
    toy = {"data": data, "prompts_per_step": 4, "num_rollouts": 8, "num_steps": 1}
    toy |= {"max_new_tokens": LONGEST, "lr": 1e-3, "warmup_ratio": 0.0}
    config = edited("distillation/sdpo", **toy)

    def say(word: str, number: int) -> str:
        """Answer in few tokens, the third of eight rightly."""
        return f"<answer>{word[::-1] if number % 8 == 2 else word[:2]}</answer>"

    trained = rollout(config, tmp_path, say=say)
    trained.train()
    asked = groups(trained.answers)
    assert len(asked) == 4
    told = []
    for group in asked:
        right = [answer for answer in group if correctness(answer) == 1]
        assert right
        prompt = shown(dict(group[0].entry)["question"], right[0].text)
        told.append([(answer.prompt_ids, prompt, answer.completion_ids) for answer in group])
    book = distillation_steps(config, embedded(), told)
    assert len(book) == len(trained.after) == 1
    assert max(distances(trained, book)) < EQUAL
