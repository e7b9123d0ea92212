"""The surface of TRL that the package relies on, read off the installed release.

`surface.json` holds, of one release: the homes of trainers and configs, the signatures of what the
package overrides or calls, the defaults of the fields that change a loss, all field names, and the
results of the stock losses on fixed batches with the metrics logged beside them, and what happens
in ten steps of stock trainers. To
watch one more home, signature or loss, add its line with null there and record again; the methods
of TRL, transformers and accelerate that our trainers override or call join by themselves.
"""

import ast
import gc
import inspect
import json
import os
import pickle
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, redirect_stderr
from dataclasses import MISSING, Field, fields, replace
from functools import cache
from importlib import import_module
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from rlhf_trl import trainers
from rlhf_trl.algorithms import LOSS_FIELDS, SHARED_FIELDS
from rlhf_trl.compare.drift.recorded_runs import facts_of as facts_of_run
from rlhf_trl.compare.matrix import Matrix, kind_of_stock
from rlhf_trl.compare.measure import Stock, logged_metrics, sentence
from rlhf_trl.compare.models import at_scale, quick_and_quiet
from rlhf_trl.compare.trainers import POLICY
from rlhf_trl.compare.windows.batches import ACROSS, BATCHES, EXTREME, RARE, PolicyBatch
from rlhf_trl.errors import InputError

Surface = dict[str, dict[str, Any]]

LIBRARIES = ("trl", "transformers", "accelerate", "torch")

RUNS, RUNS_OF_TWO = "runs", "runs on two processes"
"""The sections of what happens in runs; the second one is measured on demand."""

_WATCHED = LOSS_FIELDS | SHARED_FIELDS  # the fields of which the default is recorded
_WATCHED |= {"bf16", "gradient_checkpointing", "num_iterations", "steps_per_generation"}

# Rounding in float32 moves these sums over some hundred tokens by less than 1e-4 (measured: 6e-5)
# between AVX-512, AVX2 and plain kernels on one thread and two; a changed term moves them by more.
TOLERANCE = 1e-4
"""The relative difference of a loss or a gradient norm that is rounding."""

ONLINE = {
    "beta": 0.0,
    "epsilon_high": 0.28,
    "scale_rewards": "group",
    "importance_sampling_level": "token",
    "use_bias_correction_kl": False,
}
"""The fields of a case of GRPO or RLOO that its name does not set."""

_BATCHES = {batch.name: batch for batch in BATCHES}
_BATCHES["drift"] = replace(EXTREME, group=8, rows=8)
_BATCHES["drift of pairs"] = replace(_BATCHES["accumulation"], drift=0.2)
_BATCHES |= {batch.name: batch for batch in (ACROSS, *RARE)}
"""The windows on which losses are recorded, by the name that a case may give."""

_FIELDS_OF_WINDOW = {"generation_batch_size", "num_generations", "max_completion_length"}
_FIELDS_OF_WINDOW |= EXTREME.schedule.keys()
"""Fields that a window sets, so that no case takes their defaults."""


def shipped() -> Surface:
    """Return the surface that ships with the package, of the release it is written for."""
    return json.loads(Path(__file__).with_name("surface.json").read_text())


def read(known: Surface | None = None) -> Surface:
    """Read the surface of the installed TRL.

    Args:
        known: a surface, by default the shipped one. It says which classes, signatures, losses and
            runs to look up. These are computed at its defaults, where it has them: otherwise a
            default that changed would be reported twice, as a default and as a loss.

    Returns:
        By section: `versions`, `homes`, `signatures`, `defaults`, `fields`, `losses`, `metrics`,
        `runs`. What is not there is None; what could not be computed is the sentence of the error.
    """
    known = known or shipped()
    with quick_and_quiet(), _without_garbage_collection():
        methods, _ = relied_on()
        places = sorted({*known["signatures"], *methods})
        homes = {name: _home(name, home) for name, home in known["homes"].items()}
        config_fields: dict[str, list[str]] = {}  # by config class
        defaults: dict[str, Any] = {}  # of _WATCHED, by names such as "GRPOConfig.beta"
        for name, home in homes.items():
            if not home or not name.endswith("Config"):
                continue
            fields_by_name = {f.name: f for f in fields(_get(name, homes))}
            config_fields[name] = sorted(fields_by_name)
            for watched in sorted(fields_by_name.keys() & _WATCHED):
                defaults[f"{name}.{watched}"] = _default(fields_by_name[watched])
        defaults_of_losses = {**defaults, **known["defaults"]}  # the known ones override
        return {
            "versions": {name: version(name) for name in LIBRARIES},
            "homes": homes,
            "signatures": {place: _signature(place, homes) for place in places},
            "defaults": defaults,
            "fields": config_fields,
            **_losses(known["losses"], homes, defaults_of_losses),
            **_all_runs(known, homes, defaults_of_losses),
        }


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Save its time in the block; all that a reading of the surface makes fits into a GB."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def dump(surface: Surface) -> str:
    """Return a surface as JSON, a fact a line."""
    sections = []
    for name, facts in surface.items():
        lines = [f"    {json.dumps(place)}: {json.dumps(fact)}" for place, fact in facts.items()]
        sections.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


@cache
def relied_on() -> tuple[dict[str, set[type]], dict[str, str]]:
    """Return what our trainers rely on in TRL, transformers and accelerate.

    Returns:
        Two dictionaries. The first one maps the dotted name of each method that our classes
        override or call to these classes. The second one maps each module of ours that cannot be
        imported to the error.
    """
    users: dict[str, set[type]] = defaultdict(set)
    failed: dict[str, str] = {}
    for module in pkgutil.iter_modules(trainers.__path__, f"{trainers.__name__}."):
        try:
            members = vars(import_module(module.name)).values()
        except Exception as error:  # whatever another release breaks is what is reported
            failed[module.name] = sentence(error)
            continue
        for cls in members:
            if not inspect.isclass(cls) or cls.__module__ != module.name:  # an import of the module
                continue
            stock = _stock_trainer(cls)
            if stock is None:
                continue
            # the class itself and our mixins: all that stand before the stock trainer
            for owner in cls.__mro__[: cls.__mro__.index(stock)]:
                for place in _places_used(owner, stock):
                    users[place].add(owner)
    return users, failed


def _stock_trainer(cls: type) -> type | None:
    """Return the trainer of TRL from which a class derives, None for classes without one."""
    trl_bases = [base for base in cls.__mro__ if base.__module__.startswith("trl.")]
    if trl_bases and trl_bases[0].__name__.endswith("Trainer"):
        return trl_bases[0]
    return None  # for example a config class, whose base is TRL's config


def _places_used(owner: type, stock: type) -> Iterator[str]:
    """Yield the methods of a stock trainer, and of Accelerator, that a class overrides or calls."""
    for name, value in vars(owner).items():
        if callable(value) and hasattr(stock, name):
            yield _place(stock, name)
    source = _sources_of_classes(owner.__module__)[owner.__name__]
    calls = {
        stock: r"(?:self|super\(\))\.(\w+)\(",
        Accelerator: r"self\.accelerator\.(\w+)\(",
    }
    for library_class, pattern in calls.items():
        for name in re.findall(pattern, source):
            if inspect.isfunction(getattr(library_class, name, None)):
                yield _place(library_class, name)


@cache
def _sources_of_classes(module: str) -> dict[str, str]:
    """Return the source of each class of a module, which is parsed once for all of them."""
    source = inspect.getsource(import_module(module))
    lines = source.splitlines()
    return {
        node.name: "\n".join(lines[node.lineno - 1 : node.end_lineno])
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }


def _place(cls: type, name: str) -> str:
    """Return the dotted name of a method, by the class that defines it.

    A stock trainer's own method has no module in front, such as "GRPOTrainer._compute_loss"; what
    it inherits has, and so have the methods of Accelerator.
    """
    owner = next(base for base in cls.__mro__ if name in vars(base))
    is_own = owner is cls and cls is not Accelerator
    home = "" if is_own else f"{owner.__module__}."
    return f"{home}{owner.__name__}.{name}"


def family_of(place: str) -> str | None:
    """Return "GRPO" for GRPOTrainer, GRPOConfig, and what hangs on them; None elsewhere."""
    match = re.match(r"([A-Z]\w*?)(Trainer|Config)\b", place)
    return match and match[1]


def _home(name: str, recorded: str | None) -> str | None:
    """Return the module that exports a class: where it was recorded, or else where it may be."""
    words = re.findall("[A-Z]+(?![a-z])|[A-Z][a-z]+", name)[:-1]  # NashMDTrainer: Nash, MD
    experimental = f"trl.experimental.{'_'.join(words).lower()}"
    for module in filter(None, (recorded, "trl", experimental)):
        if inspect.isclass(_get(f"{module}.{name}", {})):
            return module
    return None


def _get(place: str, homes: dict[str, str | None]) -> Any:
    """Return the class or function with a dotted name; None if it is not there.

    Args:
        place: the name, such as "trl.GRPOTrainer", or without a module if `homes` has the class,
            such as "GRPOTrainer._compute_loss".
        homes: the modules of trainers and configs, by name.
    """
    first = place.partition(".")[0]
    parts = (f"{homes[first]}.{place}" if homes.get(first) else place).split(".")
    # the longest beginning that is a module is imported, the rest are attributes
    for cut in range(len(parts) - 1, 0, -1):
        try:
            value: Any = import_module(".".join(parts[:cut]))
            for name in parts[cut:]:
                value = getattr(value, name)
            return value
        except Exception:  # a module of another release may fail in any way: not there
            continue
    return None


def _signature(place: str, homes: dict[str, str | None]) -> str | None:
    function = _get(place, homes)
    if function is None:
        return None
    signature = inspect.signature(function)
    plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


def _default(field: Field) -> Any:
    value = field.default if field.default is not MISSING else field.default_factory()
    return value if isinstance(value, bool | int | float | str | list | None) else repr(value)


def settings(case: str) -> dict[str, Any]:
    """Return a case, such as "GRPOTrainer loss_type=grpo beta=0.1", as fields and values."""
    pairs = (setting.split("=") for setting in case.split()[1:])
    return {name: _value(text) for name, text in pairs}


def batch_of(case: str) -> tuple[PolicyBatch, tuple[str, ...]]:
    """Return the window of a case, and the further columns of its data, if it names any."""
    case_settings = settings(case)
    usual = "drift" if case.split()[0] in POLICY else "drift of pairs"
    batch = _BATCHES[case_settings.get("batch", usual)]
    return batch, tuple(case_settings.get("columns", "").split())


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _losses(
    cases: Iterable[str], homes: dict[str, str | None], defaults: dict[str, Any]
) -> Surface:
    """Compute loss, gradient norm and metrics of the cases whose trainers are there.

    A case in a batch of `RARE` is computed as on a large machine (see `at_scale`), where TRL
    takes paths that no other batch reaches: several processes, and a vocabulary in parts.

    Args:
        cases: a trainer, fields of its config and a batch, such as "GRPOTrainer loss_type=grpo
            beta=0.1 batch=temperature"; see `settings` and `batch_of`.
        homes: the modules of trainers and configs, by name.
        defaults: values of fields, such as "GRPOConfig.beta", that a case leaves open.

    Returns:
        The section `losses`: by case [loss, gradient norm], or the sentence of the error that
        keeps it from being computed. The section `metrics`: by case what the trainer logs after
        it, but for cases in bfloat16, whose counts differ between machines.
    """
    matrix = Matrix()
    losses: dict[str, Any] = {}
    metrics: dict[str, Any] = {}
    for case in cases:
        trainer_name = case.split()[0]
        config_name = trainer_name.replace("Trainer", "Config")
        trainer = _get(trainer_name, homes)
        config = _get(config_name, homes)
        if trainer is None or config is None:  # which is reported by `homes`
            continue
        batch, columns = batch_of(case)
        case_fields = _case_fields(case, config, defaults)
        side = Stock(
            case_fields,
            label=case,
            trainer=trainer_name,
            columns=columns,
            classes=(trainer, config),
        )
        try:
            machine = at_scale() if batch in RARE else nullcontext()
            # TRL shows a progress bar for the reference's log-probabilities
            with machine, redirect_stderr(StringIO()):
                window = matrix.window(kind_of_stock(side), columns, batch)
                stock = window.build(side)
                measured = window.measured(stock)
            numbers = (measured.loss, float(measured.gradient.norm()))
            losses[case] = [float(f"{number:.7g}") for number in numbers]  # 7 digits, as float32
            if not case_fields.get("bf16"):
                metrics[case] = logged_metrics(stock)
        except Exception as error:  # whatever another release breaks is what is reported
            losses[case] = sentence(error)
    return {"losses": losses, "metrics": metrics}


def _all_runs(known: Surface, homes: dict[str, str | None], defaults: dict[str, Any]) -> Surface:
    """Return the sections of runs: of one process, and of two where the known surface has them."""
    sections = {}
    for section in {RUNS, RUNS_OF_TWO} & known.keys():
        trainers = [*dict.fromkeys(place.split()[0] for place in known[section])]
        with tempfile.TemporaryDirectory(prefix="rlhf_trl-runs-") as name:
            folder = Path(name)
            if section == RUNS:
                sections[section] = _runs(trainers, homes, defaults, folder)
                continue
            arguments = (trainers, homes, defaults, folder)
            (folder / "arguments").write_bytes(pickle.dumps(arguments))
            launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            words = [sys.executable, *launcher, "-m", "rlhf_trl.compare.drift.surface", name]
            done = subprocess.run(words, capture_output=True, text=True)
            if done.returncode:
                raise InputError(f"two processes could not be run: {done.stderr[-2000:]}")
            sections[section] = json.loads((folder / "runs.json").read_text())
    return sections


def main(folder: Path) -> None:
    """Be one of two processes of the runs in a folder."""
    arguments = pickle.loads((folder / "arguments").read_bytes())
    with quick_and_quiet(), _without_garbage_collection():
        runs = _runs(*arguments)
    if os.environ["RANK"] == "0":
        (folder / "runs.json").write_text(json.dumps(runs))


def _runs(
    trainers: Iterable[str],
    homes: dict[str, str | None],
    defaults: dict[str, Any],
    folder: Path,
) -> dict[str, Any]:
    """Return what happens in runs of stock trainers, which write into a folder.

    A run that fails is one fact, such as "SFTTrainer run": the sentence of its error.
    """
    runs: dict[str, Any] = {}
    for trainer_name in trainers:
        config_name = trainer_name.replace("Trainer", "Config")
        trainer = _get(trainer_name, homes)
        config = _get(config_name, homes)
        if trainer is None or config is None:  # which is reported by `homes`
            continue
        run_fields = _case_fields(trainer_name, config, defaults)
        try:
            with redirect_stderr(StringIO()):
                runs |= facts_of_run(trainer_name, (trainer, config), run_fields, folder)
        except Exception as error:  # whatever another release breaks is what is reported
            runs[f"{trainer_name} run"] = sentence(error)
    return runs


def _case_fields(case: str, config: type, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the config fields of a case: its own, then those of ONLINE, then the defaults."""
    trainer_name = case.split()[0]
    config_name = trainer_name.replace("Trainer", "Config")
    names = {f.name for f in fields(config)}
    case_fields = {}
    for name in names & (LOSS_FIELDS | SHARED_FIELDS) - _FIELDS_OF_WINDOW:
        place = f"{config_name}.{name}"
        if place in defaults:
            case_fields[name] = defaults[place]
    if trainer_name in POLICY:
        case_fields |= {name: value for name, value in ONLINE.items() if name in names}
    case_fields |= settings(case)
    for name in ("batch", "columns"):  # which choose the window and are no fields
        case_fields.pop(name, None)
    return case_fields


if __name__ == "__main__":
    main(Path(sys.argv[1]))
