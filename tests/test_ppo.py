"""PPO's trainer: its loss against recorded and public numbers, and what it logs, keeps, refuses."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from comparison import Comparison
from policy_gradient_cases import END, LIMIT, checkpoint, drift, plain_logps, rewards_of
from ppo_cases import build, score, unsettle
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, TrainerCallback

from rlhf_trl import policy_gradient_loss
from rlhf_trl.algorithms import formulation
from rlhf_trl.book import advantages as book_advantages
from rlhf_trl.compare.measure import Measured, accumulate, batches, flat_gradient
from rlhf_trl.compare.windows.generation import fix_completions
from rlhf_trl.errors import InputError
from rlhf_trl.trainers import value_model
from rlhf_trl.trainers.ppo import BookPPOConfig

GOLDEN = Path(__file__).parent / "golden" / "policy_gradient.json"
RECORDED = [case for case in json.loads(GOLDEN.read_text()) if case["algorithm"] == "ppo"]


# --- the loss, fed tensors through a stand-in for the model --------------------------------------


def outputs_of(logps, values):
    """A model whose forward gives these, of the rows and columns that it is asked for."""

    def forward(input_ids, **_):
        places = input_ids[:, 0], slice(input_ids.shape[1] - 1)
        entropy = torch.zeros_like(logps[places])
        return SimpleNamespace(
            log_probs=logps[places], entropy=entropy, state_values=values[places]
        )

    return forward


def generation(mask):
    """What TRL makes of one prompt token each, its row, and completions with this mask."""
    ones = torch.ones(len(mask), 1, dtype=torch.long)
    return {
        "prompt_ids": torch.arange(len(mask)).unsqueeze(1),
        "prompt_mask": ones,
        "completion_ids": torch.ones_like(mask, dtype=torch.long),
        "completion_mask": mask.long(),
        "num_items_in_batch": mask.sum(),
    }


def fed(trainer, rewards, mask, old_values, **tensors):
    """Let the trainer estimate advantages from these values; return its inputs of the loss."""
    trainer._rollout_values = lambda output: old_values
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    inputs = generation(mask) | {"old_per_token_logps": torch.zeros_like(old_values)} | tensors
    inputs["advantages"] = trainer._advantages(inputs, rewards, training=True)
    return inputs


def tensor(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


@pytest.mark.parametrize("case", RECORDED, ids=lambda case: str(len(case["inputs"]["mask"])))
def test_the_trainers_loss_on_the_recorded_batches(case):
    given = {name: tensor(v) for name, v in case["inputs"].items() if v is not None}
    params = case["params"]
    settings = {name: params[name] for name in ("gamma", "lam", "vf_coef")}
    settings |= {"epsilon": params["clip_eps_lo"], "epsilon_high": params["clip_eps_hi"]}
    settings |= {"cliprange_value": params["clip_eps_val"]}
    trainer = build(formulation="code", num_iterations=2, **settings)
    logps, values = given["logps"].requires_grad_(), given["values"].requires_grad_()
    inputs = fed(
        trainer,
        given["rewards"],
        given["mask"],
        given["old_values"],
        old_per_token_logps=given["old_logps"],
    )
    loss = trainer._compute_loss(outputs_of(logps, values), inputs)
    grad_logps, grad_values = torch.autograd.grad(loss, (logps, values))
    found = {"grad_logps": grad_logps, "grad_values": grad_values}
    found |= {"loss": loss.detach(), "advantages": inputs["advantages"]}
    public = policy_gradient_loss("ppo", formulation="code", **given, **settings)
    public_logps, public_values = torch.autograd.grad(public.loss, (logps, values))
    for name, expected in case["expected"].items():
        scale = tensor(expected).abs().max()
        torch.testing.assert_close(found[name], tensor(expected), rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(grad_logps, public_logps, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(grad_values, public_values, rtol=1e-5, atol=1e-9)


def test_advantages_by_hand():
    # gamma .5, lam .5, reward 8 at the end. Three tokens, values 1 2 3: delta_2 = 8 - 3 = 5,
    # delta_1 = 3/2 - 2 = -1/2, delta_0 = 2/2 - 1 = 0; A = 5, -1/2 + 5/4 = 3/4, 0 + 3/16.
    # One token, value 4: A = 4.
    trainer = build(gamma=0.5, lam=0.5)
    mask, values = tensor([[1, 1, 1], [1, 0, 0]]), tensor([[1.0, 2, 3], [4, 9, 9]])
    inputs = fed(trainer, tensor([8.0, 8.0]), mask, values)
    assert inputs["advantages"].tolist() == [[3 / 16, 0.75, 5], [4, 0, 0]]
    assert inputs["returns"].tolist() == [[19 / 16, 2.75, 8], [8, 0, 0]]


def ragged(seed, rows=6, tokens=9):
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, tokens + 1, (rows,), generator=generator)
    mask = (torch.arange(tokens) < lengths[:, None]).double()
    draw = [torch.randn(rows, tokens, generator=generator, dtype=torch.float64) for _ in range(3)]
    return mask, draw[0], draw[1], draw[2].sum(1)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_with_lam_1_an_advantage_is_the_discounted_return_minus_the_value(gamma):
    mask, values, _, rewards = ragged(0)
    found = fed(build(gamma=gamma, lam=1.0), rewards, mask, values)["advantages"]
    left = mask.sum(1, keepdim=True) - 1 - torch.arange(mask.shape[1])  # tokens until the reward
    expected = (gamma**left * rewards[:, None] - values) * mask
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_padding_changes_neither_loss_nor_gradient():
    trainer = build(gamma=0.9, lam=0.7, num_iterations=2)
    sides = []
    for extra in (0, 5):
        mask, values, logps, rewards = ragged(1)
        wide = torch.full((len(mask), extra), 7.0, dtype=torch.float64)
        mask = torch.cat([mask, 0 * wide], dim=1)
        values, logps = (torch.cat([x, wide], dim=1) for x in (values, logps))
        old = {"old_per_token_logps": logps - 0.1}
        inputs = fed(trainer, rewards, mask, values - 0.3, **old)
        leaves = logps.requires_grad_(), values.requires_grad_()
        loss = trainer._compute_loss(outputs_of(*leaves), inputs)
        gradients = torch.autograd.grad(loss, leaves)
        assert all(not g[:, 9:].any() for g in gradients)
        sides.append([loss.detach(), *(g[:, :9] for g in gradients)])
    for narrow, wide in zip(*sides, strict=True):
        assert torch.equal(narrow, wide)


def test_whitened_advantages_leave_the_returns_alone():
    mask, values, _, rewards = ragged(2)
    plain = fed(build(), rewards, mask, values)
    white = fed(build(whiten_advantages=True), rewards, mask, values)
    kept = white["advantages"][mask.bool()]
    assert float(kept.mean()) == pytest.approx(0, abs=1e-9)
    assert float(kept.std()) == pytest.approx(1, abs=1e-6)
    correlated = torch.stack([kept, plain["advantages"][mask.bool()]])
    assert float(torch.corrcoef(correlated)[0, 1]) == pytest.approx(1)
    assert torch.equal(white["returns"], plain["returns"])


def test_whitening_by_hand():
    mask = tensor([[1, 1, 0], [1, 0, 0]])
    found = book_advantages.whitened(tensor([[1.0, 2.0, 50.0], [3.0, 50.0, 50.0]]), mask)
    torch.testing.assert_close(found, tensor([[-1.0, 0.0, 0.0], [1.0, 0.0, 0.0]]))


@pytest.mark.parametrize("finished", [0, 1])
def test_a_generation_that_is_almost_wholly_cut_off_does_not_stop_a_whitened_run(finished):
    def cut_off(prompt_ids, index, call):  # but for a completion of one token, or none
        return [END] if prompt_ids in first[:finished] else [7] * LIMIT

    first = []
    trainer = build(whiten_advantages=True, mask_truncated_completions=True, answer=None)
    fix_completions(trainer, cut_off)
    generate = trainer._generate_single_turn

    def remember(prompt_ids, *args, **kwargs):
        first.extend(map(tuple, prompt_ids))
        return generate(prompt_ids, *args, **kwargs)

    trainer._generate_single_turn = remember
    unsettle(trainer)
    ours, [batch] = accumulate(trainer, batches(trainer))
    assert batch["completion_mask"].sum() == finished
    assert not batch["advantages"].any()  # a lone token is the mean
    # the critic still learns from it: .1 is vf_coef
    error = batch["old_values"] - batch["returns"]
    assert float((error**2).sum()) > 0 or not finished
    assert ours.loss == pytest.approx(0.1 * float((error**2).sum()) / 2 / 8, abs=1e-7)


def test_the_critics_numbers_in_the_log_by_hand():
    # rewards 2 and 0, one token each, values 1 and 1: advantages 1, -1; returns 2, 0
    trainer = build(num_iterations=2, cliprange_value=0.25)
    mask, old = tensor([[1.0], [1.0]]), tensor([[1.0], [1.0]])
    logps = tensor([[-1.0], [-1.0]])
    inputs = fed(trainer, tensor([2.0, 0.0]), mask, old, old_per_token_logps=logps - 0.1)
    # new values 2 and 1.5: the first is clipped to 1.25 and its error .75 decides; the second's
    # own error 1.5 is larger than that of 1.25
    trainer._compute_loss(outputs_of(logps, tensor([[2.0], [1.5]])), inputs)
    logged = {name: values[-1] for name, values in trainer._metrics["train"].items()}
    assert logged["loss/value_avg"] == pytest.approx((0.75**2 / 2 + 1.5**2 / 2) / 2)
    assert logged["val/clipfrac_avg"] == 0.5
    assert logged["policy/approxkl_avg"] == pytest.approx(0.1**2 / 2)
    assert (logged["advantages/mean"], logged["advantages/std"]) == (0.0, 1.0)
    assert logged["returns/mean"] == 1.0
    assert logged["val/explained_variance"] == 0.0  # constant values explain nothing
    fed(trainer, tensor([2.0, 0.0]), mask, tensor([[1.5], [0.5]]))
    assert trainer._metrics["train"]["val/explained_variance"][-1] == 0.75  # 1 - .25 / 1


# --- the loss, through both models ---------------------------------------------------------------


class Plain(torch.nn.Module):
    """Policy and value model of plain transformers with the trainer's weights."""

    def __init__(self, trainer):
        super().__init__()
        config = trainer.model.config
        self.policy = AutoModelForCausalLM.from_config(config)
        policy, value = value_model.split(trainer.model.state_dict())
        self.policy.load_state_dict(policy)
        self.head = len(value) == 1
        if self.head:
            self.value = torch.nn.Linear(config.hidden_size, 1, bias=False)
        else:
            config = trainer.model.value_model.config
            self.value = AutoModelForSequenceClassification.from_config(config)
        self.value.load_state_dict(value)

    def values(self, batch):
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        backbone = (self.policy if self.head else self.value).model
        hidden = backbone(input_ids=ids, attention_mask=attention).last_hidden_state
        score = self.value if self.head else self.value.score
        return score(hidden)[:, -batch["completion_ids"].shape[1] - 1 : -1, 0]

    def gradient(self):
        """In the order of the trainer's own parameters."""
        named = {
            ("value_model." if n[0] == "v" else "") + n.partition(".")[2]: p
            for n, p in self.named_parameters()
        }
        return flat_gradient(SimpleNamespace(named_parameters=named.items))


# accumulation, steps per generation, iterations
SCHEDULES = [(1, 1, 1), (1, 1, 2), (2, 2, 1), (1, 4, 1), (2, 4, 2)]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("kind", ["separate", "head"])
@pytest.mark.parametrize("which", ["chapter", "code"])
def test_gradient_is_the_public_functions(which, kind, schedule):
    accumulation, per_generation, iterations = schedule
    for beta in (0.0, 0.1):
        trainer = build(
            formulation=which,
            gradient_accumulation_steps=accumulation,
            steps_per_generation=per_generation,
            num_iterations=iterations,
            beta=beta,
            value_model=kind,
        )
        unsettle(trainer)
        reference = AutoModelForCausalLM.from_pretrained(trainer.model.config.name_or_path)
        source, old = batches(trainer), Plain(trainer)
        for number in range(max(1, per_generation * iterations // accumulation)):
            if number:
                drift(trainer.model, 0.1, number)
            plain = Plain(trainer)
            ours, window = accumulate(trainer, source)
            total = 0.0
            for batch in window:
                given = {"beta": beta} if beta else {}
                with torch.no_grad():
                    given |= {"ref_logps": plain_logps(reference, batch)} if beta else {}
                    given |= {"old_logps": plain_logps(old.policy, batch)}
                    given |= {"old_values": old.values(batch)}
                total = total + policy_gradient_loss(
                    "ppo",
                    formulation=which,
                    logps=plain_logps(plain.policy, batch),
                    values=plain.values(batch),
                    mask=batch["completion_mask"],
                    rewards=rewards_of("ppo", which, batch),
                    **given,
                ).loss / len(window)
            total.backward()
            theirs = Measured(float(total.detach()), plain.gradient())
            assert Comparison(ours, theirs).relative_error <= 1e-5
            assert ours.loss == pytest.approx(theirs.loss, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_the_gradient_is_that_of_all_rows_with_their_padding(kind, monkeypatch):
    gradients, shapes = [], []
    for as_one in (False, True):
        trainer = build(value_model=kind, per_device_train_batch_size=16)
        unsettle(trainer)
        if as_one:
            monkeypatch.setattr(type(trainer), "_parts", lambda *args: [None])
        trainer.model.base_model.register_forward_pre_hook(
            lambda module, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)),
            with_kwargs=True,
        )
        gradients.append(accumulate(trainer, batches(trainer))[0].gradient)
    *parts, (rows, columns) = shapes  # what the policy reads of the batch
    assert len(parts) == 2 and sum(part[0] for part in parts) == rows == 16
    assert min(part[1] for part in parts) < columns
    assert float((gradients[0] - gradients[1]).norm() / gradients[1].norm()) < 1e-6


def test_a_single_update_has_the_rollouts_values_without_another_forward(monkeypatch):
    """As two updates would estimate them, but from the values of the update itself."""
    found = []
    for words in ({"num_iterations": 2}, {}):
        trainer = build(lam=0.9, gamma=0.9, beta=0.1, **words)
        unsettle(trainer)
        if not words:
            monkeypatch.setattr(type(trainer), "_rollout_values", None)
        estimate, seen = trainer._estimated, []

        def remember(batch, *args, estimate=estimate, seen=seen):
            seen.append((batch["prompt_ids"].tolist(), estimate(batch, *args)))
            return seen[-1][1]

        trainer._estimated = remember
        accumulate(trainer, batches(trainer))
        [(prompts, estimated)] = seen
        order = sorted(range(8), key=lambda i: str(prompts[i]))
        found.append([estimated[n][order] for n in ("advantages", "returns", "old_values")])
    for first, second in zip(*found, strict=True):
        torch.testing.assert_close(first, second)


def test_kl_is_counted_once():
    """With rewards of 0 and a value of 0, nothing but the KL is left in the returns."""
    trainer = build(beta=0.5, gamma=1.0, lam=1.0, reward_weights=[0.0, 0.0], num_iterations=2)
    drift(trainer.model, 0.3, 5)
    policy = Plain(trainer).policy
    reference = AutoModelForCausalLM.from_pretrained(trainer.model.config.name_or_path)
    assert not score(trainer).any()
    ours, [batch] = accumulate(trainer, batches(trainer))
    with torch.no_grad():
        logps, mask = plain_logps(policy, batch), batch["completion_mask"]
        kl = (logps - plain_logps(reference, batch)) * mask
    to_go = -0.5 * kl.flip(1).cumsum(1).flip(1) * mask
    assert float(to_go.abs().max()) > 0.1
    torch.testing.assert_close(batch["advantages"], to_go, rtol=1e-4, atol=1e-5)
    # and the loss holds no second one: at ratio 1 it is minus the mean advantage, plus the critic's
    means = (to_go - 0.1 * to_go**2 / 2).sum(1) / mask.sum(1)
    assert ours.loss == pytest.approx(-float(means.mean()), rel=1e-4)


def test_a_cut_off_completion_pays():
    trainer = build(missing_eos_penalty=2.0, gamma=1.0, lam=1.0, num_iterations=2)
    _, [batch] = accumulate(trainer, batches(trainer))
    cut_off = batch["completion_mask"].sum(1) == LIMIT
    cut_off &= batch["completion_ids"][:, -1] != END
    assert 0 < cut_off.sum() < len(cut_off)
    expected = rewards_of("ppo", "chapter", batch) - 2.0 * cut_off
    torch.testing.assert_close(batch["returns"][:, 0], expected)  # all values are still 0


# --- learning rates ------------------------------------------------------------------------------


def test_the_value_model_has_a_learning_rate_of_its_own_and_may_start_alone():
    trainer = build(
        learning_rate=0.01,
        value_learning_rate=0.03,
        value_warmup_steps=2,
        lr_scheduler_type="linear",
        max_steps=4,
    )
    unsettle(trainer)
    rates, weights = [], []

    def remember(*_, **__):
        groups = trainer.optimizer.param_groups
        rates.append((groups[0]["lr"], groups[-1]["lr"]))
        weights.append([p.detach().clone() for p in (trainer.model.lm_head.weight, score(trainer))])

    callback = TrainerCallback()
    callback.on_step_begin = remember
    trainer.add_callback(callback)
    trainer.train()
    assert [r[0] for r in rates] == pytest.approx([0, 0, 0.005, 0.0025])
    assert [r[1] for r in rates] == pytest.approx([0.03, 0.0225, 0.015, 0.0075])
    assert torch.equal(weights[0][0], weights[2][0]) and not torch.equal(
        weights[2][0], weights[3][0]
    )
    assert not torch.equal(weights[0][1], weights[1][1])


def only_policy(lr):
    """An optimizer made before the trainer: of the policy, which is all there is."""
    policy = AutoModelForCausalLM.from_pretrained(checkpoint())
    return policy, torch.optim.AdamW(policy.parameters(), lr, weight_decay=0)


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_a_given_optimizer_trains_the_critic_as_well(kind):
    policy, optimizer = only_policy(0.01)
    policy.config._name_or_path = checkpoint()
    warmup = 2 if kind == "separate" else 0
    trainer = build(
        model=policy,
        optimizers=(optimizer, None),
        value_model=kind,
        value_learning_rate=0.03,
        value_warmup_steps=warmup,
        lr_scheduler_type="constant",
        max_steps=2,
    )
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    value = {n for n in before if value_model.is_of_value_model(n)}
    trainer.train()
    moved = {n for n, p in trainer.model.named_parameters() if not torch.equal(p, before[n])}
    assert len(value) == (25 if kind == "separate" else 1)
    assert moved & value == value  # the score moves first, and with it the rest
    assert not moved - value if warmup else len(moved - value) == len(before) - len(value)
    assert [g["lr"] for g in trainer.optimizer.param_groups] == [0.01, 0.03]


def test_a_schedule_that_does_not_know_the_critic_is_refused():
    policy, optimizer = only_policy(0.01)
    policy.config._name_or_path = checkpoint()
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(InputError, match=r"write optimizers=\(optimizer, None\)"):
        build(model=policy, optimizers=(optimizer, schedule))


@pytest.mark.parametrize("own", ["optimizer", "scheduler"])
def test_deepspeeds_own_optimizer_has_no_group_for_the_critic(own, tmp_path, monkeypatch):
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 2}, own: {"type": "any"}}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    fields = {"use_cpu": True, "bf16": False, "report_to": "none"}
    for name, value in (("value_learning_rate", 0.1), ("value_warmup_steps", 1)):
        with pytest.raises(InputError, match=f"^{name} needs .* the DeepSpeed config's own {own} "):
            BookPPOConfig(**fields, **{name: value})
    BookPPOConfig(**fields)  # one learning rate for all is what such a config says


# --- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["separate", "head"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=str)
def test_values_are_float32_under_autocast(kind, weights):
    trainer = build(value_model=kind)
    unsettle(trainer, scale=0)
    policy = trainer.model.to(weights)
    seen = []
    module = policy.value_model if kind == "head" else policy.value_model.score
    module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    ids = torch.arange(7, 27).view(2, 10)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = policy(input_ids=ids, attention_mask=torch.ones_like(ids), only_values=True)
    exact = seen[0].double() @ module.weight[0].detach().double()
    assert found.dtype == torch.float32 and float(exact.abs().max()) > 0.05
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)  # bfloat16: 4e-3


# --- vLLM ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["separate", "head"])
def test_vllm_gets_the_policys_weights_and_no_others(kind):
    from trl.generation.vllm_generation import VLLMGeneration

    trainer = build(value_model=kind)
    engine = object.__new__(VLLMGeneration)
    engine.model, engine._dist = trainer.model, trainer._dist
    everything = [name for name, _ in engine._iter_named_params()]
    found = [name for name, _ in value_model.only_policy(engine._iter_named_params)()]
    plain = AutoModelForCausalLM.from_config(trainer.model.config)
    assert found == [name for name, _ in plain.named_parameters()]
    assert len(everything) > len(found)


# --- refused -------------------------------------------------------------------------------------

REFUSED = {
    "gamma": ({"gamma": 1.1}, "gamma must be a number between 0 and 1, not 1.1"),
    "lam": ({"lam": -0.1}, "lam must be a number between 0 and 1, not -0.1"),
    "whitening in the code": (
        {"formulation": "code", "whiten_advantages": True},
        "whiten_advantages is not read by ppo (code)",
    ),
    "no such kind": (
        {"value_model": "shared"},
        "value_model is 'shared'; write one of separate, head",
    ),
    "head and path": (
        {"value_model": "head", "value_model_name_or_path": "x"},
        "value_model_name_or_path is for a separate value model",
    ),
    "head and warm-up": (
        {"value_model": "head", "value_warmup_steps": 1},
        "value_warmup_steps is for a separate",
    ),
    "moving reference": ({"sync_ref_model": True, "beta": 0.1}, "without a value model"),
    "negative": ({"value_learning_rate": -1.0}, "value_learning_rate is -1.0; write 0 or more"),
    "missing model": (
        {"value_model_name_or_path": "/no/such/model"},
        "value_model_name_or_path: '/no/such/model' is neither a model folder here nor",
    ),
    "another row": ({"baseline": "none"}, "baseline is not read by ppo (chapter)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_in_one_sentence(case):
    config, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        build(**config)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_the_other_trainers_config_is_refused():
    with pytest.raises(InputError, match=r"grpo .* has no critic: use BookGRPOTrainer"):
        BookPPOConfig.resolve(
            BookPPOConfig(use_cpu=True, bf16=False, report_to="none", algorithm="grpo")
        )


def test_the_row_says_since_when_trl_has_none():
    with pytest.raises(InputError, match=r"TRL removed PPO and its value heads in 1\.13"):
        formulation("ppo", "trl")
