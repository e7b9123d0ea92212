"""What moved in TRL: the installed release against the recorded surface, and whom it concerns."""

import inspect
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from rlhf_trl import trainers
from rlhf_trl.algorithms import ALGORITHMS, LOSS_FIELDS, SHARED_FIELDS, Formulation
from rlhf_trl.compare.drift.sources import Change
from rlhf_trl.compare.drift.sources import shipped as sources
from rlhf_trl.compare.drift.surface import (
    ONLINE,
    RUNS,
    RUNS_OF_TWO,
    TOLERANCE,
    Surface,
    family_of,
    read,
    relied_on,
    settings,
    shipped,
)
from rlhf_trl.compare.measure import sentence
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

Facts = Mapping[str, Any]  # a section of a surface
# The formulations that stand on one stock trainer, by labels such as "grpo (chapter)".
RowsByLabel = Mapping[str, Formulation]

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


def check(
    recorded: Surface | None = None, processes: int = 1
) -> tuple[list[Moved], Surface, Surface]:
    """Hold the installed TRL against a recorded surface, by default the shipped one.

    Runs on two processes are measured where `processes` is 2.

    Returns:
        What moved, the recorded surface without what is not measured, and the installed one.
    """
    recorded = dict(recorded or shipped())
    if processes == 1:
        recorded.pop(RUNS_OF_TWO, None)
    installed = read(recorded)
    return compare(recorded, installed), recorded, installed


def compare(recorded: Surface, installed: Surface) -> list[Moved]:
    """Return what differs between the recorded and the installed surface.

    A trainer or config that has gone is one difference: its signatures, defaults and losses, which
    have gone with it, are not listed. A module of ours that cannot be imported with the installed
    TRL is among the differences, too.
    """
    # as `family_of` names them: "GRPO" where GRPOTrainer or GRPOConfig has gone
    gone_families = {
        family_of(name)
        for name, home in recorded["homes"].items()
        if home and not installed["homes"][name]
    }
    moved = [
        *_moved_homes(recorded["homes"], installed["homes"]),
        *_moved_signatures(recorded["signatures"], installed["signatures"], gone_families),
        *_moved_defaults(recorded["defaults"], installed["defaults"], gone_families),
        *_moved_losses(recorded["losses"], installed["losses"], gone_families),
        *_moved_metrics(recorded, installed),
        *_moved_runs(RUNS, recorded, installed, gone_families),
        *_moved_runs(RUNS_OF_TWO, recorded, installed, gone_families),
        *_moved_fields(recorded["fields"], installed["fields"]),
    ]
    _, not_importable = relied_on()
    for module, why in not_importable.items():
        concerned = "the recipes that use it"
        moved.append(
            Moved(module, recorded="can be imported", found=why, since=None, concerns=concerned)
        )
    return moved


def _moved(section: str, place: str, old: Any, new: Any) -> Moved:
    """Return one thing that moved, with the release and whom it concerns."""
    return Moved(place, old, new, _since(place, old, new), _concerns(section, place))


def _moved_homes(recorded: Facts, installed: Facts) -> Iterator[Moved]:
    """Yield the classes that another module exports than before, or none.

    A home of None says that no module exports the class.
    """
    for name, old_home in recorded.items():
        old = old_home or "absent"
        new = installed.get(name) or "absent"
        if new == "absent" and old != "absent":
            new = _why_not(old, name)
        if not _same(old, new):
            yield _moved("homes", name, old, new)


def _moved_signatures(
    recorded: Facts, installed: Facts, gone_families: Collection[str | None]
) -> Iterator[Moved]:
    """Yield the functions with another signature, and methods that have come or gone."""
    # also those of `installed`: a method that has come may override one that is relied on
    for place in dict.fromkeys([*installed, *recorded]):
        old = recorded.get(place) or "absent"
        new = installed.get(place) or "absent"
        if family_of(place) not in gone_families and not _same(old, new):
            yield _moved("signatures", place, old, new)


def _moved_defaults(
    recorded: Facts, installed: Facts, gone_families: Collection[str | None]
) -> Iterator[Moved]:
    """Yield the fields with another default; `_moved_fields` has the fields that have gone."""
    for place, old in recorded.items():
        if place not in installed or family_of(place) in gone_families:
            continue
        if not _same(old, installed[place]):
            yield _moved("defaults", place, old, installed[place])


def _moved_losses(
    recorded: Facts, installed: Facts, gone_families: Collection[str | None]
) -> Iterator[Moved]:
    """Yield the losses that differ, then those that cannot be computed.

    Losses of one trainer that fail by the same error are one difference.

    Args:
        recorded: for each case, a trainer and its settings such as "GRPOTrainer loss_type=grpo":
            [loss, gradient norm], or None for a loss that is to be watched and is not recorded yet.
        installed: the same of the installed TRL, or the error that a case raises.
        gone_families: the trainers that the installed TRL lacks, see `family_of`.
    """
    failed: dict[tuple[str, str], list[str]] = defaultdict(list)  # cases by trainer and error
    for case, old_loss in recorded.items():
        if family_of(case) in gone_families:
            continue
        old = old_loss or "absent"
        new = installed.get(case) or "absent"
        # losses in bfloat16 may differ by 3 % between machines
        tolerance = 300 * TOLERANCE if "bf16=true" in case else TOLERANCE
        if isinstance(new, str):
            trainer = case.partition(" ")[0]
            failed[trainer, new].append(case)
        elif not _same(old, new, tolerance):
            yield _moved("losses", case, old, new)
    for (trainer, why), cases in failed.items():
        what = cases[0] if len(cases) == 1 else f"{trainer}, {len(cases)} losses"
        # a loss that cannot be computed concerns everybody who uses the trainer: "homes" lists them
        concerned = _concerns("homes", trainer)
        yield Moved(what, recorded="can be computed", found=why, since=None, concerns=concerned)


def _moved_metrics(recorded: Surface, installed: Surface) -> Iterator[Moved]:
    """Yield each metric of a trainer that is logged otherwise, with the first case that shows it.

    Cases whose losses moved, or cannot be computed, are left out: they are named for that.
    """
    first_moves: dict[tuple[str, str], tuple[str, Any, Any]] = {}  # by trainer and metric
    counts: Counter[tuple[str, str]] = Counter()
    for case, old_metrics in recorded["metrics"].items():
        losses = (recorded["losses"].get(case), installed["losses"].get(case))
        new_metrics = installed["metrics"].get(case)
        if new_metrics is None or not _same(*losses):
            continue
        for name, old in old_metrics.items():
            new = new_metrics.get(name, "absent")
            if _same(old, new, least=1.0):  # means of what cancels, as margins, round like 1
                continue
            trainer, _, settings_of_case = case.partition(" ")
            counts[trainer, name] += 1
            first_moves.setdefault((trainer, name), (settings_of_case, old, new))
    for (trainer, name), (case, old, new) in first_moves.items():
        count = counts[trainer, name]
        others = f" and {count - 1} more" if count > 1 else ""
        yield _moved("metrics", f"{trainer} metric {name}, {case}{others}", old, new)


def _moved_runs(
    section: str, recorded: Surface, installed: Surface, gone_families: Collection[str | None]
) -> Iterator[Moved]:
    """Yield for each trainer what happens otherwise in its run.

    It is the first value that differs of the first fact that does; others are named beside it.
    """
    moves: dict[str, list[Moved]] = defaultdict(list)  # by trainer
    for moved in _moved_facts(section, recorded, installed):
        moves[moved.what.split()[0]].append(moved)
    for trainer, (first, *others) in moves.items():
        if family_of(trainer) in gone_families:
            continue
        # the name of a fact stands between the trainer's and the number of a value
        names = [other.what.partition(" ")[2].partition(",")[0] for other in others]
        suffix = f" (and {', '.join(names)})" if names else ""
        yield replace(first, what=first.what + suffix)


def _moved_facts(section: str, recorded: Surface, installed: Surface) -> Iterator[Moved]:
    """Yield the facts of runs that differ, each with the first of its values that does."""
    old_facts = recorded.get(section, {})
    new_facts = installed.get(section, {})
    suffix = " on two processes" if section == RUNS_OF_TWO else ""
    for place, old_values in old_facts.items():
        if f"{place.split()[0]} run" in new_facts:
            continue
        what = place + suffix
        new_values = new_facts.get(place, [])
        if len(old_values) != len(new_values):
            yield _moved("runs", what, f"{len(old_values)} values", f"{len(new_values)} values")
            continue
        for number, (old, new) in enumerate(zip(old_values, new_values, strict=True), start=1):
            if not _same(old, new, least=0.01):
                yield _moved("runs", f"{what}, value {number} of {len(old_values)}", old, new)
                break
    for place in new_facts.keys() - old_facts.keys():
        has_failed = place.endswith(" run")
        new = new_facts[place] if has_failed else f"{len(new_facts[place])} values"
        yield _moved("runs", place + suffix, "can be made" if has_failed else "absent", new)


def _moved_fields(recorded: Facts, installed: Facts) -> Iterator[Moved]:
    """Yield the fields that have come or gone: once for all configs of which the same is to say."""
    configs_of: dict[Moved, list[str]] = defaultdict(list)  # by a difference without its configs
    for config, old_names in recorded.items():
        new_names = installed.get(
            config, old_names
        )  # a config that has gone is no matter of fields
        for name in sorted({*old_names} ^ {*new_names}):
            has_come = name in new_names
            old, new = ("absent", "present") if has_come else ("present", "absent")
            since = _since(f"{config} field {name}", old, new)
            concerned = _concerns_field(f"{config}.{name}", has_come)
            alike = Moved(what=name, recorded=old, found=new, since=since, concerns=concerned)
            configs_of[alike].append(config)
    for moved, configs in configs_of.items():
        yield replace(moved, what=f"{', '.join(configs)} field {moved.what}")


def report(
    moved: Sequence[Moved],
    changes: Sequence[Change],
    recorded: Surface,
    installed: Surface,
    as_json: bool = False,
) -> str:
    """Return the versions, then a line for each thing that moved; with `as_json` all as JSON.

    Code that changed follows what it may have moved. Where nothing moved or changed, the last line
    says how much was checked.
    """
    sizes = {name: len(facts) for name, facts in recorded.items() if name != "versions"}
    sizes["fields"] = sum(map(len, recorded["fields"].values()))  # of all configs, not configs
    sizes["functions and classes"] = sum(len(facts["units"]) for facts in sources().values())
    versions = {"recorded": recorded["versions"], "installed": installed["versions"]}
    if as_json:
        content = {
            **versions,
            "checked": sizes,
            "moved": [asdict(thing) for thing in moved],
            "code": [asdict(change) for change in changes],
        }
        return json.dumps(content, indent=2)
    lines = []
    for kind, of_libraries in versions.items():
        lines.append(f"{kind}: {', '.join(f'{name} {v}' for name, v in of_libraries.items())}")
    if moved:
        lines += ["moves what is computed:", *map(str, moved)]
    old_code = [str(change) for change in changes if change.how != "new"]
    new_code = [str(change) for change in changes if change.how == "new"]
    if old_code:
        title = "code that changed:" if moved else "changed, and no measurement differs:"
        lines += [title, *old_code]
    if new_code:
        lines += ["new, executed and never recorded:", *new_code]
    if not moved:
        checked = ", ".join(f"{size} {name}" for name, size in sizes.items())
        lines.append(f"nothing moved since TRL {recorded['versions']['trl']}: {checked} checked")
    return "\n".join(lines)


def _concerns_field(place: str, has_come: bool) -> str:
    """Say whom it concerns that a field, such as "GRPOConfig.beta", has come, or else has gone."""
    name = place.rpartition(".")[2]
    if has_come:
        listed = name in LOSS_FIELDS | SHARED_FIELDS
        fate = "which name it already" if listed else "one of which it must join if it does"
        return f"the lists of fields that touch a loss in rlhf_trl/algorithms/parameters.py, {fate}"
    rows = _rows_on(family_of(place) or "GRPO")
    return ", ".join([*_shortened(_rows_with_field(name, rows), rows), "configs that set it"])


def _concerns(section: str, place: str) -> str:
    """Say whom it concerns that something in a section of the surface moved.

    Args:
        section: that section of the surface.
        place: what moved there, such as "GRPOConfig.beta" among the defaults.
    """
    # what belongs to no trainer, as a method of Accelerator, is looked for as GRPO's: see `_users`
    family = family_of(place) or "GRPO"
    name = place.rpartition(".")[2]
    rows = _rows_on(family)
    if section == "signatures":
        return ", ".join(_users(place, name, family)) or _all_users(family, rows)
    rows_with_field = _rows_with_field(name, rows)
    if section == "defaults" and rows_with_field:
        # a row that sets or reads the field has a value of its own, whatever the default is
        taking_default = [label for label in rows if label not in rows_with_field]
        reached = ", ".join([f"the stock {family}Trainer", *_shortened(taking_default, rows)])
        return f"{reached}; not the {len(rows_with_field)} formulations that name it"
    if section == "losses" and rows:
        # only a row that TRL computes with settings (`trl` is True) changes with TRL's loss
        equal = [label for label, row in rows.items() if row.trl is True and _is_case(row, place)]
        return ", ".join(_shortened(equal, rows)) or f"the stock {family}Trainer"
    return _all_users(family, rows)


def _rows_with_field(field: str, rows: RowsByLabel) -> list[str]:
    """Return the labels of the rows that set or read a field."""
    return [
        label
        for label, row in rows.items()
        if field in {**row.settings, **row.reads, **row.trainer_reads}
    ]


def _rows_on(family: str) -> RowsByLabel:
    """Return the formulations that stand on a stock trainer.

    `family` is the trainer's name without "Trainer".
    """
    return {
        f"{algorithm} ({formulation_name})": row
        for algorithm in ALGORITHMS
        for formulation_name, row in ALGORITHMS[algorithm].formulations.items()
        if row.trainer == f"{family}Trainer"
    }


def _all_users(family: str, rows: RowsByLabel) -> str:
    """Return the algorithms and scripts that stand on a stock trainer, as words."""
    scripts = [stage.script for stage in STAGES.values() if stage.stock == f"{family}Trainer"]
    others = ", ".join(scripts) or _RELY.get(family, f"what builds on {family}Trainer")
    return ", ".join([*_shortened(rows, rows), others])


def _users(place: str, name: str, family: str) -> list[str]:
    """Return our classes that override or call a method, and for GRPO the files that name it.

    The methods of GRPOTrainer, and those of no trainer, for which `family` is "GRPO" as well, are
    also used outside our trainers. So all files of the package are searched for the name.

    Args:
        place: the dotted name of the method.
        name: the method's own name.
        family: the trainer's name without "Trainer".
    """
    methods, _ = relied_on()
    classes = methods.get(place, set())
    users = sorted(cls.__name__ for cls in classes)
    if family == "GRPO" and not name.startswith("__"):
        package = Path(trainers.__file__).parents[1]
        # the classes stand for their own files, and for that of OnTRL, from which all derive
        already_named = {Path(inspect.getfile(cls)) for cls in {*classes, OnTRL}}
        files = {*package.rglob("*.py")} - already_named
        users += sorted(file.name for file in files if re.search(rf"\b{name}\b", file.read_text()))
    return users


def _is_case(row: Formulation, case: str) -> bool:
    """Tell whether a recorded loss is computed with the settings of a row."""
    values = ONLINE | settings(case)
    # a setting that the case leaves open has the row's value
    return all(_agree(setting, values.get(key, setting)) for key, setting in row.settings.items())


def _agree(setting: Any, value: Any) -> bool:
    """Tell whether a value is a row's setting, or one of its losses where that lists several.

    A setting that is a function of the row's parameters agrees with any value.
    """
    return callable(setting) or setting == value or (isinstance(setting, list) and value in setting)


def _shortened(labels: Iterable[str], rows: RowsByLabel) -> list[str]:
    """Shorten "grpo (chapter)" to "grpo" where `labels` has all formulations of it in `rows`."""
    labels = list(labels)
    incomplete = {label.split()[0] for label in rows if label not in labels}
    names = {}  # in their order, each once
    for label in labels:
        algorithm = label.split()[0]
        names[label if algorithm in incomplete else algorithm] = None
    return list(names)


def _since(place: str, old: Any, new: Any) -> str | None:
    """Return the release in which a change was made, in either direction, or None if not known."""
    release, before, after = HISTORY.get(place, (None, None, None))
    is_known = after == "absent" or (before, after) in ((old, new), (new, old))
    return release if is_known else None


def _same(old: Any, new: Any, tolerance: float = TOLERANCE, least: float = 0.0) -> bool:
    """Tell whether two facts are equal, numbers up to rounding.

    `tolerance` is relative to the larger number, but at least to `least`.
    """
    if isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        # losses near 0 are sums of terms of both signs, whose rounding does not shrink with the sum
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
