"""Distillation on plain tensors: by hand, by exact enumeration, and as TRL's functions do it."""

import itertools

import pytest
import torch
from trl.experimental.sdpo.loss_utils import compute_topk_self_distillation_loss
from trl.trainer.distillation_trainer import _chunked_divergence_loss

from rlhf_trl import distillation_loss
from rlhf_trl.book import aggregation, distillation
from rlhf_trl.errors import InputError


def drawn(*shape, seed=0, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)


MASK = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]).double()
LOGITS, TEACHER = drawn(4, 4, 7, seed=1, scale=2), drawn(4, 4, 7, seed=2, scale=2)


BOTH = {"logits": LOGITS, "teacher_logits": TEACHER}


def gradient(loss, tensor):
    return torch.autograd.grad(loss, tensor)[0]


def test_the_divergence_of_two_coins():
    p, q = torch.tensor([0.75, 0.25]).double(), torch.tensor([0.5, 0.5]).double()
    # .75 log 1.5 + .25 log .5
    expected = torch.tensor(0.30409883108112 - 0.17328679513999, dtype=torch.float64)
    torch.testing.assert_close(distillation.reverse_kl(p.log(), q.log()), expected)


def test_top_k_with_a_tail_is_the_divergence_after_others_are_put_together():
    p = torch.tensor([0.5, 0.3, 0.1, 0.1]).double()
    q = torch.tensor([0.1, 0.2, 0.3, 0.4]).double()
    # the two likeliest of p, and {.1 + .1} against {.3 + .4}
    joined = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.1, 0.2, 0.7]).double()
    expected = (joined[0] * (joined[0] / joined[1]).log()).sum()
    torch.testing.assert_close(distillation.reverse_kl(p.log(), q.log(), 2), expected)


def test_each_prompt_counts_the_same_and_each_token_of_its_completions():
    losses = torch.arange(16.0).view(4, 4)
    # two prompts: 0 + 1 + 2 + 3 + 4 + 5 over 6 tokens, 8 + 12 + 13 + 14 over 4
    expected = torch.tensor((15 / 6 + 47 / 4) / 2)
    assert torch.equal(aggregation.per_prompt(losses, MASK.float(), 2), expected)
    # micro-batches that tear prompts apart add up
    order, tokens = torch.tensor([3, 0, 2, 1]), torch.tensor([6.0, 6, 4, 4])
    parts = [
        aggregation.per_prompt(losses[rows], MASK[rows].float(), 2, tokens[rows])
        for rows in order.split(2)
    ]
    assert sum(parts) / 2 == expected


def test_sampled_and_full_form_have_the_same_expected_gradient_at_the_visited_states():
    """All 3 ** 2 completions of a student whose second token depends on the first."""
    first, second = drawn(3, seed=3).requires_grad_(), drawn(3, 3, seed=4).requires_grad_()
    teacher_first, teacher_second = drawn(3, seed=5), drawn(3, 3, seed=6)

    def logits(of_first, of_second, a):
        return torch.stack([of_first, of_second[a]])[None]

    for aggregate in ("sequence_sum", "fixed_length"):
        found = {"opd": 0, "sdpo": 0}
        for a, b in itertools.product(range(3), repeat=2):
            student, teacher = logits(first, second, a), logits(teacher_first, teacher_second, a)
            ids, mask = torch.tensor([[[a], [b]]]), torch.ones(1, 2).double()
            logps = student.log_softmax(-1).gather(-1, ids).squeeze(-1)
            teacher_logps = teacher.log_softmax(-1).gather(-1, ids).squeeze(-1)
            probability = logps.sum().exp().detach()
            each = {
                "opd": distillation.sampled_reverse_kl(logps, teacher_logps),
                "sdpo": distillation.reverse_kl(student, teacher),
            }
            extra = {"max_completion_length": 5} if aggregate == "fixed_length" else {}
            for name, losses in each.items():
                loss = getattr(aggregation, aggregate)(losses, mask, **extra)
                parts = torch.autograd.grad(loss, (first, second), retain_graph=True)
                found[name] += probability * torch.cat([g.flatten() for g in parts])
        assert found["sdpo"].norm() > 0.05
        torch.testing.assert_close(found["opd"], found["sdpo"], rtol=0, atol=1e-12)


def test_a_token_mean_over_random_lengths_has_another_expected_gradient():
    """Token 0 ends; completions of one or two tokens, 1 + 2 x 3 of them."""
    first, second = drawn(3, seed=3).requires_grad_(), drawn(3, 3, seed=4).requires_grad_()
    teacher_first, teacher_second = drawn(3, seed=5), drawn(3, 3, seed=6)
    found = {"sampled": 0, "full": 0}
    for a, b in [(0, 0), *itertools.product((1, 2), range(3))]:
        mask = torch.tensor([[1.0, float(a > 0)]]).double()
        student = torch.stack([first, second[a]])[None]
        teacher = torch.stack([teacher_first, teacher_second[a]])[None]
        ids = torch.tensor([[[a], [b]]])
        logps, other = (
            each.log_softmax(-1).gather(-1, ids).squeeze(-1) for each in (student, teacher)
        )
        probability = (logps * mask).sum().exp().detach()
        each = {
            "sampled": distillation.sampled_reverse_kl(logps, other),
            "full": distillation.reverse_kl(student, teacher),
        }
        for name, losses in each.items():
            loss = aggregation.token_mean(losses, mask)
            parts = torch.autograd.grad(loss, (first, second), retain_graph=True)
            found[name] += probability * torch.cat([g.flatten() for g in parts])
    assert (found["sampled"] - found["full"]).norm() > 0.01 * found["full"].norm()


def test_the_chapters_advantage_is_held_constant():
    logps, teacher = drawn(4, 4, seed=7).requires_grad_(), drawn(4, 4, seed=8)
    loss = distillation_loss("opd", logps=logps, teacher_logps=teacher, mask=MASK)
    expected = -(teacher - logps.detach()) * MASK / 4
    torch.testing.assert_close(gradient(loss, logps), expected, rtol=0, atol=1e-15)


@pytest.mark.parametrize("normalizer", [None, 25.0])
def test_opd_as_trl_is_what_its_distillation_trainer_computes(normalizer):
    hidden, other = drawn(4, 4, 5, seed=1).float(), drawn(4, 4, 6, seed=2).float()
    head, teacher_head = drawn(7, 5, seed=3).float(), drawn(7, 6, seed=4).float()
    hidden.requires_grad_()
    expected, _, _ = _chunked_divergence_loss(
        hidden, other, head, teacher_head, MASK, 1.0, num_items_in_batch=normalizer
    )
    student, teacher = hidden @ head.T, other @ teacher_head.T
    loss = distillation_loss(
        *("opd",), logits=student, teacher_logits=teacher, mask=MASK,
        normalizer=normalizer, formulation="trl",
    )  # fmt: skip
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        gradient(loss, hidden), gradient(expected, hidden), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("k", [1, 3, 7, 20])
def test_sdpo_differs_from_trls_experimental_one_in_its_aggregation_only(k):
    student = LOGITS.clone().requires_grad_()
    how = {"distillation_alpha": 1.0, "distillation_add_tail": True}
    losses = compute_topk_self_distillation_loss(
        student, TEACHER, distillation_topk=min(k, 7), **how
    )
    given = {"logits": student, "teacher_logits": TEACHER, "mask": MASK, "kl_top_k": k}
    trl = distillation_loss("sdpo", **given, formulation="trl")
    expected = ((losses * MASK).sum(1) / MASK.sum(1)).mean()  # SDPOTrainer's last lines
    torch.testing.assert_close(trl, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(gradient(trl, student), gradient(expected, student))
    code = distillation_loss("sdpo", **given, num_generations=2, formulation="code")
    tokens = (losses * MASK).view(2, -1).sum(1) / MASK.view(2, -1).sum(1)
    torch.testing.assert_close(code, tokens.mean(), rtol=0, atol=1e-12)
    assert (code - trl).abs() > 1e-3


def test_the_paper_compares_the_whole_vocabulary():
    student = LOGITS.clone().requires_grad_()
    loss = distillation_loss("sdpo", logits=student, teacher_logits=TEACHER, mask=MASK)
    p, q = student.softmax(-1), TEACHER.softmax(-1)
    expected = ((p * (p / q).log()).sum(-1) * MASK).sum() / 4
    torch.testing.assert_close(loss, expected)


def test_teachers_add_up_by_their_weights():
    teachers = torch.stack([TEACHER, drawn(4, 4, 7, seed=9)]).double()
    given = {"logits": LOGITS.double(), "mask": MASK, "formulation": "trl"}
    one, two = (distillation_loss("opd", teacher_logits=t, **given) for t in teachers)
    both = distillation_loss("opd", teacher_logits=teachers, **given)
    torch.testing.assert_close(both, (one + two) / 2, rtol=1e-14, atol=0)
    weights = torch.tensor([0.25, 0.75])
    found = distillation_loss("opd", teacher_logits=teachers, teacher_weights=weights, **given)
    torch.testing.assert_close(found, 0.25 * one + 0.75 * two)
    # one teacher for two of the prompts, the other one for the rest
    each = torch.tensor([[1.0, 1, 0, 0], [0, 0, 1, 1]])
    mixed = torch.cat([TEACHER[:2], teachers[1, 2:]])
    found = distillation_loss("opd", teacher_logits=teachers, teacher_weights=each, **given)
    torch.testing.assert_close(found, distillation_loss("opd", teacher_logits=mixed, **given))


def test_what_is_masked_never_matters():
    hole = torch.where(MASK.bool()[..., None], LOGITS, torch.nan).requires_grad_()
    given = {"mask": MASK, "kl_top_k": 3, "formulation": "code"}
    loss = distillation_loss("sdpo", logits=hole, teacher_logits=hole.detach() * 2, **given)
    clean = distillation_loss("sdpo", logits=LOGITS, teacher_logits=LOGITS * 2, **given)
    assert torch.equal(loss, clean) and gradient(loss, hole).isfinite().all()


@pytest.mark.parametrize(
    ("algorithm", "given", "sentence"),
    [
        ("sdpo", {"logps": MASK, "teacher_logps": MASK}, "sdpo (chapter) does not read logps"),
        ("opd", {"logps": MASK}, "opd (chapter) needs teacher_logps"),
        ("opd", {"logps": MASK, "teacher_logps": MASK[:2]}, "teacher_logps must have shape (4, 4)"),
        ("opd", {"logps": LOGITS, "teacher_logps": LOGITS}, "logps must have shape (B, T), not"),
        ("sdpo", BOTH | {"normalizer": 3.0}, "does not read"),
        (
            "sdpo",
            BOTH | {"logits": LOGITS * torch.nan},
            "logits must be finite",
        ),
        (
            "sdpo",
            BOTH | {"teacher_weights": torch.ones(2)},
            "teacher_weights must have shape (1,) or (1, B), not (2,)",
        ),
        ("sdpo", BOTH | {"beta": 1.0}, "does not read beta"),
        (
            "sdpo",
            BOTH | {"num_generations": 3},
            "num_generations must divide the batch of 4, not 3",
        ),
        ("grpo", {}, "grpo is not a distillation algorithm; those are opd, sdpo"),
    ],
)
def test_mistakes_are_one_sentence(algorithm, given, sentence):
    with pytest.raises(InputError) as error:
        distillation_loss(algorithm, mask=MASK, **given)
    assert sentence in str(error.value) and "\n" not in str(error.value)
