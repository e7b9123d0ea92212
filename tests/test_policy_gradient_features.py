"""What the policy-gradient trainer keeps of TRL, refuses, and adds."""

import inspect
import math
import os
import shutil
import statistics
from pathlib import Path

import pytest
import torch
from comparison import Comparison, measure, plain_copy
from datasets import Dataset
from policy_gradient_cases import (
    END,
    LIMIT,
    NAMES,
    WEIGHTS,
    WORDS,
    Reference,
    build,
    checkpoint,
    completion,
    completions_of,
    drawn,
    drift,
    is_right,
    own_fields,
    plain_logps,
    right,
    shaped,
)
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, TrainerCallback
from transformers.trainer_utils import rotate_checkpoints
from trl import DPOConfig, GRPOConfig, GRPOTrainer

from rlhf_trl.algorithms import LOSS_FIELDS, formulation
from rlhf_trl.compare.measure import accumulate, batches, flat_gradient
from rlhf_trl.errors import InputError
from rlhf_trl.manifests import checkpoint_fault
from rlhf_trl.rollouts.generate import Completion
from rlhf_trl.trainers.policy_gradient import BookGRPOConfig, BookGRPOTrainer

# --- kept: with a formulation that stock TRL computes, both gradients stay equal ------------------


def both(name, prepare, **config):
    """Compare our loss with TRL's own in the same row, off-policy, under the same change."""
    sides = []
    # so long that DAPO's penalty, which TRL's loss has not, never sets in
    config = {"per_device_train_batch_size": 16, "max_completion_length": 2 * LIMIT} | config
    for which in ("chapter", "trl"):
        trainer = build(name, which, num_iterations=2, **config)
        prepare(trainer)
        source = batches(trainer)
        accumulate(trainer, source)
        drift(trainer.model, 0.1, 1)
        sides.append(accumulate(trainer, source)[0])
    return Comparison(*sides)


def importance_ratio(trainer):
    """Add vLLM's ratio to what was generated."""
    generate = trainer._generate_and_score_completions

    def generated(inputs):
        output = generate(inputs)
        generator = torch.Generator().manual_seed(3)
        shape = output["completion_mask"].shape
        output["importance_sampling_ratio"] = 3 * torch.rand(shape, generator=generator)
        return output

    trainer._generate_and_score_completions = generated
    trainer.use_vllm = False
    compute = trainer._compute_loss

    def compute_loss(model, inputs):
        trainer.use_vllm = True
        try:
            return compute(model, inputs)
        finally:
            trainer.use_vllm = False

    trainer._compute_loss = compute_loss


def tool_mask(trainer):
    """Say that every third token came from a tool."""
    generate = trainer._generate

    def generated(prompts):
        output = list(generate(prompts))
        output[2] = [[int(t % 3 != 1) for t in range(len(ids))] for ids in output[1]]
        return tuple(output)

    trainer._generate = generated


def nothing(trainer):
    pass


def truncated(trainer):
    trainer.mask_truncated_completions = True


@pytest.mark.parametrize("feature", [importance_ratio, tool_mask, truncated])
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo"])
def test_kept_as_in_trl(name, feature):
    changed = both(name, feature)
    assert changed.relative_error <= 1e-6
    assert Comparison(changed.trainer, both(name, nothing).trainer).relative_error > 0.01


def test_the_importance_ratio_weighs_reinforce_too():
    sides = []
    for feature in (importance_ratio, nothing):
        trainer = build("reinforce")
        feature(trainer)
        sides.append(accumulate(trainer, batches(trainer))[0])
    assert Comparison(*sides).relative_error > 0.1


@pytest.fixture(scope="module")
def mixture_of_experts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=120,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=4,
        num_experts_per_tok=2,
        router_aux_loss_coef=0.1,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=5,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["grpo", "dapo"])
def test_the_auxiliary_loss_is_kept(name, mixture_of_experts):
    config = {"model": mixture_of_experts, "gradient_accumulation_steps": 2}
    kept = both(name, nothing, **config)
    assert kept.relative_error <= 1e-6
    without = both(name, nothing, router_aux_loss_coef=0.0, **config)
    assert Comparison(kept.trainer, without.trainer).relative_error > 1e-3


def metrics(name, which="chapter", **config):
    trainer = build(name, which, num_iterations=2, **config)
    source = batches(trainer)
    accumulate(trainer, source)
    drift(trainer.model, 0.3, 1)
    trainer._metrics["train"].clear()
    accumulate(trainer, source)
    return trainer._metrics["train"]


@pytest.mark.parametrize("name", ["grpo", "gspo", "sapo", "drgrpo", "cispo"])
def test_metrics_are_trls(name):
    ours, theirs = metrics(name, beta=0.1), metrics(name, "trl", beta=0.1)
    assert ours.keys() == theirs.keys() and {"kl", "entropy"} <= ours.keys()
    for key in ours.keys() - {"step_time"}:
        assert ours[key] == pytest.approx(theirs[key], rel=1e-5), key
    clipped = {"sapo": None, "cispo": "cispo_clip_ratio"}.get(name, "clip_ratio/region_mean")
    assert clipped is None or ours[clipped][0] > 0


@pytest.mark.parametrize(("which", "size"), [("code", 0.699), ("chapter", 2.98e-4)])
def test_an_advantage_that_is_rounding_is_logged(which, size):
    trainer = build(
        "grpo",
        which,
        num_generations=6,
        per_device_train_batch_size=6,
        rewards=[lambda prompts, **_: [0.3] * len(prompts)],
        reward_weights=[1.0],
    )
    _, [batch] = accumulate(trainer, batches(trainer))
    assert batch["advantages"].tolist() == pytest.approx([size] * 6, rel=1e-3)
    metrics = trainer._metrics["train"]
    assert metrics["equal_rewards/max_advantage"] == pytest.approx([size], rel=1e-3)
    assert metrics["equal_rewards/frac_groups"] == [1]
    assert metrics["frac_reward_zero_std"] == [0]  # TRL's share, with a standard deviation of 3e-8


def test_groups_with_contrast_are_not_counted_among_those_of_equal_rewards():
    def reward(prompts, **_):
        return [0.5 if p == prompts[0] else float(n % 2) for n, p in enumerate(prompts)]

    trainer = build(
        "grpo", "code", rewards=[reward], reward_weights=[1.0], per_device_train_batch_size=16
    )
    accumulate(trainer, batches(trainer))
    assert trainer._metrics["train"]["equal_rewards/frac_groups"] == [0.25]
    assert trainer._metrics["train"]["equal_rewards/max_advantage"] == [0]


def test_a_cut_off_completion_pays_within_its_group():
    def nothing(prompts, **_):
        return [0.0] * len(prompts)

    trainer = build(
        "drgrpo",
        missing_eos_penalty=2.0,
        rewards=[nothing],
        reward_weights=[1.0],
        per_device_train_batch_size=32,
    )
    _, [batch] = accumulate(trainer, batches(trainer))
    cut_off = (batch["completion_ids"] != END).all(1).float()
    assert 0 < cut_off.sum() < len(cut_off)
    same = (batch["prompt_ids"].unsqueeze(0) == batch["prompt_ids"].unsqueeze(1)).all(2).float()
    # of four completions to a prompt k are cut off: the group's mean is -2 k / 4
    torch.testing.assert_close(batch["advantages"], same @ cut_off / 2 - 2 * cut_off)


def test_rows_that_never_clip_log_no_clipping():
    assert not [key for key in metrics("reinforce") if "clip_ratio" in key]


def test_the_completions_table_shows_our_advantages():
    trainer = build("rloo", rewards=[right], reward_weights=[1.0])
    accumulate(trainer, batches(trainer))
    logged = list(trainer._logs["advantages"])
    rewards = list(trainer._logs["rewards"]["right"])
    expected = []
    for first in range(0, len(rewards), 4):
        group = rewards[first : first + 4]
        expected += [r - (sum(group) - r) / 3 for r in group]
    assert logged == pytest.approx(expected, abs=1e-6)


# --- refused -------------------------------------------------------------------------------------

REFUSED = {
    "delta": ("grpo", {"delta": 2.0}, "delta is not read by grpo (chapter)"),
    "top_entropy_quantile": ("grpo", {"top_entropy_quantile": 0.2}, "top_entropy_quantile is not"),
    "entropy_coef": ("dapo", {"entropy_coef": 0.1}, "entropy_coef is not read by dapo"),
    "adaptive entropy": ("grpo", {"use_adaptive_entropy": True}, "use_adaptive_entropy is not"),
    "off-policy mask": ("grpo", {"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold is"),
    "vespo": ("grpo", {"loss_type": "vespo"}, "loss_type is 'vespo', which contradicts grpo"),
    "luspo": ("gspo", {"loss_type": "luspo"}, "loss_type is 'luspo', which contradicts gspo"),
    "vespo's fields": ("grpo", {"vespo_k_pos": 1.0}, "vespo_k_pos is not read"),
    "sequence ratio": (
        "grpo",
        {"importance_sampling_level": "sequence"},
        "importance_sampling_level is 'sequence', which contradicts grpo (chapter) and its",
    ),
    "reward scaling": ("drgrpo", {"scale_rewards": "group"}, "scale_rewards is 'group', which"),
    "joined rewards": (
        "grpo",
        {"multi_objective_aggregation": "normalize_then_sum"},
        "multi_objective_aggregation",
    ),
    "another row's field": ("grpo", {"sapo_temperature_pos": 1.0}, "sapo_temperature_pos is not"),
    "a default given": ("reinforce", {"epsilon": 0.2}, "epsilon is not read by reinforce"),
    "beta where there is no KL": ("maxrl", {"beta": 0.1}, "beta is not read by maxrl"),
    "a value out of range": ("grpo", {"epsilon": -0.1}, "epsilon must be 0 or more"),
    "one completion": ("grpo", {"num_generations": 1}, "num_generations is 1, but grpo (chapter)"),
    "no correctness": ("maxrl", {"correctness_reward": None}, "maxrl (chapter) needs correctness"),
    "no such reward": (
        "maxrl",
        {"correctness_reward": "rigt"},
        "correctness_reward: 'rigt' is not among the reward functions (did you mean 'right'?)",
    ),
    "a penalty for what reads no reward": (
        "maxrl",
        {"missing_eos_penalty": 1.0},
        "missing_eos_penalty is not read by maxrl (chapter)",
    ),
    "a penalty below 0": ("grpo", {"missing_eos_penalty": -1.0}, "write 0 or more"),
    "punished too long": ("dapo", {"soft_punish_cache": 13}, "write 1 to max_completion_length"),
    "a window ending inside a generation": (
        "dapo",
        {"gradient_accumulation_steps": 2, "steps_per_generation": 3},
        "dapo (chapter) is normalized over the accumulation window",
    ),
    "a critic": ("ppo", {}, "ppo (chapter) has a critic: use BookPPOTrainer (recipes/ppo.py)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name_before_training(case):
    name, config, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        build(name, **config)
    assert says in str(error.value) and "\n" not in str(error.value)


def test_a_config_of_another_trainer_is_refused():
    with pytest.raises(InputError, match="must be a BookGRPOConfig or GRPOConfig, not a DPOConfig"):
        BookGRPOTrainer("x", [right], DPOConfig(bf16=False, use_cpu=True, report_to="none"))


def test_the_users_config_is_filled_in_and_can_name_another_row_next():
    given = BookGRPOConfig(bf16=False, use_cpu=True, report_to="none", algorithm="gspo")
    rows = Dataset.from_list([{"prompt": "sun"}])
    trainer = BookGRPOTrainer(checkpoint(), [right], given, rows)
    assert trainer.args is given and given.importance_sampling_level == "sequence"
    given.algorithm = "dapo_per_prompt"
    given.correctness_reward = "right"
    given.soft_punish_cache = 4
    assert BookGRPOTrainer(checkpoint(), [right], given, rows).args is given
    assert given.importance_sampling_level == "token" and given.epsilon_high == 0.28


@pytest.mark.parametrize("name", NAMES)
def test_loss_fields_that_a_row_does_not_read_are_trls_defaults(name):
    trainer = build(name)
    row = formulation(name, "chapter")
    stock = GRPOConfig(bf16=False, use_cpu=True, report_to="none")
    unread = LOSS_FIELDS - row.reads.keys() - row.trainer_reads.keys() - row.settings.keys()
    names = [field for field in unread if hasattr(stock, field)]
    assert "delta" in names
    assert {n: getattr(trainer.args, n) for n in names} == {n: getattr(stock, n) for n in names}


# --- REINFORCE -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("which", "baseline"), [("chapter", "batch_mean"), ("code", None)])
def test_reinforce_with_one_completion_per_prompt(which, baseline):
    config = {} if baseline is None else {"baseline": baseline}
    trainer = build("reinforce", which, num_generations=1, **config)
    assert trainer.num_generations == 1
    reference = Reference(trainer, "reinforce", which)
    assert measure(trainer, batches(trainer), reference).relative_error <= 1e-5


def test_one_completion_alone_is_refused():
    with pytest.raises(InputError, match="each process generates a single completion"):
        build("reinforce", num_generations=1, per_device_train_batch_size=1)


def test_the_moving_average_follows_the_batches():
    trainer = build(
        "reinforce",
        baseline="moving_average",
        baseline_decay=0.75,
        rewards=[right],
        reward_weights=[1.0],
    )
    source, expected = batches(trainer), None
    for _ in range(3):
        _, [batch] = accumulate(trainer, source)
        pairs = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        rewards = [is_right(ids[mask.bool()].tolist()) for ids, mask in pairs]
        mean = statistics.mean(rewards)
        before = mean if expected is None else expected
        expected = 0.75 * before + 0.25 * mean
        assert batch["advantages"].tolist() == pytest.approx([r - before for r in rewards])
        assert trainer._carried["baseline_value"] == pytest.approx(expected)


# --- DAPO's dynamic sampling ---------------------------------------------------------------------


def sampler(answer, rounds=8, **config):
    return build("dapo", dynamic_sampling_rounds=rounds, answer=answer, **config)


def with_result(prompt_ids, index, call, is_good):
    """A completion whose correctness is as wanted."""
    for attempt in range(99):
        rng = drawn(prompt_ids, index, call, attempt)
        ids = [*(rng.randrange(7, 119) for _ in range(rng.randint(1, LIMIT - 1))), 5]
        if is_right(ids) == float(is_good):
            return ids


def groups_of(batch):
    pairs = zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    found = {}
    for prompt, (ids, mask) in zip(batch["prompt_ids"].tolist(), pairs, strict=True):
        found.setdefault(tuple(t for t in prompt if t), []).append(
            is_right(ids[mask.bool()].tolist())
        )
    return found


def test_groups_without_contrast_are_dropped_in_formulation_code():
    def answer(prompt_ids, index, call):  # of every second prompt, all completions are right
        prompts.setdefault(prompt_ids, len(prompts))
        return with_result(prompt_ids, index, call, prompts[prompt_ids] % 2 or index > 1)

    prompts = {}
    trainer = build(
        "dapo", "code", dynamic_sampling_rounds=0, answer=answer, per_device_train_batch_size=16
    )
    plain = plain_copy(trainer)
    measured, [batch] = accumulate(trainer, batches(trainer))
    right = torch.tensor([is_right(ids) for ids in completions_of(batch)])
    # TRL has shuffled the completions: those of one prompt are told by its ids
    same = (batch["prompt_ids"][:, None] == batch["prompt_ids"]).all(-1).float()
    share = same @ right / 4
    kept = (share > 0) & (share < 1)
    assert kept.sum() == 8
    assert (batch["tool_mask"].amax(1) > 0).tolist() == kept.tolist()
    assert trainer._metrics["train"]["dynamic_sampling/discarded_groups"] == [2]
    # the loss is the mean over the tokens of the others, as on a batch that never had them
    tokens = batch["completion_mask"] * kept[:, None]
    loss = -(plain_logps(plain, batch).exp() / plain_logps(plain, batch).exp().detach())
    loss = (loss * batch["advantages"][:, None] * tokens).sum() / tokens.sum()
    loss.backward()
    wanted = flat_gradient(plain)
    assert (measured.gradient - wanted).norm() / wanted.norm() < 1e-4
    # in formulation chapter they stay
    trainer = sampler(answer, rounds=0, per_device_train_batch_size=16)
    assert "tool_mask" not in accumulate(trainer, batches(trainer))[1][0]


def test_a_batch_without_any_group_with_contrast_changes_nothing():
    trainer = build("dapo", "code", answer=lambda *place: with_result(*place, True))
    measured, _ = accumulate(trainer, batches(trainer))
    assert measured.loss == 0 and not measured.gradient.any()


def test_groups_without_contrast_are_replaced_by_fresh_prompts():
    calls, spent = [], []

    def answer(prompt_ids, index, call):
        calls.append((call, prompt_ids))
        # the first call answers everything right; in the second every other prompt has contrast
        prompts = list(dict.fromkeys(p for c, p in calls if c == call))
        contrast = call == 2 or (call == 1 and prompts.index(prompt_ids) % 2 == 0)
        ids = with_result(prompt_ids, index, call, index > 1 if contrast else True)
        spent.append(len(prompt_ids) + len(ids))
        return ids

    trainer = sampler(answer, per_device_train_batch_size=16)
    _, [batch] = accumulate(trainer, batches(trainer))
    assert [len([c for c, _ in calls if c == n]) for n in range(3)] == [16, 16, 8]
    assert all(sorted(group) == [0, 0, 1, 1] for group in groups_of(batch).values())
    first = {p for c, p in calls if c == 0}
    assert len(groups_of(batch)) == 4 and trainer._carried["stream_position"] == 6
    assert groups_of(batch).keys() <= {p for c, p in calls if c > 0} | first
    metrics = trainer._metrics["train"]
    assert metrics["dynamic_sampling/rounds"] == [2]
    assert metrics["dynamic_sampling/discarded_groups"] == [6]
    assert metrics["dynamic_sampling/left_without_contrast"] == [0]
    # what was discarded is not counted: half of what is left is right
    assert metrics["rewards/right/mean"] == [0.5]
    assert len(metrics["completions/mean_length"]) == 1
    tokens = batch["completion_mask"].sum()
    assert metrics["completions/mean_length"][0] == pytest.approx(float(tokens) / 16)
    assert batch["num_items_in_batch"] == tokens == trainer._window_tokens[0]
    assert len(trainer._logs["completion"]) == 16
    # but all that was generated was generated, once
    assert len(spent) == 40
    assert trainer.state.num_input_tokens_seen == sum(spent) == metrics["num_tokens"][0]


def test_metrics_of_earlier_generations_stay():
    def answer(prompt_ids, index, call):
        return with_result(prompt_ids, index, call, call % 2 == 0 or index > 1)

    trainer = sampler(answer, per_device_train_batch_size=16)
    source, means = batches(trainer), []
    for _ in range(3):
        _, [batch] = accumulate(trainer, source)
        means.append(float(batch["completion_mask"].sum()) / 16)
    metrics = trainer._metrics["train"]
    assert metrics["dynamic_sampling/discarded_groups"] == [4, 4, 4]
    assert metrics["completions/mean_length"] == pytest.approx(means)
    assert {len(metrics[name]) for name in ("reward", "entropy", "dynamic_sampling/rounds")} == {3}


def test_after_the_last_round_the_last_groups_are_kept():
    def answer(prompt_ids, index, call):
        return with_result(prompt_ids, index, call, True)

    trainer = sampler(answer, rounds=3)
    _, [batch] = accumulate(trainer, batches(trainer))
    assert trainer._metrics["train"]["dynamic_sampling/rounds"] == [3]
    assert trainer._metrics["train"]["dynamic_sampling/left_without_contrast"] == [2]
    assert trainer._carried["stream_position"] == 6
    assert {r for group in groups_of(batch).values() for r in group} == {1.0}


def test_a_single_group_without_contrast_is_replaced():
    def answer(prompt_ids, index, call):
        return with_result(prompt_ids, index, call, call == 0 or index > 1)

    trainer = sampler(answer, per_device_train_batch_size=4)
    _, [batch] = accumulate(trainer, batches(trainer))
    assert [sorted(group) for group in groups_of(batch).values()] == [[0, 0, 1, 1]]
    assert trainer._metrics["train"]["dynamic_sampling/rounds"] == [1]


def test_fresh_prompts_come_in_seeded_orders_of_the_whole_training_set():
    def words(count, **config):
        return [row["word"] for row in sampler(completion, **config)._fresh(count)]

    first, second = words(20)[:10], words(20)[10:]
    assert sorted(first) == sorted(second) == sorted(WORDS)
    assert len({tuple(x) for x in (WORDS, first, second, words(10, seed=7))}) == 4
    trainer = sampler(completion)
    parts = [row["word"] for count in (3, 9, 8) for row in trainer._fresh(count)]
    assert parts == first + second


def test_an_evaluation_is_not_resampled():
    def answer(prompt_ids, index, call):
        return with_result(prompt_ids, index, call, True)

    trainer = sampler(answer, per_device_eval_batch_size=4)
    trainer.model.eval()
    trainer._prepare_inputs([dict(trainer.train_dataset[0]) for _ in range(4)])
    assert trainer._carried["stream_position"] == 0
    assert not [name for name in trainer._metrics["train"] if "dynamic_sampling" in name]


def test_no_rounds_no_sampling():
    trainer = sampler(completion, rounds=0)
    accumulate(trainer, batches(trainer))
    assert "dynamic_sampling/rounds" not in trainer._metrics["train"]


def test_every_reward_is_computed_once_per_completion():
    judged = []

    def right(completion_ids, log_extra, **kwargs):
        judged.extend(map(tuple, completion_ids))
        log_extra("length", [len(ids) for ids in completion_ids])
        return [is_right(ids) for ids in completion_ids]

    trainer = build(
        "dapo", dynamic_sampling_rounds=4, rewards=[right, shaped], per_device_train_batch_size=32
    )
    accumulate(trainer, batches(trainer))
    discarded = trainer._metrics["train"]["dynamic_sampling/discarded_groups"][0]
    assert discarded > 0 and len(judged) == 32 + 4 * discarded
    lengths = list(trainer._logs["extra"]["length"])
    assert len(lengths) == 32
    assert trainer._metrics["train"]["completions/mean_length"] == [statistics.mean(lengths)]


def test_evaluation_leaves_out_answers_to_which_no_reward_applies():
    def even(completion_ids, **kwargs):
        return [None if len(ids) % 2 else len(ids) for ids in completion_ids]

    trainer = build("grpo", rewards=[even, even])
    said = [Completion("", True, [5] * n) for n in (1, 2, 3, 4)]
    rows, trainer.scores = [{"prompt": "p"}] * 4, {}
    assert trainer.judge(rows, said)["reward"] == [None, 2 * sum(WEIGHTS), None, 4 * sum(WEIGHTS)]


def test_a_value_that_a_reward_logs_counts_for_the_completions_that_stay():
    seen, shares = [], []

    def answer(prompt_ids, index, call):
        seen.append((call, prompt_ids))
        prompts = list(dict.fromkeys(p for c, p in seen if c == call))
        # call 0: nothing stays; 1: one prompt of four, with a right answer; 2: the other three
        stays = call == 2 or (call == 1 and prompts.index(prompt_ids) == 0)
        return with_result(prompt_ids, index, call, index >= 4 - call if stays else True)

    def right(completion_ids, log_metric, **kwargs):
        rewards = [is_right(ids) for ids in completion_ids]
        shares.append(statistics.mean(rewards))
        log_metric("share_right", shares[-1])
        return rewards

    trainer = sampler(answer, rewards=[right, shaped], per_device_train_batch_size=16)
    accumulate(trainer, batches(trainer))
    assert shares == [1, 13 / 16, 6 / 12]
    expected = (4 * 13 / 16 + 12 * 6 / 12) / 16
    assert trainer._metrics["train"]["share_right"] == pytest.approx([expected])


def test_dynamic_sampling_refuses_what_it_cannot_repeat():
    trainer = build("dapo", dynamic_sampling_rounds=1)
    trainer.rollout_func = lambda *_: None
    with pytest.raises(InputError, match="dynamic_sampling_rounds does not work with rollout_func"):
        accumulate(trainer, batches(trainer))


# --- the window's token count --------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_outside_training_a_loss_is_a_mean_over_its_own_tokens(name):
    trainer = build(name, per_device_eval_batch_size=4, answer=completion)
    _, [trained] = accumulate(trainer, batches(trainer))
    rows = [dict(trainer.train_dataset[0]) for _ in range(4)]
    trainer.model.eval()
    batch = trainer._prepare_inputs(rows)
    assert len(batch["completion_mask"]) == 4 < len(trained["completion_mask"])
    loss = trainer.compute_loss(trainer.model, batch).item()
    # on-policy every ratio is 1; CISPO's loss is that times log pi
    weights = batch["completion_mask"] * batch["advantages"].unsqueeze(1)
    if name == "cispo":
        weights = weights * plain_logps(trainer.model, batch)
    expected = -weights.sum() / batch["completion_mask"].sum()
    assert loss == pytest.approx(expected.item(), rel=1e-4, abs=1e-6) and abs(loss) > 1e-3


def test_outside_training_a_prompt_has_the_completions_of_evaluation():
    def length(completion_ids, **kwargs):
        return [float(len(ids)) for ids in completion_ids]

    config = {"num_generations": 2, "num_generations_eval": 4, "reward_weights": [1.0]}
    trainer = build("cispo", rewards=[length], **config)
    trainer.model.eval()
    batch = trainer._prepare_inputs([dict(trainer.train_dataset[n // 4]) for n in range(8)])
    loss = trainer.compute_loss(trainer.model, batch).item()
    tokens = batch["completion_mask"].sum(1).tolist()
    assert sum(tokens[:4]) != sum(tokens[4:])
    total = 0.0
    for i, logps in enumerate(plain_logps(trainer.model, batch).detach()):
        of_prompt = sum(tokens[:4] if i < 4 else tokens[4:])
        total -= batch["advantages"][i] * logps[: tokens[i]].sum() / of_prompt
    assert loss == pytest.approx(float(total / 2), rel=1e-4) and abs(loss) > 1e-3


@pytest.mark.parametrize("name", ["dapo", "cispo"])
def test_a_window_without_a_token_that_counts_has_no_gradient(name):
    def endless(prompt_ids, index, call):
        rng = drawn(prompt_ids, index, call)
        return [rng.randrange(7, 119) for _ in range(LIMIT)]

    trainer = build(name, answer=endless, mask_truncated_completions=True)
    side, [batch] = accumulate(trainer, batches(trainer))
    assert not batch["completion_mask"].any()
    assert side.loss == 0 and not side.gradient.any()


# --- pins: what the overrides rely on ------------------------------------------------------------

SIGNATURES = {
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_generate": ["self", "prompts"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_prepare_inputs": ["self", "generation_batch"],
    "_compute_loss": ["self", "model", "inputs"],
    "_get_train_sampler": ["self", "dataset"],
    "_init_training_state": [
        *["self", "max_steps", "num_update_steps_per_epoch", "num_train_epochs"],
        *["resume_from_checkpoint", "trial"],
    ],
    "_save_checkpoint": ["self", "model", "trial"],
    "_load_optimizer_and_scheduler": ["self", "checkpoint"],
    "get_batch_samples": ["self", "epoch_iterator", "num_batches", "device"],
    "_generate_single_turn": [
        *["self", "prompt_ids", "images", "multimodal_fields", "num_generations"],
        "has_tool_images",
    ],
}


@pytest.mark.parametrize("method", SIGNATURES)
def test_signatures_of_overridden_methods(method):
    found = list(inspect.signature(getattr(GRPOTrainer, method)).parameters)
    assert found == SIGNATURES[method], (
        f"TRL changed GRPOTrainer.{method}: read it and rlhf_trl/trainers/policy_gradient.py again"
    )


def test_what_the_overrides_expect_of_a_generation():
    trainer = build("grpo", "trl", gradient_accumulation_steps=2)
    source = batches(trainer)
    outputs = []
    generate = trainer._generate
    trainer._generate = lambda prompts: outputs.append(generate(prompts)) or outputs[-1]
    _, window = accumulate(trainer, source)
    assert len(outputs[0]) == 8, "TRL's _generate returns something else: see dynamic_sampling.py"
    keys = {"prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages"}
    assert window[0].keys() == keys | {"num_items_in_batch"}, (
        "TRL returns other tensors from _generate_and_score_completions; old_per_token_logps must "
        "be missing on-policy"
    )
    assert trainer._step == 2 and len(trainer._buffered_inputs) == 2
    assert trainer.loss_is_scaled_for_ga is True


def test_trl_still_refuses_one_completion_only_by_number(tmp_path):
    with pytest.raises(ValueError, match="at least 2 generations per prompt"):
        GRPOConfig(str(tmp_path), num_generations=1, bf16=False, use_cpu=True, report_to="none")


# --- checkpoints ---------------------------------------------------------------------------------

# those that carry nothing of their own from step to step are resumed as GRPO is
LIKE_GRPO = ("rloo", "drgrpo", "gspo", "cispo", "sapo")
RESUMED = [
    *[pytest.param(name, {}, marks=pytest.mark.promise) for name in LIKE_GRPO],
    *[(name, {}) for name in ("grpo", "maxrl")],
    ("reinforce", {"baseline": "batch_mean"}),
    ("reinforce", {"baseline": "moving_average"}),
    ("dapo", {"dynamic_sampling_rounds": 3, "num_generations": 2}),
]


@pytest.mark.parametrize(("name", "config"), RESUMED, ids=lambda v: str(v))
def test_resumed_between_generations_is_bit_identical(name, config, tmp_path):
    config = config | {
        "steps_per_generation": 2,
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "learning_rate": 1e-3,
        "answer": None,  # generated
    }
    config |= {"beta": 0.1} if "beta" in formulation(name, "chapter").reads else {}
    whole = build(name, output_dir=str(tmp_path), **config)
    whole.train()
    resumed = build(name, output_dir=str(tmp_path / "again"), **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert resumed.state.global_step == 4
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert resumed._carried == whole._carried
    file = tmp_path / "checkpoint-2" / "policy_gradient_state_0.pt"
    state = torch.load(file, weights_only=True)["carried"]
    if name == "dapo":
        assert 0 < state["stream_position"] < whole._carried["stream_position"]
    if config.get("baseline") == "moving_average":
        assert state["baseline_value"] != whole._carried["baseline_value"]
    file.unlink()
    again = build(name, output_dir=str(tmp_path / "without"), **config)
    with pytest.raises(InputError, match=r"lacks policy_gradient_state_0.pt"):
        again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_resumed_in_a_later_epoch_is_bit_identical(tmp_path):
    # all ten prompts make one generation, of two steps: the checkpoint ends the second epoch
    config = {
        "steps_per_generation": 2,
        "per_device_train_batch_size": 20,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 4,
        "learning_rate": 1e-3,
        "answer": None,
    }
    whole = build("grpo", output_dir=str(tmp_path), **config)
    whole.train()
    assert whole.state.epoch == 3
    resumed = build("grpo", output_dir=str(tmp_path / "again"), **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class _Breaks(TrainerCallback):
    def __init__(self, step, value):
        self._step, self._value = step, value

    def on_step_end(self, args, state, control, model=None, **kwargs):
        if state.global_step == self._step:
            next(model.parameters()).data.view(-1)[-1] = self._value


@pytest.mark.parametrize(
    ("step", "value", "last"),
    [(3, math.nan, "the last good step is 2"), (1, math.inf, "no good step was saved")],
)
def test_weights_that_are_not_finite_are_not_saved(step, value, last, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4, "answer": None}
    trainer = build("grpo", output_dir=str(tmp_path), **saving)
    trainer.add_callback(_Breaks(step, value))
    with pytest.raises(InputError, match=f"no longer finite at step {step}, so .*; {last}"):
        trainer.train()
    assert len(list(tmp_path.glob("checkpoint-*"))) == step - 1
    if step == 1:
        return
    whole = build("grpo", output_dir=str(tmp_path / "whole"), **saving)
    whole.train()
    resumed = build("grpo", output_dir=str(tmp_path), **saving)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step - 1}"))
    pairs = zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_weights_that_are_not_finite_are_saved_where_nobody_asked_for_the_refusal(tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "answer": None}
    default = BookGRPOConfig.refuse_non_finite
    trainer = build("grpo", output_dir=str(tmp_path), refuse_non_finite=default, **saving)
    trainer.add_callback(_Breaks(2, math.nan))
    trainer.train()
    assert len(list(tmp_path.glob("checkpoint-*"))) == 2


def test_a_checkpoint_is_on_the_disk_before_older_ones_are_deleted(tmp_path, monkeypatch):
    synced, deleted, rmtree = set(), [], shutil.rmtree

    def delete(path, *args, **kwargs):
        stays = (
            tmp_path / {"checkpoint-1": "checkpoint-2", "checkpoint-2": "checkpoint-3"}[path.name]
        )
        assert {str(p) for p in (stays, tmp_path, *stays.rglob("*"))} <= synced
        deleted.append(path.name)
        rmtree(path, *args, **kwargs)

    monkeypatch.setattr(os, "fsync", lambda n: synced.add(os.readlink(f"/proc/self/fd/{n}")))
    monkeypatch.setattr(shutil, "rmtree", lambda path, *args, **kw: delete(Path(path), *args, **kw))
    config = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "max_steps": 4}
    build("grpo", output_dir=str(tmp_path), **config).train()
    assert deleted == ["checkpoint-1", "checkpoint-2"]


def test_a_checkpoint_is_whole_before_it_is_pushed_or_others_are_deleted(tmp_path, monkeypatch):
    seen, pushed = [], []

    def push(trainer, folder):
        pushed.append((Path(folder).name, checkpoint_fault(folder)))

    def rotate(output_dir, save_total_limit, best_model_checkpoint, **kwargs):
        if save_total_limit is None:
            return
        seen.append(sorted(p.name for p in tmp_path.glob("checkpoint-*")))
        assert not any(checkpoint_fault(p) for p in tmp_path.glob("checkpoint-*"))
        rotate_checkpoints(output_dir, save_total_limit, best_model_checkpoint)

    monkeypatch.setattr("rlhf_trl.checkpoints.rotate_checkpoints", rotate)
    monkeypatch.setattr("transformers.trainer.rotate_checkpoints", rotate)
    monkeypatch.setattr("transformers.Trainer._push_from_checkpoint", push)
    config = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 1, "max_steps": 3}
    trainer = build("grpo", output_dir=str(tmp_path), **config)
    trainer.args.push_to_hub = True
    trainer.train()
    assert pushed == [(f"checkpoint-{step}", None) for step in (1, 2, 3)]
    pairs = [["checkpoint-1"], ["checkpoint-1", "checkpoint-2"], ["checkpoint-2", "checkpoint-3"]]
    assert seen == pairs


def test_own_fields_are_read():
    assert own_fields("dapo", "trl") == {}


# correctness and format of a prompt's eight completions
CREDIT = [(0.6, 1), (0.2, 1), (0.9, 0.75), (1, 1), (0, 1), (0.8, 1), (1, 0.5), (0, 0)]


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        # one success of eight, whose share is 1/8: (1 - 1/8) / (1/8) and -1
        ("chapter", [-1, -1, -1, 7, -1, -1, -1, -1]),
        # .6 + .2 + 1 + .8 over eight are .325: .6/.325 - 1, .2/.325 - 1, -1, 1/.325 - 1, ...
        ("code", [0.84615, -0.38462, -1, 2.07692, -1, 1.46154, -1, -1]),
    ],
)
def test_a_success_counts_in_part_where_the_books_code_lets_it(which, expected):
    trainer = build("maxrl", which, num_generations=8)
    trainer._rewards_per_func = torch.tensor(CREDIT)
    advantages = trainer._advantages(
        {"completion_mask": torch.ones(8, 1)}, torch.zeros(8), training=True
    )
    assert advantages.tolist() == pytest.approx(expected, abs=1e-4)
