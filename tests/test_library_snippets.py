"""What people write for TRL, on our trainers: only the imports and the class names are others.

A snippet is a function of the classes it would import. Stock classes run it beside ours, whose
formulation is the default, so that what a script reads afterwards is known to be there for both.
"""

import asyncio
import json
import math
import sys
from itertools import cycle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset, load_dataset
from library_cases import OURS, STOCK, examples, train
from peft import LoraConfig
from policy_gradient_cases import checkpoint
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import ModelConfig, ScriptArguments, TrlParser, get_peft_config

from rlhf_trl.tiny.tokenizer import build_tokenizer

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
ONE_STEP = {**CPU, "max_steps": 1, "logging_steps": 1, "save_strategy": "no"}
GROUPS = {"num_generations": 4, "per_device_train_batch_size": 8, "max_completion_length": 6}
BY_BATCHES = {"runtime", "per_second", "preparation_time"}


def imports(whose, kind):
    """Return what a script imports for one trainer: ours, or the stock one."""
    trainer_class, config_class = (OURS if whose == "ours" else STOCK)[kind]
    return SimpleNamespace(Trainer=trainer_class, Config=config_class)


def named(metrics):
    """Return the names of metrics without those of clocks."""
    return {name for name in metrics if not name.endswith(tuple(BY_BATCHES))}


def first_log(trainer):
    """Return what the first step logs."""
    return next(line for line in trainer.state.log_history if "loss" in line)


@pytest.fixture(params=["stock", "ours"])
def whose(request):
    """Whose classes a snippet imports."""
    return request.param


# --- quick starts ---------------------------------------------------------------------------------


def quick_grpo(lib, folder):
    def many_vowels(completions, **kwargs):
        return [float(sum(letter in "aeiou" for letter in text)) for text in completions]

    return lib.Trainer(
        model=checkpoint(),
        reward_funcs=many_vowels,
        args=lib.Config(output_dir=folder, **ONE_STEP, **GROUPS),
        train_dataset=Dataset.from_dict({"prompt": ["Name a color.", "Name an animal."] * 4}),
    )


def quick_pairs(lib, folder):
    pair = {"prompt": "The grass is", "chosen": " green.", "rejected": " loud."}
    return lib.Trainer(
        model=checkpoint(),
        args=lib.Config(output_dir=folder, **ONE_STEP),
        train_dataset=Dataset.from_list([pair] * 7 + [{**pair, "rejected": " a verb."}]),
    )


def quick_kto(lib, folder):
    def judged(completion, label):
        question = [{"role": "user", "content": "What do cows eat?"}]
        answer = [{"role": "assistant", "content": completion}]
        return {"prompt": question, "completion": answer, "label": label}

    return lib.Trainer(
        model=checkpoint(),
        args=lib.Config(output_dir=folder, **ONE_STEP),
        train_dataset=Dataset.from_list([judged("Grass.", True), judged("Stones.", False)] * 4),
    )


def quick_orpo(lib, folder):
    model = AutoModelForCausalLM.from_pretrained(checkpoint())
    tokenizer = AutoTokenizer.from_pretrained(checkpoint())
    question = [{"role": "user", "content": "Is ice cold?"}]
    sides = {"chosen": "It is.", "rejected": "Never."}
    pair = {side: [{"role": "assistant", "content": text}] for side, text in sides.items()}
    return lib.Trainer(
        model=model,
        args=lib.Config(output_dir=folder, **ONE_STEP),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list([{"prompt": question, **pair}] * 8),
    )


def quick_reward(lib, folder):
    pair = {"chosen": "Two and two is four.", "rejected": "Two and two is two."}
    return lib.Trainer(
        model=checkpoint(),
        args=lib.Config(output_dir=folder, **ONE_STEP),
        train_dataset=Dataset.from_list([pair] * 8),
    )


def quick_sft(lib, folder):
    talk = [{"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."}]
    return lib.Trainer(
        model=checkpoint(),
        args=lib.Config(output_dir=folder, **ONE_STEP, assistant_only_loss=True),
        train_dataset=Dataset.from_list([{"messages": talk}] * 8),
    )


QUICK_STARTS = {
    "grpo": (quick_grpo, "rewards/many_vowels/mean"),
    "dpo": (quick_pairs, "rewards/margins"),
    "kto": (quick_kto, "kl"),
    "orpo": (quick_orpo, "log_odds_ratio"),
    "reward": (quick_reward, "margin"),
    "sft": (quick_sft, "mean_token_accuracy"),
}


@pytest.mark.parametrize("kind", QUICK_STARTS)
def test_a_quick_start_trains_and_logs_all_that_stock_does(kind, tmp_path):
    write, metric = QUICK_STARTS[kind]
    logs = {}
    for whose in ("stock", "ours"):
        trainer = write(imports(whose, kind), str(tmp_path / whose))
        before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        trainer.train()
        assert trainer.state.global_step == 1
        if kind != "grpo":  # whose completions may all have the same reward
            moved = [not p.equal(before[name]) for name, p in trainer.model.named_parameters()]
            assert any(moved)
        logs[whose] = first_log(trainer)
        assert math.isfinite(logs[whose]["loss"]) and metric in logs[whose]
    assert named(logs["stock"]) <= named(logs["ours"])


# --- rewards --------------------------------------------------------------------------------------


def test_rewards_read_columns_wait_and_log(whose, tmp_path):
    lib, seen, running = imports(whose, "grpo"), [], []

    def right(completions, solution, log_extra=None, log_metric=None, **kwargs):
        seen.append((list(kwargs["prompts"]), list(solution)))
        log_extra("solution", list(solution))
        log_metric("solutions", len(solution))
        return [float(answer in text) for text, answer in zip(completions, solution, strict=True)]

    async def waits(completions, **kwargs):
        running.append("waits begins")
        await asyncio.sleep(0.02)
        running.append("waits ends")
        return [float(len(text)) for text in completions]

    async def waits_too(completions, hint, **kwargs):
        running.append("waits_too begins")
        await asyncio.sleep(0.02)
        assert set(hint) <= {"even", "odd"}
        return [None if word == "odd" else 1.0 for word in hint]

    rows = {"prompt": ["1+1=", "1+2="] * 4, "solution": ["2", "3"] * 4, "hint": ["even", "odd"] * 4}
    trainer = lib.Trainer(
        model=checkpoint(),
        reward_funcs=[right, waits, waits_too],
        args=lib.Config(str(tmp_path), **ONE_STEP, **GROUPS, reward_weights=[1.0, 0.5, 2.0]),
        train_dataset=Dataset.from_dict(rows),
    )
    trainer.train()
    [(prompts, solutions)] = seen
    assert len(prompts) == 8
    assert [{"1+1=": "2", "1+2=": "3"}[prompt] for prompt in prompts] == solutions
    assert running.index("waits_too begins") < running.index("waits ends")  # at the same time
    logged = first_log(trainer)
    assert logged["solutions"] == 8
    assert logged["rewards/waits_too/mean"] == 1.0
    assert logged["reward"] == pytest.approx(
        logged["rewards/right/mean"]
        + 0.5 * logged["rewards/waits/mean"]
        + 2 * solutions.count("2") / 8,
        rel=1e-5,
    )


# --- tools ----------------------------------------------------------------------------------------

AGENT_TEMPLATE = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{- '<|assistant|>' + (m.content or '') }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<think>' + (call.function | tojson) + '</think>' }}{%- endfor %}"
    "{%- else %}{{- '<|system|>' if m.role == 'tool' else '<|user|>' }}{{- m.content }}"
    "{%- endif %}{{- '<|end|>' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)
AGENT_RESPONSES = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {
        "tool_calls": {
            "open": "<think>",
            "close_pattern": "</think>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<\|end\|>", "content": "text"},
    },
}


def agent_tokenizer():
    """Return the embedded tokenizer with a chat template that has tools."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = AGENT_TEMPLATE
    tokenizer.response_template = AGENT_RESPONSES
    return tokenizer


def let_it_say(trainer, *turns):
    """Let the model, which has learned no tools, say these texts, turn by turn.

    Each turn is a function of a completion's number.
    """
    tokenizer, later = trainer.processing_class, iter(turns)

    def generate(prompt_ids, *args, **kwargs):
        say = next(later)
        texts = [say(number) + "<|end|>" for number in range(len(prompt_ids))]
        return tokenizer(texts, add_special_tokens=False)["input_ids"], None

    trainer._generate_single_turn = generate


def called(name, **arguments):
    """Return a call of a tool as the model writes it."""
    return f"<think>{json.dumps({'name': name, 'arguments': arguments})}</think>"


def test_tools_are_called_and_their_tokens_do_not_train(whose, tmp_path):
    lib, asked, masks = imports(whose, "grpo"), [], []

    def multiply(a: int, b: int) -> int:
        """
        Multiply two numbers.

        Args:
            a: One number.
            b: The other.

        Returns:
            Their product.
        """
        asked.append(("multiply", a, b))
        return a * b

    async def halve(a: int) -> float:
        """
        Halve a number.

        Args:
            a: The number.

        Returns:
            Its half.
        """
        asked.append(("halve", a))
        return a / 2

    def cites_the_tool(completions, **kwargs):
        results = [message["content"] for talk in completions for message in talk[1:2]]
        asked.append(("results", *results))
        return [float(talk[-1]["content"] == talk[1]["content"]) for talk in completions]

    class Watched(lib.Trainer):
        def _compute_loss(self, model, inputs):
            masks.append((inputs["completion_ids"], inputs["tool_mask"]))
            return super()._compute_loss(model, inputs)

    question = [{"role": "user", "content": "6 times 7?"}]
    settings = {**ONE_STEP, **GROUPS, "max_completion_length": 120}
    trainer = Watched(
        model=checkpoint(),
        reward_funcs=cites_the_tool,
        args=lib.Config(str(tmp_path), **settings),
        train_dataset=Dataset.from_list([{"prompt": question}] * 8),
        processing_class=agent_tokenizer(),
        tools=[multiply, halve],
    )
    let_it_say(
        trainer,
        lambda n: called("multiply", a=6, b=7) if n % 2 else called("halve", a=8),
        lambda n: "42",
    )
    trainer.train()
    assert asked.count(("multiply", 6, 7)) == asked.count(("halve", 8)) == 4
    assert asked[-1] == ("results", *["4.0", "42"] * 4)
    logged = first_log(trainer)
    assert logged["tools/call_frequency"] == 1 and logged["tools/failure_frequency"] == 0
    assert logged["reward"] == 0.5
    untrained = [tokens[mask == 0] for tokens, mask in zip(*masks[0], strict=True)]
    texts = trainer.processing_class.batch_decode(untrained)
    assert {text.partition("<|assistant|>")[0] for text in texts} == {
        "<|system|>4.0<|end|>",
        "<|system|>42<|end|>",
    }


def test_with_tools_formulation_trl_is_stock_bit_for_bit(tmp_path):
    def double(a: int) -> int:
        """
        Double a number.

        Args:
            a: The number.

        Returns:
            Its double.
        """
        return 2 * a

    def speak(trainer):
        ask = [lambda n: called("double", a=n), lambda n: str(2 * n + n % 3 // 2)]
        let_it_say(trainer, *ask * 8)

    def right(completions, **kwargs):
        return [float(talk[-1]["content"] == talk[1]["content"]) for talk in completions]

    def run(ours):
        return train(
            "grpo",
            ours,
            tmp_path / str(ours),
            fields={"max_completion_length": 120, "eval_strategy": "no"},
            rows=[{"prompt": [{"role": "user", "content": f"twice {n}?"}]} for n in range(8)],
            reward_funcs=right,
            processing_class=agent_tokenizer(),
            tools=[double],
            prepare=speak,
        )

    stock, ours = run(False), run(True)
    assert stock.logs[0]["grad_norm"] > 0 and stock.logs[0]["tools/call_frequency"] == 1
    assert ours.logs == stock.logs
    assert all(torch.equal(ours.weights[name], weight) for name, weight in stock.weights.items())


def test_an_environment_gives_prompts_tools_and_reward(whose, tmp_path):
    lib, resets = imports(whose, "grpo"), []

    class Counter:
        def reset(self, **kwargs):
            self.count = 0
            resets.append(self)
            return "Count to 3."

        def get_reward(self) -> float:
            return float(self.count == 3)

        def add(self, step: int) -> int:
            """
            Add to the count.

            Args:
                step: How much.

            Returns:
                The new count.
            """
            self.count += step
            return self.count

    trainer = lib.Trainer(
        model=checkpoint(),
        args=lib.Config(str(tmp_path), **{**ONE_STEP, **GROUPS, "max_completion_length": 120}),
        processing_class=agent_tokenizer(),
        environment_factory=Counter,
    )
    let_it_say(
        trainer, lambda n: called("add", step=3 if n < 2 else 1), lambda n: "Done after a call."
    )
    trainer.train()
    assert len(resets) == len({id(counter) for counter in resets}) == 8
    assert sorted(counter.count for counter in resets) == [1] * 6 + [3] * 2
    logged = first_log(trainer)
    assert logged["reward"] == logged["rewards/Counter/mean"] == 0.25


# --- adapters, callbacks, metrics -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_lora_trains_and_saves_the_adapter_only(kind, whose, tmp_path):
    lib = imports(whose, kind)
    task = {"modules_to_save": ["score"]} if kind == "reward" else {"task_type": "CAUSAL_LM"}
    trainer = lib.Trainer(
        checkpoint(),
        args=lib.Config(str(tmp_path), **ONE_STEP, learning_rate=1e-3),
        train_dataset=Dataset.from_list(examples(kind)),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **task),
    )
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    moved = {name for name, p in trainer.model.named_parameters() if not p.equal(before[name])}
    assert any("lora_B" in name for name in moved)
    assert all("lora_" in name or "score" in name for name in moved)
    trainer.save_model()
    assert json.loads((tmp_path / "adapter_config.json").read_text())["r"] == 4
    assert not (tmp_path / "model.safetensors").exists()


def test_callbacks_hear_of_steps_logs_and_evaluations(whose, tmp_path):
    lib, heard = imports(whose, "sft"), []

    class Listener(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            heard.append(("step", state.global_step, type(model).__name__))

        def on_log(self, args, state, control, logs=None, **kwargs):
            heard.append(("log", state.global_step, "loss" in logs))

        def on_evaluate(self, args, state, control, metrics=None, **kwargs):
            heard.append(("evaluated", state.global_step, metrics["eval_loss"] > 0))
            control.should_training_stop = True

    evaluated = {"eval_strategy": "steps", "eval_steps": 1, "max_steps": 2}
    trainer = lib.Trainer(
        checkpoint(),
        args=lib.Config(str(tmp_path), **{**ONE_STEP, **evaluated}),
        train_dataset=Dataset.from_list(examples("sft")),
        eval_dataset=Dataset.from_list(examples("sft", 4)),
        callbacks=[Listener()],
    )
    trainer.train()
    assert heard[:2] == [("step", 1, "Qwen3ForCausalLM"), ("log", 1, True)]
    assert ("evaluated", 1, True) in heard
    assert not any(step == 2 for _, step, _ in heard)  # the callback has stopped it


@pytest.mark.parametrize("kind", ["dpo", "reward", "sft"])
def test_compute_metrics_gets_all_predictions(kind, tmp_path):
    shapes, metrics = {}, {}
    for whose in ("stock", "ours"):
        lib = imports(whose, kind)

        def measure(prediction, whose=whose):
            shapes[whose] = np.shape(prediction.predictions)
            return {"largest": float(np.max(prediction.predictions))}

        torch.manual_seed(0)
        trainer = lib.Trainer(
            checkpoint(),
            args=lib.Config(str(tmp_path), **ONE_STEP, per_device_eval_batch_size=4, seed=3),
            train_dataset=Dataset.from_list(examples(kind)),
            eval_dataset=Dataset.from_list(examples(kind, 8)),
            compute_metrics=measure,
        )
        metrics[whose] = trainer.evaluate()
    assert shapes["ours"] == shapes["stock"]
    assert metrics["ours"]["eval_largest"] == pytest.approx(metrics["stock"]["eval_largest"])
    assert named(metrics["stock"]) <= named(metrics["ours"])


@pytest.mark.parametrize("kind", ["grpo", "dpo", "kto", "orpo", "reward", "sft"])
def test_predict_and_evaluate_report_all_that_stock_does(kind, tmp_path):
    rows = Dataset.from_list(examples(kind, 4))
    more = {"reward_funcs": lambda completions, **kwargs: [1.0 for _ in completions]}
    predicted, evaluated = {}, {}
    for whose in ("stock", "ours"):
        lib = imports(whose, kind)
        trainer = lib.Trainer(
            AutoModelForCausalLM.from_pretrained(checkpoint()) if kind == "orpo" else checkpoint(),
            args=lib.Config(str(tmp_path), **ONE_STEP, **(GROUPS if kind == "grpo" else {})),
            train_dataset=rows,
            eval_dataset=rows,
            processing_class=build_tokenizer(),
            **(more if kind == "grpo" else {}),
        )
        predicted[whose] = trainer.predict(trainer.eval_dataset).metrics
        # as it comes, but for ORPOTrainer, which tokenizes nothing after it is made
        evaluated[whose] = trainer.evaluate(None if kind == "orpo" else rows)
    assert named(predicted["stock"]) <= named(predicted["ours"])
    assert named(evaluated["stock"]) <= named(evaluated["ours"])
    loss = evaluated["ours"]["eval_loss"]
    assert math.isfinite(loss)
    if kind != "grpo":  # which samples anew
        assert predicted["ours"]["test_loss"] == pytest.approx(loss)


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["grpo", "dpo", "reward", "sft"])
def test_a_stream_without_end_is_read_for_max_steps(kind, tmp_path):
    lib, rows, read = imports("ours", kind), examples(kind), []

    def endless():
        yield from cycle(rows)

    def note(row):
        read.append(row["prompt"])
        return row

    more = {"reward_funcs": lambda completions, **kwargs: [1.0 for _ in completions]}
    trainer = lib.Trainer(
        checkpoint(),
        args=lib.Config(str(tmp_path), **ONE_STEP, **(GROUPS if kind == "grpo" else {})),
        train_dataset=IterableDataset.from_generator(endless).map(note),
        **(more if kind == "grpo" else {}),
    )
    trainer.train()
    assert trainer.state.global_step == 1
    assert {*read} <= {row["prompt"] for row in rows} and len(read) >= 2
    assert math.isfinite(first_log(trainer)["loss"])


@pytest.mark.parametrize("kind", ["grpo", "dpo", "kto", "orpo", "reward", "sft"])
def test_evaluation_sets_by_name_are_reported_by_name(kind, tmp_path):
    rows = Dataset.from_list(examples(kind, 8))
    lib = imports("ours", kind)
    more = {"reward_funcs": lambda completions, **kwargs: [1.0 for _ in completions]}
    trainer = lib.Trainer(
        checkpoint(),
        args=lib.Config(
            str(tmp_path),
            **{**ONE_STEP, **(GROUPS if kind == "grpo" else {}), "per_device_eval_batch_size": 8},
            eval_strategy="steps",
            eval_steps=1,
        ),
        train_dataset=rows,
        eval_dataset={"easy": rows.select(range(4)), "hard": rows},
        processing_class=build_tokenizer(),
        **(more if kind == "grpo" else {}),
    )
    trainer.train()
    logged = trainer.state.log_history
    easy, hard = (
        next(line for line in logged if f"eval_{name}_loss" in line) for name in ("easy", "hard")
    )
    assert math.isfinite(easy["eval_easy_loss"]) and math.isfinite(hard["eval_hard_loss"])
    assert "eval_hard_loss" not in easy and "eval_easy_loss" not in hard


# --- a script -------------------------------------------------------------------------------------


def test_a_script_reads_options_and_a_file(whose, tmp_path, monkeypatch):
    lib = imports(whose, "dpo")
    data = tmp_path / "pairs.jsonl"
    data.write_text("\n".join(map(json.dumps, examples("dpo"))))
    config = tmp_path / "config.yaml"
    config.write_text(f"model_name_or_path: {checkpoint()}\nlearning_rate: 0.002\nuse_peft: true\n")
    words = ["--config", str(config), "--dataset_name", str(data), "--output_dir", str(tmp_path)]
    words += ["--use_cpu", "--bf16", "false", "--report_to", "none", "--max_steps", "1"]
    words += ["--lora_target_modules", "q_proj", "v_proj", "--beta", "0.2", "--save_strategy", "no"]
    monkeypatch.setattr(sys, "argv", ["dpo.py", *words])

    parser = TrlParser((ScriptArguments, lib.Config, ModelConfig))
    script_args, training_args, model_args = parser.parse_args_and_config()
    dataset = load_dataset("json", data_files=script_args.dataset_name)
    trainer = lib.Trainer(
        model_args.model_name_or_path,
        args=training_args,
        train_dataset=dataset[script_args.dataset_train_split],
        peft_config=get_peft_config(model_args),
    )
    trainer.train()

    assert (trainer.args.learning_rate, trainer.args.beta) == (0.002, 0.2)
    trained = [name for name, p in trainer.model.named_parameters() if p.requires_grad]
    assert trained and all("_proj.lora_" in name for name in trained)
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(math.log(2), abs=1e-4)
