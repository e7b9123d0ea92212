"""What moved in TRL: the installed release against the recorded surface that the package relies on.

`surface.json` holds, of one release: the homes of trainers and configs, the signatures of what the
package overrides or calls, the defaults of the fields that change a loss, all field names, and the
results of the stock losses on fixed batches. To watch one more home, signature or loss, add its
line with null there and record again; what our trainers override joins by itself.
"""

import inspect
import json
import logging
import os
import pkgutil
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import MISSING, Field, asdict, dataclass, fields
from functools import cache
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlhf_trl import trainers
from rlhf_trl.algorithms import ALGORITHMS, LOSS_FIELDS, SHARED_FIELDS
from rlhf_trl.compare import stock

SURFACE = Path(__file__).with_name("surface.json")
Surface = dict[str, dict[str, Any]]

_WATCHED = LOSS_FIELDS | SHARED_FIELDS
_WATCHED |= {"bf16", "gradient_checkpointing", "num_iterations", "steps_per_generation"}

# Kept by hand: the release in which something took its place or value, what it was, what it is.
# Each line was read off the published packages on both sides of the change.
HISTORY = {
    "GRPOConfig.beta": ("0.19.0", 0.04, 0.0),
    "GRPOConfig.loss_type": ("0.22.0", "bnpo", "dapo"),
    "GRPOConfig.scale_rewards": ("0.22.0", True, "group"),
    "GRPOConfig.max_completion_length": ("1.10.0", 256, 512),
    "GRPOConfig.use_bias_correction_kl": ("1.10.0", False, True),
    "DPOConfig field rpo_alpha": ("0.29.0", "present", "absent"),
    "DPOConfig field reference_free": ("0.29.0", "present", "absent"),
    "DPOConfig field max_prompt_length": ("0.29.0", "present", "absent"),
    "ORPOTrainer": ("0.29.0", "trl", "trl.experimental.orpo"),
    "ORPOConfig": ("0.29.0", "trl", "trl.experimental.orpo"),
    "CPOTrainer": ("0.29.0", "trl", "trl.experimental.cpo"),
    "CPOConfig": ("0.29.0", "trl", "trl.experimental.cpo"),
    "PPOTrainer": ("1.13.0", "trl.experimental.ppo", "absent"),
    "PRMTrainer": ("1.14.0", "trl.experimental.prm", "absent"),
    "BCOTrainer": ("1.14.0", "trl.experimental.bco", "absent"),
    "NashMDTrainer": ("1.14.0", "trl.experimental.nash_md", "absent"),
    "XPOTrainer": ("1.14.0", "trl.experimental.xpo", "absent"),
}

# What relies on a trainer: algorithms, and what else.
_RELY: dict[str, tuple[list[str], str]] = {
    "GRPO": (
        [name for name, row in ALGORITHMS.items() if row.family == "policy_gradient"],
        "recipes/grpo.py",
    ),
    "RLOO": (["rloo"], "the comparison with stock TRL only"),
    "DPO": (
        ["dpo", "cdpo", "ipo", "simpo", "dpo_norm", "apo_zero", "apo_down"],
        "what builds on DPOTrainer",
    ),
    "KTO": (["kto"], "what builds on KTOTrainer"),
    "Reward": (["reward", "orm", "prm"], "what builds on RewardTrainer"),
    "SFT": ([], "recipes/sft.py"),
    "ORPO": (["orpo"], "what builds on ORPOTrainer"),
    "CPO": (["simpo"], "the comparison with stock TRL only"),
    "PPO": (["ppo"], "its row, which says that TRL has none"),
}


@dataclass(frozen=True)
class Moved:
    """One thing that moved.

    Attributes:
        what: its dotted name.
        recorded: what the surface holds.
        found: what the installed TRL has.
        since: the release that changed it, or None where the table does not know.
        concerns: whom it concerns.
    """

    what: str
    recorded: Any
    found: Any
    since: str | None
    concerns: str

    def __str__(self) -> str:
        since = f" (changed in {self.since})" if self.since else ""
        old, new = _shown(self.recorded), _shown(self.found)
        return f"{self.what}: {old} -> {new}{since}; concerns {self.concerns}"


def check(recorded: Surface | None = None) -> tuple[list[Moved], Surface, Surface]:
    """Hold the installed TRL against a recorded surface.

    Args:
        recorded: what `read` returned of another release; by default, the shipped surface.

    Returns:
        What moved, the recorded surface, and the installed one.
    """
    recorded = recorded or json.loads(SURFACE.read_text())
    installed = read(recorded)
    return compare(recorded, installed), recorded, installed


def read(known: Surface | None = None) -> Surface:
    """Read the surface of the installed TRL.

    Args:
        known: the surface whose places and losses are looked up; by default, the shipped one. The
            losses are computed at its defaults, so that a changed default is told once.

    Returns:
        By section: `versions`, `homes`, `signatures`, `defaults`, `fields`, `losses`. What is not
        there is None; a loss that could not be computed is the sentence of the error.
    """
    known = known or json.loads(SURFACE.read_text())
    with _quiet():
        places = sorted({*known["signatures"], *overrides()[0]})
        homes = {name: _home(name, home) for name, home in known["homes"].items()}
        config_fields = {
            name: {f.name: f for f in fields(_get(name, homes))}
            for name, home in homes.items()
            if home and name.endswith("Config")
        }
        defaults = {
            f"{config}.{name}": _default(by_name[name])
            for config, by_name in config_fields.items()
            for name in sorted(by_name.keys() & _WATCHED)
        }
        return {
            "versions": {name: version(name) for name in ("trl", "transformers", "torch")},
            "homes": homes,
            "signatures": {place: _signature(place, homes) for place in places},
            "defaults": defaults,
            "fields": {config: sorted(by_name) for config, by_name in config_fields.items()},
            "losses": _losses(known["losses"], homes, {**defaults, **known["defaults"]}),
        }


def compare(recorded: Surface, found: Surface) -> list[Moved]:
    """Return what differs between two surfaces; what hangs on a class that has gone is left out."""
    moved: list[Moved] = []
    gone = {_family(n) for n, home in recorded["homes"].items() if home and not found["homes"][n]}
    failed = set()
    for section in ("homes", "signatures", "defaults", "losses"):
        for place, old in recorded[section].items():
            new = found[section].get(place)
            if section == "defaults":
                if place not in found[section]:  # told as a field
                    continue
            else:
                old, new = old or "absent", new or "absent"
            if _same(old, new) or (section != "homes" and _family(place) in gone):
                continue
            if section == "losses" and isinstance(new, str):  # told once for all of a trainer
                if (_family(place), new) in failed:
                    continue
                failed.add((_family(place), new))
            whom = _concerns(section, place)
            moved.append(Moved(place, old, new, _since(place, old, new), whom))
    fates: dict[tuple[str, str, str, str | None], list[str]] = defaultdict(list)
    for config, names in recorded["fields"].items():
        for name in sorted({*names} ^ {*found["fields"].get(config, names)}):
            fate = ("present", "absent") if name in names else ("absent", "present")
            fates[name, *fate, _since(f"{config} field {name}", *fate)].append(config)
    for (name, old, new, since), configs in fates.items():
        to_list = "the lists of fields in rlhf_trl/algorithms.py"
        whom = to_list if new == "present" else "configs that set it"
        moved.append(Moved(f"{', '.join(configs)} field {name}", old, new, since, whom))
    for module, why in overrides()[1].items():
        moved.append(Moved(module, "can be imported", why, None, "the recipes that use it"))
    return moved


def report(moved: list[Moved], recorded: Surface, installed: Surface, as_json: bool = False) -> str:
    """Return the versions, then what moved a line each, or what was checked; or all as JSON."""
    sizes = {name: len(facts) for name, facts in recorded.items() if name != "versions"}
    sizes["fields"] = sum(map(len, recorded["fields"].values()))
    versions = {"recorded": recorded["versions"], "installed": installed["versions"]}
    if as_json:
        found = {**versions, "checked": sizes, "moved": [asdict(m) for m in moved]}
        return json.dumps(found, indent=2)
    lines = [
        f"{kind}: {', '.join(f'{k} {v}' for k, v in found.items())}"
        for kind, found in versions.items()
    ]
    checked = ", ".join(f"{n} {name}" for name, n in sizes.items())
    nothing = f"nothing moved since TRL {recorded['versions']['trl']}: {checked} checked"
    return "\n".join([*lines, *(map(str, moved) if moved else [nothing])])


def dump(surface: Surface) -> str:
    """Return a surface as JSON, a fact a line."""
    sections = []
    for name, facts in surface.items():
        lines = [f"    {json.dumps(place)}: {json.dumps(fact)}" for place, fact in facts.items()]
        sections.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n  }")
    return "{\n" + ",\n".join(sections) + "\n}\n"


@cache
def overrides() -> tuple[dict[str, set[str]], dict[str, str]]:
    """Return what our trainers override of TRL's, and by whom; and modules that do not import."""
    found: dict[str, set[str]] = defaultdict(set)
    failed: dict[str, str] = {}
    for module in pkgutil.iter_modules(trainers.__path__, f"{trainers.__name__}."):
        try:
            classes = vars(import_module(module.name)).values()
        except Exception as error:  # whatever another release breaks is what is reported
            failed[module.name] = stock.sentence(error)
            continue
        for cls in (c for c in classes if inspect.isclass(c) and c.__module__ == module.name):
            theirs = [c for c in cls.__mro__ if c.__module__.startswith("trl.")]
            if not theirs or not theirs[0].__name__.endswith("Trainer"):
                continue
            for owner in cls.__mro__[: cls.__mro__.index(theirs[0])]:
                for name, value in vars(owner).items():
                    if callable(value) and hasattr(theirs[0], name):
                        found[f"{theirs[0].__name__}.{name}"].add(owner.__name__)
    return found, failed


def _concerns(section: str, place: str) -> str:
    """Say whom it concerns: our classes that override it, or the rows that it reaches."""
    family, name = _family(place) or "GRPO", place.rpartition(".")[2]
    algorithms, rest = _RELY.get(family, ([], "whoever imports it"))
    everyone = ", ".join([*algorithms, rest])
    rows = {
        f"{algorithm} ({which})": row
        for algorithm in algorithms
        if algorithm in ALGORITHMS
        for which, row in ALGORITHMS[algorithm].formulations.items()
    }
    if section == "signatures":
        users = sorted(overrides()[0].get(place, ()))
        if not users and family == "GRPO":  # called, not overridden
            files = sorted(Path(trainers.__file__).parents[1].rglob("*.py"))
            users = [f.name for f in files if re.search(rf"\b{name}\b", f.read_text())]
        return ", ".join(users) or everyone
    if section == "defaults":
        own = {n for n, r in rows.items() if name in {**r.settings, **r.reads, **r.trainer_reads}}
        if own:
            reached = [f"the stock {family}Trainer", *(n for n in rows if n not in own)]
            return f"{', '.join(reached)}; not the rows that name it ({len(own)} formulations)"
    if section == "losses" and rows:
        case = {**stock.ONLINE, **stock.settings(place.partition(" ")[2])}
        equal = [
            n
            for n, r in rows.items()
            if r.trl is True and all(case.get(k, v) == v for k, v in r.settings.items())
        ]
        return ", ".join(equal) or f"the stock {family}Trainer"
    return everyone


def _family(place: str) -> str | None:
    found = re.match(r"([A-Z]\w*?)(Trainer|Config)\b", place)
    return found and found[1]


def _since(place: str, old: Any, new: Any) -> str | None:
    release, before, after = HISTORY.get(place, (None, None, None))
    return release if after == "absent" or {before, after} == {old, new} else None


def _same(old: Any, new: Any) -> bool:
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        return all(map(_near, old, new))
    return old == new and type(old) is type(new)


def _near(old: Any, new: Any) -> bool:
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= stock.TOLERANCE * max(abs(old), abs(new))
    return old == new


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], float):
        return f"loss {value[0]:g}, gradient {value[1]:g}"
    return str(value)


def _home(name: str, recorded: str | None) -> str | None:
    """Return the module that exports a class: where it was recorded, or else where it may be."""
    before = HISTORY[name][1] if name in HISTORY else None
    experimental = f"trl.experimental.{(_family(name) or '').lower()}"
    for module in filter(None, (recorded, before, "trl", experimental)):
        if inspect.isclass(_get(f"{module}.{name}", {})):
            return module
    return None


def _get(place: str, homes: dict[str, str | None]) -> Any:
    """Return what a dotted place, or a class at home, names; None if it is not there."""
    first = place.partition(".")[0]
    parts = (f"{homes[first]}.{place}" if homes.get(first) else place).split(".")
    for cut in range(len(parts) - 1, 0, -1):
        try:
            found: Any = import_module(".".join(parts[:cut]))
            for name in parts[cut:]:
                found = getattr(found, name)
            return found
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


def _losses(
    cases: dict[str, Any], homes: dict[str, str | None], defaults: dict[str, Any]
) -> dict[str, Any]:
    """Compute the losses of the trainers that are there; each is built once."""
    found: dict[str, Any] = {}
    for family in dict.fromkeys(map(_family, cases)):
        places = [f"{homes.get(name)}.{name}" for name in (f"{family}Trainer", f"{family}Config")]
        trainer, config = (_get(place, {}) for place in places)
        if trainer is None or config is None:
            continue
        its = [case for case in cases if _family(case) == family]
        known = {f.name for f in fields(config)}
        given = {
            name: value
            for (owner, _, name), value in ((k.partition("."), v) for k, v in defaults.items())
            if owner == config.__name__ and name in known
        }
        results = stock.losses(family, trainer, config, given, [c.partition(" ")[2] for c in its])
        found |= dict(zip(its, results, strict=True))
    return found


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings, logs and progress bars of the libraries from the reader."""
    os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")
    import datasets
    from transformers.utils import logging as transformers_logging

    level, bars = logging.root.manager.disable, datasets.is_progress_bar_enabled()
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
        transformers_logging.enable_progress_bar()
        if bars:
            datasets.enable_progress_bars()
