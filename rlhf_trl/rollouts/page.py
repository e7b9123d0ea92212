"""A run's rollouts, or those of several side by side, as one HTML page that needs nothing else."""

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from math import ceil, isfinite
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.output import RECORD, write_whole

LIMIT = 5_000_000  # bytes of the page for each run; if all samples do not fit, some are shown
GENERATIONS = 60  # as long as more are left, generations are left out before prompts are
SAMPLE_BYTES = 60  # that a sample takes beside its completion


def write_page(runs: Sequence[str | Path], target: str | Path) -> None:
    """Write the page of the runs in these folders."""
    template = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    content = _dump([_fitting(run) for run in runs])
    # JSON stands in a script element, which a text in it must not end; nor begin a comment there
    content = content.replace("</", "<\\/").replace("<!", "\\u003c!")
    try:
        write_whole(target, template.replace("DATA", content, 1))
    except OSError as error:
        raise InputError(
            f"--output: {str(target)!r} cannot be written ({error.strerror}); name another file."
        ) from error


def _fitting(run: str | Path) -> dict[str, Any]:
    """Return a run as the page takes it, with as many of its samples as fit into `LIMIT` bytes."""
    path = Path(run, RECORD)
    if not path.is_file():
        raise InputError(f"{run}: there is no {RECORD}; name the folder of a run that generated.")
    # SQLite cannot read a WAL file in a folder where it may not write, unless it is told that
    # nobody changes the file
    mode = "ro" if os.access(run, os.W_OK) else "ro&immutable=1"
    uri = f"{path.resolve().as_uri()}?mode={mode}"
    limit = LIMIT
    try:
        with closing(sqlite3.connect(uri, uri=True, timeout=60)) as connection:
            content = _read(connection, limit)
            size = len(_dump(content).encode())
            while limit > SAMPLE_BYTES and size > LIMIT:  # a smaller limit has no room for a sample
                # in proportion, and 5 % less, since samples are not all of one size
                limit = int(0.95 * limit * LIMIT / size)
                content = _read(connection, limit)
                size = len(_dump(content).encode())
    except sqlite3.Error as error:
        raise InputError(f"{path}: it cannot be read ({error}); name another run.") from error
    if not content["splits"]:
        raise InputError(f"{path}: nothing is recorded there; name another run.")
    return {"name": str(run), **content}


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))


def _read(connection: sqlite3.Connection, limit: float) -> dict[str, Any]:
    """Return the prompts, their right answers, and the splits, which share `limit` bytes.

    The smallest split is read first: what it does not need of its share goes to the larger ones.
    """
    sizes = connection.execute(
        f"SELECT split, SUM(LENGTH(CAST(completion AS BLOB)) + {SAMPLE_BYTES}) AS size "
        "FROM rollouts GROUP BY split ORDER BY size, split"
    ).fetchall()
    prompts: dict[int, int] = {}  # {id of a prompt: its place in the page}; each split adds some
    splits = {}
    for number, (split, size) in enumerate(sizes):
        splits_left = len(sizes) - number
        share = max(limit, 1) / splits_left  # at least 1 byte in all, as a divisor must not be 0
        splits[split] = _read_split(connection, split, excess=size / share, prompts=prompts)
        limit -= min(size, share)
    texts = dict(connection.execute("SELECT id, prompt FROM prompts"))
    answers = _answers(connection)
    return {
        "prompts": [texts[key] for key in prompts],
        "answers": [" or ".join(answers.get(key, ())) for key in prompts],
        "splits": dict(sorted(splits.items())),
    }


def _answers(connection: sqlite3.Connection) -> dict[int, list[str]]:
    """Return {id of a prompt: its right answers}; a prompt may be in several rows of the data."""
    answers: dict[int, list[str]] = {}
    table = "SELECT 1 FROM sqlite_master WHERE name = 'answers'"
    if connection.execute(table).fetchone():  # a run without known answers has no such table
        for key, answer in connection.execute("SELECT prompt_id, answer FROM answers"):
            answers.setdefault(key, []).append(answer)
    return answers


def _read_split(
    connection: sqlite3.Connection, split: str, excess: float, prompts: dict[int, int]
) -> dict[str, Any]:
    """Return a split as the page takes it: curves over all generations, and some of the samples.

    Args:
        connection: to the record.
        split: such as "train".
        excess: the size of all samples, divided by the room for them; about one sample in `excess`
            is shown.
        prompts: {id of a prompt: its place in the page}; prompts of shown samples are added.
    """
    of_split = "FROM rollouts WHERE split = ?"
    names = _names(connection, split)
    reward_means = "".join("AVG(json_extract(rewards, ?)), " for _ in names)
    curves = connection.execute(  # a row of means for each generation
        f"SELECT generation, step, AVG(reward), {reward_means}AVG(finished), AVG(tokens) "
        f"{of_split} GROUP BY generation",
        (*(f"$.{json.dumps(name)}" for name in names), split),
    ).fetchall()
    (groups,) = connection.execute(f"SELECT MAX(group_id) + 1 {of_split}", (split,)).fetchone()
    (first_prompt,) = connection.execute(
        f"SELECT prompt_id {of_split} ORDER BY generation", (split,)
    ).fetchone()
    every, prompt_every = _intervals(excess, len(curves), groups)
    shown = []
    generations = [(generation, step) for generation, step, *_ in curves]
    shown_generations = dict.fromkeys([*generations[::every], generations[-1]])  # each once
    for generation, step in shown_generations:
        # Show 1 in `prompt_every` prompts, the same ones in each generation: those whose ids leave
        # the same remainder as a prompt of the first generation. Ids are evenly spread hashes.
        rows = connection.execute(
            "SELECT group_id, prompt_id, completion, tokens, finished, reward, advantage, rewards "
            f"{of_split} AND generation = ? AND prompt_id % ? = ? ORDER BY sample",
            (split, generation, prompt_every, first_prompt % prompt_every),
        )
        samples = [_sample(row, names, prompts) for row in rows]
        if samples:
            shown.append({"generation": generation, "step": step, "samples": samples})
    return {
        "names": names,
        "curves": [[_four_digits(value) for value in row] for row in curves],
        "shown": shown,
        "left_out": [every, prompt_every],
    }


def _intervals(excess: float, generations: int, groups: int) -> tuple[int, int]:
    """Return `every` and `prompt_every`: show 1 in so many generations, and 1 in so many prompts.

    Generations are left out first, as long as `GENERATIONS` remain, and then prompts. Where fewer
    than two prompts of a generation would remain, further generations are left out instead.

    Args:
        excess: the size of all samples, divided by the room for them.
        generations: how many there are.
        groups: how many prompts a generation has at most.
    """
    leaving_generations = min(ceil(excess), generations // GENERATIONS)
    leaving_two_prompts = ceil(2 * excess / groups)
    every = max(1, leaving_generations, leaving_two_prompts)
    return every, max(1, ceil(excess / every))


def _sample(row: tuple[Any, ...], names: list[str], prompts: dict[int, int]) -> list[Any]:
    """Return a sample as the page takes it.

    Args:
        row: the columns of the record that `_read_split` selects.
        names: of all rewards, in the order of the page.
        prompts: {id of a prompt: its place in the page}; the sample's is added if it is new.
    """
    group, prompt_id, completion, tokens, finished, reward, advantage, rewards = row
    by_name = json.loads(rewards)
    numbers = [reward, advantage, *(by_name.get(name) for name in names)]
    place = prompts.setdefault(prompt_id, len(prompts))
    return [group, place, completion, tokens, finished, *map(_four_digits, numbers)]


def _names(connection: sqlite3.Connection, split: str) -> list[str]:
    """Return the names of all rewards of a split, in order.

    A resumed run may go on with other rewards, so each generation is looked at; all samples of a
    generation have the same rewards, so its first sample is enough.
    """
    rows = connection.execute(
        "SELECT rewards FROM rollouts WHERE split = ? AND sample = 0 ORDER BY generation", (split,)
    )
    return list(dict.fromkeys(name for (rewards,) in rows for name in json.loads(rewards)))


def _four_digits(value: float | None) -> float | None:
    """Return a number with four digits, to save bytes; a whole one, as it is; not finite: None."""
    if value is None or not isfinite(value):
        return None
    return int(value) if value == int(value) else float(f"{value:.4g}")
