"""The table of algorithms in words: from the rows, the docstrings and TRL's source."""

import inspect
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_trl.algorithms import ALGORITHMS, FORMULATIONS, Formulation, algorithm

# Where in TRL's grpo_trainer.py the counterpart of a part stands: a pattern, and what it is. The
# patterns are looked up in the installed file, so the line numbers are those of that version.
_IN_TRL = {
    "group_standardised": (r"std_rewards \+ 1e-4", "advantages divided by the standard deviation"),
    "group_centred": (r"advantages = rewards - mean_grouped_rewards", "advantages, centred"),
    "token_ratio": (r"log_importance_weights = log_ratio$", "ratio of each token"),
    "sequence_ratio": (r"\(log_ratio \* mask\)\.sum\(-1\) / mask\.sum", "ratio of the sequence"),
    "clipped_ratio": (r"-torch\.min\(per_token_loss1, per_token_loss2\)", "clipped surrogate"),
    "clipped_importance_weight": (r"torch\.clamp\(coef_1, max=self\.epsilon_high\)", "weight"),
    "soft_gate": (r"torch\.sigmoid\(temperatures", "soft gate"),
    "sequence_mean": (r'if self\.loss_type in \["grpo", "sapo"\]', "mean over each sequence"),
    "fixed_length": (r"per_token_loss\.size\(0\) \* self\.max_completion_length", "fixed length"),
    "token_mean": (r'self\.loss_type in \["cispo", "dapo", "vespo"\]', "mean over all tokens"),
}
PARTS = {
    "advantage": "advantages",
    "ratio": "surrogates",
    "surrogate": "surrogates",
    "aggregation": "aggregation",
    "kl_penalty": "rewards",
    "value_loss": "value",
}


def describe(name: str) -> dict[str, Any]:
    """Return a row of the table as plain data, one mapping per formulation.

    Raises:
        InputError: there is no such algorithm.
    """
    row = algorithm(name)
    formulations = {}
    for kind in FORMULATIONS:
        form = getattr(row, kind)
        formulations[kind] = _formulation(form) if isinstance(form, Formulation) else form
    return {
        "name": row.name,
        "title": row.title,
        "family": row.family,
        "source": row.source,
        "paper": row.paper,
        "formulations": formulations,
    }


def _formulation(form: Formulation) -> dict[str, Any]:
    parts = {p: _name(getattr(form, p)) for p in PARTS}
    return {
        **parts,
        "normalised_over": form.window,
        "kl": form.kl,
        "kl_sign": form.kl_sign,
        "reads": dict(form.reads),
        "trl_settings": dict(form.settings),
        "trl": form.trl,
        "differs": form.differs,
    }


def _name(part: str | Callable[..., Any]) -> str:
    return part if isinstance(part, str) else part.__name__


def table() -> str:
    """Return one line per algorithm and formulation, for a terminal."""
    head = ("algorithm", "", "advantage", "ratio", "surrogate", "aggregation", "over", "KL", "TRL")
    lines = [head]
    for name in ALGORITHMS:
        row = describe(name)
        for kind, form in row["formulations"].items():
            if isinstance(form, str):
                lines.append((name, kind, f"- {form}"))
                continue
            parts = [form[p] for p in ("advantage", "ratio", "surrogate", "aggregation")]
            over = form["normalised_over"].replace("_", "-")
            equal = "equal" if form["trl"] is True else "differs"
            lines.append((name, kind, *parts, over, form["kl"], equal))
    widths = [max(len(line[i]) for line in lines if len(line) > 3) for i in range(len(head))]
    text = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=False)).rstrip()
        for line in lines
    ]
    foot = [
        "",
        "over: what the mean spans; KL: where beta * KL goes; TRL: whether stock GRPOTrainer with "
        "the row's settings computes it.",
        "rlhf-trl algorithms NAME explains one; sources:",
        *(f"  {row.title}: {row.source}; {row.paper}" for row in ALGORITHMS.values()),
    ]
    return "\n".join(text + foot)


def explain(name: str) -> str:
    """Return an algorithm in full: equations, our functions, our hook, TRL's code, differences.

    Raises:
        InputError: there is no such algorithm.
    """
    row = describe(name)
    lines = [f"{row['title']} ({name})", f"  {row['source']}; {row['paper']}"]
    for kind, form in row["formulations"].items():
        lines += ["", f"formulation {kind}"]
        if isinstance(form, str):
            lines.append(f"  none: {form}")
            continue
        for part, module in PARTS.items():
            if form[part] != "none":
                equation, place = _ours(module, form[part])
                lines += [
                    f"  {part}: {form[part]}, normalised over the {form['normalised_over']}"
                    if part == "aggregation"
                    else f"  {part}: {form[part]}"
                ]
                lines += [f"    {equation}", f"    {place}"]
                if found := _in_trl(form[part]):
                    lines.append(f"    TRL: {found}")
        if form["kl"] != "none":
            sign = "" if form["kl_sign"] == "chapter" else ", with the code's sign"
            lines.append(
                f"  KL: beta * {form['reads'].get('kl_estimator', 'k3')} in the {form['kl']}{sign}"
            )
        lines.append("  reads: " + (", ".join(f"{k}={v}" for k, v in form["reads"].items()) or "-"))
        settings = ", ".join(f"{k}={v}" for k, v in form["trl_settings"].items())
        lines.append(f"  TRL settings: {settings}")
        lines.append("  stock TRL: " + ("equal" if form["trl"] is True else form["trl"]))
        lines.append(f"  note: {form['differs']}")
    critic = algorithm(name).chapter.value_loss != "none"
    hook = "ppo.py, over policy_gradient.py" if critic else "policy_gradient.py"
    lines += ["", f"hook: rlhf_trl/trainers/{hook}"]
    return "\n".join(lines)


def _ours(module: str, function: str) -> tuple[str, str]:
    """Return the equation (second paragraph of the docstring) and the place of a book function."""
    from rlhf_trl import book

    found = getattr(getattr(book, module), function)
    paragraphs = inspect.cleandoc(found.__doc__).split("\n\n")
    line = inspect.getsourcelines(found)[1]
    return " ".join(paragraphs[1].split()), f"rlhf_trl/book/{module}.py:{line}"


def _in_trl(part: str) -> str | None:
    spec = find_spec("trl")
    if part not in _IN_TRL or spec is None or spec.origin is None:
        return None
    pattern, what = _IN_TRL[part]
    lines = (Path(spec.origin).parent / "trainer" / "grpo_trainer.py").read_text().splitlines()
    for number, line in enumerate(lines, 1):
        if re.search(pattern, line):
            return f"trainer/grpo_trainer.py:{number}, {what}"
    return "trainer/grpo_trainer.py has no counterpart any more"
