"""Reward functions by name or dotted path, as `reward_funcs` names them."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from rlhf_trl.data.answers import NotRead
from rlhf_trl.data.arrow import cells
from rlhf_trl.data.gym import GymTasks
from rlhf_trl.errors import InputError, nearest
from rlhf_trl.rewards.checked import checked
from rlhf_trl.rewards.verifiers import (
    ANSWER,
    VERIFIERS,
    RewardFunc,
    answer_text,
    format_reward,
    gym_score,
    quoted_answer,
)

if TYPE_CHECKING:
    from datasets import Dataset


def load_rewards(
    names: Sequence[str],
    tasks: GymTasks | None,
    columns: Iterable[str] = (),
    judge_block: Any = None,
    folder: str = "",
) -> list[RewardFunc]:
    """Return the reward functions called `names`, as in `reward_funcs`, each `checked`.

    `tasks` are the gym's questions; without them, the user's data have these `columns`.
    `judge_block` is the `llm_judge:` block; `folder` is the run's, where a judge keeps its replies.
    """
    known = [*VERIFIERS, "format", "gym_score", "llm_judge"]
    if not names:
        raise InputError(f"reward_funcs is empty; name at least one of {', '.join(known)}.")
    # the columns that reward functions get; a row of the gym's is a dict, whose keys are columns
    present = [c for c in (columns if tasks is None else tasks.train[0]) if c != "prompt"]
    functions = []
    for name in names:
        function = _built_in(name, tasks, present)
        if function is None:  # a dotted path, or llm_judge: few runs need to import these
            from rlhf_trl.rewards.by_path import import_reward

            function = import_reward(name, known, judge_block, folder)
        functions.append(checked(function, name))
    return functions


def answer_columns(own: Any) -> list[str]:
    """Return the columns of right answers that the built-in rewards of a recipe compare with."""
    names = [*getattr(own, "reward_funcs", ()), getattr(own, "correctness", None) or ""]
    parts = [name.partition(":") for name in names]
    return list(dict.fromkeys(name or ANSWER for base, _, name in parts if base in VERIFIERS))


def check_right_answers(names: Sequence[str], *sides: "Dataset | None") -> None:
    """Refuse right answers that the rewards called `names` cannot read, before a run begins.

    `math` reads slowly: only its first answers are checked now, the others when they are drawn.
    """
    for name in names:
        base, colon, column = name.partition(":")
        if base not in VERIFIERS:
            continue
        column = column if colon else ANSWER
        for rows in sides:
            if rows and column in rows.column_names:
                _check_cells(name, VERIFIERS[base], rows, column)


def check_all_rewarded(names: Sequence[str], rows: "Dataset") -> None:
    """Refuse training rows to which none of the rewards called `names` applies.

    A reward that compares with a right answer does not apply where the answer is null.
    """
    if not all(name.partition(":")[0] in VERIFIERS for name in names):
        return  # a reward that compares with nothing applies to every row
    columns = list(dict.fromkeys(name.partition(":")[2] or ANSWER for name in names))
    right_answers = zip(*(cells(rows, column) for column in columns), strict=True)
    count = sum(all(cell is None for cell in row) for row in right_answers)
    if count:
        raise InputError(
            f"reward_funcs: {', '.join(names)} would not apply to {count} of {len(rows)} training "
            f"rows, of which {' and '.join(columns)} is empty; leave these rows out, or add a "
            "reward that applies to all, such as format."
        )


def _check_cells(name: str, verifier: Any, rows: "Dataset", column: str) -> None:
    """Refuse a column with right answers that a verifier, called `name`, cannot read."""
    answers = rows.select_columns([column])[: verifier.answers_to_check][column]
    unreadable = []
    for place, cell in enumerate(answers):
        try:
            if cell is not None:  # null: the reward does not apply
                verifier.read_right_answer(answer_text(cell))
        except NotRead as error:
            unreadable.append((place, cell, error))
    if unreadable:
        place, cell, error = unreadable[0]
        raise InputError(
            f"reward_funcs: {name} cannot use {len(unreadable)} of {len(answers)} right answers; "
            f"the first, {quoted_answer(cell, rows[place]['prompt'])}, {error}"
        ) from error


def _built_in(name: str, tasks: GymTasks | None, columns: list[str]) -> RewardFunc | None:
    """Return the built-in reward function of this name, or None.

    `columns` are what reward functions get: all columns of the data set but the prompt.
    """
    base, colon, _ = name.partition(":")
    if base in VERIFIERS:
        return _comparison(name, columns)
    if base not in ("format", "gym_score"):
        return None
    if colon:
        raise InputError(f"reward_funcs: {base} reads no column; write {base} in place of {name}.")
    if base == "format":
        return format_reward
    if tasks is None:
        raise InputError(
            "reward_funcs: gym_score is the score of reasoning-gym, which does not know these "
            f"data; write one of {', '.join(VERIFIERS)}, or the dotted path of your own."
        )
    return gym_score(tasks)


def _comparison(name: str, columns: list[str]) -> RewardFunc:
    """Return the verifier that `name` begins with, reading the column after the colon, if any."""
    base, colon, column = name.partition(":")
    column = column if colon else ANSWER
    if column not in columns:
        raise InputError(
            f"reward_funcs: {name!r} reads the column {column!r}{nearest(column, columns)}, "
            f"and rewards get {', '.join(columns)}; write {base}:COLUMN."
        )
    if base == "math" and find_spec("math_verify") is None:
        raise InputError(
            "reward_funcs: math needs the extra math, which is not installed; run "
            "scripts/setup.sh math, or pip install 'rlhf_trl[math]'."
        )
    verifier = VERIFIERS[base]

    def compared(completions: list[Any], **sample: Any) -> list[float | None]:
        """Call the verifier with the column as `answer`, whatever its name."""
        return verifier(completions, **{**sample, ANSWER: sample[column]})

    return compared
