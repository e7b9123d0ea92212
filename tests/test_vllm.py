"""Training whose answers come from vLLM, through engines that stand in for it.

TRL's own backend talks to them: the engine in the trainer's process, or a server's client. They
hold a model of their own, which changes only by the weights that TRL hands over by name, and answer
with it.
"""

import copy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from trl.generation import vllm_generation

from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.stages import stage_of_config
from rlhf_trl.tiny import checkpoint_path

ROOT = Path(__file__).parent.parent
# what makes a config of configs/scale one for the embedded model on this machine
HERE = """
expect: {processes: 1, strategy: none}
model_name_or_path: tiny
dtype: float32
bf16: false
use_cpu: true
dataset:
  source: reasoning_gym
  specs: [{name: spell_backward, config: {max_word_len: 4}}]
  size: 64
  eval_size: 8
reward_funcs: [exact_match, format]
per_device_train_batch_size: 16
gradient_accumulation_steps: 1
max_completion_length: 14
max_steps: 4
learning_rate: 1.0e-3
eval_strategy: "no"
eval_on_start: false
save_strategy: "no"
disable_tqdm: true
"""


class Engine:
    """A model that answers, and the weights that it was given."""

    def __init__(self):
        config = AutoConfig.from_pretrained(checkpoint_path())
        torch.manual_seed(1)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.parameters = dict(self.model.named_parameters())
        self.given = []  # of each hand-over, the names
        self.asked = 0

    def load_weights(self, named):
        """Take weights by name; an unknown name is an error, as in vLLM."""
        for name, weight in named:
            with torch.no_grad():
                self.parameters[name].copy_(weight)
            self.given[-1].append(name)

    @torch.no_grad()
    def answer(self, prompts, tokens):
        """Return sampled completions and the log-probability of each of their tokens."""
        self.asked += 1
        self.check(self)
        answers = []
        for prompt in prompts:
            ids, logps = [*prompt], []
            while len(logps) < tokens and ids[-1] != self.model.config.eos_token_id:
                row = self.model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
                ids.append(int(torch.multinomial(row.exp(), 1)))
                logps.append(float(row[ids[-1]]))
            answers.append((ids[len(prompt) :], logps))
        return answers


class Colocated(Engine):
    """What TRL uses of `vllm.LLM`."""

    def __init__(self, **options):
        super().__init__()
        self.options, self.awake = options, {"weights", "kv_cache"}
        runner = SimpleNamespace(model_runner=SimpleNamespace(model=self))
        executor = SimpleNamespace(driver_worker=runner)
        length = SimpleNamespace(max_model_len=options["max_model_len"] or 256)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=length)
        self.given.append([])
        Engine.made.append(self)

    def sleep(self, level):
        """Free everything; at level 2 the weights are lost."""
        assert level == 2
        self.awake = set()
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.fill_(float("nan"))

    def wake_up(self, tags):
        """Be ready for weights, or for answers."""
        self.awake |= {*tags}

    def load_weights(self, named):
        """Take weights, which need their memory."""
        assert "weights" in self.awake
        super().load_weights(named)

    def reset_prefix_cache(self):
        """End a hand-over."""
        self.given.append([])

    def generate(self, prompts, sampling_params, use_tqdm):
        """Return answers as vLLM does."""
        assert self.awake == {"weights", "kv_cache"} and sampling_params.n == 1
        ids = [prompt["prompt_token_ids"] for prompt in prompts]
        outputs = []
        for prompt, (tokens, logps) in zip(
            ids, self.answer(ids, sampling_params.max_tokens), strict=True
        ):
            logprobs = [
                {token: SimpleNamespace(rank=1, logprob=logp)}
                for token, logp in zip(tokens, logps, strict=True)
            ]
            output = SimpleNamespace(token_ids=tokens, logprobs=logprobs)
            outputs.append(SimpleNamespace(prompt_token_ids=prompt, outputs=[output]))
        return outputs


class Server(Engine):
    """What TRL uses of `VLLMClient`."""

    def __init__(self, base_url, group_port, connection_timeout):
        super().__init__()
        self.base_url = base_url
        Engine.made.append(self)

    def init_communicator(self, device):
        """Join the group in which weights are sent."""

    def get_server_info(self):
        """Return what TRL asks of a server."""
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def update_named_params(self, metadata, named_params):
        """Take weights, announced with dtype and shape."""
        self.given.append([])
        named = list(named_params)
        announced = [
            (name, str(w.dtype).removeprefix("torch."), list(w.shape)) for name, w in named
        ]
        assert metadata == announced
        self.load_weights(named)

    def reset_prefix_cache(self):
        """End a hand-over."""

    def generate(self, prompts, features, n, max_tokens, **sampling):
        """Return n answers to each prompt."""
        answers = self.answer([prompt for prompt in prompts for _ in range(n)], max_tokens)
        return {
            "prompt_ids": prompts,
            "completion_ids": [tokens for tokens, _ in answers],
            "logprobs": [[[logp] for logp in logps] for _, logps in answers],
        }


@pytest.fixture
def engines(monkeypatch):
    """Put the stand-ins where TRL imports vLLM; return those that are made."""
    Engine.made = []
    monkeypatch.setattr(vllm_generation, "is_vllm_available", lambda: True)
    monkeypatch.setattr(vllm_generation, "LLM", Colocated, raising=False)
    monkeypatch.setattr(vllm_generation, "SamplingParams", SimpleNamespace, raising=False)
    monkeypatch.setattr(vllm_generation, "VLLMClient", Server)
    return Engine.made


CASES = {  # a config of configs/scale, and what else is written
    "grpo colocated": ("grpo_vllm_colocate", ""),
    "grpo on a server": ("grpo_vllm_server", ""),
    "grpo with LoRA": ("grpo_lora", ""),
    "grpo with long answers": ("grpo_8k", ""),
    "ppo colocated": ("ppo_vllm_colocate", "steps_per_generation: 2"),
    "ppo on a server": ("ppo_vllm_server", "steps_per_generation: 2"),
    "ppo with a value head": (
        "ppo_vllm_colocate",
        "value_model: head\nsteps_per_generation: 2",
    ),
}


QUICK = ("grpo colocated", "grpo with LoRA", "ppo on a server")


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[] if c in QUICK else pytest.mark.promise) for c in CASES]
)
def test_the_sampler_answers_with_the_weights_of_the_last_update(case, engines, tmp_path):
    name, more = CASES[case]
    config = tmp_path / "config.yaml"
    base = ROOT / "configs" / "scale" / f"{name}.yaml"
    here = f"extends: {base}\noutput_dir: {tmp_path / 'run'}{HERE}{more}\n"
    config.write_text(here)
    stage = stage_of_config(read_config(config))
    loaded = stage.load(["--config", str(config)])
    trainer_class = stage.part("trainer")
    policies = []  # at each question, all weights that the engine has

    class Watched(trainer_class):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            (engine,) = engines
            engine.check = self.compare

        def compare(self, engine):
            """Hold the engine's weights against the policy's, an adapter merged."""
            model = self.accelerator.unwrap_model(self.model)
            if loaded.model.use_peft:
                model = copy.deepcopy(model).merge_and_unload()
            policy = dict(model.named_parameters())
            for key, weight in engine.parameters.items():
                # merging and unmerging at each hand-over rounds
                apart = 1e-6 if loaded.model.use_peft else 0
                torch.testing.assert_close(weight, policy[key].detach(), rtol=0, atol=apart)
            policies.append(torch.cat([w.detach().flatten() for w in engine.parameters.values()]))

    stage.part("run")(loaded, Watched, **stage.options)
    (engine,) = engines
    assert isinstance(engine, Server if "server" in case else Colocated)
    generations = 2 if stage.name == "ppo" else 4
    assert len(policies) == engine.asked == generations
    moved = [float((one - other).abs().max()) for one, other in pairwise(policies)]
    assert min(moved) > 0  # each generation is of other weights than the one before
    handed_over = [names for names in engine.given if names]
    names = list(engine.parameters)
    assert handed_over == [names] * len(handed_over)  # all, once, and none of a value model
