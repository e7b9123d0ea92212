"""Changes of TRL's source that are planted, and which comparison or recorded loss finds each.

`python tests/tampering.py rlhf_trl/compare/tampering.md` plants them all and writes the table.
"""
# ruff: noqa: E501

import inspect
import re
import sys
import textwrap
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from unittest.mock import patch

from planted import ON_LOSSES, ON_ONE, READER, SECOND_READER
from planted import planted as plant

from rlhf_trl.compare.drift import differences as drift
from rlhf_trl.compare.drift import sources, surface
from rlhf_trl.compare.matrix import Matrix, applies, kind_of
from rlhf_trl.compare.models import quick_and_quiet
from rlhf_trl.compare.rows import ROWS
from rlhf_trl.compare.trainers import trainer_classes
from rlhf_trl.compare.windows.batches import BATCHES
from rlhf_trl.compare.windows.order import _check_shuffle


@dataclass(frozen=True)
class Change:
    """One change of one function."""

    what: str
    trainer: str  # whose comparisons and recorded losses it concerns
    place: str  # the function's name in `owner`
    old: str
    new: str
    owner: str = ""  # dotted, where it is not the trainer
    known: str = ""  # the thread that told of such a fault


def _of(trainer, place, *changes, owner=""):
    return [
        Change(what, trainer, place, old, new, owner, *known) for what, old, new, *known in changes
    ]


_RATIO = "log_ratio = per_token_logps - old_per_token_logps"
_K3 = (
    "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per_token_logps - per_token_logps) - 1"
)
_TOKENS = "loss = (per_token_loss * mask).sum() / normalizer"
_WINDOW = "normalizer * self.current_gradient_accumulation_steps / self.args.steps_per_generation"
_CLIP = "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)"
_SUM = "(rewards_per_func * self.reward_weights.to(device).unsqueeze(0)).nansum(dim=1)"
_SEQUENCE = "(log_ratio * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)"
_MEAN = "((per_token_loss * mask).sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"
_ADAPTER = '"ref" if "ref" in model.peft_config else None'
_SAMPLER = 'per_token_loss = per_token_loss * inputs["importance_sampling_ratio"]'

CHANGES = [
    *_of(
        "GRPOTrainer",
        "_compute_loss",
        ("the ratio is always 1", _RATIO, _RATIO.replace("old_per_token_logps", "per_token_logps.detach()"), "torchforge #571"),
        ("GSPO's ratio is a product", _SEQUENCE, "(log_ratio * mask).sum(-1)", "TRL #3823"),
        ("GSPO's ratio counts padding", _SEQUENCE, "(log_ratio * mask).sum(-1) / mask.size(-1)", "AReaL #1346"),
        ("the KL is maximized", "per_token_loss + self.beta * per_token_kl", "per_token_loss - self.beta * per_token_kl", "RAGEN #58, ToolRL #52"),
        ("k3 with the other sign", _K3, _K3.replace("ref_per_token_logps - per_token_logps", "per_token_logps - ref_per_token_logps"), "rlhf-book #489"),
        ("k2 in the place of k3", _K3, "(ref_per_token_logps - per_token_logps) ** 2 / 2"),
        ("the KL is always multiplied by the ratio", "if self.args.use_bias_correction_kl:", "if True:"),
        ("tokens of tools count", 'completion_mask * inputs["tool_mask"]', "completion_mask"),
        ("the lower bound is the upper one", "1 - self.epsilon_low, 1", "1 - self.epsilon_high, 1"),
        ("the upper bound is the lower one", "1 + self.epsilon_high)", "1 + self.epsilon_low)"),
        ("delta is ignored", "if self.args.delta is not None:", "if False:"),
        ("the larger of the two surrogates", "-torch.min(per_token_loss1", "-torch.max(per_token_loss1"),
        ("grpo divides by the padded length", _MEAN, _MEAN.replace("mask.sum(-1).clamp(min=1.0)", "mask.size(-1)"), "TRL #3187, #3178"),
        ("grpo forgets the accumulation", "policy_loss = loss.detach()\n            loss = loss / normalizer", "policy_loss = loss.detach()"),
        ("dapo is divided by the accumulation again", _TOKENS, _TOKENS + " / self.current_gradient_accumulation_steps", "ms-swift #10117, open-instruct #1161"),
        ("dapo's window is the generation", _WINDOW, "normalizer"),
        ("dapo's mean is per prompt", _TOKENS, "loss = ((per_token_loss * mask).view(-1, self.num_generations * mask.size(1)).sum(1) / mask.view(-1, self.num_generations * mask.size(1)).sum(1).clamp(min=1)).mean() / self.current_gradient_accumulation_steps", "TRL #5375, verl #2776, AReaL #289"),
        ("Dr. GRPO divides by the longest of the batch", "(per_token_loss.size(0) * self.max_completion_length)", "per_token_loss.numel()", "verl #3741"),
        ("bnpo counts padding", "mask.sum().clamp(min=1.0)\n            normalizer", "mask.numel()\n            normalizer"),
        ("the bonus for entropy is a penalty", "loss - apply_coef * entropy_loss", "loss + apply_coef * entropy_loss"),
        ("tokens of low entropy are kept", "per_token_loss * entropy_mask", "per_token_loss * ~entropy_mask"),
        ("the off-policy mask is dropped", "per_token_loss * off_policy_mask", "per_token_loss"),
        ("the sampler's ratio is squared", _SAMPLER, _SAMPLER + " ** 2"),
        ("the sampler's ratio is dropped", _SAMPLER, "pass", "TRL #6945, #4772"),
        ("SAPO falls back to the plain ratio", "per_token_loss = -soft_coef_1 * advantages", "per_token_loss = -coef_1 * advantages", "Soup #584"),
        ("SAPO's gate without its scale", "* 4 / temperatures", "* 4"),
        ("LUSPO is averaged over tokens", "loss = (per_token_loss * mask).sum(-1).mean()", "loss = (per_token_loss * mask).sum() / mask.sum()"),
        ("CISPO's weight has an upper bound of 1.1 times", "max=self.epsilon_high).detach()", "max=1.1 * self.epsilon_high).detach()"),
        ("what stands on padding counts", _MEAN, _MEAN.replace("per_token_loss * mask", "per_token_loss + 0.01 * per_token_logps.exp() * (1 - mask)"), "AReaL #1346, TRL #6654, Soup #723"),
    ),
    *_of(
        "GRPOTrainer",
        "_generate_and_score_completions",
        ("advantages are not centered", "advantages = rewards - mean_grouped_rewards", "advantages = rewards"),
        ("the baseline is the batch's mean", "mean_grouped_rewards.repeat_interleave(num_generations, dim=0)", "torch.nanmean(rewards).expand_as(rewards)"),
        ("the spread is the population's", "nanstd(rewards.view(-1, num_generations), dim=1)", "rewards.view(-1, num_generations).std(1, unbiased=False)"),
        ("reward weights are ignored", _SUM, "rewards_per_func.nansum(dim=1)"),
        ("a second reward is dropped", _SUM, "rewards_per_func[:, 0] * self.reward_weights[0]"),
        ("weights are ignored where each reward is scaled", "(reward_k * self.reward_weights.to(device).unsqueeze(0))", "reward_k"),
        ("advantages are clipped at 2", "advantages = torch.nan_to_num(advantages, nan=0.0)", "advantages = torch.nan_to_num(advantages, nan=0.0).clamp(-2, 2)"),
        ("rewards below 0 are 0", _SUM, _SUM + ".clamp(min=0)"),
        ("scale_rewards: batch is that of the group", "nanstd(rewards).expand_as(rewards)\n                else:", "nanstd(rewards.view(-1, num_generations), dim=1).repeat_interleave(num_generations)\n                else:"),
        ("dapo's tokens are those of tools, too", "completion_mask * tool_mask\n        num_items", "completion_mask\n        num_items"),
        ("dapo's tokens are padding, too", "gather(loss_mask.sum())", "gather(torch.ones_like(loss_mask).sum())"),
        ("completions that were cut off are dropped", "if self.mask_truncated_completions:", "if True:"),
        ("completions that were cut off are kept", "if self.mask_truncated_completions:", "if False:"),
        ("the end token is masked away", "completion_mask = [torch.ones_like(ids, dtype=torch.long) for ids in completion_ids]", "completion_mask = [(ids != self.eos_token_id).long() for ids in completion_ids]", "TRL #6357"),
        ("the sampler's ratio is upside down", "(old_per_token_logps - sampling_per_token_logps) * mask", "(sampling_per_token_logps - old_per_token_logps) * mask"),
        ("the sampler's lower bound is ignored", "(vllm_importance_sampling_ratio < min_val) | (", "("),
        ("the sampler's ratio of a completion is a mean", "per_token_logps_diff.sum(dim=-1, keepdim=True)", "per_token_logps_diff.mean(dim=-1, keepdim=True)"),
        ("the policy at generation is forgotten", "if self.args.gradient_accumulation_steps % generate_every != 0 or (", "if False or ("),
        ("prompts are padded on the right", 'padding_side="left"', 'padding_side="right"', "AReaL #1346"),
        ("rewards are rounded", "unscorable_mask = torch.isnan", "rewards_per_func = rewards_per_func.round()\n        unscorable_mask = torch.isnan"),
        ("a failed completion counts as reward 0", "unscorable_mask = torch.isnan", "rewards_per_func[:, -1] = rewards_per_func[:, -1].where(rewards_per_func[:, -1] != 0.25, 0)\n        unscorable_mask = torch.isnan", "NeMo-RL #3589"),
    ),
    *_of("GRPOTrainer", "_calculate_rewards", ("the end token is cut off before the reward", "def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):", "def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):\n        completion_ids_list = [ids[:-1] for ids in completion_ids_list]", "TRL #6966, #5813")),
    *_of(
        "GRPOTrainer",
        "_get_per_token_logps_and_entropies",
        ("the first token of a completion is not scored", "labels[:, :-logits_to_keep] = -100", "labels[:, : 1 - logits_to_keep] = -100"),
        ("padding is attended to", '"attention_mask": attention_mask_batch}', '"attention_mask": torch.ones_like(attention_mask_batch)}', "TRL #6654"),
    ),
    *_of("GRPOTrainer", "_prepare_inputs", ("each micro-batch is the first", "self._buffered_inputs[self._step % self.args.steps_per_generation]", "self._buffered_inputs[0]")),
    *_of("GRPOTrainer", "_generate", ("completions are tokenized again", "completion_ids, logprobs = self._generate_single_turn(\n                prompt_ids, images, multimodal_fields, num_generations\n            )", "completion_ids, logprobs = self._generate_single_turn(\n                prompt_ids, images, multimodal_fields, num_generations\n            )\n            completion_ids = [self._tokenizer(self._tokenizer.decode(ids, skip_special_tokens=True), add_special_tokens=False)['input_ids'] or ids for ids in completion_ids]", "TRL #5224, ms-swift #10012")),
    *_of("GRPOTrainer", "__init__", ("log-probabilities are taken at temperature 1", "temperature=self.temperature,\n            cast", "cast", "TRL #3029, NeMo-RL #935, OpenRLHF #853")),
    *_of(
        "GRPOTrainer",
        "get_gamma_weights",
        ("VESPO's two sides are exchanged", "torch.where(is_nonneg_adv, k_pos, k_neg)", "torch.where(is_nonneg_adv, k_neg, k_pos)"),
    ),
    *_of(
        "GRPOTrainer",
        "training_step",
        ("every second micro-batch is lost", "self.accelerator.backward(loss, **kwargs)", "self._seen = getattr(self, '_seen', 0) + 1\n            self._seen % 2 and self.accelerator.backward(loss, **kwargs)", "arXiv:2604.23747, DeepSpeed #7967, #7981"),
        owner="transformers.Trainer",
    ),
    *_of(
        "DPOTrainer",
        "training_step",
        ("losses are not divided by the accumulation", "loss = loss / self.current_gradient_accumulation_steps", "pass", "open-instruct #1498, accelerate #3877"),
        owner="transformers.Trainer",
    ),
    *_of(
        "BookGRPOTrainer",
        "compute_loss",
        ("a fused path bypasses an override", "return self._compute_loss(model, inputs)", "return GRPOTrainer._compute_loss(self, model, inputs)", "Liger #1082, TRL #6808, #7009"),
        owner="trl.GRPOTrainer",
    ),
    *_of(
        "RLOOTrainer",
        "_compute_loss",
        ("RLOO's clip is lost", "torch.clamp(coef_1, 1 - self.epsilon_low, 1 + self.epsilon_high)", "coef_1"),
        ("RLOO sums over completions", "per_sequence_loss.mean()", "per_sequence_loss.sum()"),
        ("RLOO averages over tokens", "logps = (per_token_logps * completion_mask).sum(1)", "logps = (per_token_logps * completion_mask).mean(1)"),
    ),
    *_of(
        "RLOOTrainer",
        "_generate_and_score_completions",
        ("RLOO's baseline has the completion itself", "(grouped_sum - grouped_rewards) / (scorable_counts - 1)", "(grouped_sum / scorable_counts).expand_as(grouped_rewards)"),
        ("RLOO's KL is a reward", "rewards = rewards - self.beta * kl", "rewards = rewards + self.beta * kl"),
        ("RLOO's KL is a mean", "kl = (per_token_kl * completion_mask).sum(-1)", "kl = (per_token_kl * completion_mask).mean(-1)"),
        ("RLOO does not normalize", "if self.normalize_advantages:", "if False:"),
    ),
    *_of(
        "DPOTrainer",
        "_compute_loss",
        ("the rejected have no reference", "rejected_logps - ref_rejected_logps", "rejected_logps"),
        ("DPO without beta", "-F.logsigmoid(self.beta * delta_score)\n", "-F.logsigmoid(delta_score)\n"),
        ("robust is not rescaled", " / (1 - 2 * self.label_smoothing)", ""),
        ("the hinge has no margin", "torch.relu(1 - self.beta * delta_score)", "torch.relu(-self.beta * delta_score)"),
        ("sppo's target is halved", "(chosen_logratios - 0.5 / self.beta)", "(chosen_logratios - 0.25 / self.beta)"),
        ("the term of SFT is a sum", "-chosen_per_token_logps[chosen_mask.bool()].mean()", "-chosen_per_token_logps[chosen_mask.bool()].sum()"),
        ("lengths count the prompt", "chosen_avg_score = chosen_scores / chosen_mask.sum(dim=1)", "chosen_avg_score = chosen_scores / (chosen_mask.sum(dim=1) + 1)"),
        ("apo_zero of the rejected has the other sign", "losses_rejected = torch.sigmoid(self.beta * rejected_logratios)", "losses_rejected = torch.sigmoid(-self.beta * rejected_logratios)"),
        ("ld_alpha is ignored", "shared_logps + self.ld_alpha * tail_logps\n        chosen_logps", "shared_logps + tail_logps\n        chosen_logps"),
        ("another divergence", "math.log(2) + F.logsigmoid(chosen_logratios)", "F.logsigmoid(2 * chosen_logratios)"),
        ("weights of losses are ignored", "per_sequence_loss.mean() * loss_weight", "per_sequence_loss.mean()"),
        ("pairs are summed", "per_sequence_loss.mean() * loss_weight", "per_sequence_loss.sum() * loss_weight"),
        ("WPO's weights are those of the chosen", "chosen_weights * rejected_weights", "chosen_weights"),
        ("discopop's temperature is ignored", "logits / self.args.discopop_tau", "logits"),
    ),
    *_of("BookDPOTrainer", "compute_ref_log_probs", ("the reference's log-probabilities are means", "ref_logps = ref_per_token_logps.sum(dim=1)", "ref_logps = ref_per_token_logps.mean(dim=1)"), owner="trl.DPOTrainer"),
    *_of("BookKTOTrainer", "compute_ref_log_probs", ("KTO's precomputed reference is that of the matched", 'KL_input_ids', 'input_ids'), owner="trl.KTOTrainer"),
    *_of(
        "KTOTrainer",
        "_compute_loss",
        ("KTO's weights are exchanged", "(self.desirable_weight * chosen_losses, self.undesirable_weight * rejected_losses)", "(self.undesirable_weight * chosen_losses, self.desirable_weight * rejected_losses)"),
        ("KTO adds up", "loss = losses.nanmean()", "loss = losses.nansum()"),
        ("KTO's rejected have no reference point", "self.beta * (kl - rejected_logratios)", "self.beta * -rejected_logratios"),
        ("KTO loses the last of an odd class", "chosen_idx = torch.nonzero(bool_labels, as_tuple=False).view(-1)", "chosen_idx = torch.nonzero(bool_labels, as_tuple=False).view(-1)\n        chosen_idx = chosen_idx[: len(chosen_idx) // 2 * 2]", "TRL #1911"),
    ),
    *_of("KTOTrainer", "_compute_kl_logps", ("KTO's pairs are the matched ones", 'KL_model_kwargs.pop("KL_input_ids")', 'KL_model_kwargs.pop("KL_input_ids") * 0 + batch["input_ids"][:, : 1]')),
    *_of(
        "RewardTrainer",
        "compute_loss",
        ("the margin is added", '- inputs["margin"]', '+ inputs["margin"]'),
        ("the term that centers takes the difference", "(rewards_chosen + rewards_rejected) ** 2", "(rewards_chosen - rewards_rejected) ** 2"),
        ("pairs of rewards are summed", "nn.functional.logsigmoid(rewards_chosen - rewards_rejected).mean()", "nn.functional.logsigmoid(rewards_chosen - rewards_rejected).sum()"),
    ),
    *_of(
        "ORPOTrainer",
        "odds_ratio_loss",
        ("ORPO without beta", "losses = self.beta * ratio", "losses = ratio"),
        ("ORPO's odds are probabilities", "log1mexp(policy_chosen_logps) - log1mexp(policy_rejected_logps)", "0 * policy_chosen_logps"),
        owner="trl.experimental.orpo.ORPOTrainer",
    ),
    *_of(
        "ORPOTrainer",
        "concatenated_forward",
        ("ORPO sums log-probabilities", "average_log_prob=True", "average_log_prob=False"),
        owner="trl.experimental.orpo.ORPOTrainer",
    ),
    *_of(
        "CPOTrainer",
        "cpo_loss",
        ("SimPO's margin is not divided by beta", "self.simpo_gamma / self.beta", "self.simpo_gamma"),
        ("CPO's ipo has another target", "(logits - 1 / (2 * self.beta)) ** 2", "(logits - 1 / self.beta) ** 2"),
        owner="trl.experimental.cpo.CPOTrainer",
    ),
    *_of(
        "CPOTrainer",
        "get_batch_loss_metrics",
        ("CPO's likelihood is not weighed", "self.cpo_alpha * policy_nll_loss", "policy_nll_loss"),
        owner="trl.experimental.cpo.CPOTrainer",
    ),
    *_of(
        "SFTTrainer",
        "compute_loss",
        ("SFT averages over each micro-batch", "outputs.label_mask.sum() if num_items_in_batch is None else num_items_in_batch", "outputs.label_mask.sum()"),
        ("DFT's weight has a gradient", "outputs.log_probs.exp().detach()", "outputs.log_probs.exp()"),
        ("SFT's loss has the other sign", "per_token_loss = -outputs.log_probs", "per_token_loss = outputs.log_probs"),
    ),
    *_of(
        "GRPOTrainer",
        "_generate_single_turn",
        ("the end token is cut off where TRL generates", "(sequence_indices <= eos_idx", "(sequence_indices < eos_idx"),
        ("a completion goes on to its last end token", "is_eos.int().argmax(dim=1)[", "(is_eos.size(1) - 1 - is_eos.int().flip(1).argmax(dim=1))["),
        ("generation attends to padding", "[torch.ones_like(t) for t in prompt_tensors],\n                padding_value=0", "[torch.ones_like(t) for t in prompt_tensors],\n                padding_value=1"),
    ),
    *_of(
        "GRPOTrainer",
        "__init__",
        ("completions are sampled at temperature 1", '"temperature": self.temperature,', ""),
        ("completions are greedy", '"do_sample": True', '"do_sample": False'),
        ("the reference's log-probabilities are taken at temperature 1", "self.ref_model, temperature=self.temperature, cast", "self.ref_model, cast"),
        ("rewards are averaged where no weights are given", "torch.ones(len(reward_funcs), dtype=torch.float32)", "torch.full((len(reward_funcs),), 1 / len(reward_funcs))"),
    ),
    *_of("GRPOTrainer", "_get_train_sampler", ("prompts are skipped where generations are used twice", "repeat_count=self.num_iterations * self.args.steps_per_generation", "repeat_count=self.args.steps_per_generation")),
    *_of(
        "GRPOTrainer",
        "shuffle_sequence_dict",
        ("a generation is shuffled with replacement", "torch.randperm(batch_size)", "torch.randint(batch_size, (batch_size,))"),
        ("a generation is not shuffled", "torch.randperm(batch_size)", "torch.arange(batch_size)"),
        owner="trl.trainer.utils",
    ),
    *_of(
        "GRPOTrainer",
        "__iter__",
        ("each epoch has the same order", "generator=self.generator)", "generator=torch.Generator().manual_seed(self.seed))"),
        ("the last, short chunk of prompts is kept", "len(chunk) == self.batch_size", "len(chunk)"),
        owner="trl.trainer.utils.RepeatSampler",
    ),
    *_of(
        "GRPOTrainer",
        "_calculate_rewards",
        ("columns reach reward functions in another order", "[example[key] for example in inputs]", "[example[key] for example in inputs[::-1]]"),
        ("rewards are rounded to bfloat16", "dtype=torch.float32, device=device)", "dtype=torch.bfloat16, device=device)"),
        ("each reward is clipped to 1", "gather(rewards_per_func)", "gather(rewards_per_func.clamp(-1, 1))"),
        ("a reward model does not see the prompt", '{"messages": p + c}', '{"messages": c}'),
    ),
    *_of(
        "GRPOTrainer",
        "_generate",
        ("reward functions see the text without its last token", "batch_decode(completion_ids,", "batch_decode([ids[:-1] for ids in completion_ids],"),
        ("reward functions see special tokens", "skip_special_tokens=True", "skip_special_tokens=False"),
    ),
    *_of(
        "GRPOTrainer",
        "_generate_and_score_completions",
        ("a completion without any reward has 0", "rewards[unscorable_mask] = torch.nan", "pass"),
        ("a reward that is None makes the sum NaN", ".nansum(dim=1)", ".sum(dim=1)"),
        ("a completion without any reward counts in the baseline", "torch.nanmean(rewards.view(-1, num_generations), dim=1)", "torch.nan_to_num(rewards).view(-1, num_generations).mean(dim=1)"),
        ("tokens that the sampler could not score make the loss NaN", "per_token_logps_diff = torch.nan_to_num(per_token_logps_diff, nan=0.0)", "pass"),
    ),
    *_of(
        "GRPOTrainer",
        "_compute_loss",
        ("the sampler's ratio weighs the KL, too", "per_token_loss + self.beta * per_token_kl", "per_token_loss + self.beta * per_token_kl * inputs.get('importance_sampling_ratio', 1)"),
        ("GSPO's ratio is NaN where a completion is masked", _SEQUENCE, _SEQUENCE.replace(".clamp(min=1.0)", "")),
        ("grpo's last window is divided as a whole one", "self.current_gradient_accumulation_steps if", "self.args.gradient_accumulation_steps if"),
        ("dapo's last window is divided as a whole one", "normalizer * self.current_gradient_accumulation_steps", "normalizer * self.args.gradient_accumulation_steps"),
    ),
    *_of("GRPOTrainer", "_get_per_token_logps_and_entropies", ("tokens that are padding elsewhere are not scored", "attention_mask_batch == 0, -100", "input_ids_batch == self._tokenizer.pad_token_id, -100")),
    *_of("GRPOTrainer", "_prepare_inputs", ("evaluation reads the training buffer", '"train" if self.model.training else "eval"', '"train"')),
    *_of("GRPOTrainer", "__post_init__", ("each micro-batch is a generation unless told otherwise", "self.steps_per_generation = self.gradient_accumulation_steps", "self.steps_per_generation = 1"), owner="trl.GRPOConfig"),
    *_of(
        "GRPOTrainer",
        "_forward_tile",
        ("parts of the vocabulary are added without their maximum", "rescale = torch.exp(running_max - new_m)", "rescale = torch.ones_like(new_m)"),
        ("a token of the second part is looked up in the first", "local = targets - vocab_start", "local = targets"),
        owner="trl.kernels.chunked_logprob",
    ),
    *_of("GRPOTrainer", "backward", ("the second part's gradient goes to the first", "grad_weight[start:end], tile", "grad_weight[: end - start], tile"), owner="trl.kernels.chunked_logprob.ChunkedLogProbFunction"),
    *_of(
        "RLOOTrainer",
        "_generate_and_score_completions",
        ("RLOO clips rewards after the KL", "rewards = rewards - self.beta * kl", "rewards = rewards - self.beta * kl\n            if self.reward_clip_range:\n                rewards = rewards.clamp(*self.reward_clip_range)"),
        ("RLOO: a completion without any reward has 0", "rewards[unscorable_mask] = torch.nan", "pass"),
    ),
    *_of("RLOOTrainer", "__init__", ("RLOO's reference is at temperature 1", "self.ref_model, temperature=self.temperature", "self.ref_model")),
    *_of("RLOOTrainer", "_generate_single_turn", ("RLOO: the end token is cut off where TRL generates", "(sequence_indices <= eos_idx", "(sequence_indices < eos_idx")),
    *_of(
        "DPOTrainer",
        "training_step",
        ("a short last window is divided as a whole one", "loss / self.current_gradient_accumulation_steps", "loss / self.args.gradient_accumulation_steps"),
        owner="transformers.Trainer",
    ),
    *_of(
        "DPOTrainer",
        "torch_call",
        ("keep_start keeps a token less", "slice(None, self.max_length)", "slice(None, self.max_length - 1)"),
        ("keep_end keeps the start", "slice(-self.max_length, None)", "slice(None, self.max_length)"),
        owner="trl.trainer.dpo_trainer.DataCollatorForPreference",
    ),
    *_of(
        "DPOTrainer",
        "_prepare_dataset",
        ("pairs whose chosen is too long are dropped", 'len(example["prompt_ids"]) <', 'len(example["prompt_ids"] + example["chosen_ids"]) <'),
        ("an answer that ends is ended twice", 'if not example["chosen"].endswith(eos_token):', "if True:"),
        ("DPO trains on the generation prompt", "add_generation_prompt=True,", ""),
    ),
    *_of("DPOTrainer", "common_prefix_length", ("a token that spans prompt and answer is the prompt's", "if token != other_token:", "if False:"), owner="trl.data_utils"),
    *_of(
        "DPOTrainer",
        "_compute_loss",
        ("forward_kl has the other sign", "1 - torch.exp(-chosen_logratios)", "1 - torch.exp(chosen_logratios)"),
        ("alpha_divergence has the other sign", "1.0).to(dtype) * coef", "1.0).to(dtype) * -coef"),
        ("DPO does not score tokens that are padding elsewhere", "masked_fill(completion_mask == 0, -100)", 'masked_fill((completion_mask == 0) | (inputs["input_ids"] == self._tokenizer.pad_token_id), -100)'),
    ),
    *_of("DPOTrainer", "compute_ref_log_probs", ("the precomputed reference ignores ld_alpha", "self.ld_alpha * tail_logps", "tail_logps")),
    *_of("DPOTrainer", "__init__", ("a reference model that is given is ignored", "self.ref_model = ref_model\n", "self.ref_model = None\n")),
    *_of("DPOTrainer", "_sync_target_model", ("sync_ref_model mixes the other way round", "mul_(1.0 - alpha).add_(copy_param.data, alpha=alpha)", "mul_(alpha).add_(copy_param.data, alpha=1.0 - alpha)"), owner="trl.trainer.callbacks.SyncRefModelCallback"),
    *_of("KTOTrainer", "torch_call", ("KTO cuts texts in front, masks behind", "full_ids[: self.max_length]", "full_ids[-self.max_length :]"), owner="trl.trainer.kto_trainer.DataCollatorForUnpairedPreference"),
    *_of("KTOTrainer", "_prepare_dataset", ("KTO trains on the generation prompt", "add_generation_prompt=True,", "")),
    *_of("KTOTrainer", "extract_prompt", ("the space before an answer is the prompt's", "idx -= 1", "pass"), owner="trl.data_utils"),
    *_of("KTOTrainer", "_unpair_row", ("pairs are unpaired into twice the chosen", 'batch["chosen"] + batch["rejected"]', 'batch["chosen"] + batch["chosen"]'), owner="trl.data_utils"),
    *_of("RewardTrainer", "_prepare_dataset", ("a rejected answer that is too long stays", 'and len(example["rejected_ids"]) <= args.max_length', "")),
    *_of(
        "SFTTrainer",
        "_prepare_dataset",
        ("keep_end cuts ids and labels on different sides", 'example["labels"][sl]', 'example["labels"][: len(example["input_ids"][sl])]'),
        ("SFT trains on the generation prompt", "add_generation_prompt=True,", ""),
    ),
    *_of("SFTTrainer", "_pack_bfd", ("packing cuts off a token more", "pc.list_slice(column, 0, seq_length)", "pc.list_slice(column, 0, seq_length - 1)"), owner="trl.data_utils"),
    *_of("SFTTrainer", "torch_call", ("a packed text's first token is learned from the text before", 'output["labels"][output["position_ids"] == 0] = -100', "pass"), owner="trl.trainer.sft_trainer.DataCollatorForLanguageModeling"),
    *_of(
        "ORPOTrainer",
        "tokenize_row",
        ("ORPO cuts off a token more", "max(0, self.max_length - len", "max(0, self.max_length - 1 - len"),
        owner="trl.experimental.orpo.ORPOTrainer",
    ),
    *_of("ORPOTrainer", "concatenated_forward", ("ORPO's likelihood leaves out tokens that are padding elsewhere", "torch.where(attention_mask == 1, labels, -100)", "torch.where(labels != self.padding_value, labels, -100)"), owner="trl.experimental.orpo.ORPOTrainer"),
    *_of("CPOTrainer", "cpo_loss", ("SimPO's label smoothing has the other sign", "- F.logsigmoid(-self.beta", "+ F.logsigmoid(-self.beta"), owner="trl.experimental.cpo.CPOTrainer"),
    *_of("DistillationTrainer", "__init__", ("distillation is at temperature 1", "self.temperature = args.temperature", "self.temperature = 1.0")),
    *_of("DistillationTrainer", "_jsd_tile", ("student and teacher are weighed alike", "(beta * torch.exp(log_pt)", "((1 - beta) * torch.exp(log_pt)"), owner="trl.kernels.chunked_divergence"),
    *_of(
        "GRPOTrainer",
        "_generate_and_score_completions",
        ("GRPO's reference has the adapter", _ADAPTER, "'default'"),
        ("the sampler's ratio has no lower bound", "min=self.vllm_importance_sampling_clip_min,", "min=None,"),
        ("advantages are those of the first process", "self.accelerator.process_index * len(prompts)", "0"),
    ),
    *_of("GRPOTrainer", "_generate_single_turn", ("only the tokenizer's end ends a completion", "torch.isin(completion_ids, torch.tensor(self.eos_token_ids, device=device))", "completion_ids == self._tokenizer.eos_token_id")),
    *_of(
        "GRPOTrainer",
        "_tool_call_loop",
        ("what a tool said is trained on", "[0] * tool_length + [1] * post", "[1] * tool_length + [1] * post"),
        ("a completion behind a tool's answer has no limit", "if excess_length > 0:", "if False:"),
    ),
    *_of("GRPOTrainer", "_prepare_inputs", ("the shuffle of a generation is left out", "shuffle_sequence_dict(generation_batch)", "generation_batch")),
    *_of("GRPOTrainer", "_compute_loss", ("dapo's tokens are not shared among processes", " / self.accelerator.num_processes", "")),
    *_of("GRPOTrainer", "_calculate_rewards", ("a reward model's text begins twice", 'padding_side="right", add_special_tokens=False', 'padding_side="right"')),
    *_of("GRPOTrainer", "_tokenize_prompts", ("what templates are told does not reach them", '({"padding": True} if needs_padding_workaround else {}),\n                **self.chat_template_kwargs', '({"padding": True} if needs_padding_workaround else {})')),
    *_of("GRPOTrainer", "_tokenize_prompts", ("plain prompts do not begin as the tokenizer does", "self.processing_class(text=prompts)", "self.processing_class(text=prompts, add_special_tokens=False)")),
    *_of("GRPOTrainer", "_get_eval_sampler", ("evaluation has one completion of a prompt", "mini_repeat_count=self.num_generations_eval", "mini_repeat_count=1")),
    *_of("GRPOTrainer", "__init__", ("generation ends at the tokenizer's end only", '"eos_token_id": self.eos_token_ids', '"eos_token_id": self._tokenizer.eos_token_id')),
    *_of("GRPOTrainer", "disable_dropout_in_model", ("dropout stays on", "module.p = 0", "pass"), owner="trl.trainer.utils"),
    *_of("GRPOTrainer", "add_fused_lm_head", ("logits are not capped", 'getattr(text_config, "final_logit_softcapping", None)', "None"), owner="trl.trainer.utils"),
    *_of(
        "RLOOTrainer",
        "_generate_and_score_completions",
        ("RLOO's reference has the adapter", _ADAPTER, "'default'"),
    ),
    *_of("RLOOTrainer", "_prepare_inputs", ("the shuffle of RLOO's generation is left out", "shuffle_sequence_dict(generation_batch)", "generation_batch")),
    *_of("DPOTrainer", "_compute_loss", ("DPO's reference has the adapter", _ADAPTER.replace("model.", "ref_model_unwrapped."), "'default'")),
    *_of("DPOTrainer", "compute_ref_log_probs", ("the precomputed reference has the adapter", _ADAPTER.replace("model.", "unwrapped_model."), "'default'")),
    *_of("DPOTrainer", "_prepare_dataset", ("pairs without room for an answer stay", 'len(example["prompt_ids"]) <', "0 <")),
    *_of("DPOTrainer", "_tokenize", ("texts do not begin as the tokenizer does", "processing_class(text=input)", "processing_class(text=input, add_special_tokens=False)"), owner="trl.data_utils"),
    *_of(
        "KTOTrainer",
        "_compute_loss",
        ("KTO's reference has the adapter", _ADAPTER.replace("model.", "ref_model_unwrapped."), "'default'"),
        ("KTO's reference point is that of one process", "self.accelerator.gather_for_metrics(kl).mean()", "kl"),
    ),
    *_of("KTOTrainer", "compute_ref_log_probs", ("KTO's precomputed reference has the adapter", _ADAPTER.replace("model.", "unwrapped_model."), "'default'")),
    *_of("RewardTrainer", "__init__", ("the reward model does not know what pads", "model.config.get_text_config().pad_token_id = processing_class.pad_token_id", "pass")),
    *_of("SFTTrainer", "compute_loss", ("SFT's loss is not that of all processes", "loss * (self.accelerator.num_processes // self.get_tp_size())", "loss")),
    *_of(
        "SFTTrainer",
        "_prepare_dataset",
        ("SFT trains on what users say, too", '"assistant_masks" in column_names', "False"),
        ("texts are not shuffled before they are packed", "if args.shuffle_dataset:\n                    dataset", "if False:\n                    dataset"),
        ("texts of which nothing is trained on stay", 'any(label != -100 for label in example["labels"])', "True"),
        ("SFT learns nothing where nothing is masked", "token_id if all(bits) else", "token_id if any(bits) else"),
    ),
    *_of("ORPOTrainer", "build_tokenized_answer", ("ORPO's answers begin as texts do", "processing_class(prompt + answer, add_special_tokens=False)", "processing_class(prompt + answer)"), owner="trl.experimental.orpo.ORPOTrainer"),
    *_of(
        "DistillationTrainer",
        "_compute_loss",
        ("distillation trains on what tools said", 'completion_mask * inputs["tool_mask"]', "completion_mask"),
        ("the teacher drops out", "self.teacher_model.eval()", "self.teacher_model.train()"),
    ),
    *_of("DistillationTrainer", "compute_loss", ("distillation's tokens are not shared among processes", " / self.accelerator.num_processes", "")),
    *_of("DistillationTrainer", "_generate_single_turn", ("only the tokenizer's end ends what a student writes", "torch.isin(completion_ids, torch.tensor(self.eos_token_ids, device=device))", "completion_ids == self._tokenizer.eos_token_id")),
    *_of(
        "SDPOTrainer",
        "build",
        ("a success is its own demonstration", "if dont_reprompt_self and j == i:", "if False:"),
        ("the last success is the demonstration", "successful[0]", "successful[-1]"),
        ("no success is high enough", ">= threshold:", "> threshold:"),
        owner="trl.experimental.sdpo.sdpo_trainer.SuccessfulRolloutTeacherContextBuilder",
    ),
    *_of("SDPOTrainer", "_compute_teacher_student_logits", ("SDPO trains without a demonstration, too", "completion_mask * self_distillation_mask.unsqueeze(1)", "completion_mask")),
    *_of("SDPOTrainer", "_tokenize_teacher_messages", ("SDPO's long prompts lose their end", "ids[-self.trainer.args.max_reprompt_len :]", "ids[: self.trainer.args.max_reprompt_len]"), owner="trl.experimental.sdpo.sdpo_trainer.SuccessfulRolloutTeacherContextBuilder"),
    *_of("SDPOTrainer", "_prepare_training_batch", ("SDPO's rewards are not weighed", "(rewards_per_func * self.reward_weights.to(device).unsqueeze(0))", "rewards_per_func")),
    *_of("SDPOTrainer", "_forward_logits", ("SDPO is at temperature 1", "logits / self.temperature", "logits")),
    *_of("DistillationTrainer", "_get_train_sampler", ("distillation skips prompts", "repeat_count=self.args.gradient_accumulation_steps", "repeat_count=1")),
    *_of("SDPOTrainer", "compute_loss", ("SDPO forgets the accumulation", "loss / accumulation_scale", "loss")),
    *_of("SDPOTrainer", "compute_divergence", ("SDPO's student and teacher change places", "torch.lerp(kl_student, kl_teacher, alpha)", "torch.lerp(kl_teacher, kl_student, alpha)"), owner="trl.experimental.sdpo.loss_utils"),
    *_of("SDPOTrainer", "add_tail_bucket", ("the rest of the vocabulary has the mass of the others", "torch.log(-torch.expm1(log_s))", "log_s"), owner="trl.experimental.sdpo.loss_utils"),
    *_of("SDPOTrainer", "apply_importance_sampling_clipping", ("SDPO's ratio has no bound", ".clamp(max=clip_coeff)", ""), owner="trl.experimental.sdpo.loss_utils"),
    *_of("SDPOTrainer", "on_step_end", ("SDPO's teacher stays", "self.sync_target_model(model, self.ref_model, args.teacher_update_rate)", "pass"), owner="trl.experimental.sdpo.teacher_sync.SyncTeacherModelCallback"),
]  # fmt: skip


def _owner(change):
    if not change.owner:
        return trainer_classes(change.trainer)[0]
    module, _, name = change.owner.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except AttributeError:  # a module that nothing has imported yet
        return import_module(change.owner)


@cache
def edited(change):
    """Return the class or modules that have a function, and what a change makes of it."""
    owner = _owner(change)
    free = inspect.ismodule(owner)
    home = owner if free else next(c for c in owner.__mro__ if change.place in vars(c))
    original = getattr(home, change.place)
    source = textwrap.dedent(inspect.getsource(original))
    old, new = change.old, change.new
    if not free:  # as dedented
        old, new = (text.replace("\n    ", "\n") for text in (old, new))
    assert old in source, f"{old!r} is not in {change.place}"
    source = source.replace(old, new, 1)
    if free:
        space = vars(home)
        trl = [m for name, m in list(sys.modules.items()) if name.startswith("trl.")]
        homes = [m for m in trl if vars(m).get(change.place) is original]
    else:
        space, homes = vars(sys.modules[home.__module__]), [home]
        source = re.sub(r"super\(\)", f"super({home.__name__}, self)", source)
    found = {}  # not the module itself, whose names the function still sees as they are then
    exec(compile(source, f"<{change.what}>", "exec"), space, found)
    return homes, found[change.place]


@contextmanager
def planted(change):
    """Replace a function by its own source with one change."""
    homes, function = edited(change)
    with ExitStack() as stack:
        for home in homes:
            stack.enter_context(patch.object(home, change.place, function))
        # what was found out of the function as it was
        _check_shuffle.cache_clear()
        stack.callback(_check_shuffle.cache_clear)
        yield


_FIRST = ("accumulation", "extreme", "tools", "sampler", "beta", "temperature")


def comparisons(trainer):
    """Return the comparisons of a trainer, those that tell most first."""
    order = [*_FIRST, *(b.name for b in BATCHES if b.name not in _FIRST)]
    found = {}  # the same side on the same batch is compared once, with the first row that has it
    for row in ROWS:
        for batch in BATCHES:
            if getattr(row.right, "trainer", None) == trainer and applies(row, batch):
                found.setdefault((repr(row.right), batch.name), (row, batch))
    return sorted(
        found.values(), key=lambda pair: (bool(pair[0].identities), order.index(pair[1].name))
    )


def told(change, name):
    """Order what is tried: what shares most words with what the change is about comes first."""
    about = set(re.findall(r"[a-z]+", f"{HINTS.get(change.what, '')}".lower()))
    return -len(about & set(re.findall(r"[a-z]+", name.lower())))


def by_compare(change, clean):
    """Return the first comparison that a change makes unexplained, or None."""

    def name(row, batch):
        return f"{row.algorithm}{f', {row.variant}' if row.variant else ''}, {batch.name}"

    matrix = Matrix()
    field = FIELDS.get(change.what)  # only where it is set does the change act
    if field and not any(field in repr(row.right) for row in ROWS):
        return None
    for row, batch in sorted(comparisons(change.trainer), key=lambda p: told(change, name(*p))):
        window = clean.window(*kind_of(row), batch)
        clean.side(row.left, window)
        matrix._windows = clean._windows
        books = {key: side for key, side in clean._measured.items() if key[0].startswith("Book(")}
        matrix._measured |= books
        try:
            with planted(change):
                result = matrix.compare(row, batch)
        except Exception:
            return name(row, batch)
        if not result.explained:
            return name(row, batch)
    return None


def by_drift(change, clean):
    """Return the first recorded loss that a change moves, or None."""
    shipped = surface.shipped()
    matrix = Matrix()
    cases = [c for c in shipped["losses"] if c.split()[0] == change.trainer.removeprefix("Book")]
    for case in sorted(cases, key=lambda case: told(change, case)):
        batch, columns = surface.batch_of(case)
        trainer = case.split()[0]
        clean.window("GRPOTrainer" if trainer == "RLOOTrainer" else trainer, columns, batch)
        matrix._windows = clean._windows
        with planted(change), patch.object(surface, "Matrix", lambda: matrix):
            found = surface._losses([case], shipped["homes"], shipped["defaults"])["losses"]
        if not drift._same(shipped["losses"][case], found[case]):
            return case.partition(" ")[2]
    return None


def by_code(change):
    """Tell whether the changed function is one whose code is recorded."""
    function = inspect.unwrap(getattr(_owner(change), change.place))
    facts = sources.shipped().get(function.__module__, {"units": ()})
    return function.__qualname__.partition(".<locals>")[0] in facts["units"]


def on_drift(fault):
    """Return the first thing that `drift` measures of a trainer and that a fault of it moves.

    Of faults in other libraries, and of trainers that have none, all recorded runs are looked at.
    """
    trainer, *change = fault
    shipped = surface.shipped()
    del shipped[surface.RUNS_OF_TWO]
    has_run = any(fact.startswith(trainer) for fact in shipped[surface.RUNS])
    for section in ("losses", surface.RUNS):
        if section == "losses" or (has_run and change[0].startswith("trl.")):
            facts = shipped[section].items()
            shipped[section] = {name: x for name, x in facts if name.startswith(trainer)}
    with plant(*change):
        moved = drift.check(shipped)[0]
    return re.split(r" \(|, value", moved[0].what)[0] if moved else None


FIELDS = {
    "delta is ignored": "'delta'",
    "the bonus for entropy is a penalty": "entropy_coef",
    "tokens of low entropy are kept": "top_entropy",
    "the off-policy mask is dropped": "off_policy",
    "LUSPO is averaged over tokens": "luspo",
    "VESPO's two sides are exchanged": "vespo",
    "weights are ignored where each reward is scaled": "normalize_then_sum",
    "RLOO does not normalize": "normalize_advantages",
    "the hinge has no margin": "hinge",
    "sppo's target is halved": "sppo",
    "ld_alpha is ignored": "ld_alpha",
    "another divergence": "divergence",
    "WPO's weights are those of the chosen": "use_weighting",
    "discopop's temperature is ignored": "discopop",
    "the term of SFT is a sum": "'sft'",
    "CPO's ipo has another target": "CPOTrainer', loss_type': 'ipo'",
    "DFT's weight has a gradient": "dft",
    **dict.fromkeys(
        (
            "the reference's log-probabilities are taken at temperature 1",
            "rewards are averaged where no weights are given",
            "a reward model does not see the prompt",
            "a completion without any reward has 0",
            "a reward that is None makes the sum NaN",
            "a completion without any reward counts in the baseline",
            "tokens that the sampler could not score make the loss NaN",
            "the sampler's ratio weighs the KL, too",
            "GSPO's ratio is NaN where a completion is masked",
            "grpo's last window is divided as a whole one",
            "dapo's last window is divided as a whole one",
            "evaluation reads the training buffer",
            "tokens that are padding elsewhere are not scored",
            "each micro-batch is a generation unless told otherwise",
            "each reward is clipped to 1",
            "parts of the vocabulary are added without their maximum",
            "a token of the second part is looked up in the first",
            "the second part's gradient goes to the first",
            "RLOO clips rewards after the KL",
            "RLOO: a completion without any reward has 0",
            "RLOO's reference is at temperature 1",
            "a short last window is divided as a whole one",
            "keep_start keeps a token less",
            "keep_end keeps the start",
            "pairs whose chosen is too long are dropped",
            "an answer that ends is ended twice",
            "DPO trains on the generation prompt",
            "the space before an answer is the prompt's",
            "a token that spans prompt and answer is the prompt's",
            "forward_kl has the other sign",
            "alpha_divergence has the other sign",
            "DPO does not score tokens that are padding elsewhere",
            "the precomputed reference ignores ld_alpha",
            "a reference model that is given is ignored",
            "sync_ref_model mixes the other way round",
            "KTO cuts texts in front, masks behind",
            "KTO trains on the generation prompt",
            "pairs are unpaired into twice the chosen",
            "a rejected answer that is too long stays",
            "keep_end cuts ids and labels on different sides",
            "SFT trains on the generation prompt",
            "packing cuts off a token more",
            "a packed text's first token is learned from the text before",
            "ORPO cuts off a token more",
            "ORPO's likelihood leaves out tokens that are padding elsewhere",
            "SimPO's label smoothing has the other sign",
            "distillation is at temperature 1",
            "student and teacher are weighed alike",
            "GRPO's reference has the adapter",
            "the sampler's ratio has no lower bound",
            "advantages are those of the first process",
            "dapo's tokens are not shared among processes",
            "a reward model's text begins twice",
            "plain prompts do not begin as the tokenizer does",
            "what templates are told does not reach them",
            "dropout stays on",
            "logits are not capped",
            "RLOO's reference has the adapter",
            "DPO's reference has the adapter",
            "the precomputed reference has the adapter",
            "pairs without room for an answer stay",
            "texts do not begin as the tokenizer does",
            "KTO's reference has the adapter",
            "KTO's reference point is that of one process",
            "KTO's precomputed reference has the adapter",
            "SFT's loss is not that of all processes",
            "SFT trains on what users say, too",
            "SFT learns nothing where nothing is masked",
            "texts are not shuffled before they are packed",
            "texts of which nothing is trained on stay",
            "ORPO's answers begin as texts do",
            "distillation trains on what tools said",
            "the teacher drops out",
            "distillation's tokens are not shared among processes",
        ),
        "no row",
    ),
}
HINTS = {
    "GSPO's ratio is a product": "gspo sequence",
    "GSPO's ratio counts padding": "gspo sequence",
    "the KL is maximized": "beta",
    "k3 with the other sign": "beta",
    "k2 in the place of k3": "beta",
    "the KL is always multiplied by the ratio": "beta",
    "tokens of tools count": "tools",
    "the lower bound is the upper one": "dapo extreme",
    "the upper bound is the lower one": "dapo extreme",
    "delta is ignored": "delta",
    "grpo divides by the padded length": "grpo",
    "dapo is divided by the accumulation again": "dapo",
    "dapo's window is the generation": "dapo steps_per_generation several_generations",
    "dapo's mean is per prompt": "dapo extreme",
    "Dr. GRPO divides by the longest of the batch": "drgrpo dr_grpo ragged",
    "bnpo counts padding": "bnpo dapo",
    "the bonus for entropy is a penalty": "entropy_coef",
    "tokens of low entropy are kept": "top_entropy_quantile",
    "the off-policy mask is dropped": "off_policy_mask_threshold",
    "the sampler's ratio is squared": "sampler",
    "the sampler's ratio is dropped": "sampler",
    "SAPO falls back to the plain ratio": "sapo",
    "SAPO's gate without its scale": "sapo",
    "LUSPO is averaged over tokens": "luspo",
    "CISPO's weight has an upper bound of 1.1 times": "cispo extreme",
    "weights are ignored where each reward is scaled": "normalize_then_sum",
    "advantages are clipped at 2": "extreme",
    "rewards below 0 are 0": "extreme",
    "scale_rewards: batch is that of the group": "batch scaled",
    "dapo's tokens are those of tools, too": "dapo tools",
    "dapo's tokens are padding, too": "dapo",
    "completions that were cut off are dropped": "extreme",
    "completions that were cut off are kept": "mask_truncated_completions overlong filtering",
    "the sampler's ratio is upside down": "sampler",
    "the sampler's lower bound is ignored": "sampler token_mask",
    "the sampler's ratio of a completion is a mean": "sampler sequence_mask",
    "log-probabilities are taken at temperature 1": "temperature",
    "VESPO's two sides are exchanged": "vespo",
    "RLOO's KL is a reward": "default beta",
    "RLOO's KL is a mean": "default beta",
    "RLOO does not normalize": "normalize_advantages",
    "robust is not rescaled": "robust cdpo",
    "the hinge has no margin": "hinge",
    "sppo's target is halved": "sppo_hard",
    "the term of SFT is a sum": "sft",
    "lengths count the prompt": "ipo",
    "apo_zero of the rejected has the other sign": "apo_zero",
    "ld_alpha is ignored": "ld_alpha",
    "another divergence": "js_divergence",
    "weights of losses are ignored": "loss_weights cdpo",
    "WPO's weights are those of the chosen": "use_weighting",
    "discopop's temperature is ignored": "discopop",
    "KTO's precomputed reference is that of the matched": "precompute",
    "the margin is added": "margin",
    "the term that centers takes the difference": "centering center_rewards_coefficient",
    "CPO's ipo has another target": "ipo",
    "CPO's likelihood is not weighed": "cpo_alpha",
    "losses are not divided by the accumulation": "sigmoid",
    "DFT's weight has a gradient": "dft",
    "the reference's log-probabilities are taken at temperature 1": "beta temperature",
    "rewards are averaged where no weights are given": "scored",
    "rewards are rounded to bfloat16": "unscored",
    "each reward is clipped to 1": "unscored",
    "a reward model does not see the prompt": "scored",
    "a completion without any reward has 0": "unscored",
    "a reward that is None makes the sum NaN": "unscored",
    "a completion without any reward counts in the baseline": "unscored",
    "tokens that the sampler could not score make the loss NaN": "unscored",
    "the sampler's ratio weighs the KL, too": "unscored",
    "GSPO's ratio is NaN where a completion is masked": "sequence mask truncated",
    "grpo's last window is divided as a whole one": "unscored",
    "dapo's last window is divided as a whole one": "scored",
    "tokens that are padding elsewhere are not scored": "unscored",
    "evaluation reads the training buffer": "scored",
    "each micro-batch is a generation unless told otherwise": "scored",
    "parts of the vocabulary are added without their maximum": "unscored",
    "a token of the second part is looked up in the first": "unscored",
    "the second part's gradient goes to the first": "unscored",
    "RLOO clips rewards after the KL": "unscored",
    "RLOO: a completion without any reward has 0": "unscored",
    "RLOO's reference is at temperature 1": "temperature",
    "a short last window is divided as a whole one": "cut",
    "keep_start keeps a token less": "cut",
    "keep_end keeps the start": "cut front",
    "pairs whose chosen is too long are dropped": "cut",
    "an answer that ends is ended twice": "ended",
    "DPO trains on the generation prompt": "chat",
    "the space before an answer is the prompt's": "implicit",
    "a token that spans prompt and answer is the prompt's": "ended",
    "forward_kl has the other sign": "forward",
    "alpha_divergence has the other sign": "alpha divergence",
    "DPO does not score tokens that are padding elsewhere": "ended",
    "the precomputed reference ignores ld_alpha": "ld alpha precompute",
    "a reference model that is given is ignored": "cut",
    "sync_ref_model mixes the other way round": "sync",
    "KTO cuts texts in front, masks behind": "cut",
    "KTO trains on the generation prompt": "chat",
    "pairs are unpaired into twice the chosen": "implicit",
    "a rejected answer that is too long stays": "cut",
    "keep_end cuts ids and labels on different sides": "front",
    "SFT trains on the generation prompt": "chat",
    "packing cuts off a token more": "packed",
    "a packed text's first token is learned from the text before": "packed",
    "ORPO cuts off a token more": "cut",
    "ORPO's likelihood leaves out tokens that are padding elsewhere": "ended",
    "SimPO's label smoothing has the other sign": "smoothing",
    "distillation is at temperature 1": "temperature",
    "student and teacher are weighed alike": "temperature",
    "GRPO's reference has the adapter": "adapter",
    "the sampler's ratio has no lower bound": "sampler clip_min",
    "advantages are those of the first process": "scored",
    "dapo's tokens are not shared among processes": "scored",
    "a reward model's text begins twice": "scored",
    "plain prompts do not begin as the tokenizer does": "unscored",
    "what templates are told does not reach them": "scored",
    "dropout stays on": "adapter",
    "logits are not capped": "adapter",
    "RLOO's reference has the adapter": "adapter",
    "DPO's reference has the adapter": "adapter",
    "the precomputed reference has the adapter": "adapter precompute",
    "pairs without room for an answer stay": "cut",
    "texts do not begin as the tokenizer does": "ended",
    "KTO's reference has the adapter": "adapter",
    "KTO's reference point is that of one process": "cut",
    "KTO's precomputed reference has the adapter": "adapter precompute",
    "the reward model does not know what pads": "cut",
    "SFT's loss is not that of all processes": "cut packed",
    "SFT trains on what users say, too": "assistant",
    "SFT learns nothing where nothing is masked": "packed",
    "texts are not shuffled before they are packed": "packed",
    "texts of which nothing is trained on stay": "cut ended",
    "ORPO's answers begin as texts do": "ended",
    "distillation trains on what tools said": "scored",
    "the teacher drops out": "scored",
    "distillation's tokens are not shared among processes": "scored",
}
"""What a change is about: it is tried first where these words are."""


def table(found):
    """Write what was found by which comparison as Markdown."""
    lines = ["| change | trainer | known | compare | drift |", "| --- | --- | --- | --- | --- |"]
    for change, one, other in found:
        cells = (
            change.what,
            change.trainer,
            change.known or "-",
            one or "not found",
            other or "not found",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


INTRODUCTION = """# Planted faults

Generated by `python tests/tampering.py rlhf_trl/compare/tampering.md`. Each line is one change of
TRL's source (or of transformers' training step), planted alone, and the first comparison of
`rlhf-trl compare` and the first recorded loss of `rlhf-trl drift` that tells. *known* names public
threads about such a fault. {both} of {all} are found by compare or drift, {compare} by compare,
{drift} by drift. The code of {code} is recorded: without any measurement `drift` names the changed
function, too."""

OF_WHOLE_RUNS = """
## Order, optimizer, schedule, evaluation, logs

Faults that a fixed batch hardly shows, with the first measurement of `drift` that tells, the code
apart: a recorded loss, a metric, or a fact of ten recorded steps. The first ones are known kinds;
those after the first line were written down by a reader of TRL and transformers who had not seen
what is recorded. At first 23 of his 30 were measured, and 26 named by their code; what the others
taught is recorded now. Those after the second line are another such reader's, of which 26 were
measured at first and all 30 named by their code. {code} of {all} are named by their code,
{measured} are measured."""


def main(path):
    """Plant everything, and write the page."""
    clean, found = Matrix(), []
    with quick_and_quiet():
        for change in CHANGES:
            found.append((change, by_compare(change, clean), by_drift(change, clean)))
            print(*found[-1][1:], change.what, sep=" | ", flush=True)
    counts = {
        "all": len(found),
        "compare": sum(bool(one) for _, one, _ in found),
        "drift": sum(bool(other) for *_, other in found),
        "both": sum(bool(one or other) for _, one, other in found),
        "code": sum(map(by_code, CHANGES)),
    }
    with open(path, "w", encoding="utf-8") as file:
        file.write(f"{INTRODUCTION.format(**counts)}\n\n{table(found)}\n{of_whole_runs()}")


def of_whole_runs():
    """Plant the faults of `planted`, and return their section of the page."""
    lines = ["| change | function | measured |", "| --- | --- | --- |"]
    measured = named = 0
    known = {**ON_ONE, **ON_LOSSES}
    groups = {**known, "first line": None, **READER, "second line": None, **SECOND_READER}
    for what, fault in groups.items():
        if fault is None:
            lines.append("| - | - | - |")
            continue
        with quick_and_quiet():
            told = on_drift(fault)
        _, module, function, *_ = fault
        measured += told is not None
        named += function in sources.shipped()[module]["units"]
        lines.append(f"| {what} | `{function}` | {told or 'not found'} |")
        print(lines[-1], flush=True)
    count = sum(fault is not None for fault in groups.values())
    counts = {"all": count, "measured": measured, "code": named}
    return f"{OF_WHOLE_RUNS.format(**counts)}\n\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(sys.argv[1])
