"""The planned bytes against live ones."""

from pathlib import Path

import pytest
import torch
from transformers import Trainer

from rlhf_trl.run import plan
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.shares import Launch
from rlhf_trl.run.stages import stage_of_config

ROOT = Path(__file__).parent.parent


class Live:
    """What a trainer's first micro-batch saves, seen by hooks around its own training step."""

    def __init__(self, monkeypatch):
        self.saved = None
        original = Trainer.training_step

        def training_step(trainer, model, inputs, *rest):
            if self.saved is not None:
                return original(trainer, model, inputs, *rest)
            owned = {
                t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]
            }
            kept = []

            def pack(tensor):
                kept.append(tensor)
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = original(trainer, model, inputs, *rest)
            storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in kept}
            self.saved = sum(s.nbytes() for at, s in storages.items() if at not in owned)
            self.parameters = plan.size_of([*model.parameters()])
            self.trainer = trainer
            return loss

        monkeypatch.setattr(Trainer, "training_step", training_step)
        self.shapes = []
        forward_of = torch.nn.Module.__call__

        def call(module, *args, **kwargs):
            if torch.is_grad_enabled() and isinstance(kwargs.get("input_ids"), torch.Tensor):
                self.shapes.append(tuple(kwargs["input_ids"].shape))
            return forward_of(module, *args, **kwargs)

        monkeypatch.setattr(torch.nn.Module, "__call__", call)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize(
    "name", ["grpo", "ppo", "dpo", "orpo", "kto", "sft", "reward", "prm", "orm"]
)
def test_saved_activations_are_those_of_the_live_trainer(name, checkpointed, monkeypatch, tmp_path):
    config = str(ROOT / "configs" / "tiny" / f"{name}.yaml")
    stage = stage_of_config(read_config(config))
    words = ["--config", config, "--output_dir", str(tmp_path / "run"), "--max_steps", "1"]
    words += ["--activation_checkpointing", str(checkpointed).lower()]
    words += ["--eval_strategy", "no", "--save_strategy", "no", "--load_best_model_at_end", "false"]
    live = Live(monkeypatch)
    loaded = stage.load(words)
    stage.part("run")(loaded, stage.part("trainer"), **stage.options)
    monkeypatch.undo()
    rows, tokens = live.shapes[0]
    texts = plan.Texts(rows=rows, tokens=tokens)
    lines = [*plan._training_lines(stage, loaded, Launch(), texts)]
    sizes = {line.what: line.size for line in lines}
    planned = sum(size for what, size in sizes.items() if "activations" in what)
    if name == "orpo":
        planned += sizes["logits of the update"]
    print(name, checkpointed, live.shapes[:4], planned, live.saved, planned / live.saved)
    assert planned == pytest.approx(live.saved, rel=0.05)
