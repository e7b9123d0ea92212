"""What a comment of a translated config says of its field, and how a file holds it."""

import textwrap
from dataclasses import dataclass
from typing import Any

WIDTH = 100


@dataclass(frozen=True)
class Differs:
    """How a field differs: what the code that is translated does, and what is done here."""

    code: str  # goes on behind "the book's code"
    here: str

    def __str__(self) -> str:
        return f"the book's code {self.code}; here {self.here}"


Note = str | Differs  # a str is what to know of a field that does not differ


@dataclass(frozen=True)
class Line:
    """A field of a translated config."""

    value: Any
    note: Note = ""  # how it differs, or what to know
    sources: tuple[str, ...] = ()  # the fields there that it is made of


def commented(body: str, comment: str) -> str:
    """Return a field of a YAML file with its comment behind it, or above it where it is long."""
    if not comment:
        return body
    one_line = f"{body.rstrip()} # {comment}\n"
    if body.count("\n") > 1 or len(one_line) > WIDTH:
        return as_comment(comment) + body
    return one_line


def launch_line(script: str, output: Any, processes: int = 1, on_cpu: bool = False) -> str:
    """Return a comment with the command that runs a recipe with the translated config.

    It is one line, however long, to be copied.
    """
    if processes > 1:
        name = "cpu_2proc" if on_cpu else "ddp"
        options = f" --num_processes {processes}"
    else:
        name = "cpu" if on_cpu else "one_gpu"
        options = ""
    launch = f"configs/accelerate/{name}.yaml{options}"
    return f"# accelerate launch --quiet --config_file {launch} {script} --config {output}\n"


def as_comment(text: str) -> str:
    """Return lines of a comment; further ones are indented as the first."""
    how = {"break_long_words": False, "break_on_hyphens": False}
    indent = text[: len(text) - len(text.lstrip())]
    lines = textwrap.wrap(text, WIDTH - 2, subsequent_indent=indent, **how)
    return "".join(f"# {line}\n" for line in lines)
