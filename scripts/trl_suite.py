"""TRL's own tests on the trainers of this package: `scripts/trl_suite.sh` runs them.

As a plugin of pytest it puts local stand-ins in the place of what the tests fetch (tiny models of
the same architectures, a small tokenizer, the data that the checkout's own script makes), and our
classes in the place of TRL's. As a program it prints what came out, file by file.
"""

import argparse
import ast
import dataclasses
import os
import runpy
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

HUB = "trl-internal-testing"
SNAPSHOT = "0" * 40  # the commit that the stand-ins pretend to be
STEPS = 4  # of a training whose length a test does not name
MODELS = (
    "tiny-CohereForCausalLM",
    "tiny-Cohere2ForCausalLM",
    "tiny-DeepseekV3ForCausalLM",
    "tiny-DeepseekV3ForCausalLM-0528",
    "tiny-GPTNeoXForCausalLM",
    "tiny-Gemma2ForCausalLM",
    "tiny-GemmaForCausalLM",
    "tiny-Glm4MoeForCausalLM",
    "tiny-GptOssForCausalLM",
    "tiny-Lfm2ForCausalLM",
    "tiny-LlamaForCausalLM-3",
    "tiny-LlamaForCausalLM-3.1",
    "tiny-LlamaForCausalLM-3.2",
    "tiny-LlamaForSequenceClassification-3.2",
    "tiny-MistralForCausalLM-0.1",
    "tiny-MistralForCausalLM-0.2",
    "tiny-Olmo3ForCausalLM",
    "tiny-Phi3ForCausalLM",
    "tiny-Qwen2ForCausalLM-2.5",
    "tiny-Qwen2ForSequenceClassification-2.5",
    "tiny-Qwen3ForCausalLM",
    "tiny-Qwen3ForSequenceClassification",
    "tiny-Qwen3MoeForCausalLM",
    "tiny-T5ForConditionalGeneration",
)
SIZES = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "max_position_embeddings": 4096,
    # mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # latent attention
    "q_lora_rank": 4,
    "kv_lora_rank": 4,
    "qk_nope_head_dim": 2,
    "qk_rope_head_dim": 2,
    "v_head_dim": 2,
    # T5's names
    "d_model": 8,
    "d_kv": 2,
    "d_ff": 16,
    "num_layers": 2,
    "num_heads": 4,
}
OURS = {
    "BookGRPO": "trl.GRPO",
    "BookRLOO": "trl.RLOO",
    "BookDPO": "trl.DPO",
    "BookKTO": "trl.KTO",
    "BookReward": "trl.Reward",
    "BookSFT": "trl.SFT",
    "BookORPO": "trl.experimental.orpo.ORPO",
}


# --- stand-ins ------------------------------------------------------------------------------------


def make_data(checkout: Path, folder: Path) -> None:
    """Write the data sets that the checkout's own scripts would upload, a folder for each."""
    from datasets import DatasetDict

    def kept(data: Any, repo: str, config_name: str) -> None:
        data.save_to_disk(folder / repo / config_name)

    original = DatasetDict.push_to_hub
    DatasetDict.push_to_hub = kept
    try:
        for name in ("zen", "harmony"):
            script = checkout / "scripts" / f"generate_{name}_dataset.py"
            runpy.run_path(str(script))["main"](0.1, True, f"{HUB}/{name}")
    finally:
        DatasetDict.push_to_hub = original


def make_tokenizer(folder: Path) -> Any:
    """Return a byte-level tokenizer of the data, with Qwen's template and special tokens."""
    import trl
    from datasets import load_from_disk
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    special += ["<tool_call>", "</tool_call>", "<think>", "</think>", "<unk>"]
    texts = load_from_disk(folder / HUB / "zen" / "standard_language_modeling")["train"]["text"]
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(list(texts), trainer)
    template = Path(trl.__file__).parent / "chat_templates" / "qwen2_5.jinja"
    if not template.exists():
        template = template.with_name("qwen3.jinja")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=special[1:3],
        chat_template=template.read_text("utf-8"),
        model_max_length=4096,
    )


def make_model(name: str, tokenizer: Any, folder: Path) -> None:
    """Write a model of random weights where the hub's cache would hold it."""
    import torch
    import transformers

    kind = getattr(transformers, name.removeprefix("tiny-").partition("-")[0])
    config = kind.config_class()
    for size, value in SIZES.items():
        if hasattr(config, size):
            setattr(config, size, value)
    config.vocab_size = len(tokenizer)
    config.layer_types = (getattr(config, "layer_types", None) or [])[:2] or None
    config.eos_token_id, config.pad_token_id = tokenizer.eos_token_id, tokenizer.pad_token_id
    config.bos_token_id = None
    if name.startswith("tiny-T5"):
        config.decoder_start_token_id = tokenizer.pad_token_id
    if "Classification" in name:
        config.num_labels = 1
    torch.manual_seed(0)
    repo = folder / "hub" / f"models--{HUB}--{name}"
    snapshot = repo / "snapshots" / SNAPSHOT
    (repo / "refs").mkdir(parents=True, exist_ok=True)
    (repo / "refs" / "main").write_text(SNAPSHOT)
    kind(config).save_pretrained(snapshot)
    tokenizer.save_pretrained(snapshot)


def prepare(checkout: Path, folder: Path) -> None:
    """Make all stand-ins, once; a model that this release cannot make is left out and named."""
    if (folder / "whole").exists():
        return
    make_data(checkout, folder)
    tokenizer = make_tokenizer(folder)
    for name in MODELS:
        try:
            make_model(name, tokenizer, folder)
        except Exception as error:
            print(f"no stand-in for {name}: {type(error).__name__}: {error}")
    (folder / "whole").touch()


# --- the plugin -----------------------------------------------------------------------------------


def pytest_configure(config: Any) -> None:
    """Put stand-ins in the place of what is fetched, and ours in the place of TRL's."""
    import datasets
    from transformers import TrainingArguments

    folder, formulation = Path(os.environ["HF_HOME"]), os.environ["TRL_SUITE"]
    load, check = datasets.load_dataset, TrainingArguments.__post_init__

    def load_local(path: str, name: str = "", split: str | None = None, **options: Any) -> Any:
        if not path.startswith(HUB):
            return load(path, name or None, split=split, **options)
        data = datasets.load_from_disk(folder / path / name)
        if options.get("streaming"):
            data = {part: rows.to_iterable_dataset() for part, rows in data.items()}
            data = datasets.IterableDatasetDict(data)
        return data[split] if split else data

    def on_this_machine(args: TrainingArguments) -> None:
        args.use_cpu = True
        args.bf16 = bool(args.bf16) and args.fp16
        if args.max_steps < 0 and args.num_train_epochs == 3.0:
            args.max_steps = STEPS
        check(args)

    for file in Path("tests").rglob("*.py"):
        supply_missing(file)
    datasets.load_dataset, TrainingArguments.__post_init__ = load_local, on_this_machine
    if formulation != "stock":
        put_ours(formulation)


def supply_missing(file: Path) -> None:
    """Give TRL's modules what a test file imports and the installed release does not have.

    It says False to whatever it is asked: the tests that need it fail, on stock, too.
    """
    from importlib import import_module

    for node in ast.parse(file.read_text("utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] != "trl":
            continue
        try:
            module = import_module(node.module)
        except ImportError:
            continue
        for name in (alias.name for alias in node.names):
            if not hasattr(module, name):
                setattr(module, name, lambda *args, **kwargs: False)


def put_ours(formulation: str) -> None:
    """Let `from trl import GRPOTrainer, GRPOConfig` give our classes."""
    from importlib import import_module

    import rlhf_trl

    # all are imported before the first is put in its place: some stand on several of TRL's
    classes = {n: (getattr(rlhf_trl, f"{n}Config"), getattr(rlhf_trl, f"{n}Trainer")) for n in OURS}
    for name, theirs in OURS.items():
        module, _, prefix = theirs.rpartition(".")
        config, trainer = classes[name]
        if formulation == "trl" and name != "BookSFT":
            fields = [("formulation", str, dataclasses.field(default="trl"))]
            config = dataclasses.make_dataclass(f"{prefix}Config", fields, bases=(config,))
            config.__module__ = module  # where pickle finds it
        home = import_module(module)
        setattr(home, f"{prefix}Trainer", trainer)
        setattr(home, f"{prefix}Config", config)


# --- the report -----------------------------------------------------------------------------------


def outcomes(path: Path) -> dict[str, tuple[str, str]]:
    """Return what became of each test ("passed", "refused" or "failed"), and why."""
    results = {}
    for case in ElementTree.parse(path).iter("testcase"):
        fault = case.find("failure")
        fault = case.find("error") if fault is None else fault
        if case.find("skipped") is not None:
            continue
        name = f"{case.get('classname').rpartition('tests.')[2]}::{case.get('name')}"
        message = "" if fault is None else fault.get("message", "").partition("\n")[0]
        kind = "refused" if message.startswith("rlhf_trl.") else "failed"  # with a sentence
        results[name] = ("passed" if fault is None else kind, message)
    return results


def report(folder: Path) -> None:
    """Print a table by file, and what passes on stock and not on ours."""
    by_mode = {path.stem: outcomes(path) for path in folder.glob("*.xml")}
    stock = by_mode.pop("stock")
    counted = [name for name, (outcome, _) in stock.items() if outcome == "passed"]
    per_file = Counter(name.partition(".")[0] for name in counted)
    modes = sorted(by_mode, reverse=True)
    print("| file | stock | " + " | ".join(modes) + " |")
    print("|" + "---|" * (2 + len(modes)))
    for file, count in sorted(per_file.items()):
        cells = []
        for mode in modes:
            results = Counter(
                by_mode[mode].get(name, ("failed", ""))[0]
                for name in counted
                if name.startswith(f"{file}.")
            )
            cells.append(f"{results['passed']} passed, {results['refused']} refused")
        print(f"| {file} | {count} | " + " | ".join(cells) + " |")
    for mode in modes:
        print(f"\nformulation {mode}: pass on stock and not here")
        for name in counted:
            outcome, message = by_mode[mode].get(name, ("failed", "not run"))
            if outcome != "passed":
                print(f"- {name}: {outcome}: {message[:300]}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["prepare", "report"])
    parser.add_argument("folder", type=Path, help="of the stand-ins, or of the results")
    parser.add_argument("checkout", type=Path, nargs="?", help="of TRL, to prepare")
    words = parser.parse_args()
    if words.what == "prepare":
        prepare(words.checkout, words.folder)
    else:
        report(words.folder)
