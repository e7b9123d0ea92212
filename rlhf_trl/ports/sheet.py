"""A config of the book's code becoming one of ours: both sides, and the text that comes out."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.ports.book_fields import CONVERT, DEFAULTS, OF_KIND, OFF, TO, note_of
from rlhf_trl.ports.book_values import wrong_type, wrong_value
from rlhf_trl.ports.comments import Line, Note, as_comment, commented, launch_line
from rlhf_trl.run.stages import stage_of_config
from rlhf_trl.run.yaml_loader import dump_yaml


class Sheet:
    """A config in the making: the book's on one side, the lines of the new one on the other."""

    def __init__(self, path: Any, config: dict[str, Any], kind: str, output: Any):
        """Check the fields of a config of the book's code; no line is written yet.

        Args:
            path: the file, for messages.
            config: its fields; those of a block under a dotted name, such as "data.size".
            kind: a key of DEFAULTS.
            output: where the translation goes, for the command at its head.

        Raises:
            InputError: the code has no such field, or a value is not one for it.
        """
        self.path, self.config, self.kind, self.output = path, config, kind, output
        self.table = DEFAULTS[kind]  # the fields of the code, with its defaults
        self.lines: dict[str, Line] = {}  # by the names of the new fields
        self.left_out: dict[str, Note] = {}  # why the code's fields have no line, by their names
        self.row: Any = None  # the formulation that is trained; `write_by_tables` sets it
        for name, value in config.items():
            if name not in self.table:
                hint = nearest(name, self.table)
                self.refuse(f"{name} is not a field of the book's code{hint}; remove it")
            if fault := wrong_type(kind, name, value):
                self.refuse(fault)
        # only now that all types are right, as the rules compare numbers; the defaults are looked
        # at, too, for the code has no default of a field such as selection.strategy that would do
        for name in self.table:
            value = self[name]  # or the code's default
            if fault := wrong_value(name, value):
                self.refuse(fault)

    def refuse(self, why: str) -> NoReturn:
        """Stop with one sentence about the file."""
        raise InputError(f"{self.path}: {why}.")

    def __getitem__(self, name: str) -> Any:
        """Return what the code would use."""
        return self.config.get(name, self.table[name])

    def values(self, names: str) -> list[Any]:
        """Return what the code would use for several fields."""
        return [self[name] for name in names.split()]

    def write(self, to: str, value: Any, sources: str = "", note: Note = "") -> None:
        """Write a field of the new config, with what it comes from and why it is what it is."""
        names = tuple(sources.split())
        for name in names:
            self.left_out.pop(name, None)
        self.lines[to] = Line(value, note, names)

    def add(self, to: str, value: Any, note: Note = "") -> None:
        """Write a field of the new config that the code has no field for."""
        self.write(to, value, note=note)

    def set_note(self, to: str, note: Note) -> None:
        """Give a field of the new config, which is written already, another note."""
        line = self.lines[to]
        self.lines[to] = Line(line.value, note, line.sources)

    def leave_out(self, name: str, why: Note) -> None:
        """Say why a field of the code has no counterpart, unless a line is made of it already."""
        if not any(name in line.sources for line in self.lines.values()):
            self.left_out[name] = why

    def write_by_tables(self, algorithm: str | None = None, source: str = "") -> Mapping[str, Any]:
        """Write an algorithm, and every field of the code that the tables of `book_fields` cover.

        Args:
            algorithm: its name in the table of algorithms; None: the recipe has no choice of one.
            source: the field of the code that names the algorithm; "": none does.

        Returns:
            The fields that the algorithm's row reads, with their defaults; none without a row.
        """
        reads: Mapping[str, Any] = {}
        if algorithm:
            reads = self._write_row(algorithm, source)
        for name in self.table:
            self._write_or_leave_out(name, algorithm, reads)
        if "wandb_project" in self.table:
            tracker = "wandb" if self["wandb_project"] else "none"
            # a comment names the code's field once: at `project`, if that has been written above
            sources = "wandb_project" if "project" not in self.lines else ""
            self.write("report_to", tracker, sources)
        if "output_dir" not in self.table:
            self.add("output_dir", f"outputs/{Path(self.path).stem}", "the book's code saves none")
        return reads

    def _write_row(self, algorithm: str, source: str) -> Mapping[str, Any]:
        """Write the row of the table of algorithms; return what it reads, with its defaults."""
        self.row = algorithms.formulation(algorithm, "code")
        self.write("algorithm", algorithm, source)
        self.write("formulation", "code", note=f"Against the chapter: {self.row.differs}")
        return {**self.row.reads, **self.row.trainer_reads}

    def _write_or_leave_out(
        self, name: str, algorithm: str | None, reads: Mapping[str, Any]
    ) -> None:
        """Write what becomes of a field of the code by the tables, or why nothing does."""
        to = OF_KIND.get(self.kind, TO).get(name, "")
        value = self[name]
        is_off = name in OFF and value == OFF[name]
        note: Note = "" if is_off else note_of(self.kind, name)
        if algorithm and to in algorithms.LOSS_FIELDS and to not in reads:
            self.leave_out(name, f"not read by {algorithm}")
        elif to and value is not None:
            converted = CONVERT[name](value) if name in CONVERT else value
            self.write(to, converted, name, note)
        elif not to and note:
            self.leave_out(name, note)

    def check(self) -> None:
        """Refuse numbers that the loss cannot have, by the names that the code has for them."""
        reads = self.row.reads if self.row else ()
        values = {to: line.value for to, line in self.lines.items() if to in reads}
        if not values:
            return
        try:
            self.row.parameters(values)
        except InputError as error:
            fault = str(error).removesuffix(".")
            about = [to for to in values if re.search(rf"\b{to}\b", fault)]
            names = [name for to in about for name in self.lines[to].sources]
            self.refuse(": ".join([*names[:1], fault]))

    def text(self) -> str:
        """Return the YAML."""
        stage = stage_of_config({key: line.value for key, line in self.lines.items()}, self.path)
        parts = [
            f"# {Path(self.path).name} of the book's published code, for one process:\n",
            launch_line(stage.script, self.output),
        ]
        for to, line in self.lines.items():
            parts.append(commented(dump_yaml({to: line.value}), self._comment(to, line)))
        written = {n: why for n, why in self.left_out.items() if self.config.get(n) is not None}
        parts += ["# left out:\n"] * bool(written)
        parts += [as_comment(f"  {name}: {why}") for name, why in written.items()]
        return "".join(parts)

    def _comment(self, to: str, line: Line) -> str:
        """Return where a field comes from, unless its name says so, and its note."""
        origins = [name for name in line.sources if name in self.config]
        if line.sources and not origins:
            names = ", ".join(line.sources)
            origins = [f"{names} (the code's default)" if len(line.sources) < 4 else "its defaults"]
        origins = [] if origins == [to] else origins
        return ": ".join(part for part in (", ".join(origins), str(line.note)) if part)
