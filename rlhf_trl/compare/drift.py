"""What moved in TRL: the installed release against the recorded surface, and whom it concerns."""

import inspect
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from rlhf_trl import trainers
from rlhf_trl.algorithms import ALGORITHMS, LOSS_FIELDS, SHARED_FIELDS
from rlhf_trl.compare.measure import sentence
from rlhf_trl.compare.surface import (
    ONLINE,
    TOLERANCE,
    Surface,
    family_of,
    read,
    relied_on,
    settings,
    shipped,
)
from rlhf_trl.run.stages import STAGES
from rlhf_trl.trainers.on_trl import OnTRL

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

# What relies on a trainer that no recipe stands on.
_RELY = {
    "RLOO": "the row rloo, which is held against it",
    "PPO": "the row ppo, which says that TRL has none",
    "PRM": "the row prm, which says that TRL has none",
}


@dataclass(frozen=True)
class Moved:
    """One thing that moved."""

    what: str  # its dotted name
    recorded: Any  # what the surface holds
    found: Any  # what the installed TRL has
    since: str | None  # the release that changed it, or None where the table does not know
    concerns: str  # whom it concerns

    def __str__(self) -> str:
        since = f" (changed in {self.since})" if self.since else ""
        old, new = _shown(self.recorded), _shown(self.found)
        return f"{self.what}: {old} -> {new}{since}; concerns {self.concerns}"


def check(recorded: Surface | None = None) -> tuple[list[Moved], Surface, Surface]:
    """Hold the installed TRL against a recorded surface, by default the shipped one.

    Returns:
        What moved, the recorded surface, and the installed one.
    """
    recorded = recorded or shipped()
    installed = read(recorded)
    return compare(recorded, installed), recorded, installed


def compare(recorded: Surface, found: Surface) -> list[Moved]:
    """Return what differs between two surfaces; what hangs on a class that has gone is left out."""
    moved: list[Moved] = []
    gone = {family_of(n) for n, home in recorded["homes"].items() if home and not found["homes"][n]}
    failed: dict[tuple[str, str], list[str]] = defaultdict(list)
    for section in ("homes", "signatures", "defaults", "losses"):
        # a method that has come may stand before one that is relied on
        come = found[section] if section == "signatures" else ()
        for place, old in {**dict.fromkeys(come), **recorded[section]}.items():
            if section != "homes" and family_of(place) in gone:
                continue
            new = found[section].get(place)
            if section == "defaults" and place not in found[section]:  # told as a field
                continue
            if section != "defaults":
                old, new = old or "absent", new or "absent"
            if section == "homes" and new == "absent" != old:
                new = _why_not(old, place)
            if section == "losses" and isinstance(new, str):
                failed[place.partition(" ")[0], new].append(place)
            elif not _same(old, new, 300 * TOLERANCE if "bf16=true" in place else TOLERANCE):
                whom = _concerns(section, place)
                moved.append(Moved(place, old, new, _since(place, old, new), whom))
    for (trainer, why), places in failed.items():
        what = places[0] if len(places) == 1 else f"{trainer}, {len(places)} losses"
        moved.append(Moved(what, "can be computed", why, None, _concerns("homes", trainer)))
    fates: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for config, names in recorded["fields"].items():
        for name in sorted({*names} ^ {*found["fields"].get(config, names)}):
            fate = ("present", "absent") if name in names else ("absent", "present")
            since = _since(f"{config} field {name}", *fate)
            fates[name, *fate, since, _concerns(fate[1], f"{config}.{name}")].append(config)
    for (name, *fate_and_whom), configs in fates.items():
        moved.append(Moved(f"{', '.join(configs)} field {name}", *fate_and_whom))
    for module, why in relied_on()[1].items():
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


def _concerns(section: str, place: str) -> str:
    """Say whom it concerns; the section is "present" or "absent" for a field that came or went."""
    family, name = family_of(place) or "GRPO", place.rpartition(".")[2]
    rows = {
        f"{algorithm} ({which})": row
        for algorithm in ALGORITHMS
        for which, row in ALGORITHMS[algorithm].formulations.items()
        if row.trainer == f"{family}Trainer"
    }
    scripts = [stage.script for stage in STAGES.values() if stage.stock == f"{family}Trainer"]
    others = ", ".join(scripts) or _RELY.get(family, f"what builds on {family}Trainer")
    everyone = ", ".join([*_joined(rows, rows), others])
    own = [n for n, r in rows.items() if name in {**r.settings, **r.reads, **r.trainer_reads}]
    if section == "present":
        listed = name in LOSS_FIELDS | SHARED_FIELDS
        fate = "which name it already" if listed else "one of which it must join if it does"
        return f"the lists of fields that touch a loss in rlhf_trl/algorithms/parameters.py, {fate}"
    if section == "absent":
        return ", ".join([*_joined(own, rows), "configs that set it"])
    if section == "signatures":
        classes = relied_on()[0].get(place, set())
        users = sorted(cls.__name__ for cls in classes)
        if family == "GRPO" and not name.startswith("__"):  # and who names it
            files = {*Path(trainers.__file__).parents[1].rglob("*.py")}
            files -= {Path(inspect.getfile(cls)) for cls in {*classes, OnTRL}}
            users += sorted(f.name for f in files if re.search(rf"\b{name}\b", f.read_text()))
        return ", ".join(users) or everyone
    if section == "defaults" and own:
        others = _joined([n for n in rows if n not in own], rows)
        reached = ", ".join([f"the stock {family}Trainer", *others])
        return f"{reached}; not the {len(own)} formulations that name it"
    if section == "losses" and rows:
        case = ONLINE | settings(place)
        equal = [
            n
            for n, r in rows.items()
            if r.trl is True and all(_agree(v, case.get(k, v)) for k, v in r.settings.items())
        ]
        return ", ".join(_joined(equal, rows)) or f"the stock {family}Trainer"
    return everyone


def _agree(setting: Any, value: Any) -> bool:
    """Tell whether a row's setting, of which a list is a sum of losses, has or holds a value."""
    return callable(setting) or setting == value or (isinstance(setting, list) and value in setting)


def _joined(labels: Iterable[str], rows: Iterable[str]) -> list[str]:
    """Write "grpo" where all formulations of an algorithm are meant, else "grpo (chapter)"."""
    rest = {label.split()[0] for label in rows if label not in labels}
    names = [label if label.split()[0] in rest else label.split()[0] for label in labels]
    return list(dict.fromkeys(names))


def _since(place: str, old: Any, new: Any) -> str | None:
    release, before, after = HISTORY.get(place, (None, None, None))
    known = after == "absent" or (before, after) in ((old, new), (new, old))
    return release if known else None


def _same(old: Any, new: Any, tolerance: float = TOLERANCE, least: float = 0.0) -> bool:
    """Tell whether two facts are equal up to rounding, of numbers of a size of `least` or more."""
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        # terms of both signs make losses near 0
        return all(_same(a, b, tolerance, 0.01) for a, b in zip(old, new, strict=True))
    if isinstance(old, float) and isinstance(new, float):
        return abs(old - new) <= tolerance * max(abs(old), abs(new), least)
    return old == new and type(old) is type(new)


def _shown(value: Any) -> str:
    if isinstance(value, list) and len(value) == 2 and isinstance(value[0], float):
        return f"loss {value[0]:g}, gradient {value[1]:g}"
    return str(value)


def _why_not(home: str, name: str) -> str:
    """Return "absent", or the error that keeps a class that is there from being imported."""
    try:
        getattr(import_module(home), name)
    except (AttributeError, ModuleNotFoundError):
        return "absent"
    except Exception as error:
        return sentence(error)
    return "absent"
