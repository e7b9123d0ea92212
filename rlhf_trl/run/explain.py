"""The table of algorithms in words: from the rows, the docstrings and TRL's source.

It stands here and not beside the table: which trainer a row belongs to is known to the registry of
stages, how lines are laid out to `evaluation.tables`, and both are above `rlhf_trl/algorithms/`.
"""

import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rlhf_trl.algorithms import (
    ALGORITHMS,
    FORMULATIONS,
    Formulation,
    algorithm,
    names,
    nearest_row,
)
from rlhf_trl.evaluation import tables
from rlhf_trl.run.stages import stage_of

# Where in TRL's grpo_trainer.py the counterpart of a part stands: a pattern, and what it is. The
# patterns are looked up in the installed file, so the line numbers are those of that version.
_IN_TRL = {
    "group_standardized": (r"std_rewards \+ 1e-4", "advantages divided by the standard deviation"),
    "group_centered": (r"advantages = rewards - mean_grouped_rewards", "advantages, centered"),
    "token_ratio": (r"log_importance_weights = log_ratio$", "ratio of each token"),
    "sequence_ratio": (r"\(log_ratio \* mask\)\.sum\(-1\) / mask\.sum", "ratio of the sequence"),
    "clipped_ratio": (r"-torch\.min\(per_token_loss1, per_token_loss2\)", "clipped surrogate"),
    "clipped_importance_weight": (r"torch\.clamp\(coef_1, max=self\.epsilon_high\)", "weight"),
    "soft_gate": (r"torch\.sigmoid\(temperatures", "soft gate"),
    "sequence_mean": (r'if self\.loss_type in \["grpo", "sapo"\]', "mean over each sequence"),
    "fixed_length": (r"per_token_loss\.size\(0\) \* self\.max_completion_length", "fixed length"),
    "token_mean": (r'self\.loss_type in \["cispo", "dapo", "vespo"\]', "mean over all tokens"),
}
# The other stock trainers: the file, and where its loss stands if its config has no loss_type.
_TRAINERS = {
    "RLOOTrainer": ("trainer/rloo_trainer.py", r"per_sequence_loss = -torch\.min"),
    "DPOTrainer": ("trainer/dpo_trainer.py", None),
    "KTOTrainer": ("trainer/kto_trainer.py", None),
    "CPOTrainer": ("experimental/cpo/cpo_trainer.py", r"logits = logits - gamma_logratios"),
    "ORPOTrainer": ("experimental/orpo/orpo_trainer.py", r"log_odds = \(policy_chosen_logps"),
    "RewardTrainer": ("trainer/reward_trainer.py", r"logsigmoid\(rewards_chosen"),
    "DistillationTrainer": ("trainer/distillation_trainer.py", r"= _chunked_divergence_loss\("),
    "SDPOTrainer": ("experimental/sdpo/sdpo_trainer.py", r"loss_mask\)\.sum\(-1\) / "),
}
# What a line of the table shows of a formulation, by family: heading and key of `describe`.
_COLUMNS = {
    "policy_gradient": {
        "advantage": "advantage",
        "ratio": "ratio",
        "surrogate": "surrogate",
        "aggregation": "aggregation",
        "over": "normalized_over",
        "KL": "kl",
    },
    "direct_alignment": {"loss": "loss", "log-probs": "logps", "reference": "reference"},
    "reward_model": {"loss": "loss", "aggregation": "aggregation"},
    "distillation": {"loss": "loss", "aggregation": "aggregation", "over": "normalized_over"},
}
_WORDS = {True: "yes", False: "no", "micro_batch": "micro-batch"}
_LABELS = {
    "kl": "KL",
    "kl_sign": "sign of the KL",
    "logps": "log-probs",
    "trl_trainer": "TRL's trainer",
    "trl_settings": "TRL's settings",
    "differs": "note",
}
# The fields of a formulation, beside its parts, that `describe` shows, and their keys there.
_FURTHER_FIELDS = {
    "kl": "kl",
    "kl_sign": "kl_sign",
    "logps": "logps",
    "reference": "reference",
    "window": "normalized_over",
}
_FOOT = {
    "policy_gradient": "over: what a mean over tokens spans (means over completions or prompts add "
    "up); KL: where beta * KL goes; TRL: whether the stock trainer with the row's settings "
    "computes it.",
    "direct_alignment": "log-probs: sum or mean over the tokens of a completion; reference: "
    "whether the reference policy's are read.",
    "reward_model": "aggregation: of the losses of tokens or steps; none where completions are "
    "compared.",
    "distillation": "over: what the mean spans.",
}


def describe(name: str) -> dict[str, Any]:
    """Return a row of the table as plain data, one mapping per formulation."""
    row = algorithm(name)
    forms: dict[str, Any] = {kind: getattr(row, kind) for kind in FORMULATIONS}
    forms |= {kind: _formulation(form) for kind, form in row.formulations.items()}
    return {
        "name": row.name,
        "title": row.title,
        "family": row.family,
        "source": row.source,
        "paper": row.paper,
        "nearest": row.nearest,
        "formulations": forms,
    }


def _formulation(form: Formulation) -> dict[str, Any]:
    """Return a formulation as plain data: its parts, other choices, and what TRL makes of it."""
    description: dict[str, Any] = {}
    for part in form.parts:  # such as "ratio"
        chosen = getattr(form, part)  # a function of the book, or its name
        description[part] = chosen if isinstance(chosen, str) else chosen.__name__
    for declared in fields(form):
        if declared.name in _FURTHER_FIELDS:
            description[_FURTHER_FIELDS[declared.name]] = getattr(form, declared.name)
    trl_settings = {  # a setting that depends on the config is a function, its docstring says how
        name: value.__doc__ if callable(value) else value for name, value in form.settings.items()
    }
    return {
        **description,
        "reads": dict(form.reads),  # parameters of the loss, with their defaults
        "trl_trainer": form.trainer,  # the stock trainer of these settings
        "trl_settings": trl_settings,  # the fields of that trainer's config that it fixes
        "trl": form.trl,  # whether the stock trainer computes the formulation, or why not
        "differs": form.differs,  # a sentence on what sets the formulation apart
    }


def table() -> str:
    """Return one line per algorithm and formulation, family by family, for a terminal.

    Columns that it has no room for are named below.
    """
    text: list[str] = []
    for family, columns in _COLUMNS.items():
        lines, left_out = tables.that_fit(_lines(family, columns))
        text += [tables.text(lines), "", *tables.wrapped(_FOOT[family])]
        if left_out:
            text += tables.wrapped(f"No room here for: {', '.join(left_out)}.")
        text.append("")
    text += tables.wrapped(
        "form: the formulation; - throughout: there is none. rlhf-trl algorithms NAME explains "
        "one and says why, NAME NAME shows them side by side. Sources:"
    )
    for row in ALGORITHMS.values():
        text += tables.wrapped(f"{row.title}: {row.source}; {row.paper}", "  ")
    return "\n".join(text)


def _lines(family: str, columns: dict[str, str]) -> list[tables.Line]:
    """Return the lines of a family's table: one for each algorithm and formulation."""
    lines = []
    for name in names(family):
        for kind, form in describe(name)["formulations"].items():
            line = {"algorithm": name, "form": kind, **dict.fromkeys([*columns, "TRL"], "-")}
            if not isinstance(form, str):
                line |= {head: _WORDS.get(form[key], form[key]) for head, key in columns.items()}
                equal = "equal" if form["trl"] is True else "differs"
                line["TRL"] = f"{form['trl_trainer']} {equal}"
            lines.append(line)
    return lines


def side_by_side(chosen: Sequence[str]) -> str:
    """Return what several algorithms are made of, a column for each and a table by formulation."""
    rows = {name: describe(name) for name in chosen}
    sources = {name: f"{row['source']}; {row['paper']}" for name, row in rows.items()}
    text = [tables.side_by_side([{"": "source", **sources}]), ""]
    for kind in FORMULATIONS:
        parts = {name: _parts(row["formulations"][kind]) for name, row in rows.items()}
        lines = []
        for label in dict.fromkeys(label for column in parts.values() for label in column):
            cells = {name: column.get(label, "-") for name, column in parts.items()}
            marker = "" if len(set(cells.values())) == 1 else " *"
            lines.append({kind: label + marker, **cells})
        text += [tables.side_by_side(lines), ""]
    return "\n".join([*text, "*: where they differ; rlhf-trl algorithms NAME explains one"])


def _parts(form: dict[str, Any] | str) -> dict[str, str]:
    """Return a formulation of `describe` as cells by label."""
    if isinstance(form, str):
        return {"none": form}
    cells = {}
    for label, value in form.items():
        if label in ("reads", "trl_settings"):
            value = _pairs(value, ",  ")
        if label == "trl":
            label, value = "stock TRL", "equal" if value is True else value
        cells[_LABELS.get(label, label.replace("_", " "))] = _WORDS.get(value, value)
    return cells


def explain(name: str) -> str:
    """Return an algorithm in full: equations, our functions, our hook, TRL's code, differences."""
    row = algorithm(name)
    lines = [f"{row.title} ({name})", f"  {row.source}; {row.paper}"]
    for kind in FORMULATIONS:
        form = getattr(row, kind)
        lines += ["", f"formulation {kind}"]
        lines += [f"  none: {form}"] if isinstance(form, str) else _in_full(form)
        if near := nearest_row(name, kind):
            same = "; the same while every ratio is 1" if near.same_at_ratio_1 else ""
            lines.append(f"  nearest: {near.name}; differs in {', '.join(near.differs_in)}{same}")
    lines += ["", f"hook: {stage_of(name).hook}"]
    return "\n".join(lines)


def _in_full(form: Formulation) -> list[str]:
    """Return the lines about a formulation: its parts with equation and places, then the rest."""
    description = _formulation(form)
    lines = _lines_of_parts(form, description)
    if description.get("kl", "none") != "none":  # only policy gradients have the key
        sign = "" if form.kl_sign == "chapter" else ", with the code's sign"
        estimator = {**form.reads, **form.constants}["kl_estimator"]
        lines.append(f"  KL: beta * {estimator} in the {form.kl}{sign}")
    if "logps" in description:  # of direct alignment
        lines.append(f"  log-probabilities: {form.logps} over the tokens of a completion")
        lines.append(f"  reference policy: {'read' if form.reference else 'not read'}")
    lines.append(f"  reads: {_pairs(form.reads)}")
    lines.append(f"  fixes: {_pairs(form.constants)}")
    lines.append(f"  TRL settings: {_pairs(description['trl_settings'])}")
    lines.append("  stock TRL: " + ("equal" if form.trl is True else form.trl))
    lines += [f"    {form.trainer}: {place}" for place in losses_in_trl(form)]
    lines.append(f"  note: {form.differs}")
    return lines


def _lines_of_parts(form: Formulation, description: Mapping[str, Any]) -> list[str]:
    """Return the lines about a formulation's parts; its `description` is that of `_formulation`."""
    lines = []
    for part, module in form.parts.items():  # a module of rlhf_trl/book, which has its functions
        function = description[part]
        if function == "none":
            continue
        line = f"  {part}: {function}"
        # a mean over tokens depends on the batch it is taken over; the other aggregations are
        # means over completions or prompts, which come out the same however they are split
        if function == "token_mean" and "normalized_over" in description:
            line += f", normalized over the {description['normalized_over']}"
        equation, place = ours(module, function)
        lines += [line, f"    {equation}", f"    {place}"]
        counterpart = in_trl(form, function)
        if counterpart:
            lines.append(f"    TRL: {counterpart}")
    return lines


def _pairs(values: Mapping[str, Any], separator: str = ", ") -> str:
    """Return values by name in one line; a dash where there is none."""
    return separator.join(f"{name}={value}" for name, value in values.items()) or "-"


def ours(module: str, function: str) -> tuple[str, str]:
    """Return the equation (second paragraph of the docstring) and the place of a book function."""
    from rlhf_trl import book

    book_function = getattr(getattr(book, module), function)
    paragraphs = inspect.cleandoc(book_function.__doc__).split("\n\n")
    _, line = inspect.getsourcelines(book_function)
    return " ".join(paragraphs[1].split()), f"rlhf_trl/book/{module}.py:{line}"


def in_trl(form: Formulation, part: str) -> str | None:
    """Return where the counterpart of a policy gradient's part stands in the installed TRL."""
    if form.trainer != "GRPOTrainer" or part not in _IN_TRL:
        return None
    pattern, what = _IN_TRL[part]
    return f"{_find('trainer/grpo_trainer.py', pattern)}, {what}"


def losses_in_trl(form: Formulation) -> list[str]:
    """Return where the losses of another stock trainer stand in the installed TRL."""
    if form.trainer not in _TRAINERS or not (form.settings or form.trl is True):
        return []
    file, pattern = _TRAINERS[form.trainer]
    types = form.settings.get("loss_type", [])
    types = [types] if isinstance(types, str) else types
    patterns = [pattern] if pattern else [rf'loss_type == "{name}"' for name in types]
    return [_find(file, pattern) for pattern in patterns]


def _find(file: str, pattern: str) -> str:
    """Return the place of a pattern in a file of the installed TRL, which is not imported."""
    path = Path(find_spec("trl").origin).parent / file
    lines = path.read_text().splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if re.search(pattern, line):
            return f"{file}:{number}"
    return f"{file} has no counterpart any more"
