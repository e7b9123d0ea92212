"""`rlhf-trl drift` on the pinned TRL, and on one of which a single thing has been moved."""

import functools
import json
import sys
from dataclasses import dataclass
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location

import accelerate
import pytest
import transformers
import trl
import trl.models

from rlhf_trl.cli import main
from rlhf_trl.compare.drift import differences as drift
from rlhf_trl.compare.drift import surface
from rlhf_trl.compare.matrix import Matrix
from rlhf_trl.compare.measure import Book
from rlhf_trl.errors import InputError
from rlhf_trl.trainers.policy_gradient import BookGRPOTrainer
from rlhf_trl.trainers.sft import BookSFTTrainer

SHIPPED = surface.shipped()


def watching(*losses):
    """The shipped surface with only these losses and no runs, which take most of the time."""
    few = {
        section: {k: v for k, v in SHIPPED[section].items() if k in losses}
        for section in ("losses", "metrics")
    }
    surface_of_few = {**SHIPPED, **few, surface.RUNS: {}}
    del surface_of_few[surface.RUNS_OF_TWO]
    return surface_of_few


def moved(*losses):
    return drift.check(watching(*losses))[0]


def only(*losses):
    """The one thing that moved."""
    (one,) = moved(*losses)
    return one


@pytest.fixture
def few(monkeypatch):
    """The shipped surface with a few of its losses, as the command reads it then."""
    few = watching(*[f"GRPOTrainer loss_type={name}" for name in ("sapo", "dapo")])
    assert len(few["losses"]) == 2
    for module in (drift, surface):
        monkeypatch.setattr(module, "shipped", lambda: few)
    return few


def hide(monkeypatch, module, name):
    """Take a name out of one of TRL's lazy modules."""
    getattr(module, name)  # now the module keeps it
    surface.relied_on()  # and our trainers, which cannot be imported without it, are there
    monkeypatch.delattr(module, name)
    monkeypatch.delitem(module._class_to_module, name)


def test_nothing_has_moved_in_the_pinned_trl(capsys):
    try:
        main(["drift"])
    except SystemExit:
        pytest.fail(
            "TRL is no longer what this package was written for. Check each line, adapt what it "
            "concerns, then run `rlhf-trl drift --overwrite --record "
            f"rlhf_trl/compare/drift/surface.json`.\n{capsys.readouterr().out}"
        )
    was, now, result = capsys.readouterr().out.splitlines()
    assert was.startswith("recorded: trl 1.16.0, ") and now.startswith("installed: trl 1.16.0, ")
    assert (
        "nothing moved since TRL 1.16.0" in result
        and f"{len(SHIPPED['losses'])} losses, " in result
    )


def test_the_surface_covers_what_the_trainers_override():
    found, failed = surface.relied_on()
    missing = found.keys() - SHIPPED["signatures"].keys()
    assert not failed and not missing, "record the surface again (and add a home that is not in it)"
    assert {c.__name__ for c in found["GRPOTrainer._calculate_rewards"]} == {
        "BookDistillationTrainer",
        "DynamicSampling",
        "PolicyGradientTrainer",
        "RewardedAnswers",
    }
    assert None not in [*SHIPPED["signatures"].values(), *SHIPPED["losses"].values()]
    assert all(isinstance(x, float) for pair in SHIPPED["losses"].values() for x in pair)


def overridden():
    """Return (our class, name, TRL's trainer) of every method of ours that a library has."""
    methods = set()
    for module in FAMILIES.values():
        for cls in vars(import_module(f"rlhf_trl.trainers.{module}")).values():
            mro = getattr(cls, "__mro__", ())
            place = next((n for n, c in enumerate(mro) if c.__module__.startswith("trl.")), 0)
            if not mro or not mro[place].__name__.endswith("Trainer"):
                continue
            for ours in mro[:place]:
                for name, value in vars(ours).items():
                    known = any(name in vars(theirs) for theirs in mro[place:])
                    if callable(value) and not name.startswith("__") and known:
                        methods.add((ours, name, mro[place]))
    return methods


FAMILIES = {
    "GRPOTrainer": "policy_gradient",
    "DPOTrainer": "direct_alignment",
    "KTOTrainer": "direct_alignment",
    "ORPOTrainer": "orpo",
    "RewardTrainer": "reward_models",
    "SFTTrainer": "sft",
}


def test_every_method_that_overrides_one_is_marked_and_no_other():
    assert len(overridden()) > 50
    unmarked = {
        f"{ours.__name__}.{name}"
        for ours, name, _ in overridden()
        if not getattr(vars(ours)[name], "__override__", False)
    }
    assert not unmarked


@pytest.mark.parametrize(
    "method", sorted({(theirs.__name__, name) for _, name, theirs in overridden()}), ids=".".join
)
def test_our_trainers_are_not_imported_over_a_method_that_is_gone(method, monkeypatch):
    owner, name = method
    module = import_module(f"rlhf_trl.trainers.{FAMILIES[owner]}")
    for cls in getattr(module, owner).__mro__:
        if name in vars(cls):
            monkeypatch.delattr(cls, name)
    spec = spec_from_file_location("anew", module.__file__)
    monkeypatch.setitem(sys.modules, "anew", module_from_spec(spec))
    says = rf"^trl {trl.__version__} has no \w+Trainer\.{name}, which \w+ overrides"
    with pytest.raises(InputError, match=says):
        spec.loader.exec_module(sys.modules["anew"])


def test_a_trainer_that_does_not_override_a_method_does_without(monkeypatch):
    monkeypatch.delattr(transformers.Trainer, "_init_training_state")
    assert type("Anew", (BookSFTTrainer,), {}).__mro__[1] is BookSFTTrainer
    with pytest.raises(InputError, match=r"_init_training_state, which Anew overrides"):
        type("Anew", (BookGRPOTrainer,), {})


def test_a_changed_method_of_another_library_is_told_once(monkeypatch):
    def _init_training_state(self, max_steps): ...

    def reduce(self, tensor, how="sum"): ...

    monkeypatch.setattr(transformers.Trainer, "_init_training_state", _init_training_state)
    monkeypatch.setattr(accelerate.Accelerator, "reduce", reduce)
    second, first = moved()
    assert first.what == "transformers.trainer.Trainer._init_training_state"
    assert (first.found, first.concerns) == ("(self, max_steps)", "PolicyGradientTrainer")
    assert second.what == "accelerate.accelerator.Accelerator.reduce"
    assert second.recorded == "(self, tensor, reduction='sum', scale=1.0)"
    assert second.concerns == "PolicyGradientTrainer, Rebalanced"


def test_a_method_that_trl_puts_before_the_one_relied_on_is_told(monkeypatch):
    def _save(self, folder): ...

    monkeypatch.setattr(trl.GRPOTrainer, "_save", _save, raising=False)
    surface.relied_on.cache_clear()
    try:
        one = only()
    finally:
        surface.relied_on.cache_clear()
    assert (one.what, one.recorded, one.found) == ("GRPOTrainer._save", "absent", "(self, folder)")


# case -> the book's function, on the same window
PRINTED = {
    "GRPOTrainer loss_type=grpo": Book("grpo", params={"epsilon_high": 0.28}),
    "GRPOTrainer loss_type=dr_grpo scale_rewards=none batch=heavy": Book(
        "drgrpo", params={"epsilon_high": 0.28}
    ),
    "DPOTrainer loss_type=sigmoid": Book("dpo"),
    "DPOTrainer loss_type=ipo": Book("ipo", "trl"),
    "KTOTrainer loss_type=kto beta=1.0 desirable_weight=2.0": Book(
        "kto", params={"beta": 1.0, "desirable_weight": 2.0}
    ),
    "RewardTrainer columns=margin": Book("reward"),
    "CPOTrainer loss_type=simpo cpo_alpha=0.0": Book(
        "simpo", params={"beta": 0.1, "gamma_beta_ratio": 5.0}
    ),
    "DistillationTrainer beta=1.0": Book("opd", "trl"),
}


@pytest.mark.parametrize("case", PRINTED)
def test_recorded_losses_are_those_of_the_equations(case):
    batch, columns = surface.batch_of(case)
    window = Matrix().window(case.split()[0], columns, batch)
    loss, gradient = window.book(PRINTED[case])
    assert SHIPPED["losses"][case] == pytest.approx([loss, float(gradient.norm())], rel=1e-5)


def test_recorded_losses_agree_where_theory_says_so():
    losses = SHIPPED["losses"]
    # with x = beta d: robust is (.9 l(x) - .1 l(-x)) / .8, l(-x) is l(x) + x, and the mean of x is
    # 1 - hinge where no x exceeds 1
    value = {name.split("=")[1]: pair[0] for name, pair in losses.items() if name.startswith("DPO")}
    by_hand = value["sigmoid"] - (1 - value["hinge"]) / 8
    assert value["robust label_smoothing"] == pytest.approx(by_hand, rel=1e-6)
    same = [name for name in losses if "precompute" in name]  # what is not computed twice
    different = {tuple(pair) for name, pair in losses.items() if name not in same}
    assert len(different) == len(losses) - len(same) and len(same) == 3


@pytest.mark.parametrize(("case", "told"), [("loss_type=sft", True), ("bf16=true", False)])
def test_a_loss_in_bfloat16_may_round_elsewhere(case, told):
    place = next(name for name in SHIPPED["losses"] if case in name)
    loss, norm = SHIPPED["losses"][place]
    found = SHIPPED["losses"] | {place: [loss * 1.001, norm * 0.99]}
    moved = drift.compare(SHIPPED, {**SHIPPED, "losses": found})
    assert [one.what for one in moved] == [place] * told


def test_a_changed_default_is_told_once_with_its_release(monkeypatch):
    @dataclass
    class GRPOConfig(trl.GRPOConfig):
        max_completion_length: int | None = 256  # what dr_grpo divides by

    monkeypatch.setattr(trl, "GRPOConfig", GRPOConfig)
    one = only("GRPOTrainer loss_type=dr_grpo scale_rewards=none batch=heavy")
    assert (one.what, one.recorded, one.found) == ("GRPOConfig.max_completion_length", 512, 256)
    assert one.since == "1.10.0"
    # Dr. GRPO's chapter and trl name it themselves; nobody else's rows do
    told = one.concerns.partition(";")[0].split(", ")
    assert {"the stock GRPOTrainer", "grpo", "drgrpo (code)"} <= {*told} and "drgrpo" not in told


def test_a_default_that_moves_another_way_has_no_release(monkeypatch):
    monkeypatch.setattr(trl.GRPOConfig.__dataclass_fields__["beta"], "default", 0.1)
    assert (only().what, only().found, only().since) == ("GRPOConfig.beta", 0.1, None)


def test_a_new_field_and_one_that_has_gone_are_named(monkeypatch):
    @dataclass
    class DPOConfig(trl.DPOConfig):
        tilt: float = 1.0

    monkeypatch.setattr(trl, "DPOConfig", DPOConfig)
    monkeypatch.delitem(trl.GRPOConfig.__dataclass_fields__, "epsilon_high")
    gone, new = moved()
    assert (new.what, new.recorded, new.found) == ("DPOConfig field tilt", "absent", "present")
    assert "algorithms/parameters.py" in new.concerns
    assert (gone.what, gone.found) == ("GRPOConfig field epsilon_high", "absent")
    assert "grpo, drgrpo, gspo, cispo" in gone.concerns and "maxrl" not in gone.concerns


def test_a_field_that_all_configs_lose_is_one_line(monkeypatch):
    for name in SHIPPED["fields"]:
        monkeypatch.delitem(surface._get(name, SHIPPED["homes"]).__dataclass_fields__, "seed")
    assert only().what == f"{', '.join(SHIPPED['fields'])} field seed"


def test_a_changed_signature_names_who_overrides_it(monkeypatch):
    def _calculate_rewards(self, inputs, prompts, *, completions=()): ...

    monkeypatch.setattr(trl.GRPOTrainer, "_calculate_rewards", _calculate_rewards)
    one = only()
    assert one.what == "GRPOTrainer._calculate_rewards"
    assert one.recorded == "(self, inputs, prompts, completions, completion_ids_list)"
    assert one.found == "(self, inputs, prompts, *, completions=())"
    assert one.concerns == (
        "BookDistillationTrainer, DynamicSampling, PolicyGradientTrainer, RewardedAnswers, "
        "training_time.py"
    )


def test_a_function_that_has_gone_names_who_calls_it(monkeypatch):
    hide(monkeypatch, trl.models, "unwrap_model_for_generation")
    assert (only().found, only().concerns) == ("absent", "held_out.py")


def test_a_class_that_has_gone_is_one_line(monkeypatch):
    monkeypatch.delattr("trl.experimental.orpo.ORPOTrainer")
    one = only("ORPOTrainer beta=0.1", "SFTTrainer loss_type=nll")
    assert str(one).startswith("ORPOTrainer: trl.experimental.orpo -> absent; concerns orpo")


def test_a_class_that_has_moved_is_followed(monkeypatch):
    hide(monkeypatch, trl, "KTOTrainer")
    one, its_init = moved("KTOTrainer loss_type=kto beta=1.0 desirable_weight=2.0")
    assert (one.what, one.recorded, one.found) == ("KTOTrainer", "trl", "trl.experimental.kto")
    assert (its_init.what, its_init.found) == ("KTOTrainer.__init__", "(self, *args, **kwargs)")


def test_a_class_that_cannot_be_imported_says_why(monkeypatch):
    hide(monkeypatch, trl, "RLOOTrainer")
    monkeypatch.setitem(trl._class_to_module, "RLOOTrainer", "nowhere")
    one = only("RLOOTrainer beta=0.05")
    assert one.what == "RLOOTrainer" and "Failed to import trl.nowhere" in one.found


def scaled(factor, method, when):
    """A method whose result is multiplied."""

    @functools.wraps(method)
    def wrapper(self, *args, **kwargs):
        return method(self, *args, **kwargs) * (factor if when(self) else 1)

    return wrapper


def test_a_changed_loss_is_named_and_ends_with_1(monkeypatch, capsys, few):
    loss = scaled(1.001, trl.GRPOTrainer._compute_loss, lambda t: t.loss_type == "sapo")
    monkeypatch.setattr(trl.GRPOTrainer, "_compute_loss", loss)
    with pytest.raises(SystemExit) as stop:
        main(["drift"])
    assert stop.value.code == 1
    _, _, title, line, title_of_code, code = capsys.readouterr().out.splitlines()
    assert (title, title_of_code) == ("moves what is computed:", "code that changed:")
    assert code.startswith("trl.trainer.grpo_trainer:GRPOTrainer._compute_loss: replaced while")
    assert line.startswith("GRPOTrainer loss_type=sapo: loss ")
    assert line.endswith("; concerns sapo (chapter), sapo (trl)")
    with pytest.raises(SystemExit) as stop:
        main(["drift", "--json"])
    found = json.loads(capsys.readouterr().out)
    (one,) = found["moved"]
    assert stop.value.code == 1 and one["what"] == "GRPOTrainer loss_type=sapo"
    assert one["found"][0] / one["recorded"][0] == pytest.approx(1.001, rel=1e-5)
    assert found["checked"]["losses"] == 2 and found["installed"]["trl"] == "1.16.0"


def test_ktos_reference_point_is_seen(monkeypatch):
    no_kl = scaled(0, trl.KTOTrainer._compute_kl_logps, lambda t: True)
    monkeypatch.setattr(trl.KTOTrainer, "_compute_kl_logps", no_kl)
    kto = [name for name in SHIPPED["losses"] if name.startswith("KTO")]
    assert kto[0] in [one.what for one in moved(*kto)]


def test_a_loss_that_fails_is_told_once_for_all(monkeypatch):
    def _compute_loss(self, model, inputs, return_outputs):
        raise RuntimeError("no such\nthing")

    monkeypatch.setattr(trl.DPOTrainer, "_compute_loss", _compute_loss)
    names = [name for name in SHIPPED["losses"] if name.startswith("DPO")]
    one = only(*names)
    assert (one.what, one.found) == (
        f"DPOTrainer, {len(names)} losses",
        "RuntimeError: no such thing",
    )


def test_recording_writes_what_was_read_and_overwrites_nothing(tmp_path, capsys, few):
    path = tmp_path / "surface.json"
    main(["drift", "--record", str(path)])
    recorded = json.loads(path.read_text())
    assert drift.compare(few, recorded) == [] == drift.compare(recorded, few)
    assert recorded["losses"].keys() == few["losses"].keys()
    assert recorded["metrics"].keys() == few["metrics"].keys()
    measured = ("losses", "metrics", "versions")
    assert {k: v for k, v in recorded.items() if k not in measured} == {
        k: v for k, v in few.items() if k not in measured
    }
    path.write_text("mine")
    with pytest.raises(SystemExit) as stop:
        main(["drift", "--record", str(path)])
    assert "add --overwrite" in stop.value.code and path.read_text() == "mine"
    main(["drift", "--record", str(path), "--overwrite"])
    assert json.loads(path.read_text())["homes"] == SHIPPED["homes"]
    assert [p.name for p in tmp_path.iterdir()] == ["surface.json"]


@pytest.mark.parametrize("place", drift.HISTORY)
def test_the_table_of_releases_ends_where_trl_is_now(place):
    _, before, after = drift.HISTORY[place]
    if " field " in place:
        config, _, name = place.split()
        now = "present" if name in SHIPPED["fields"][config] else "absent"
    else:
        section = "defaults" if "." in place else "homes"
        now = SHIPPED[section][place]
        now = "absent" if now is None else now
    assert now == after != before
