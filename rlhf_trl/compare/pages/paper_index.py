"""TRL's paper index held against the papers: what each config of it computes, and what mends it."""

import ast
import json
import re
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from rlhf_trl.algorithms import ALGORITHMS, LOSS_FIELDS, SHARED_FIELDS
from rlhf_trl.compare.closest import Distance, distances
from rlhf_trl.compare.matrix import Matrix
from rlhf_trl.compare.models import quick_and_quiet
from rlhf_trl.compare.pages import report
from rlhf_trl.compare.subjects import TRAINERS, read_subject
from rlhf_trl.errors import InputError
from rlhf_trl.run.yaml_loader import dump_yaml

INDEX = Path(__file__).with_name("paper_index.json")
"""A copy of the configs in TRL's docs/source/paper_index.md, which its wheel does not have."""

ROW_OF_OTHER_PAPER = {"2501.12948": "grpo", "2510.00977": "grpo", "2312.09244": "reward"}
"""Papers that train by the equation of another: DeepSeek-R1, It Takes Two, Helping or Herding."""

REMARKS = {"2503.14476": " (the paper's text filters overlong completions, its equation does not)"}
"""What to say behind the fix of a paper's config."""


@dataclass(frozen=True)
class Claim:
    """A config that the index gives for a paper, named by its arXiv identifier or "no link"."""

    line: int
    section: str
    paper: str
    config: str
    fields: Mapping[str, Any]

    @property
    def algorithm(self) -> str:
        """The row whose equation the paper has, or ""."""
        link = f"arXiv:{self.paper}"
        rows = [name for name, row in ALGORITHMS.items() if row.paper == link]
        loss_type = self.fields.get("loss_type")
        if loss_type in rows:  # of several rows of the paper, the one that the config names
            return loss_type
        return rows[0] if rows else ROW_OF_OTHER_PAPER.get(self.paper, "")


def read_index(path: str | Path | None = None) -> tuple[str, list[Claim]]:
    """Return the source and the claims of the shipped index, or of another one in Markdown."""
    if path is None:
        content = json.loads(INDEX.read_text(encoding="utf-8"))
        return content["source"], [Claim(*claim) for claim in content["claims"]]
    try:
        claims = list(_claims(Path(path).read_text(encoding="utf-8"), path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--paper-index: {path} cannot be read: {error}") from error
    if not claims:
        raise InputError(f"--paper-index: {path} has no XConfig(...) in a block of ```python")
    return str(path), claims


def _claims(text: str, path: Any) -> Iterator[Claim]:
    """Yield a claim for each call of an XConfig in the Python blocks of a Markdown text."""
    for block in re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, block.start()) + 1  # of the block's first fence
        section, paper = _section_and_paper(text[: block.start()])
        code = re.sub(r"^\s*\.\.\.$", "", block[1], flags=re.MULTILINE)  # "..." for more fields
        try:
            tree = ast.parse(textwrap.dedent(code))
        except SyntaxError as error:
            raise InputError(f"--paper-index: {path}, line {line}: not Python: {error}") from error
        for node in ast.walk(tree):
            # a call by a plain name, such as GRPOConfig(...)
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            if name.endswith("Config"):
                yield Claim(line + node.lineno, section, paper, name, _literal_fields(node))


def _section_and_paper(before: str) -> tuple[str, str]:
    """Return the last heading of a text, and the first paper linked below it; "" for none."""
    # the text before the first heading, then a heading and the text below it in turn
    sections = re.split(r"^##+ (.*)\n", before, flags=re.MULTILINE)
    section = sections[-2].strip() if len(sections) > 1 else ""
    link = re.search(r"papers/(\d{4}\.\d{4,5})", sections[-1])
    return section, link[1] if link else ""


def _literal_fields(call: ast.Call) -> dict[str, Any]:
    """Return the keyword arguments of a call that are literals; other values are not known."""
    literals = {}
    for keyword in call.keywords:
        parts = ast.walk(keyword.value)
        if keyword.arg and not any(isinstance(part, ast.Name | ast.Call) for part in parts):
            literals[keyword.arg] = ast.literal_eval(keyword.value)
    return literals


def page(path: str | Path | None = None, output_format: str = "table") -> str:
    """Check every claim of an index; return the page as text, Markdown, HTML or JSON."""
    source, claims = read_index(path)
    matrix = Matrix()
    with quick_and_quiet():
        lines = [_line(claim, matrix) for claim in tqdm(claims, "paper index", disable=None)]
    if output_format == "json":
        return json.dumps(lines, indent=2)
    # cells such as "grpo: equal" or "grpo: cosine 0.9876, ...", see `_add_fix` and `_in_words`
    comparisons = [line["paper's equation"] for line in lines if line["paper's equation"] != "-"]
    compared = len(comparisons)
    equal = sum(comparison.endswith(": equal") for comparison in comparisons)
    built = sum(line["builds"] == "yes" for line in lines)
    head = f"""# TRL's paper index on TRL {version("trl")}

Source: {source}.
Generated by `rlhf-trl compare --paper-index --format markdown`.

Of {len(lines)} configs, {built} build on one process as they stand. {compared} were compared
with the equation of their paper as the table of algorithms has it: {equal} compute it. Cosine,
ratio and error are those of the gradient, on the batch where it is worst; prompts, lengths and
schedule are those of the batches. `then` is what the config gives with the fix, measured."""
    return f"{head}\n\n{report.table(lines, output_format)}"


def _line(claim: Claim, matrix: Matrix) -> dict[str, str]:
    """Return the line of a claim: what its config computes, and what brings it to the paper.

    The first columns are filled in from left to right, `_add_fix` fills in the last three. Where
    the config cannot be measured, one column has the reason and those after it keep "-".
    """
    loss_fields = LOSS_FIELDS | SHARED_FIELDS
    shown = {name: value for name, value in claim.fields.items() if name in loss_fields}
    line = {
        "line": str(claim.line),
        "paper": f"{claim.section} ({claim.paper or 'no link'})",
        "config": f"{claim.config}: {report.as_text(shown) or 'defaults'}",
        "builds": "-",
        "computes": "-",
        "paper's equation": "-",
        "fix": "-",
        "then": "-",
    }
    config = _config(claim.config)
    if config is None:
        return line | {"builds": _why_no_config(claim.config)}
    line["builds"] = _builds(config, claim.fields)
    trainer = claim.config.replace("Config", "Trainer")
    if trainer not in TRAINERS:
        return line | {"computes": f"not compared: {trainer}"}
    # `builds` names the fields that this TRL does not have; the others are measured
    names = {f.name for f in fields(config)}
    config_fields = {name: value for name, value in claim.fields.items() if name in names}
    with tempfile.TemporaryDirectory() as folder:
        measure = partial(_measured, Path(folder, "config"), trainer, matrix)
        try:
            measured = measure(config_fields)
            if claim.algorithm:
                _add_fix(line, claim, config_fields, measure)
        except InputError as error:  # also what the trainer refuses
            return line | {"computes": str(error)}
    return line | {"computes": _computed(measured)}


def _computed(measured: Sequence[Distance]) -> str:
    """Return the names of the formulations at no distance, or else the closest one."""
    equal = [distance.name for distance in measured if distance.equal]
    closest = measured[0]
    return ", ".join(equal) or f"none; closest {closest.name}: {_in_words(closest)}"


def _why_no_config(name: str) -> str:
    """Say why TRL has no config class of this name: it is PEFT's, as LoraConfig, or nobody's."""
    import peft

    if hasattr(peft, name):
        return "not a trainer"
    return f"no such class in TRL {version('trl')}"


def _builds(config: type, fields: Mapping[str, Any]) -> str:
    """Return "yes" if a config class takes these fields on one process, else why not."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            config(**{"output_dir": folder, "use_cpu": True, "bf16": False, **fields})
        except Exception as error:  # whatever TRL raises
            return f"no: {' '.join(str(error).split())}"
    return "yes"


def _measured(
    path: Path,
    trainer: str,
    matrix: Matrix,
    config_fields: Mapping[str, Any],
    *wanted: tuple[str, str],
    fixes: bool = False,
) -> list[Distance]:
    """Return how far a config of a trainer is from formulations: see `distances`.

    The config is written to a file first, so that it is read and checked like a user's config.

    Args:
        path: of that file, which is temporary.
        trainer: the name of a trainer of TRL.
        matrix: keeps what was measured for the next call.
        config_fields: the fields that the config sets.
        wanted: (algorithm, formulation) pairs; none: all that the trainer could compute.
        fixes: whether to look for changes of fields that bring the config closer.

    Raises:
        InputError: as `distances`, without the path, which no user knows.
    """
    path.write_text(dump_yaml({**config_fields}))
    try:
        return distances(read_subject(path, trainer), wanted, matrix, fixes)
    except InputError as error:
        raise InputError(str(error).replace(f"{path}, {trainer}: ", "")) from error


def _add_fix(
    line: dict[str, str],
    claim: Claim,
    config_fields: Mapping[str, Any],
    measure: Callable[..., list[Distance]],
) -> None:
    """Write into a line how far its config is from the paper's equation, and what mends it.

    Args:
        line: the cells of the claim's line by column, changed in place.
        claim: the config and its paper.
        config_fields: the fields of the config that the installed TRL has.
        measure: takes config fields and (algorithm, formulation) pairs: see `_measured`.
    """
    equation = (claim.algorithm, "chapter")
    (distance,) = measure(config_fields, equation, fixes=True)
    line["paper's equation"] = f"{claim.algorithm}: {_in_words(distance)}"
    if distance.changes:
        line["fix"] = report.as_text(distance.changes) + REMARKS.get(claim.paper, "")
        (after_changes,) = measure({**config_fields, **distance.changes}, equation)
        line["then"] = _in_words(after_changes)
    elif distance.equal:
        pass  # there is nothing to mend
    elif distance.why:  # the table of algorithms says why no settings give equality
        line["fix"] = distance.why
    elif distance.on_policy:  # equal on the first update after each generation
        line["fix"] = "one update per generation"
    else:
        line["fix"] = ""


def _config(name: str) -> Any:
    """Return a config class of TRL, experimental or not; None if there is none."""
    import trl

    homes: list[Any] = [trl]
    for init in sorted(Path(trl.__file__).parent.glob("experimental/*/__init__.py")):
        if re.search(rf"\b{name}\b", init.read_text(encoding="utf-8")):
            homes.append(import_module(f"trl.experimental.{init.parent.name}"))
    return next((getattr(home, name) for home in homes if hasattr(home, name)), None)


def _in_words(distance: Distance) -> str:
    """Return a distance in words."""
    if distance.untested:
        return f"not settled: {', '.join(distance.untested)} may act elsewhere"
    if distance.equal:
        return "equal"
    worst = distance.worst
    apart = f"cosine {worst.grad_cosine:.4f}, ratio {worst.grad_norm_ratio:.4f}"
    apart += f", error {worst.grad_rel_error:.1e}"
    return f"{apart}, equal on-policy" if distance.on_policy else apart
