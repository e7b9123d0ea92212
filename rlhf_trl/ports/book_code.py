"""A config of the book's published code, as one for this project's recipes."""

from pathlib import Path
from typing import Any

from rlhf_trl import algorithms
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.output import write_whole
from rlhf_trl.ports.book_fields import DEFAULTS
from rlhf_trl.ports.book_kinds import FILL
from rlhf_trl.ports.explain import explain_book
from rlhf_trl.ports.sheet import Sheet
from rlhf_trl.ports.trl_config import is_of_trl, read_trl
from rlhf_trl.run.yaml_loader import read_yaml


def translate(
    path: str | Path, output: str | Path = "THIS_FILE", command: str | None = None
) -> str:
    """Translate a YAML config of the book's code for a recipe, whose command has the `output`.

    A config of TRL is translated, too: see `trl_config`.

    Args:
        path: the config.
        output: where the translation goes, for the command at its head.
        command: the command of TRL that the config is for; None: see by its fields.

    Raises:
        InputError: a field is unknown, a value is wrong, or something does not carry over.
    """
    values = read_yaml(path)
    if command is not None or is_of_trl(values):
        return read_trl(path, values, command).text(output)
    return read_book(path, values, output).text()


def explain(path: str | Path, command: str | None = None) -> str:
    """Return a table of a translation, field by field, and of what is trained on both sides."""
    values = read_yaml(path)
    if command is not None or is_of_trl(values):
        return read_trl(path, values, command).explained()
    return explain_book(read_book(path, values))


def read_book(path: str | Path, values: dict[str, Any], output: str | Path = "THIS_FILE") -> Sheet:
    """Return the values of a config of the book's code beside their translation."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name not in ("data", "selection"):
            flat[name] = value
        elif isinstance(value, dict):
            flat |= {f"{name}.{key}": inner for key, inner in value.items()}
        else:
            raise InputError(f"{path}: {name} is {value!r}; write a mapping.")
    sheet = Sheet(path, flat, _kind(path, flat), output)
    FILL[sheet.kind](sheet)
    sheet.check()
    return sheet


def write_translation(path: str | Path, output: str | Path, command: str | None = None) -> None:
    """Translate a config into a new file; one that is there already is an InputError."""
    text = translate(path, output, command)
    if Path(output).exists():
        raise InputError(f"--output: {output} exists; name a new file.")
    write_whole(output, lambda part: part.write_text(text, encoding="utf-8"))


def _kind(path: Any, values: dict[str, Any]) -> str:
    """Return the kind of a config, a key of DEFAULTS, by its loss, else by the fields that it has.

    Some kinds have no `loss`, others may leave it at its default. Then the kind that has most of
    the fields is taken, so that one misspelled field is refused by its name, not the whole config.
    """
    kind_of_loss: dict[str, str] = {}
    for family, kind in (
        ("policy_gradient", "policy_gradients"),
        ("direct_alignment", "direct_alignment"),
        ("distillation", "distillation"),
    ):
        kind_of_loss |= dict.fromkeys(algorithms.names(family, "code"), kind)
    loss = values.get("loss")
    if loss is not None:
        if not isinstance(loss, str) or loss not in kind_of_loss:
            hint = nearest(loss, kind_of_loss) if isinstance(loss, str) else ""
            losses = ", ".join(kind_of_loss)
            raise InputError(f"{path}: loss is {loss!r}{hint}; write one of {losses}.")
        return kind_of_loss[loss]
    known_fields = {kind: len(values.keys() & fields.keys()) for kind, fields in DEFAULTS.items()}
    most = max(known_fields.values())
    best = [kind for kind, count in known_fields.items() if count == most]
    if len(best) > 1:
        raise InputError(
            f"{path}: this is not a config of the book's code: its fields fit {', '.join(best)} "
            "alike; write those of one, such as its loss."
        )
    return best[0]
