"""`reward_loss`, against numbers worked by hand, enumeration and torch's own losses."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from rlhf_trl import reward_loss
from rlhf_trl.book import reward_models
from rlhf_trl.errors import InputError

NAN = float("nan")


def f64(numbers):
    return torch.tensor(numbers, dtype=torch.float64)


def log_sigmoid(x):
    return -math.log(1 + math.exp(-x))


# --- comparisons ---------------------------------------------------------------------------------

PAIR = {"chosen": f64([1.0, -0.5]), "rejected": f64([-1.0, 1.0])}  # 2 and -1.5 apart


@pytest.mark.parametrize("which", ["chapter", "code", "trl"])
def test_bradley_terry(which):
    loss = reward_loss("bradley_terry", **PAIR, formulation=which)
    assert loss.item() == pytest.approx(-(log_sigmoid(2) + log_sigmoid(-1.5)) / 2, abs=1e-14)


def test_both_forms_of_the_chapter_agree():
    # eq:rewardmodeling2: log(1 + e^(r_r - r_c))
    expected = (math.log(1 + math.exp(-2)) + math.log(1 + math.exp(1.5))) / 2
    assert reward_loss("bradley_terry", **PAIR).item() == pytest.approx(expected, abs=1e-14)


def test_the_margin():
    loss = reward_loss("bradley_terry", **PAIR, margin=f64([3.0, 1.0]))
    assert loss.item() == pytest.approx(-(log_sigmoid(-1) + log_sigmoid(-2.5)) / 2, abs=1e-14)
    one = reward_loss("bradley_terry", **PAIR, margin=0.5)
    assert one.item() == pytest.approx(-(log_sigmoid(1.5) + log_sigmoid(-2)) / 2, abs=1e-14)
    assert reward_loss("bradley_terry", **PAIR, margin=0) == reward_loss("bradley_terry", **PAIR)


def test_the_centering():
    # sums of 0 and 0.5: a mean square of 0.125
    plain = reward_loss("bradley_terry", **PAIR).item()
    loss = reward_loss("bradley_terry", **PAIR, center_rewards_coefficient=0.4)
    assert loss.item() == pytest.approx(plain + 0.4 * 0.125, abs=1e-14)
    shifted = {name: rewards + 7 for name, rewards in PAIR.items()}
    assert reward_loss("bradley_terry", **shifted).item() == pytest.approx(plain, abs=1e-14)
    pulled = reward_loss("bradley_terry", **shifted, center_rewards_coefficient=0.4)
    assert pulled.item() == pytest.approx(plain + 0.4 * (14**2 + 14.5**2) / 2, abs=1e-11)


def test_two_completions_are_a_pair():
    rewards = torch.stack([PAIR["chosen"], PAIR["rejected"]], 1)
    expected = reward_loss("bradley_terry", **PAIR).item()
    assert reward_loss("kwise", rewards=rewards).item() == pytest.approx(expected, abs=1e-14)


def test_rankings_of_three_by_enumeration():
    """Each ranking has the probability of being drawn by picking the best of the rest in turn."""
    scores = [0.3, -1.2, 2.0]
    total = 0.0
    for ranking in itertools.permutations(scores):
        weights = [math.exp(s) for s in ranking]
        probability = weights[0] / sum(weights) * weights[1] / (weights[1] + weights[2])
        loss = reward_loss("kwise", rewards=f64([ranking])).item()
        assert loss == pytest.approx(-math.log(probability), abs=1e-14)
        total += math.exp(-loss)
    assert total == pytest.approx(1, abs=1e-14)


def test_rankings_are_averaged_and_far_rewards_are_finite():
    rewards = f64([[2.0, 0.3, -1.2], [800.0, 0.0, -800.0]]).requires_grad_()
    loss = reward_loss("kwise", rewards=rewards)
    first = reward_loss("kwise", rewards=rewards[:1])
    assert loss.item() == pytest.approx(first.item() / 2, abs=1e-14)  # the second is certain
    (gradient,) = torch.autograd.grad(loss, rewards)
    assert gradient.isfinite().all() and gradient.sum().item() == pytest.approx(0, abs=1e-14)


# --- tokens and steps ----------------------------------------------------------------------------

LOGITS = f64([[0.5, -1.0, 2.0], [1.5, NAN, NAN]])
LABELS = torch.tensor([[1, 1, 1], [0, -100, -100]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
# -log sigmoid(w) for 1, -log sigmoid(-w) for 0
FIRST = [-log_sigmoid(0.5), -log_sigmoid(-1.0), -log_sigmoid(2.0)]
SECOND = -log_sigmoid(-1.5)


def test_orm_by_hand():
    chapter = reward_loss("orm", logits=LOGITS, labels=LABELS)
    assert chapter.item() == pytest.approx((sum(FIRST) / 3 + SECOND) / 2, abs=1e-14)
    code = reward_loss("orm", logits=LOGITS, labels=LABELS, formulation="code")
    assert code.item() == pytest.approx((sum(FIRST) + SECOND) / 4, abs=1e-14)


def test_orms_code_is_torchs_own_loss():
    torch.manual_seed(0)
    logits = torch.randn(4, 7, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 2, (4, 7)).masked_fill(torch.rand(4, 7) < 0.3, -100)
    counted = labels != -100
    expected = F.binary_cross_entropy_with_logits(logits[counted], labels[counted].double())
    found = reward_loss("orm", logits=logits, labels=labels, formulation="code")
    assert found.item() == pytest.approx(expected.item(), abs=1e-14)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)


def test_orms_labels_may_be_one_per_completion():
    expected = reward_loss("orm", logits=LOGITS, labels=LABELS)
    labels = torch.tensor([True, False])
    assert reward_loss("orm", logits=LOGITS, labels=labels, mask=MASK.bool()) == expected
    both = reward_loss("orm", logits=LOGITS, labels=LABELS, mask=torch.ones(2, 3))
    assert both == expected  # a label of -100 never counts


@pytest.mark.parametrize(
    ("kind", "which"), [("orm", "chapter"), ("orm", "code"), ("prm", "chapter"), ("prm", "code")]
)
def test_what_does_not_count_has_no_gradient(kind, which):
    logits = (
        LOGITS.clone()
        if which == "chapter" or kind == "orm"
        else LOGITS[..., None] * f64([1, 2, 3])
    )
    logits = logits.requires_grad_()
    loss = reward_loss(kind, logits=logits, labels=LABELS, formulation=which)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite() and loss.dtype == torch.float64
    assert (gradient[LABELS == -100] == 0).all() and (gradient[LABELS != -100] != 0).all()


def test_prm_by_hand():
    # eq:prm_loss: the steps of a solution are summed, solutions averaged
    loss = reward_loss("prm", logits=LOGITS, labels=LABELS)
    assert loss.item() == pytest.approx((sum(FIRST) + SECOND) / 2, abs=1e-14)


@pytest.mark.parametrize("weights", [None, [1.0, 0.25, 3.0]])
def test_prms_code_is_torchs_own_loss(weights):
    torch.manual_seed(1)
    logits = torch.randn(3, 5, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 3, (3, 5)).masked_fill(torch.rand(3, 5) < 0.4, -100)
    weights = None if weights is None else f64(weights)
    counted = labels != -100
    expected = F.cross_entropy(logits[counted], labels[counted], weight=weights)
    given = {"logits": logits, "labels": labels, "class_weights": weights}
    found = reward_loss("prm", **given, formulation="code")
    assert found.item() == pytest.approx(expected.item(), abs=1e-14)
    gradients = [torch.autograd.grad(loss, logits)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, rtol=0, atol=1e-15)


@pytest.mark.parametrize(
    ("kind", "which", "classes"),
    [("orm", "chapter", ()), ("orm", "code", ()), ("prm", "chapter", ()), ("prm", "code", (3,))],
)
def test_a_batch_without_anything_to_learn_is_zero(kind, which, classes):
    logits = torch.ones(2, 4, *classes, dtype=torch.float64, requires_grad=True)
    weights = {"class_weights": f64([1.0, 2.0, 3.0])} if classes else {}
    labels = torch.full((2, 4), -100)
    loss = reward_loss(kind, logits=logits, labels=labels, formulation=which, **weights)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.item() == 0 and (gradient == 0).all()


def test_the_functions_keep_their_shapes():
    assert reward_models.plackett_luce(torch.randn(4, 3)).shape == (4,)
    assert reward_models.outcome(torch.randn(2, 5), torch.ones(2, 5)).shape == (2, 5)
    assert reward_models.process(torch.randn(2, 5, 3), torch.ones(2, 5)).shape == (2, 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_precision_is_that_of_the_rewards(dtype):
    pair = {name: rewards.to(dtype) for name, rewards in PAIR.items()}
    assert reward_loss("bradley_terry", **pair, margin=1.0).dtype == dtype
    assert reward_loss("orm", logits=LOGITS.to(dtype), labels=LABELS).dtype == dtype


# --- refusals ------------------------------------------------------------------------------------

ORM = {"logits": f64([[1.0, 2.0]]), "labels": torch.tensor([[1, 0]])}
REFUSED = {
    "an unknown kind": ("orn", {}, "unknown reward model 'orn' (did you mean 'orm'?); known: brad"),
    "no such formulation": (
        "orm",
        ORM | {"formulation": "trl"},
        "orm has no formulation 'trl': TRL has no outcome reward model; it has chapter, code",
    ),
    "one side only": ("bradley_terry", {"chosen": f64([1.0])}, "reward (chapter) needs rejected"),
    "a margin the code has not": (
        "bradley_terry",
        PAIR | {"margin": 1.0, "formulation": "code"},
        "reward (code) does not read margin; it reads chosen, rejected",
    ),
    "a centering the code has not": (
        "bradley_terry",
        PAIR | {"center_rewards_coefficient": 0.1, "formulation": "code"},
        "reward (code) does not read center_rewards_coefficient; it reads no parameter",
    ),
    "sides of two lengths": (
        "bradley_terry",
        {"chosen": f64([1.0]), "rejected": f64([1.0, 2.0])},
        "rejected must have shape (1,) to go with chosen, not (2,)",
    ),
    "an infinite reward": (
        "bradley_terry",
        {"chosen": f64([1.0, math.inf]), "rejected": f64([1.0, 2.0])},
        "chosen must be finite, but at positions [1] it is not",
    ),
    "one completion": ("kwise", {"rewards": f64([[1.0]])}, "must have shape (B, K) with K of 2"),
    "labels of another shape": (
        "orm",
        ORM | {"labels": torch.tensor([[1]])},
        "labels must have shape (1, 2) to go with logits, not (1, 1)",
    ),
    "labels that are no outcome": (
        "orm",
        ORM | {"labels": torch.tensor([[1, 2]])},
        "labels must be 0, 1 or -100, not 2",
    ),
    "labels that are no class": (
        "prm",
        {"logits": torch.zeros(1, 1, 3), "labels": torch.tensor([[-1]]), "formulation": "code"},
        "labels must be 0, 1, 2 or -100, not -1",
    ),
    "two logits for three classes": (
        "prm",
        {"logits": torch.zeros(1, 1, 2), "labels": torch.tensor([[1]]), "formulation": "code"},
        "logits must have shape (B, S, 3), not (1, 1, 2)",
    ),
    "class weights for two classes": (
        "prm",
        ORM | {"class_weights": f64([1.0, 2.0, 3.0])},
        "prm (chapter) does not read class_weights; it reads logits, labels, mask",
    ),
    "class weights of one class": (
        "prm",
        {
            "logits": torch.zeros(1, 1, 3),
            "labels": torch.tensor([[1]]),
            "class_weights": f64([1.0, 0.0, 1.0]),
            "formulation": "code",
        },
        "class_weights must be 3 numbers above 0",
    ),
    "a mask of weights": ("orm", ORM | {"mask": f64([[0.5, 1.0]])}, "mask must hold only 0 and 1"),
    "a NaN that counts": (
        "orm",
        ORM | {"logits": f64([[NAN, 1.0]])},
        "logits must be finite on the positions that count",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_is_one_sentence(case):
    kind, given, says = REFUSED[case]
    with pytest.raises(InputError) as error:
        reward_loss(kind, **given)
    assert says in str(error.value) and "\n" not in str(error.value)
