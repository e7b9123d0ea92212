"""The code of TRL, transformers and accelerate that a run executes, known by its hashes.

`sources.json` names every function of these libraries that a run of a stage, or a recorded loss,
executes, the classes that own them and the module constants that they read. Of the modules that
make a training step it names all the others, too, which other settings execute. Each is hashed by
its syntax tree, so that comments, docstrings and formatting do not count. What differs in the
installed files, or has been replaced in memory, is named in under a second, whatever it computes.
"""

import ast
import hashlib
import json
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import CodeType
from typing import Any, Literal

from rlhf_trl.run.stages import STAGES

LIBRARIES = ("trl", "transformers", "accelerate")
RECORD = Path(__file__).with_name("sources.json")

WHOLE = (
    "trl.data_utils",
    "trl.experimental.",
    "trl.kernels.",
    "trl.models.",
    "trl.trainer.",
    "transformers.data.data_collator",
    "transformers.optimization",
    "transformers.trainer",
    "accelerate.accelerator",
    "accelerate.data_loader",
    "accelerate.optimizer",
    "accelerate.scheduler",
)
"""Beginnings of the names of modules that are recorded whole where anything of them is executed."""

ALSO = (("transformers.models.mixtral.modeling_mixtral", "load_balancing_loss_func"),)
"""What TRL calls elsewhere, at settings that no recipe has."""

UNUSED = "-"
"""Stands for the stages that execute something, where none does, nor any recorded loss."""

Place = tuple[str, str]  # a module, and a name in it such as "Trainer.training_step"
Sources = dict[str, dict[str, Any]]
"""By module: "file", the hash of all of it; "units", by name [hash, stages that execute it];
"other", names that are never executed; "wrapped", by name the code that a decorator puts in place
of a function."""


@dataclass(frozen=True)
class Change:
    """A piece of code that is not what was recorded."""

    place: str  # such as "trl.trainer.grpo_trainer:GRPOTrainer._compute_loss"
    how: Literal["changed", "gone", "new", "replaced while running"]
    stages: tuple[str, ...]  # those that execute it; of new code, of what calls it

    def __str__(self) -> str:
        scripts = [f"recipes/{stage}.py" for stage in self.stages if stage != UNUSED]
        executing = ", ".join(scripts)
        if len(scripts) == len(STAGES):
            executing = "all recipes"
        elif self.stages == (UNUSED,):
            executing = "what other settings switch on"
        return f"{self.place}: {self.how}; executed by {executing or 'the recorded losses'}"


class Module:
    """The installed source of one module."""

    def __init__(self, name: str):
        self.name = name
        self.path = _path_of(name)
        self.content = self.path.read_bytes() if self.path else b""

    @property
    def file_hash(self) -> str:
        """The hash of the file as it lies there: where it is the recorded one, nothing changed."""
        return _hash(self.content)

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        """What is defined outside functions, by name: functions, classes and constants.

        A name has several nodes where branches define it, as a property and its setter do.
        """
        nodes: dict[str, list[ast.AST]] = defaultdict(list)

        def add(body: Iterable[ast.AST], inside: str) -> None:
            for node in body:
                if isinstance(node, ast.ClassDef):
                    nodes[inside + node.name].append(node)
                    add(node.body, f"{inside}{node.name}.")
                elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    nodes[inside + node.name].append(node)
                elif isinstance(node, ast.If | ast.Try | ast.With):
                    add(ast.iter_child_nodes(node), inside)
                elif isinstance(node, ast.ExceptHandler):
                    add(node.body, inside)
                elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign) and not inside:
                    for name in _names_assigned(node):
                        nodes[name].append(node)

        add(ast.parse(self.content).body, "")
        return dict(nodes)

    @cached_property
    def constants(self) -> set[str]:
        """The names that are given a value outside functions and classes."""
        assignments = (ast.Assign, ast.AnnAssign, ast.AugAssign)
        return {
            name
            for name, nodes in self.nodes.items()
            if all(isinstance(node, assignments) for node in nodes)
        }

    def unit_hash(self, name: str) -> str:
        """Return the hash of what a name stands for."""
        return _hash(repr([_plain(node, True) for node in self.nodes[name]]).encode())


@cache
def _path_of(module: str) -> Path | None:
    """Return the file of a module, without importing it where that is possible."""
    loaded = sys.modules.get(module)
    if loaded is not None:
        return Path(loaded.__file__) if getattr(loaded, "__file__", None) else None
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    path = Path(spec.submodule_search_locations[0]).joinpath(*rest)
    files = (path.with_suffix(".py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _names_assigned(node: ast.AST) -> Iterator[str]:
    """Yield the names that a statement gives a value to."""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    for target in targets:
        yield from (part.id for part in ast.walk(target) if isinstance(part, ast.Name))


def _plain(node: Any, is_unit: bool = False) -> Any:
    """Return a syntax tree as tuples that every Python from 3.11 on agrees on.

    Left out are docstrings, the help of config fields, empty fields (newer releases of Python have
    more of them), and a class's methods, which are units of their own.
    """
    if isinstance(node, list):
        return [_plain(part) for part in node]
    if not isinstance(node, ast.AST):
        return node
    content = {name: getattr(node, name, None) for name in node._fields}
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        body = node.body[1:] if ast.get_docstring(node, clean=False) is not None else node.body
        if is_unit and isinstance(node, ast.ClassDef):
            definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
            body = [part for part in body if not isinstance(part, definitions)]
        # the string after a field of a dataclass documents it
        content["body"] = [part for part in body if not _is_text(part)]
    if isinstance(node, ast.Call):
        content["keywords"] = [word for word in node.keywords if word.arg != "metadata"]
    if isinstance(node, ast.JoinedStr):
        content["values"] = [part for part in node.values if getattr(part, "value", None) != ""]
    if isinstance(node, ast.Constant):
        return "Constant", type(node.value).__name__, repr(node.value)
    filled = [(name, _plain(part)) for name, part in content.items() if part not in (None, [])]
    return type(node).__name__, filled


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def record(executed: Mapping[str, Iterable[Place]]) -> Sources:
    """Return the hashes of what was executed.

    Args:
        executed: by stage, what it executes; "" for the recorded losses.
    """
    stages_of: dict[Place, set[str]] = defaultdict(set)
    for stage, places in executed.items():
        for place in places:
            stages_of[place].add(stage)
    for name in {module for module, _ in stages_of if module.startswith(WHOLE)}:
        for unit in Module(name).nodes:
            stages_of[name, unit] = stages_of.get((name, unit)) or {UNUSED}
    for place in ALSO:
        stages_of[place] = stages_of.get(place) or {UNUSED}
    sources: Sources = {}
    for name in sorted({module for module, _ in stages_of}):
        module = Module(name)
        units = {
            unit: [module.unit_hash(unit), " ".join(sorted(stages_of[name, unit])).strip()]
            for unit in sorted(module.nodes)
            if (name, unit) in stages_of
        }
        import_module(name)
        sources[name] = {
            "file": module.file_hash,
            "other": sorted(module.nodes.keys() - units.keys()),
            "wrapped": {
                unit: _in_memory(module, unit).co_qualname
                for unit in units
                if _is_replaced(module, unit, None)
            },
            "units": units,
        }
    return sources


def dump(sources: Sources) -> str:
    """Return sources as JSON, a module a line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(facts)}" for name, facts in sources.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def shipped() -> Sources:
    """Return the sources that ship with the package, of the releases it is written for."""
    return json.loads(RECORD.read_text())


def changes(recorded: Sources | None = None) -> list[Change]:
    """Return what differs in the installed code from what was recorded, each piece once."""
    recorded = recorded or shipped()
    changed: dict[Place, Change] = {}
    edited: dict[str, Module] = {}
    for name, facts in recorded.items():
        module = Module(name)
        if module.file_hash != facts["file"]:
            edited[name] = module
        for unit, (unit_hash, stages) in facts["units"].items():
            how = None
            if name in edited and unit not in module.nodes:
                how = "gone"
            elif name in edited and module.unit_hash(unit) != unit_hash:
                how = "changed"
            elif _is_replaced(module, unit, facts["wrapped"].get(unit)):
                how = "replaced while running"
            if how:
                changed[name, unit] = Change(f"{name}:{unit}", how, tuple(stages.split()))
    return [*changed.values(), *_new(recorded, edited, changed)]


def _in_memory(module: Module, name: str) -> CodeType | None:
    """Return the code that a loaded module runs under a name; None for what is no function."""
    value: Any = sys.modules.get(module.name)
    for part in name.split("."):
        value = vars(value).get(part) if hasattr(value, "__dict__") else None
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    return getattr(value, "__code__", None)


def _is_replaced(module: Module, name: str, wrapper: str | None) -> bool:
    """Tell whether a loaded module runs other code under a name than its file has there.

    `wrapper` names the code that a decorator puts in its place, None without a decorator.
    """
    code = _in_memory(module, name)
    if code is None:
        return False
    if wrapper is not None:
        return code.co_qualname != wrapper
    return code.co_filename != str(module.path) or outer_name(code) != name


def outer_name(code: CodeType) -> str:
    """Return the name of the function outside functions to which a piece of code belongs."""
    return code.co_qualname.partition(".<locals>")[0]


def _new(
    recorded: Sources, edited: Mapping[str, Module], changed: Mapping[Place, Change]
) -> Iterator[Change]:
    """Yield functions that were not there when the sources were recorded and that are executed.

    One is executed if changed code, or new code that is executed, names it; if it overrides a
    method that is executed; or if it belongs to a new class that is used.
    """
    named: dict[str, set[str]] = defaultdict(set)  # stages, by a name that such code mentions

    def mention(place: Place, stages: Iterable[str]) -> None:
        for node in edited[place[0]].nodes.get(place[1], ()) if place[0] in edited else ():
            for part in ast.walk(node):
                mentioned = getattr(part, "attr", None) or getattr(part, "id", None)
                if mentioned:
                    named[mentioned].update(stages)

    for place, change in changed.items():
        mention(place, change.stages)
    methods: dict[str, set[str]] = defaultdict(set)  # stages, by the last name of a method
    for facts in recorded.values():
        for unit, (_, stages) in facts["units"].items():
            if "." in unit and stages != UNUSED:
                methods[unit.rpartition(".")[2]].update(stages.split())
    unknown = [
        (name, unit)
        for name, module in edited.items()
        for unit in module.nodes.keys() - recorded[name]["units"].keys()
        if unit not in recorded[name]["other"]
    ]
    found: dict[Place, set[str]] = {}
    before = None
    while found != before:  # until no new code leads to more of it
        before = dict(found)
        for name, unit in unknown:
            owner, _, last = unit.rpartition(".")
            is_known = owner in recorded[name]["units"]
            ways = [named[last]] if last in named and (is_known or not owner) else []
            if is_known and last in methods:
                ways.append(methods[last])
            if (name, owner) in found:
                ways.append(found[name, owner])
            if ways:
                found[name, unit] = set().union(*ways)
                mention((name, unit), found[name, unit])
    for (name, unit), stages in found.items():
        yield Change(f"{name}:{unit}", "new", tuple(sorted(stages)))
