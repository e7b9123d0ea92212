"""Direct-alignment trainers against the public function, and against stock TRL."""

import inspect
import math

import comparison
import direct_alignment_cases
import pytest
import torch
from datasets import Dataset
from direct_alignment_cases import REFERENCE, ROWS, Reference, build, message, pairs
from policy_gradient_cases import checkpoint, drift
from transformers import Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.orpo import ORPOTrainer

from rlhf_trl.algorithms import formulation
from rlhf_trl.compare import measure
from rlhf_trl.errors import InputError
from rlhf_trl.losses.preferences import completions_loss
from rlhf_trl.tiny.model import build_model
from rlhf_trl.tiny.tokenizer import build_tokenizer
from rlhf_trl.trainers import reference_cache
from rlhf_trl.trainers.direct_alignment import BookDPOConfig, BookDPOTrainer

TOLERANCE = 1e-5


def measured(trainer, reference, scale=0.05):
    drift(trainer.model, scale, 99)
    return comparison.measure(trainer, measure.batches(trainer), reference)


def agrees(found):
    assert found.relative_error <= TOLERANCE
    assert math.isclose(found.trainer.loss, found.reference.loss, rel_tol=1e-5, abs_tol=1e-6)
    assert found.reference.gradient.norm() > 1e-3


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("name", "which"), ROWS)
def test_gradient_is_that_of_the_public_function(name, which, accumulation):
    trainer = build(name, which, gradient_accumulation_steps=accumulation)
    agrees(measured(trainer, Reference(name, which)))


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_processes_that_cannot_share_the_references_file_end_with_a_sentence(name, monkeypatch):
    # the second process has another temporary folder
    monkeypatch.setattr(reference_cache, "gather_object", lambda paths: [*paths, "/tmp/other"])
    with pytest.raises(InputError, match="cannot share the log-probabilities of a data set in mem"):
        build(name, "trl", precompute_ref_log_probs=True)


@pytest.mark.parametrize("which", ["chapter", "code", "trl"])
def test_a_tie_is_one_half_and_not_right_for_trl(which):
    trainer = build("dpo", which)
    trainer.eval_dataset = trainer.train_dataset
    metrics = trainer.evaluate()  # the policy is the reference still
    assert metrics["eval_loss"] == pytest.approx(math.log(2))
    assert metrics["eval_rewards/margins"] == metrics["eval_rewards/accuracies"] == 0.0
    assert metrics["eval_pair_accuracy"] == 0.5


@pytest.mark.parametrize(("name", "which"), REFERENCE)
def test_precomputed_reference_log_probabilities_change_nothing(name, which):
    trainer = build(name, which, precompute_ref_log_probs=True)
    assert trainer.ref_model is None
    agrees(measured(trainer, Reference(name, which)))


OTHER = {
    "cdpo": {"beta": 0.7, "label_smoothing": 0.3},
    "simpo": {"beta": 3.0, "gamma_beta_ratio": 0.1},
    "kto": {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5},
}


@pytest.mark.parametrize("name", ["dpo", "ipo", "dpo_norm", "apo_zero", "apo_down", "orpo", *OTHER])
def test_parameters_of_the_config_reach_the_loss(name):
    params = OTHER.get(name, {"beta": 0.6})
    agrees(measured(build(name, **params), Reference(name, "chapter", **params)))


@pytest.mark.parametrize("name", ["dpo", "ipo", "simpo"])
def test_the_likelihood_of_the_chosen_can_be_added(name):
    trainer = build(name, nll_weight=0.4)
    agrees(measured(trainer, Reference(name, "chapter", nll_weight=0.4)))
    assert trainer._metrics["train"]["nll"][-1] > 0


@pytest.mark.parametrize("name", ["dpo", "simpo", "kto", "orpo"])
def test_an_adapter_trains_against_the_model_without_it(name):
    from peft import LoraConfig

    adapter = LoraConfig(target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    trainer = build(name, peft=adapter)
    torch.manual_seed(0)
    with torch.no_grad():
        for key, parameter in trainer.model.named_parameters():
            if "lora_B" in key:  # starts at 0
                parameter.normal_(std=0.3)
    ours, window = measure.accumulate(trainer, measure.batches(trainer))
    loss = Reference(name, "chapter")(trainer.model, window)
    assert math.isclose(ours.loss, float(loss), rel_tol=1e-5)
    with trainer.model.disable_adapter():
        base = Reference(name, "chapter")(trainer.model, window)
    assert abs(float(base - loss)) > 1e-3


# --- stock TRL -----------------------------------------------------------------------------------


def stock(trainer, name, **config):
    """A stock trainer on the data that ours has prepared, with the weights that ours has now."""
    kto = name == "kto"
    base, config_class = (KTOTrainer, KTOConfig) if kto else (DPOTrainer, DPOConfig)
    columns = ["prompt", "completion", "label"] if kto else ["prompt", "chosen", "rejected"]
    rows = trainer.train_dataset.select_columns(columns).to_list()
    kept = ("output_dir", "use_cpu", "bf16", "gradient_checkpointing", "report_to", "max_length")
    args = {key: getattr(trainer.args, key) for key in kept}
    built = base(
        checkpoint(),
        args=config_class(**args, per_device_train_batch_size=4, disable_tqdm=True, **config),
        train_dataset=Dataset.from_list(rows),
        processing_class=trainer.processing_class,
    )
    built.model.load_state_dict(trainer.model.state_dict())
    return built


STOCK = {
    "dpo": {"loss_type": ["sigmoid"], "beta": 0.1},
    "cdpo": {
        "loss_type": ["sigmoid", "robust"],
        "loss_weights": [1.8, -0.8],
        "label_smoothing": 0.1,
        "beta": 0.1,
    },
    "dpo_norm": {"loss_type": ["sigmoid_norm"], "beta": 2.0},
    "apo_zero": {"loss_type": ["apo_zero"], "beta": 0.1},
    "apo_down": {"loss_type": ["apo_down"], "beta": 0.1},
    "kto": {"loss_type": "kto", "beta": 0.1},
}


@pytest.mark.parametrize("which", ["chapter", "trl"])
@pytest.mark.parametrize("name", STOCK)
def test_the_gradient_is_stock_trls(name, which):
    trainer = build(name, which)
    drift(trainer.model, 0.05, 99)
    theirs = stock(trainer, name, **STOCK[name])
    ours, window = measure.accumulate(trainer, measure.batches(trainer))
    other, stock_window = measure.accumulate(theirs, measure.batches(theirs))
    assert torch.equal(window[0]["input_ids"], stock_window[0]["input_ids"])
    error = (ours.gradient - other.gradient).norm() / other.gradient.norm()
    assert error <= TOLERANCE
    offset = 1 if name.startswith("apo") and which == "chapter" else 0
    assert math.isclose(ours.loss + offset, other.loss, rel_tol=1e-5)


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_auxiliary_loss_of_a_mixture_of_experts_is_kept(name, tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "moe_intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.1}
    ids = {"vocab_size": 120, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 5}
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **ids)).save_pretrained(
        tmp_path
    )
    found = {}
    for which, config in (("chapter", {}), ("trl", {}), ("without", {"router_aux_loss_coef": 0.0})):
        formulation = "chapter" if which == "without" else which
        trainer = build(name, formulation, model=str(tmp_path), **config)
        found[which], _ = measure.accumulate(trainer, measure.batches(trainer))
    ours, theirs = found["chapter"], found["trl"]
    assert comparison.Comparison(ours, theirs).relative_error <= 1e-6
    assert math.isclose(ours.loss, theirs.loss, rel_tol=1e-6)
    assert comparison.Comparison(ours, found["without"]).relative_error > 1e-3


def test_the_summed_ipo_is_not_stock_trls():
    trainer = build("ipo")
    drift(trainer.model, 0.05, 99)
    theirs = stock(trainer, "ipo", loss_type=["ipo"], beta=0.1)
    ours, _ = measure.accumulate(trainer, measure.batches(trainer))
    other, _ = measure.accumulate(theirs, measure.batches(theirs))
    assert (ours.gradient - other.gradient).norm() / other.gradient.norm() > 0.5


# --- metrics -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dpo", "dpo_norm", "simpo", "orpo", "ipo"])
def test_logged_rewards_are_beta_times_what_the_row_reads(name):
    trainer = build(name)
    drift(trainer.model, 0.05, 99)
    _, window = measure.accumulate(trainer, measure.batches(trainer))
    reference = Reference(name, "chapter")
    with torch.no_grad():
        given = reference.given(comparison.plain_copy(trainer), window[0])
        sums = Reference("dpo", "chapter").given(comparison.plain_copy(trainer), window[0])
    beta = formulation(name, "chapter").reads["beta"]
    rewards = [
        beta * (given[f"policy_{side}_logps"] - given.get(f"ref_{side}_logps", 0))
        for side in ("chosen", "rejected")
    ]
    stored = trainer._stored_metrics if name == "orpo" else trainer._metrics
    logged = {key: values[-1] for key, values in stored["train"].items()}
    near = {"rel": 1e-3, "abs": 1e-4}
    assert logged["rewards/chosen"] == pytest.approx(float(rewards[0].mean()), **near)
    assert logged["rewards/rejected"] == pytest.approx(float(rewards[1].mean()), **near)
    margin = rewards[0] - rewards[1]
    assert logged["rewards/margins"] == pytest.approx(float(margin.mean()), **near)
    assert logged["rewards/accuracies"] == pytest.approx(float((margin > 0).float().mean()))
    for side in ("chosen", "rejected"):  # sums in every row, so that displacement is visible
        total = float(sums[f"policy_{side}_logps"].mean())
        assert logged[f"logps/{side}"] == pytest.approx(total, rel=1e-4)


# --- what is refused, and what is not loaded -----------------------------------------------------


def test_simpo_and_orpo_build_no_reference_model(monkeypatch):
    import trl.trainer.dpo_trainer as home

    loaded = []
    create = home.create_model_from_path
    monkeypatch.setattr(
        home, "create_model_from_path", lambda *a, **k: loaded.append(a) or create(*a, **k)
    )
    assert build("simpo").ref_model is None
    assert len(loaded) == 1  # the policy
    assert build("dpo").ref_model is not None
    assert len(loaded) == 3
    assert not hasattr(build("orpo"), "ref_model")


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"label_smoothing": 0.1}, "label_smoothing is not read by dpo"),
        ({"gamma_beta_ratio": 0.1}, "gamma_beta_ratio is not read by dpo"),
        ({"loss_type": ["ipo"]}, "contradicts dpo"),
        ({"beta": 0.0}, "beta must be a number above 0"),
        ({"ld_alpha": 0.5}, "ld_alpha is not read"),
        ({"use_weighting": True}, "use_weighting is not read"),
        ({"f_divergence_type": "forward_kl"}, "f_divergence_type is not read"),
        ({"nll_weight": -1.0}, "nll_weight is -1.0"),
        ({"truncation_mode": "keep_end"}, "overlong: cut_prompt"),
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_fields_that_the_row_does_not_read(config, part):
    with pytest.raises(InputError, match=part):
        build("dpo", **config)


def test_a_config_of_another_trainer_is_refused():
    with pytest.raises(InputError, match="args must be a BookDPOConfig or DPOConfig, not a KTOC"):
        BookDPOTrainer("x", args=KTOConfig(bf16=False, use_cpu=True, report_to="none"))


def test_another_trainers_algorithm_is_refused():
    config = BookDPOConfig(bf16=False, use_cpu=True, report_to="none", algorithm="kto")
    with pytest.raises(InputError, match=r"kto \(chapter\) is not trained on DPOTrainer"):
        BookDPOTrainer("x", args=config)


def test_the_users_config_is_filled_in_and_can_name_another_row_next():
    given = BookDPOConfig(bf16=False, use_cpu=True, report_to="none", algorithm="ipo")
    data = {"train_dataset": Dataset.from_list(pairs(4)), "processing_class": build_tokenizer()}
    trainer = BookDPOTrainer(checkpoint(), args=given, **data)
    assert trainer.args is given and given.loss_type == ["ipo"]
    assert given.beta == 0.1 and given.label_smoothing == 0.0
    given.algorithm = "cdpo"
    assert BookDPOTrainer(checkpoint(), args=given, **data).args is given
    assert given.loss_type == ["sigmoid", "robust"] and given.label_smoothing == 0.1


def test_a_streamed_data_set_is_refused_where_it_is_cut():
    rows = Dataset.from_list(pairs(4)).to_iterable_dataset()
    settings = {"bf16": False, "use_cpu": True, "report_to": "none", "max_steps": 1}
    config = BookDPOConfig(output_dir="/nonexistent", overlong="drop", **settings)
    with pytest.raises(InputError, match="load it whole"):
        BookDPOTrainer(
            checkpoint(), args=config, train_dataset=rows, processing_class=build_tokenizer()
        )


def test_a_likelihood_term_is_not_stock():
    with pytest.raises(InputError, match="nll_weight is not read by dpo"):
        build("dpo", "trl", nll_weight=0.1)


def test_simpo_refuses_a_reference():
    with pytest.raises(InputError, match="reads no reference model"):
        build("simpo", sync_ref_model=True)


def test_a_reference_with_another_vocabulary():
    config = build_model().config
    config.vocab_size = 128
    with pytest.raises(InputError, match="a vocabulary of 128 tokens and the model one of 120"):
        BookDPOTrainer(
            checkpoint(),
            args=BookDPOConfig(output_dir="/nonexistent", use_cpu=True, bf16=False),
            ref_model=Qwen3ForCausalLM(config),
            train_dataset=Dataset.from_list(pairs(4)),
            processing_class=build_tokenizer(),
        )


# --- over-long and identical pairs ---------------------------------------------------------------

LONG = {
    "prompt": message("user", "p" * 20),
    "chosen": message("assistant", "c" * 10),
    "rejected": message("assistant", "r" * 6),
}


def test_weights_of_losses_without_losses_are_one_sentence():
    with pytest.raises(InputError, match=r"loss_weights is \[2.0\], but there is no loss_type"):
        BookDPOConfig(loss_weights=[2.0])


CHATML = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>ab' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


@pytest.mark.parametrize("form", ["messages", "texts"])
def test_orpo_trains_on_the_tokens_that_the_tokenizer_makes(monkeypatch, form):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = CHATML  # something follows the end, and nothing comes first
    assert (
        tokenizer.bos_token_id is not None
        and tokenizer("a")["input_ids"][0] != tokenizer.bos_token_id
    )
    monkeypatch.setattr(direct_alignment_cases, "build_tokenizer", lambda: tokenizer)
    rows = pairs(4)
    if form == "texts":
        rows = [{key: value[0]["content"] for key, value in row.items()} for row in rows]
    made = {which: build("orpo", which, rows=rows) for which in ("chapter", "code", "trl")}
    dpo = build("dpo", rows=rows).train_dataset
    for number, row in enumerate(rows):
        for side in ("chosen", "rejected"):
            if form == "texts":
                prompt = tokenizer(row["prompt"])["input_ids"]
                whole = tokenizer(row["prompt"] + row[side] + "<|end|>")["input_ids"]
            else:
                how = {"tokenize": True, "return_dict": False}
                prompt = tokenizer.apply_chat_template(
                    row["prompt"], add_generation_prompt=True, **how
                )
                whole = tokenizer.apply_chat_template(row["prompt"] + row[side], **how)
            labels = [-100] * len(prompt) + whole[len(prompt) :]
            for which in ("chapter", "code"):
                columns = made[which].train_dataset[number]
                assert columns[f"{side}_input_ids"] == whole
                assert columns[f"{side}_labels"] == labels
            assert dpo[number]["prompt_ids"] + dpo[number][f"{side}_ids"] == whole
            ends = [tokenizer.eos_token_id] * (form == "messages")  # of TRL's own
            stock = made["trl"].train_dataset[number][f"{side}_input_ids"]
            assert stock == [tokenizer.bos_token_id, *whole, *ends]


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo"])
def test_overlong_pairs_follow_the_rule(name):
    # bos user 20 end assistant = 24 tokens of prompt; c 10 + end = 11; r 6 + end = 7
    rows = [LONG, *pairs(7)]
    cut = build(name, rows=rows, max_length=30, overlong="cut_prompt", count=None)
    # of KTO, the two answers are the rows
    alone = [0, 8] if name == "kto" else [0]
    numbers = cut.fitted["train"]
    assert (numbers["cut"], numbers["over-long"]) == (alone, [])
    longest = {len(ids) for ids in texts_of(cut)}
    assert max(longest) == 30
    dropped = build(name, rows=rows, max_length=30, overlong="drop", count=None)
    numbers = dropped.fitted["train"]
    assert (numbers["cut"], numbers["over-long"]) == ([], alone)
    assert max(len(ids) for ids in texts_of(dropped)) <= 30


def texts_of(trainer):
    found = []
    for row in trainer.train_dataset:
        if "chosen_input_ids" in row:
            found += [row["chosen_input_ids"], row["rejected_input_ids"]]
        else:
            sides = ("completion_ids", "chosen_ids", "rejected_ids")
            found += [row["prompt_ids"] + row[side] for side in sides if side in row]
    return found


@pytest.mark.parametrize("name", ["dpo", "orpo"])
def test_pairs_that_are_identical_when_cut_are_dropped(name):
    alike = {**LONG, "rejected": message("assistant", "c" * 9 + "d")}
    rows = [*pairs(2), alike, *pairs(1)]
    trainer = build(name, rows=rows, max_length=30, overlong="cut_completion")
    assert trainer.fitted["train"]["identical"] == [2]
    assert len(trainer.train_dataset) == 3


@pytest.mark.parametrize("name", ["dpo", "kto", "orpo"])
def test_all_pairs_overlong_is_one_sentence(name):
    with pytest.raises(InputError, match=r"no row is left \(\d+ over-long"):
        build(name, max_length=2)


# --- memory --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "config", "models"),
    [("dpo", {}, 2), ("dpo", {"precompute_ref_log_probs": True}, 1), ("simpo", {}, 1)],
)
def test_models_in_memory(name, config, models):
    import gc

    from transformers import PreTrainedModel

    gc.collect()
    before = {id(o) for o in gc.get_objects() if isinstance(o, PreTrainedModel)}
    trainer = build(name, **config)
    gc.collect()
    found = [o for o in gc.get_objects() if isinstance(o, PreTrainedModel) and id(o) not in before]
    whole = [o for o in found if type(o).__name__ == "Qwen3ForCausalLM"]
    assert len(whole) == models
    assert trainer.model in whole


# --- TRL's side ----------------------------------------------------------------------------------

LOOP = ["dataloader", "description", "prediction_loss_only", "ignore_keys", "metric_key_prefix"]
OVERRIDDEN = {
    (DPOTrainer, "_compute_loss"): ["model", "inputs", "return_outputs"],
    (DPOTrainer, "_prepare_dataset"): ["dataset", "processing_class", "args", "dataset_name"],
    (DPOTrainer, "_precompute_ref_logps"): ["dataset", "name", "batch_size"],
    (DPOTrainer, "compute_ref_log_probs"): ["model", "inputs"],
    (DPOTrainer, "evaluation_loop"): LOOP,
    (KTOTrainer, "_compute_loss"): ["model", "inputs", "return_outputs"],
    (KTOTrainer, "_prepare_dataset"): ["dataset", "processing_class", "args", "dataset_name"],
    (KTOTrainer, "compute_ref_log_probs"): ["model", "inputs"],
    (KTOTrainer, "evaluation_loop"): LOOP,
    (ORPOTrainer, "concatenated_forward"): ["model", "batch"],
    (ORPOTrainer, "get_batch_loss_metrics"): ["model", "batch", "train_eval"],
    (ORPOTrainer, "evaluation_loop"): LOOP,
}


@pytest.mark.parametrize("method", OVERRIDDEN, ids=lambda m: f"{m[0].__name__}.{m[1]}")
def test_signatures_of_overridden_methods(method):
    trainer, name = method
    found = list(inspect.signature(getattr(trainer, name)).parameters)[1:]
    assert found == OVERRIDDEN[method], (
        f"TRL has changed {trainer.__name__}.{name}; read it again and adapt rlhf_trl/trainers"
    )


def test_kto_still_rotates_completions_within_the_batch_of_a_device():
    theirs = stock(build("kto"), "kto", loss_type="kto", beta=0.1)
    completions = theirs.train_dataset["completion_ids"][:4]
    expected = [completions[-1], *completions[:-1]]
    assert theirs.train_dataset["KL_completion_ids"][:4] == expected, (
        "TRL's KTOTrainer pairs prompts and completions another way; adapt kto_order and rotated"
    )


def test_the_codes_reference_point_is_that_of_the_rejected(monkeypatch):
    """z = max(0, mean of log pi / pi_ref of the rejected); where there is one, of all."""
    seen = []
    monkeypatch.setattr(
        "rlhf_trl.trainers.direct_alignment.completions_loss",
        lambda *args, **given: seen.append(given) or completions_loss(*args, **given),
    )
    trainer = build("kto", "code", count=8, per_device_train_batch_size=4)
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter *= 1.1
    _, [batch] = measure.accumulate(trainer, measure.batches(trainer))
    ratios = seen[0]["policy_rejected_logps"] - seen[0]["ref_rejected_logps"]
    kl = seen[0]["policy_kl_logps"] - seen[0]["ref_kl_logps"]
    assert kl.tolist() == ratios.tolist() and len(kl) == 2
    assert not seen[0]["policy_kl_logps"].requires_grad
    assert trainer._metrics["train"]["kl"] == [pytest.approx(max(ratios.mean().item(), 0))]
    alone = {key: value[:2] for key, value in batch.items() if hasattr(value, "shape")}
    trainer._compute_loss(trainer.model, alone, False)
    assert len(seen[1]["policy_rejected_logps"]) == 1 and len(seen[1]["policy_kl_logps"]) == 2
