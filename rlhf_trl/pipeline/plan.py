"""A pipeline's YAML: one model and one data set, a list of stages, and who answers at the end."""

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError, nearest
from rlhf_trl.evaluation.probes import probe_file, read_probes
from rlhf_trl.models import EMBEDDED, UNTRAINED
from rlhf_trl.output import write_whole
from rlhf_trl.run.config_files import read_config, value_at
from rlhf_trl.run.folders import model_folder
from rlhf_trl.run.shipped import config_file
from rlhf_trl.run.stages import Stage, stage_of_config
from rlhf_trl.run.yaml_loader import dump_yaml

KEYS = ("output_dir", "common", "stages", "answers")
RESERVED = ("answers", "configs")  # folders beside those of the stages


@dataclass(frozen=True)
class PlannedStage:
    """One stage of a pipeline, and what its config says with everything laid over it."""

    name: str
    config: str  # the path of the recipe's config
    stage: Stage
    own: dict[str, Any]  # what stands over that config: the common keys, the stage's over them
    inputs: dict[str, list[str]]  # by dotted key that names an earlier stage: all that it names
    title: str | None = None  # for people

    def value(self, key: str) -> Any:
        """Return what the config says with all that stands over it; None of a key that is unset."""
        return value_at(_merged(read_config(self.config), self.own), key.split("."))

    def write(self, file: Path) -> None:
        """Write the config of its runs, which extends that of the recipe."""
        base = os.path.relpath(self.config, file.parent)
        write_whole(file, dump_yaml({"extends": base, **self.own}))


@dataclass(frozen=True, kw_only=True)
class Answers:
    """Which models answer the held-out prompts at the end, and what scores the answers."""

    prompts_of: str  # the stage whose held-out prompts and rewards they are
    reference: str | None = None  # the model that the KL is to; None: that stage's start
    proxy: str | None = None  # the stage whose reward model scores the answers
    gold: str | None = None  # the score that is really wanted
    samples: int = 4  # answers to each prompt at temperature 1
    checkpoints: bool = False  # whether every checkpoint answers, too
    probes: str | None = None  # a file of further prompts, which the ends of runs answer
    options: dict[str, Any] = field(default_factory=dict)  # over that stage's config


@dataclass(frozen=True)
class Plan:
    """A checked pipeline."""

    file: str
    folder: Path
    stages: dict[str, PlannedStage]
    answers: Answers

    def describe(self, seeds: int, reference: str) -> dict[str, Any]:
        """Return what the page reads of it; the KL of answers is to the model `reference`."""
        stages = {
            name: {
                "title": planned.title,
                "recipe": planned.stage.script,
                "config": planned.config,
                "algorithm": planned.value("algorithm"),
                "makes": planned.stage.makes,
                "inputs": planned.inputs,
            }
            for name, planned in self.stages.items()
        }
        answers = {**asdict(self.answers), "reference": reference}
        return {"pipeline": self.file, "seeds": seeds, "stages": stages, "answers": answers}


def read_plan(path: str, output_dir: str | None = None) -> Plan:
    """Read and check a pipeline's YAML.

    Args:
        path: of the YAML, or the name of one that ships (`pipeline/tiny`).
        output_dir: in place of the one it names.

    Raises:
        InputError: a key or a stage is unknown, or a stage reads a model that no stage before it
            makes and that is not there.
    """
    path = str(config_file(path))
    content = read_config(path)
    for key in content:
        if key not in KEYS:
            raise InputError(f"{path}: {key} is no key of a pipeline{nearest(key, KEYS)}.")
    written_stages = content.get("stages")
    if not isinstance(written_stages, dict) or not written_stages:
        raise InputError(f"{path}: stages is missing; list each as NAME: {{config: PATH}}.")
    folder = output_dir or content.get("output_dir")
    if not isinstance(folder, str):
        raise InputError(
            f"{path}: output_dir is missing; name the folder that the stages write to."
        )
    common = _mapping(content.get("common"), f"{path}: common")
    stages: dict[str, PlannedStage] = {}
    for name, own in written_stages.items():
        own = _mapping(own, f"{path}: stages.{name}")
        stages[name] = _stage(path, name, own, common, stages, [*written_stages])
    answers = _answers(path, _mapping(content.get("answers"), f"{path}: answers"), stages)
    return Plan(path, Path(folder), stages, answers)


def _mapping(value: Any, place: str) -> dict[str, Any]:
    """Return a block of the YAML, empty where it is not there; refuse what is none."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InputError(f"{place} is {value!r}; write keys and values below it.")
    return dict(value)


def _stage(
    path: str,
    name: str,
    own: dict[str, Any],
    common: Mapping[str, Any],
    earlier: Mapping[str, PlannedStage],
    names: Sequence[str],
) -> PlannedStage:
    """Return a stage: the config that it names, the common keys over it, its own over these.

    Args:
        path: of the pipeline's YAML, to which that of a config is relative.
        name: of the stage.
        own: its block; it is emptied of `config` and `title`.
        common: keys for all stages.
        earlier: the stages before it.
        names: of all stages.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) or name in RESERVED:
        raise InputError(
            f"{path}: {name!r} cannot be the name of a stage, which is that of a folder; write "
            f"letters, digits and _, and none of {', '.join(RESERVED)}."
        )
    config, title = own.pop("config", None), own.pop("title", None)
    if not isinstance(config, str):
        raise InputError(f"{path}: stages.{name}.config is missing; name the config of a recipe.")
    config = str(Path(path).parent / config)
    over = _merged(common, own)
    values = _merged(read_config(config), over)
    stage = stage_of_config(values, config)
    inputs = {}
    for key in sorted(stage.reads):
        value = value_at(values, key.split("."))
        models = [model for model in (value if isinstance(value, list) else [value]) if model]
        for model in models:
            if model in earlier:
                inputs[key] = models
            else:
                _check_elsewhere(f"{path}: stages.{name}.{key}", model, names)
    return PlannedStage(name, config, stage, over, inputs, title)


def _merged(below: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return two mappings as one: blocks are merged, of anything else `over` counts."""
    merged = dict(below)
    for key, value in over.items():
        both_blocks = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both_blocks else value
    return merged


def _check_elsewhere(place: str, model: Any, names: Sequence[str]) -> None:
    """Refuse what is no earlier stage, no model in a folder, and no name that a hub has.

    Args:
        place: file and key that name it.
        model: what it names.
        names: of all stages.
    """
    is_there = model in (EMBEDDED, UNTRAINED) or Path(str(model)).is_dir()
    with suppress(InputError):
        # a hub has models without an owner, too, but here they are rather stages misspelled
        is_there |= "/" in model and bool(model_folder("", model))
    if is_there:
        return
    what = "stands after it" if model in names else "is no stage before it, no folder"
    raise InputError(
        f"{place}: {model} {what}, so there is no model to read; name an earlier stage, the folder "
        f"of a model or OWNER/NAME on the hub{nearest(str(model), names)}."
    )


def _answers(path: str, own: dict[str, Any], stages: Mapping[str, PlannedStage]) -> Answers:
    """Return the block `answers` with its defaults, checked against the stages."""
    known = [item.name for item in fields(Answers)]
    for key in own:
        if key not in known:
            raise InputError(f"{path}: answers.{key} is no key here{nearest(key, known)}.")
    policies = [name for name, planned in stages.items() if planned.stage.makes == "policy"]
    prompted = [name for name in policies if stages[name].stage.prompted]
    if not policies:
        raise InputError(f"{path}: no stage trains a policy, so nobody could answer; add one.")
    # by default the first stage that samples while it trains, if any does
    own.setdefault("prompts_of", (prompted or policies)[0])
    judges = [name for name, planned in stages.items() if planned.stage.makes == "reward_model"]
    for key, names in (("prompts_of", policies), ("proxy", judges)):
        if key in own and own[key] not in names:
            raise InputError(
                f"{path}: answers.{key} is {own[key]}; name one of {', '.join(names) or 'none'}."
            )
    answers = Answers(**own)
    if not isinstance(answers.samples, int) or answers.samples < 1:
        raise InputError(f"{path}: answers.samples is {answers.samples}; write 1 or more.")
    if answers.probes is None:
        return answers
    if not isinstance(answers.probes, str):
        raise InputError(f"{path}: answers.probes is {answers.probes!r}; name a file.")
    probes = probe_file(answers.probes, Path(path).parent)
    read_probes(probes)  # refuses what is none before hours of training
    return replace(answers, probes=str(probes))
