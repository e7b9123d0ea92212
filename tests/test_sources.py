"""Code of the libraries that differs from the recorded one is named, and nothing else is."""

import inspect
import subprocess
import sys
import textwrap
import time
from importlib import import_module

import pytest
import transformers
from planted import ON_LOSSES, ON_ONE, ON_TWO, READER, SECOND_READER

from rlhf_trl.compare.drift import differences as drift
from rlhf_trl.compare.drift import sources
from rlhf_trl.compare.drift.sources import Module
from rlhf_trl.compare.drift.tracing import Trace

SHIPPED = sources.shipped()

TRAINER = "transformers.trainer"
FAULTS = [
    # module, what changes there, old, new: these show in runs or losses
    *(fault[1:] for name, fault in {**ON_ONE, **ON_TWO}.items() if name != "resumed schedule"),
    (TRAINER, "Trainer._load_optimizer_and_scheduler", "self.lr_scheduler.load_state_dict", "str"),
    *(fault[1:] for fault in ON_LOSSES.values()),
    (
        "trl.trainer.dpo_trainer",
        "DPOTrainer._precompute_ref_logps",
        "Hasher.hash((dataset._fingerprint, model_hash))",
        "Hasher.hash(dataset._fingerprint)",
    ),
    # no function: a field's default, a constant, a class's attribute
    (
        "trl.trainer.dpo_config",
        "DPOConfig",
        "label_smoothing: float = field(\n        default=0.0",
        "label_smoothing: float = field(\n        default=0.1",
    ),
    (TRAINER, "OPTIMIZER_NAME", '"optimizer.pt"', '"optimizer.bin"'),
]


@pytest.fixture
def edit(monkeypatch, tmp_path):
    """Let a module's file be another one, which has a text replaced once."""
    files = {}
    path_of = sources._path_of
    monkeypatch.setattr(sources, "_path_of", lambda name: files.get(name) or path_of(name))

    def edit(module, old, new):
        text = files.get(module, path_of(module)).read_text()
        assert old in text, f"{old!r} is not in {module}"
        files[module] = tmp_path / module
        files[module].write_text(text.replace(old, new, 1))

    # functions in memory are of another file than the edited one
    monkeypatch.setattr(sources, "_is_replaced", lambda *_: False)
    return edit


def named():
    return {(change.place, change.how) for change in sources.changes()}


def test_the_installed_libraries_are_the_recorded_ones_in_under_a_second():
    start = time.process_time()
    assert sources.changes() == []
    assert time.process_time() - start < 1
    assert sum(len(facts["units"]) for facts in SHIPPED.values()) > 1000


@pytest.mark.parametrize(("module", "unit", "old", "new"), FAULTS, ids=[f[1] for f in FAULTS])
def test_a_fault_in_the_installed_code_is_named(module, unit, old, new, edit):
    edit(module, old, new)
    assert named() == {(f"{module}:{unit}", "changed")}


@pytest.mark.parametrize("name", READER | SECOND_READER)
def test_a_fault_that_a_reader_planted_is_named(name, edit):
    _, module, function, old, new = (READER | SECOND_READER)[name]
    value = import_module(module)
    for part in function.split("."):
        value = getattr(value, part)
    lines = inspect.getsource(inspect.unwrap(value)).splitlines()
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    source = textwrap.dedent("\n".join(lines))
    assert source.count(old) == 1
    changed = textwrap.indent(source.replace(old, new), indent).strip()
    edit(module, textwrap.indent(source, indent).strip(), changed)
    assert named() == {(f"{module}:{function}", "changed")}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""\n        Returns the current learning rate', '"""Return the rate'),
        ("    def _get_learning_rate(", "    def unused(self): ...\n\n    def _get_learning_rate("),
    ],
    ids=["a docstring", "an unused function"],
)
def test_what_computes_nothing_does_not_count(old, new, edit):
    edit(TRAINER, old, new)
    assert named() == set()


def test_formatting_does_not_count(edit):
    source = Module(TRAINER).content.decode()
    line = next(x for x in source.splitlines() if x.strip().startswith("decay_parameters = get_"))
    wider = line.replace("(", "(\n\n            ").replace('"', "'") + "  # a comment"
    edit(TRAINER, line, wider)
    assert named() == set()


def test_a_method_that_comes_to_override_an_executed_one_is_new(edit):
    body = "    def _get_learning_rate(self):\n        return 0\n\n    def _compute_loss"
    edit("trl.trainer.dpo_trainer", "    def _compute_loss", body)
    assert named() == {("trl.trainer.dpo_trainer:DPOTrainer._get_learning_rate", "new")}


def test_a_function_that_changed_code_calls_is_new(edit):
    module = "transformers.optimization"
    after = "def get_linear_schedule_with_warmup("
    edit(module, after, f"def half(x):\n    return x / 2\n\n\n{after}")
    assert named() == set()
    edit(module, "float(max(1, num_warmup_steps))", "half(num_warmup_steps)")
    changed = f"{module}:_get_linear_schedule_with_warmup_lr_lambda"
    assert named() == {(changed, "changed"), (f"{module}:half", "new")}


def test_what_new_code_calls_is_new_and_what_is_used_nowhere_is_not(edit):
    module = "transformers.optimization"
    after = "def get_linear_schedule_with_warmup("
    added = """LIMIT = 2


class Unused:
    def get_last_lr(self):
        return 0


class Holder:
    def value(self):
        return LIMIT


def half(x):
    return x / Holder().value()


"""
    edit(module, after, added + after)
    assert named() == set()
    edit(module, "float(max(1, num_warmup_steps))", "half(num_warmup_steps)")
    new = {"half", "Holder", "Holder.value", "LIMIT"}
    changed = (f"{module}:_get_linear_schedule_with_warmup_lr_lambda", "changed")
    assert named() == {changed, *((f"{module}:{name}", "new") for name in new)}


def test_what_has_gone_is_named(edit):
    edit(TRAINER, "def get_decay_parameter_names", "def get_decayed_parameter_names")
    assert (f"{TRAINER}:Trainer.get_decay_parameter_names", "gone") in named()


def test_a_function_that_is_replaced_while_running_is_named(monkeypatch):
    monkeypatch.setattr(transformers.Trainer, "training_step", lambda self, *args: 0)
    (change,) = sources.changes()
    assert change.place == f"{TRAINER}:Trainer.training_step"
    assert change.how == "replaced while running" and "grpo" in change.stages
    assert str(change).endswith("executed by all recipes")


def test_a_trace_names_functions_their_classes_and_the_constants_they_read():
    trace = Trace()
    with trace.on():
        transformers.trainer_utils.get_last_checkpoint("/")
        transformers.TrainerState()
    places = trace.places()
    module = "transformers.trainer_utils"
    assert {(module, "get_last_checkpoint"), (module, "_re_checkpoint")} <= places
    assert ("transformers.trainer_callback", "TrainerState") in places
    assert ("transformers.trainer_callback", "TrainerState.__post_init__") in places
    assert (module, "set_seed") not in places


PROGRAM = """
import json, sys
from rlhf_trl.compare.drift.sources import Module
class Text(Module):
    def __init__(self, content):
        self.content = content
print(Text(sys.stdin.buffer.read()).unit_hash("f"))
"""


def test_a_hash_is_the_same_on_every_python():
    # measured on Python 3.11, 3.12 and 3.13
    source = '''
@decorated(1, x=2.5)
async def f[T](a: int, /, b="", *, c=None, **d) -> list[int]:
    """Text."""
    e = f"{a!r:>{b}}" "tail" f"{c=}"
    return [x async for x in a if x] or e or -1e-6 or 0 or "" or b"" or (None,)
'''.replace("[T]", "")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], input=source.encode(), capture_output=True
    )
    assert done.stdout.decode().strip() == "f9d42a6a2025218f", done.stderr.decode()


def test_the_report_says_that_nothing_measured_differs(monkeypatch):
    surface = drift.shipped()
    change = sources.Change("trl.x:f", "changed", ("sft",))
    new = sources.Change("trl.x:g", "new", ("sft",))
    lines = drift.report([], [change, new], surface, surface).splitlines()
    assert lines[2:-1] == [
        "changed, and no measurement differs:",
        "trl.x:f: changed; executed by recipes/sft.py",
        "new, executed and never recorded:",
        "trl.x:g: new; executed by recipes/sft.py",
    ]


def test_a_decorated_function_that_is_replaced_is_named(monkeypatch):
    from transformers.models.qwen3 import modeling_qwen3

    monkeypatch.setattr(modeling_qwen3.Qwen3ForCausalLM, "forward", lambda self: None)
    (change,) = sources.changes()
    assert change.place.endswith(":Qwen3ForCausalLM.forward")
