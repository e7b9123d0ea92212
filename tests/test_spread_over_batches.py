"""How far two losses are apart depends on the batch: the spread over batches of one shape.

STATED was measured once on a single batch of this shape (a two-layer Qwen3, four completions of 9,
4, 6 and 2 tokens, ratios between 0.54 and 7.5) that nobody kept. A number that a fixed batch gives
elsewhere in these tests may differ from it by as much as the spread found here.
"""

from dataclasses import replace

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rlhf_trl import policy_gradient_loss
from rlhf_trl.algorithms import formulation
from rlhf_trl.losses.policy_gradients import estimate_advantages, surrogate_loss

LENGTHS, PROMPT, BATCHES = [9, 4, 6, 2], 5, 24


class Batch:
    """A random model with four completions; the ratios to the old policy are drawn."""

    def __init__(self, seed):
        torch.manual_seed(seed)
        config = Qwen3Config(
            vocab_size=128,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=128,
        )
        self.model = Qwen3ForCausalLM(config)
        self.ids = torch.randint(7, 128, (4, PROMPT + max(LENGTHS)))
        self.mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).float()
        self.rewards = torch.randn(4)
        self.old = self.logps().detach() - (0.6 * torch.randn(4, max(LENGTHS))).clamp(-0.6, 2)

    def logps(self, temperature=1.0):
        logits = self.model(self.ids).logits[:, PROMPT - 1 : -1] / temperature
        logps = torch.log_softmax(logits, -1)
        return logps.gather(-1, self.ids[:, PROMPT:, None]).squeeze(-1)

    def gradient(self, loss):
        self.model.zero_grad()
        loss.backward()
        return torch.cat([p.grad.flatten() for p in self.model.parameters()])

    def book(self, name, temperature=1.0, old=True, **params):
        given = {"old_logps": self.old} if old else {}
        loss = policy_gradient_loss(
            name,
            logps=self.logps(temperature),
            mask=self.mask,
            rewards=self.rewards,
            **given | params,
        ).loss
        return self.gradient(loss)

    def changed(self, name, **parts):
        """The row of an algorithm with other parts, by which TRL's default differs."""
        row = formulation(name, "trl")
        numbers = row.parameters({}) | parts.pop("numbers", {})
        row = replace(row, **parts)
        advantages = estimate_advantages(row, numbers, rewards=self.rewards, mask=self.mask)
        return self.gradient(
            surrogate_loss(
                row,
                numbers,
                logps=self.logps(),
                mask=self.mask,
                advantages=advantages,
                old_logps=self.old,
            )
        )

    def stock_rloo(self):
        """What TRL's RLOOTrainer computes: one clipped ratio per whole sequence."""
        ratio = (((self.logps() - self.old) * self.mask).sum(1)).exp()
        advantages = (self.rewards - self.rewards.mean()) * 4 / 3
        clipped = ratio.clamp(0.8, 1.2)
        return self.gradient(-torch.min(ratio * advantages, clipped * advantages).mean())


PAIRS = {
    "Dr. GRPO, chapter against code": lambda batch: (
        batch.book("drgrpo", max_completion_length=max(LENGTHS)),
        batch.book("drgrpo", formulation="code"),
    ),
    "GSPO under TRL's default loss": lambda batch: (
        batch.changed("gspo", aggregation="token_mean"),
        batch.book("gspo"),
    ),
    "CISPO with the bound copied": lambda batch: (
        batch.changed("cispo", numbers={"epsilon_high": 0.4 - 1}),
        batch.book("cispo"),
    ),
    "a temperature of 0.6": lambda batch: (batch.book("grpo", 0.6), batch.book("grpo")),
    "RLOO off-policy": lambda batch: (
        batch.stock_rloo(),
        batch.book("rloo", old=False),
    ),
}
# cosine and norm ratio; None where only one of them was recorded
STATED = {
    "Dr. GRPO, chapter against code": (0.945, 0.639),
    "GSPO under TRL's default loss": (0.948, None),
    "a temperature of 0.6": (0.992, 1.71),
    "RLOO off-policy": (0.28, None),
}


@pytest.fixture(scope="module")
def drawn():
    return [Batch(seed) for seed in range(BATCHES)]


def spread(pair, batches):
    """Cosines and norm ratios over the batches that have a gradient."""
    found = []
    for left, right in map(PAIRS[pair], batches):
        if left.norm() and right.norm():
            cosine = torch.nn.functional.cosine_similarity(left, right, dim=0)
            found.append((float(cosine), float(left.norm() / right.norm())))
    assert len(found) > BATCHES / 2
    return list(zip(*found, strict=True))


@pytest.mark.parametrize("pair", STATED)
def test_the_stated_distance_lies_in_the_spread(pair, drawn):
    for stated, measured in zip(STATED[pair], spread(pair, drawn), strict=True):
        if stated is not None:
            assert min(measured) < stated < max(measured)
            assert max(measured) - min(measured) > 0.02  # no number of one batch stands for all


def test_a_copied_cispo_bound_scales_by_less_than_half(drawn):
    # 0.584 was stated for it: the chapter's weights are at least 0.8, TRL's at most 0.4, so only
    # terms that cancel could lift the ratio of the sums above 0.5
    _, ratios = spread("CISPO with the bound copied", drawn)
    assert min(ratios) > 0.25 and max(ratios) < 0.5
