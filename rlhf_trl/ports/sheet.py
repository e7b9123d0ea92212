"""A config of the book's code becoming one of ours: both sides, and the text that comes out."""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.ports.book_fields import CHECKS, CONVERT, DEFAULTS, NOTES, NULLABLE, OF_KIND, TO
from rlhf_trl.run.stages import stage_of_config
from rlhf_trl.run.yaml_loader import dump_yaml

WIDTH = 100


class Sheet:
    """A config in the making: the book's on one side, the lines of the new one on the other."""

    def __init__(self, path: Any, given: dict[str, Any], kind: str, output: Any):
        self.path, self.given, self.kind, self.output = path, given, kind, output
        self.table = DEFAULTS[kind]
        self.lines: dict[str, tuple[Any, str]] = {}
        self.left_out: dict[str, str] = {}
        self.row: Any = None
        for name, value in given.items():
            if name not in self.table:
                hint = nearest(name, self.table)
                self.refuse(f"{name} is not a field of the book's code{hint}; remove it")
            self._check_type(name, value)
        for name, (fits, says) in CHECKS.items():
            if name in self.table and not fits(self[name]):
                self.refuse(f"{name} is {self[name]!r}{says}")

    def _check_type(self, name: str, value: Any) -> None:
        kind = NULLABLE.get(name, type(self.table[name]))
        if kind is type(None) or (value is None and name in NULLABLE):
            return
        words = {bool: "true or false", int: "a whole number", float: "a number", str: "a string"}
        fits = isinstance(value, int | float) if kind is float else isinstance(value, kind)
        if not fits or (isinstance(value, bool) and kind is not bool):
            self.refuse(f"{name} is {value!r}; write {words[kind]}")

    def refuse(self, why: str) -> NoReturn:
        """Stop with one sentence about the file."""
        raise InputError(f"{self.path}: {why}.")

    def __getitem__(self, name: str) -> Any:
        """Return what the code would use."""
        return self.given.get(name, self.table[name])

    def values(self, names: str) -> list[Any]:
        """Return what the code would use for several fields."""
        return [self[name] for name in names.split()]

    def write(self, to: str, value: Any, sources: str = "", note: str = "") -> None:
        """Write a field of the new config, with what it comes from and why it is what it is."""
        names = sources.split()
        self.left_out = {n: why for n, why in self.left_out.items() if n not in names}
        origins = [n if n in self.given else f"{n} (the code's default)" for n in names]
        origins = [] if origins == [to] else origins
        self.lines[to] = (value, ": ".join(part for part in (", ".join(origins), note) if part))

    def fix(self, **values: Any) -> None:
        """Write fields that the code has no field for, a value or a value with its note."""
        for to, value in values.items():
            self.write(to, *((value[0], "", value[1]) if isinstance(value, tuple) else (value,)))

    def leave_out(self, name: str, why: str) -> None:
        """Say that a field of the config has no counterpart."""
        if self.given.get(name) is not None:
            self.left_out[name] = why

    def move(self, algorithm: str | None = None, source: str = "") -> Mapping[str, Any]:
        """Write the row and every field that its line suffices for; return what the row reads."""
        reads: dict[str, Any] = {}
        if algorithm:
            self.row = algorithms.formulation(algorithm, "code")
            reads = {**self.row.reads, **self.row.trainer_reads}
            self.write("algorithm", algorithm, source)
            self.write("formulation", "code", note=self.row.differs)
        for name in self.table:
            to = OF_KIND.get(self.kind, TO).get(name, "")
            if algorithm and to in algorithms.LOSS_FIELDS - set(reads):
                self.leave_out(name, f"not read by {algorithm}")
            elif to and (value := self[name]) is not None:
                self.write(to, CONVERT.get(name, lambda v: v)(value), name, NOTES.get(name, ""))
            elif not to and name in NOTES:
                self.leave_out(name, NOTES[name])
        if "wandb_project" in self.table:
            self.write("report_to", "wandb" if self["wandb_project"] else "none", "wandb_project")
        if "output_dir" not in self.table:
            self.fix(output_dir=(f"outputs/{Path(self.path).stem}", "the code saves nothing"))
        return reads

    def text(self) -> str:
        """Return the YAML, whose loss has numbers that it can have."""
        reads = self.row.reads if self.row else ()
        try:
            if read := {to: value for to, (value, _) in self.lines.items() if to in reads}:
                self.row.parameters(read)
        except InputError as error:
            self.refuse(str(error))
        stage = stage_of_config({key: value for key, (value, _) in self.lines.items()}, self.path)
        parts = [
            f"# {Path(self.path).name} of the book's published code, for one process:\n"
            "# accelerate launch --config_file configs/accelerate/one_gpu.yaml "
            f"{stage.script} --config {self.output}\n"
        ]
        for to, (value, comment) in self.lines.items():
            parts.append(commented(dump_yaml({to: value}), comment))
        parts += ["# left out:\n"] * bool(self.left_out)
        parts += [_wrapped(f"  {name}: {why}") for name, why in self.left_out.items()]
        return "".join(parts)


def commented(body: str, comment: str) -> str:
    """Return a field of a YAML file with its comment behind it, or above it where it is long."""
    if not comment:
        return body
    one_line = f"{body.rstrip()} # {comment}\n"
    if body.count("\n") > 1 or len(one_line) > WIDTH:
        return _wrapped(comment) + body
    return one_line


def _wrapped(text: str) -> str:
    how = {"break_long_words": False, "break_on_hyphens": False}
    indent = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(text, WIDTH - 2, subsequent_indent=indent, **how)
    return "".join(f"# {line}\n" for line in lines)
