"""The trainers as a library: a TRL script whose import and class names were changed."""

import inspect
import pickle
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
import trl
from datasets import Dataset, DatasetDict
from library_cases import OURS, STOCK, examples, length, shares, train
from policy_gradient_cases import checkpoint
from trl import TrlParser
from two_processes import on_two_processes

import rlhf_trl
from rlhf_trl.errors import InputError
from rlhf_trl.tiny.tokenizer import build_tokenizer

CPU = {"use_cpu": True, "bf16": False, "report_to": "none", "disable_tqdm": True}
LOSSES = [
    ("grpo", {}),
    ("grpo", {"loss_type": "grpo"}),
    ("grpo", {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    ("grpo", {"loss_type": "bnpo"}),
    ("grpo", {"loss_type": "cispo", "epsilon_high": 5.0}),
    ("grpo", {"loss_type": "sapo"}),
    ("grpo", {"beta": 0.1, "num_iterations": 2}),
    ("grpo", {"delta": 1.5, "loss_type": "grpo", "entropy_coef": 0.01}),
    ("rloo", {}),
    ("rloo", {"num_iterations": 2, "normalize_advantages": True, "reward_clip_range": (5, 30)}),
    ("dpo", {}),
    ("dpo", {"loss_type": "ipo"}),
    ("dpo", {"loss_type": "hinge"}),
    ("dpo", {"loss_type": "robust", "label_smoothing": 0.1}),
    ("dpo", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}),
    ("dpo", {"f_divergence_type": "js_divergence"}),
    ("dpo", {"max_length": 12}),
    ("kto", {}),
    ("kto", {"loss_type": "apo_zero_unpaired", "desirable_weight": 2.0}),
    ("kto", {"max_length": 12}),
    ("orpo", {}),
    ("orpo", {"beta": 0.3, "max_length": 20}),
    ("reward", {}),
    ("reward", {"center_rewards_coefficient": 0.01, "max_length": 18}),
    ("sft", {}),
    ("sft", {"packing": True, "max_length": 32}),
]


def assert_same(ours, stock):
    assert ours.logs == stock.logs
    assert ours.weights.keys() == stock.weights.keys()
    for name, weight in stock.weights.items():
        assert torch.equal(ours.weights[name], weight), name


@pytest.mark.parametrize(("kind", "fields"), LOSSES, ids=str)
def test_formulation_trl_is_stock_bit_for_bit(kind, fields, tmp_path):
    stock = train(kind, False, tmp_path / "stock", fields=fields)
    assert stock.logs[0]["grad_norm"] > 0
    assert_same(train(kind, True, tmp_path / "ours", fields=fields), stock)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dpo", "kto", "reward", "sft"])
def test_a_stream_and_an_adapter_are_stocks(kind, tmp_path):
    options = {"stream": kind != "kto", "lora": True}
    stock = train(kind, False, tmp_path / "stock", **options)
    assert_same(train(kind, True, tmp_path / "ours", **options), stock)


def test_several_rewards_one_without_other_keywords_are_stocks(tmp_path):
    options = {"reward_funcs": [length, shares], "fields": {"reward_weights": [1.0, 0.5]}}
    rows = [{**row, "answer": row["answer"]} for row in examples("grpo")]

    def strict(prompts, completions, completion_ids, answer, trainer_state, log_extra, log_metric):
        return shares(completions, answer)

    options["reward_funcs"] = [length, strict]
    stock = train("grpo", False, tmp_path / "stock", rows=rows, **options)
    assert_same(train("grpo", True, tmp_path / "ours", rows=rows, **options), stock)


@pytest.mark.parametrize("kind", ["grpo", "rloo", "dpo", "kto", "orpo", "reward"])
def test_a_stock_config_means_formulation_trl(kind, tmp_path):
    settings = {"use_cpu": True, "bf16": False, "report_to": "none", "max_steps": 1}
    args = STOCK[kind][1](str(tmp_path), **settings)
    more = {"reward_funcs": length} if kind in ("grpo", "rloo") else {}
    trainer = OURS[kind][0](
        checkpoint(),
        args=args,
        train_dataset=Dataset.from_list(examples(kind)),
        processing_class=build_tokenizer(),
        **more,
    )
    assert trainer.args is args
    assert trainer._stock and type(args) is STOCK[kind][1]


def test_a_row_is_named_where_a_stock_config_has_its_settings():
    def named(config):
        config = config(use_cpu=True, bf16=False, report_to="none")
        return rlhf_trl.BookGRPOConfig.resolve(config).algorithm

    assert named(trl.GRPOConfig) == "dapo"
    assert named(lambda **more: trl.GRPOConfig(loss_type="sapo", **more)) == "sapo"
    assert named(lambda **more: trl.GRPOConfig(loss_type="vespo", **more)) is None


@pytest.mark.parametrize("kind", OURS)
def test_signatures_are_trls(kind):
    ours, theirs = OURS[kind][0], STOCK[kind][0]
    assert inspect.signature(ours.__init__) == inspect.signature(theirs.__init__)
    assert inspect.signature(ours) == inspect.signature(theirs)


def test_token_reward_models_have_the_signature_of_the_reward_trainer():
    ours = rlhf_trl.BookTokenRewardTrainer
    assert inspect.signature(ours.__init__) == inspect.signature(trl.RewardTrainer.__init__)


def test_a_process_reward_models_steps_are_fields_of_its_config(tmp_path):
    words = ["--output_dir", str(tmp_path), "--use_cpu", "true", "--bf16", "false"]
    words += ["--algorithm", "prm", "--step_separator", "\n", "--step_split", ";"]
    (args,) = TrlParser(rlhf_trl.BookTokenRewardConfig).parse_args_and_config(words)
    trace = {"prompt": "ab", "completions": ["cd", "e"], "labels": [1, -1]}
    trainer = rlhf_trl.BookTokenRewardTrainer(
        checkpoint(),
        args=pickle.loads(pickle.dumps(args)),
        train_dataset=Dataset.from_list([trace] * 2),
        processing_class=build_tokenizer(),
    )
    text = trainer.processing_class.decode(trainer.train_dataset[0]["input_ids"])
    assert text.endswith("cd\ne\n") and trainer.reader.step_split == ";"
    with pytest.raises(InputError, match="step_separator is None and step_split None"):
        rlhf_trl.BookTokenRewardTrainer(
            checkpoint(),
            args=rlhf_trl.BookTokenRewardConfig(str(tmp_path), **CPU, algorithm="prm"),
            train_dataset=Dataset.from_list([trace]),
            processing_class=build_tokenizer(),
        )


def test_trls_parser_takes_the_configs():
    words = ["--output_dir", "x", "--use_cpu", "true", "--bf16", "false"]
    names = [name for name in rlhf_trl.__all__ if name.endswith("Config")]
    assert len(names) == 10
    for name in set(names) - {"BookSFTConfig"}:  # whose loss is none of a row
        config = getattr(rlhf_trl, name)
        (args,) = TrlParser(config).parse_args_and_config([*words, "--formulation", "code"])
        assert args.formulation == "code" and args.algorithm is None
    words += ["--algorithm", "gspo", "--epsilon", "0.3"]
    (args,) = TrlParser(rlhf_trl.BookGRPOConfig).parse_args_and_config(words)
    assert (args.algorithm, args.epsilon) == ("gspo", 0.3)


def test_a_row_shows_in_the_config_and_survives_pickling():
    args = rlhf_trl.BookGRPOConfig(use_cpu=True, bf16=False, report_to="none", algorithm="gspo")
    rlhf_trl.BookGRPOConfig.resolve(args)
    again = pickle.loads(pickle.dumps(args))
    assert "algorithm=gspo" in str(again).replace("'", "").replace(" ", "")
    assert rlhf_trl.BookGRPOConfig.resolve(again).row.label == "gspo (chapter)"
    again.formulation = "trl"
    assert rlhf_trl.BookGRPOConfig.resolve(again).label == "gspo (trl)"


@pytest.mark.parametrize(
    "name",
    ["GRPO", "PPO", "Distillation", "DPO", "KTO", "ORPO", "Reward", "TokenReward", "SFT"],
)
def test_configs_are_pickled_whole(name, tmp_path):
    config_class = getattr(rlhf_trl, f"Book{name}Config")
    more = {"teacher_models": ["teacher"]} if name == "Distillation" else {}
    args = config_class(str(tmp_path), **CPU, save_steps=7, **more)
    again = pickle.loads(pickle.dumps(args))
    assert type(again) is config_class and again.save_steps == 7
    if hasattr(config_class, "resolve"):
        before, after = config_class.resolve(args), config_class.resolve(again)
        assert (after.row, after.parameters) == (before.row, before.parameters)
    assert pickle.loads(pickle.dumps(args)).to_dict() == args.to_dict()


def test_a_checkpoints_arguments_say_what_was_computed(tmp_path):
    fields = {"formulation": "chapter", "algorithm": "simpo", "max_steps": 1}
    saved = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "no"}
    train("dpo", True, tmp_path, fields={**fields, **saved})
    args = torch.load(tmp_path / "checkpoint-1" / "training_args.bin", weights_only=False)
    assert (args.algorithm, args.formulation) == ("simpo", "chapter")
    assert args.gamma_beta_ratio > 0 and not args.precompute_ref_log_probs


def test_another_rows_loss_type_names_the_algorithm_to_write():
    args = rlhf_trl.BookGRPOConfig(use_cpu=True, bf16=False, report_to="none", loss_type="dapo")
    with pytest.raises(InputError, match=r"loss_type is 'dapo', which .* write algorithm: dapo"):
        rlhf_trl.BookGRPOConfig.resolve(args)


def test_one_generation_at_evaluation_is_refused_before_training(tmp_path):
    fields = {"num_generations_eval": 1, "formulation": "chapter"}
    with pytest.raises(InputError, match="num_generations_eval is 1, but grpo"):
        train("grpo", True, tmp_path, fields=fields)


def test_a_column_of_the_users_reaches_the_reward_as_it_is(tmp_path):
    seen = []

    def reward(completions, finished, completion_finished, **kwargs):
        seen.extend(zip(finished, completion_finished, strict=True))
        return [float(len(text)) for text in completions]

    rows = [{**row, "finished": "mine"} for row in examples("grpo")]
    train("grpo", True, tmp_path, rows=rows, reward_funcs=reward, fields={"max_steps": 1})
    assert {finished for finished, _ in seen} == {"mine"}
    assert {type(ended) for _, ended in seen} == {bool}


def test_evaluation_sets_by_name(tmp_path):
    rows = Dataset.from_list(examples("orpo"))
    trainer = rlhf_trl.BookORPOTrainer(
        checkpoint(),
        args=rlhf_trl.BookORPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none"),
        train_dataset=rows,
        eval_dataset=DatasetDict(first=rows.select([0, 1, 2]), second=rows.select([3, 4])),
        processing_class=build_tokenizer(),
    )
    metrics = trainer.evaluate()
    assert {"eval_first_loss", "eval_second_loss"} <= metrics.keys()


def test_importing_the_package_loads_neither_torch_nor_trl():
    program = "import sys, rlhf_trl; print({'torch', 'trl'} & {*sys.modules}, *dir(rlhf_trl))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.startswith("set() ") and "BookGRPOTrainer" in done.stdout


def test_the_pages_python_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parent.parent / "recipes" / "library.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 4
    names = {"__name__": "page"}
    for block in blocks:
        exec(compile(block, "library.md", "exec"), names)
    logged = [line["loss"] for line in names["trainer"].state.log_history if "loss" in line]
    assert (names["args"].algorithm, names["args"].epsilon) == ("gspo", 0.2)
    assert names["trainer"].state.global_step == 1 and not logged


@pytest.mark.multiprocess
@pytest.mark.slow
def test_two_processes_are_stocks_too(tmp_path):
    whole, printed = on_two_processes("library_processes.py", tmp_path, timeout=240)
    assert whole, printed
    assert printed.count(" same\n") == 8


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_reward_that_is_an_object_learns_what_is_finished(asynchronous, tmp_path):
    seen = []

    class Reward:
        __name__ = "reward"

        def __call__(self, completions, completion_finished, **kwargs):
            seen.extend(completion_finished)
            return [float(len(text)) for text in completions]

    class Waiting(Reward):
        async def __call__(self, completions, completion_finished, **kwargs):
            return super().__call__(completions, completion_finished)

    reward = Waiting() if asynchronous else Reward()
    fields = {"max_steps": 1, "formulation": "chapter", "eval_strategy": "no"}
    logs = train("grpo", True, tmp_path, reward_funcs=reward, fields=fields).logs
    assert len(seen) == 8 and {type(ended) for ended in seen} == {bool}
    assert any(line.get("rewards/reward/mean") for line in logs)


def test_a_subclass_may_ask_the_model_while_it_is_evaluated(tmp_path):
    modes = []

    class Asking(rlhf_trl.BookDPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            modes.append(model.training)
            return super()._compute_loss(model, inputs, return_outputs)

    trainer = Asking(
        checkpoint(),
        args=rlhf_trl.BookDPOConfig(
            str(tmp_path), use_cpu=True, bf16=False, report_to="none", evaluate_examples=True
        ),
        train_dataset=Dataset.from_list(examples("dpo")),
        eval_dataset=Dataset.from_list(examples("dpo")[:5]),
        processing_class=build_tokenizer(),
    )
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == pytest.approx(0.6931, abs=1e-4)  # ln 2: nothing has moved
    assert modes and not any(modes)


def own_dpo(folder, **fields):
    return rlhf_trl.BookDPOTrainer(
        checkpoint(),
        args=rlhf_trl.BookDPOConfig(str(folder), **CPU, **fields),
        train_dataset=Dataset.from_list(examples("dpo")),
        processing_class=build_tokenizer(),
    )


@pytest.mark.parametrize("says", [None, "401 Unauthorized\n\nInvalid username or password."])
def test_an_upload_that_cannot_begin_is_one_sentence(says, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise ConnectionError(says)

    if says is not None:  # otherwise huggingface_hub itself refuses, offline
        monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    reason = "offline mode is enabled" if says is None else "401 Unauthorized Invalid username"
    with pytest.raises(InputError, match=rf"^push_to_hub: .*{reason}.*`hf auth login`") as at_once:
        own_dpo(tmp_path, push_to_hub=True)
    trainer = own_dpo(tmp_path)
    with pytest.raises(InputError, match=rf"^push_to_hub: .*{reason}") as later:
        trainer.push_to_hub()
    for stop in (at_once, later):
        assert "\n" not in str(stop.value)
        shown = "".join(traceback.format_exception(stop.value))
        assert "During handling" not in shown and "direct cause" not in shown
    assert not (tmp_path / "model.safetensors").exists()


def test_a_recipe_that_cannot_upload_ends_with_the_sentence(refused):
    assert refused("grpo", "grpo", "--push_to_hub", "--dataset.size", 40).startswith(
        "error: push_to_hub: "
    )


def test_the_card_of_a_run_names_algorithm_and_formulation(tmp_path):
    fields = {"algorithm": "apo_zero", "save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    own_dpo(tmp_path, **fields).train()
    card = (tmp_path / "README.md").read_text()
    assert "trained with APO-zero" in card and "Its loss is `apo_zero (chapter)`" in card
    own_dpo(tmp_path, formulation="code").create_model_card()
    assert "`dpo (code)`" in (tmp_path / "README.md").read_text()


def test_a_row_without_a_reference_leaves_precomputing_to_the_user(tmp_path):
    rows = Dataset.from_list(examples("dpo")[:5])
    for asked in (False, True):
        trainer = own_dpo(
            tmp_path,
            algorithm="simpo",
            precompute_ref_log_probs=asked,
            max_steps=1,
            save_strategy="no",
            learning_rate=1e-3,
        )
        assert trainer.ref_model is None
        assert trainer.args.precompute_ref_log_probs is asked
        before = trainer.evaluate(rows)["eval_loss"]
        trainer.train()
        assert "ref_chosen_logps" not in trainer.train_dataset.column_names
        assert trainer.evaluate(rows)["eval_loss"] != before


def test_the_users_config_is_whole_again_after_a_constructor_that_fails(tmp_path):
    args = rlhf_trl.BookDPOConfig(str(tmp_path), **CPU, algorithm="simpo", loss_type=None)
    with pytest.raises(ValueError, match="train_dataset"):
        rlhf_trl.BookDPOTrainer(checkpoint(), args=args, train_dataset=None)
    assert not args.precompute_ref_log_probs


@pytest.mark.parametrize("formulation", ["chapter", "trl"])
def test_orpo_takes_a_plain_dict_of_evaluation_sets(formulation, tmp_path):
    rows = Dataset.from_list(examples("orpo"))
    trainer = rlhf_trl.BookORPOTrainer(
        checkpoint(),
        args=rlhf_trl.BookORPOConfig(str(tmp_path), **CPU, formulation=formulation),
        train_dataset=rows,
        eval_dataset={"first": rows.select([0, 1, 2]), "second": rows.select([3, 4])},
        processing_class=build_tokenizer(),
    )
    assert {name: len(part) for name, part in trainer.eval_dataset.items()} == {
        "first": 3,
        "second": 2,
    }
    metrics = trainer.evaluate()
    assert metrics["eval_first_loss"] != metrics["eval_second_loss"]
