"""What the comments of a translated config say: both sides of a difference, and nothing false."""

import random
import re
from pathlib import Path

import pytest
import torch
import yaml
from book_loops import book_configs
from book_statements import CHECKS, check_of, statements

from rlhf_trl import book
from rlhf_trl.algorithms import names
from rlhf_trl.ports.book_code import read_book, translate
from rlhf_trl.ports.book_fields import DEFAULTS, NOTES
from rlhf_trl.ports.comments import Differs
from rlhf_trl.ports.quantities import quantities
from rlhf_trl.run.yaml_loader import read_yaml

ROOT = Path(__file__).parent.parent
SPECS = {"size": 100, "specs": [{"name": "spell_backward"}]}
GYM = {"data": SPECS, "num_rollouts": 8}
PPO = {"loss": "ppo", "data": SPECS, "prompts_per_step": 16, "num_rollouts": 1}


@pytest.fixture
def comments(tmp_path):
    """Return the text of a translation in one line, without the marks of comments."""

    def comments(**config):
        path = tmp_path / "book.yaml"
        path.write_text(yaml.safe_dump(config))
        return " ".join(translate(path).replace("#", " ").split())

    return comments


EVERY_LOSS = {
    **{loss: GYM for loss in names("policy_gradient", "code")},
    **{loss: {} for loss in names("direct_alignment", "code")},
    "sdpo": GYM,
}
OTHERS = {
    "sft": {"chat_template_source": "m"},
    "rejection sampling": {"selection": {"strategy": "top_per_prompt"}},
    "reward": {"model_id": "m"},
    "orm": {"model_id": "m", "rollouts_per_prompt": 100},
    "prm": {"model_id": "m", "max_steps": 12, "lr_scheduler": "warmup_only"},
}


@pytest.mark.parametrize("case", [*EVERY_LOSS, *OTHERS])
def test_no_comment_says_that_nothing_differs(comments, case):
    config = {"loss": case, **EVERY_LOSS[case]} if case in EVERY_LOSS else OTHERS[case]
    text = comments(**config)
    assert "Nothing" not in text
    assert "as the code" not in text  # whose code?


def test_every_difference_of_the_table_names_both_sides():
    for note in NOTES.values():
        if isinstance(note, Differs):
            assert note.code and note.here
            assert str(note) == f"the book's code {note.code}; here {note.here}"


def test_notes_are_of_fields_and_kinds_that_exist():
    everywhere = {name for table in DEFAULTS.values() for name in table}
    for name in NOTES:
        kind, _, field = name.rpartition("/")
        assert field in (DEFAULTS[kind] if kind else everywhere), name


# --- what was false ------------------------------------------------------------------------------


def test_simpos_note_on_gamma_is_not_ppos(comments):
    assert "a ratio to beta" not in comments(**PPO)
    assert "gamma: a ratio to beta; TRL's simpo_gamma is beta x gamma" in comments(
        loss="simpo", gamma=0.3
    )


def test_process_reward_models_do_not_shuffle_before_they_cut(comments):
    text = comments(**OTHERS["prm"], samples=2000)
    assert "shuffles" not in text
    assert "the book's code takes the first 2000 rows that have a rated step and holds out" in text
    assert "the book's code shuffles all rows before it takes 2000" in comments(
        model_id="m", samples=2000
    )


def test_sdpos_note_has_no_number_beside_the_field(comments):
    text = comments(loss="sdpo", kl_top_k=100, **GYM)
    assert "kl_top_k: 100" in text and "20 likeliest" not in text


@pytest.mark.parametrize(
    ("estimator", "says"),
    [("kl1", "k1 has the other sign"), ("kl2", None), ("kl3", "k3 has the other sign")],
)
def test_only_k1_and_k3_have_the_other_sign(comments, estimator, says):
    text = comments(loss="grpo", beta=0.1, kl_estimator=estimator, **GYM)
    assert (says or "") in text
    assert (says is None) == (re.search("k. has the other sign", text) is None)
    # on a batch: the code's estimate is that of the policies swapped, which changes k1 and k3 alone
    logps, ref_logps = -torch.rand(2, 50, dtype=torch.float64)
    name = estimator.replace("kl", "k")
    chapter_estimator = getattr(book.kl, name)
    chapter = chapter_estimator(logps, ref_logps)
    code = book.kl.in_code(chapter_estimator)(logps, ref_logps)
    assert torch.equal(code, chapter_estimator(ref_logps, logps))
    assert torch.allclose(code, chapter) == (estimator == "kl2")


@pytest.mark.parametrize("path", sorted((ROOT / "configs/book").glob("*.yaml")), ids=str)
def test_the_configs_of_the_book_say_none_of_it(path):
    text = path.read_text(encoding="utf-8")
    assert "what the code takes for right" not in text and "Nothing." not in text
    if path.stem == "prm":
        assert "shuffles" not in text


# by the name of a config, what was said falsely of it, and a pattern of what is said instead
FALSE = {
    "policy_gradients/ppo": ("a ratio to beta", r"gamma: 1.0"),
    "policy_gradients/maxrl": ("what the code takes for right", r"with its partial credit"),
    "policy_gradients/dapo": (
        "num_train_epochs: 1 # the book's code goes",
        r"1 for each group, on",
    ),
    "policy_gradients/grpo": ("the KL has the other sign", r"kl_estimator: k3"),
    "reward_models/prm": ("shuffles", r"takes the first 2000 rows that have a rated step"),
    "distillation/sdpo": ("20 likeliest", r"kl_top_k: 20"),
}


@pytest.mark.parametrize("key", FALSE)
def test_what_was_said_falsely_of_a_config_is_gone(key, comments):
    said, instead = FALSE[key]
    text = comments(**book_configs()[key].fields)
    assert said not in text
    assert re.search(instead, text)


# --- where the rates of direct alignment end ------------------------------------------------------


def code_rates(rows, size, accumulation, epochs, warmup_ratio=0.1):
    """Return the share of the rate at each step, by stepping through the code's epochs."""
    batches = -(-rows // size)
    scheduled = batches // accumulation * epochs
    warmup = int(scheduled * warmup_ratio)
    shares, step = [], 0
    for _ in range(epochs):
        for batch in range(1, batches + 1):
            if batch % accumulation and batch < batches:
                continue
            rising = (step + 1) / (warmup + 1)
            falling = max(0.0, (scheduled - step) / max(1, scheduled - warmup))
            shares.append(rising if step < warmup else falling)
            step += 1
    return shares


@pytest.mark.parametrize(
    ("rows", "epochs", "says"),
    [
        (
            970,
            3,
            "reaches 0 after 45 of its 48 steps, so that the last 3 have rate 0; here after 48",
        ),
        (
            970,
            1,
            "reaches 0 after 15 of its 16 steps, so that the last one has rate 0; here after 16",
        ),
        (960, 3, "lr_scheduler_type: linear # to 0, as in the book's code"),
    ],
)
def test_the_last_steps_of_direct_alignment_have_rate_0(
    comments, sheet_of_values, rows, epochs, says
):
    config = {"loss": "dpo", "max_samples": rows, "num_epochs": epochs, "batch_size": 8}
    config |= {"gradient_accumulation_steps": 8, "dataset_name": "me/pairs"}
    shares = code_rates(rows, 8, 8, epochs)
    assert shares.count(0.0) == (epochs if rows == 970 else 0)
    assert says.replace(" #", "") in comments(**config)
    counted = {one.name: (one.code, one.here) for one in quantities(sheet_of_values(**config))}
    assert counted["optimizer steps"] == (len(shares), len(shares))
    if rows == 970:
        moving = len(shares) - shares.count(0.0)
        assert counted["optimizer steps at a rate above 0"] == (moving, len(shares))


def test_where_the_rows_are_not_known_the_end_of_the_rates_depends(comments):
    text = comments(loss="dpo", max_samples=None, dataset_name="me/pairs", num_epochs=3)
    last = "the last 3 steps have where an epoch leaves micro-batches over"
    assert f"the book's code goes to 0, which {last}; here to 0 after the last step" in text


@pytest.fixture
def sheet_of_values(tmp_path):
    """Return a config of the book's code with its translation."""

    def sheet(**config):
        path = tmp_path / "sheet.yaml"
        path.write_text(yaml.safe_dump(config))
        return read_book(path, read_yaml(path))

    return sheet


# --- statements with a number, on a toy batch ----------------------------------------------------


@pytest.mark.parametrize(("nats", "step"), [(256.0, 2.0), (1024.0, 8.0), (1.0, 1 / 128)])
def test_log_probabilities_in_bfloat16_come_in_steps(comments, nats, step):
    text = comments(loss="simpo" if nats < 2 else "dpo")
    shown = "in steps of 0.008 between 1 and 2 nats per token"
    assert (shown if nats < 2 else "in steps of 2 from 256 nats on and of 8 from 1,024 on") in text
    below, above = torch.tensor([nats + 0.49 * step, nats + 0.51 * step]).bfloat16().float()
    assert (above - below).item() == step


def test_a_token_of_a_short_micro_batch_weighs_more_in_the_code(comments):
    assert "a token weighs half as much there and the same here" in comments(**OTHERS["sft"])
    losses = torch.rand(3, requires_grad=True)  # 1 token in the first micro-batch, 2 in the second
    ((losses[:1].mean() + losses[1:].mean()) / 2).backward()
    assert losses.grad[1] == losses.grad[0] / 2
    losses.grad = None
    losses.mean().backward()
    assert losses.grad[1] == losses.grad[0]


def test_a_critics_random_head_spreads_the_first_values(comments):
    text = comments(**PPO)
    assert "about 0.6 times the size of the hidden states" in text
    torch.manual_seed(0)
    hidden = torch.randn(256, 2048)  # of size 1
    heads = [torch.nn.Linear(2048, 1, bias=False, dtype=torch.bfloat16) for _ in range(64)]
    values = torch.cat([hidden @ head.weight.T.float() for head in heads], dim=1)
    assert values.square().mean().sqrt().item() == pytest.approx(0.6, abs=0.05)


# --- all statements of the 27 configs ------------------------------------------------------------


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    """Return what the comments of the 27 translations say, by their text."""
    return statements(tmp_path_factory.mktemp("spoken"))


def test_every_statement_has_one_check(spoken, tmp_path):
    assert len(spoken) > 80
    for statement in spoken.values():
        check_of(statement, tmp_path)


def test_no_check_is_of_a_sentence_that_nothing_says(spoken):
    for pattern, _ in CHECKS:
        assert any(pattern.fullmatch(text) for text in spoken), pattern.pattern


@pytest.mark.parametrize("number", range(10))
def test_ten_statements_drawn_by_a_seed_hold_on_a_toy_batch(spoken, tmp_path, number):
    text = random.Random(32).sample(sorted(spoken), 10)[number]
    check_of(spoken[text], tmp_path)()


@pytest.mark.promise
def test_all_statements_hold_on_a_toy_batch(spoken, tmp_path):
    wrong = {}
    for text, statement in sorted(spoken.items()):
        try:
            check_of(statement, tmp_path)()
        except AssertionError as error:
            wrong[text] = str(error)
    assert not wrong
