"""The record of every rollout of a run: one SQLite file in its folder."""

import atexit
import json
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from hashlib import blake2b
from math import isfinite
from pathlib import Path
from typing import Any

from rlhf_trl.errors import InputError
from rlhf_trl.output import RECORD
from rlhf_trl.rollouts.blocks import Rollouts

SCHEMA = """
CREATE TABLE IF NOT EXISTS run (key TEXT PRIMARY KEY, value TEXT);
CREATE TABLE IF NOT EXISTS prompts (id INTEGER PRIMARY KEY, prompt TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS rollouts (
    split TEXT, generation INTEGER, sample INTEGER, step INTEGER NOT NULL, epoch REAL NOT NULL,
    group_id INTEGER NOT NULL, prompt_id INTEGER NOT NULL REFERENCES prompts (id),
    completion TEXT NOT NULL, tokens INTEGER NOT NULL, finished INTEGER NOT NULL,
    reward REAL, advantage REAL, rewards TEXT NOT NULL, PRIMARY KEY (split, generation, sample)
);
"""
INSERT = """
INSERT INTO rollouts VALUES (
    :split, :generation, :sample, :step, :epoch, :group_id, :prompt_id, :completion, :tokens,
    :finished, :reward, :advantage, :rewards
)
"""
ANSWERS = """
CREATE TABLE IF NOT EXISTS answers (
    prompt_id INTEGER, answer TEXT, PRIMARY KEY (prompt_id, answer)
) WITHOUT ROWID;
"""
# Prefixes of file systems that share no memory between machines, which WAL would need.
REMOTE = ("nfs", "cifs", "smb", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "gluster", "fuse.")

Job = Callable[[sqlite3.Connection], object]


class Store:
    """Writes a run's rollouts, a transaction for each generation, in a thread of its own.

    Only that thread ever touches the connection; the first thing to write starts the thread and
    creates the file. A full queue blocks. An error is raised by the next call. What is queued is
    still written when the process ends, unless it is killed.

    The `facts` about the run go to the table `run`, and `answers`, pairs of a prompt and a right
    answer to it, to a table of that name; both are read when the file is opened.
    """

    def __init__(
        self,
        folder: str | Path,
        config: Rollouts,
        facts: Mapping[str, Any],
        answers: Iterable[tuple[Any, str]] = (),
    ):
        self.path = Path(folder, RECORD)
        self._config = config
        self._facts = facts
        self._answers = answers
        self._jobs: queue.Queue[Job | None] = queue.Queue(16)  # None ends the thread
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        # Record the generations of training whose number is a multiple of this. `_thin` doubles it,
        # or sets it to 0: recording has ended, of evaluations, too.
        self._interval = config.every

    def write(
        self,
        split: str,
        generation: int,
        when: tuple[int, float],
        samples: Sequence[tuple[Any, ...]],
        rewards: Mapping[str, Sequence[float | None]],
        advantages: Sequence[float] | None = None,
        samples_per_prompt: int = 1,
    ) -> None:
        """Record a generation; what was recorded under its split and number is replaced.

        Args:
            split: such as "train".
            generation: its number.
            when: the steps and epochs before the generation.
            samples: of each sample, prompt by prompt: the prompt and the completion (texts or
                conversations), its number of tokens, whether the model ended it, and the weighted
                sum of its rewards or None.
            rewards: {name of a reward: its values, one for each sample}, penalties included; a
                value is None or NaN where the reward does not apply.
            advantages: one for each sample, if there are any.
            samples_per_prompt: how many neighboring samples have the same prompt.
        """

        steps_before, epochs_before = when

        def job(connection: sqlite3.Connection) -> None:
            """Insert the samples, in the thread that holds the connection."""
            if not self._interval:  # recording has ended
                return
            if (
                split.startswith("train") and generation % self._interval
            ):  # evaluations are all kept
                return
            prompts: dict[int, str] = {}
            rows = []
            for number, (prompt, completion, tokens, finished, reward) in enumerate(samples):
                prompt_text = _text(prompt)
                prompt_id = _key(prompt_text)
                prompts[prompt_id] = prompt_text
                by_name = {name: _finite(values[number]) for name, values in rewards.items()}
                row = {
                    "split": split,
                    "generation": generation,
                    "sample": number,
                    "step": steps_before,
                    "epoch": epochs_before,
                    "group_id": number // samples_per_prompt,
                    "prompt_id": prompt_id,
                    "completion": _text(completion),
                    "tokens": tokens,
                    "finished": finished,
                    "reward": reward,
                    "advantage": advantages[number] if advantages else None,
                    "rewards": json.dumps(by_name),
                }
                rows.append(row)
            # a resumed run, or a second evaluation at a step, records a generation again
            _delete(connection, "split = ? AND generation = ?", split, generation)
            connection.executemany("INSERT OR IGNORE INTO prompts VALUES (?, ?)", prompts.items())
            connection.executemany(INSERT, rows)
            self._thin(connection)

        self._put(job)

    def rewind(self, step: int, generation: int) -> None:
        """Delete what was recorded after a checkpoint at `step`.

        Of training that is `generation` and all later ones, and of other splits all later steps.
        """
        if self.path.exists():
            later = "CASE WHEN split LIKE 'train%' THEN generation >= ? ELSE step > ? END"
            self._put(lambda connection: _delete(connection, later, generation, step))
            self.flush()

    def flush(self) -> None:
        """Wait until everything queued is on the disk; raise what went wrong."""
        if self._thread is not None:
            self._put(lambda connection: connection.execute("PRAGMA wal_checkpoint"))
            self._jobs.join()
            self._check()

    def close(self) -> None:
        """Write what is queued and close the file; call `flush` first to learn of errors."""
        if self._thread is not None:
            atexit.unregister(self.close)
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _put(self, job: Job) -> None:
        self._check()
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="rollouts", daemon=True)
            self._thread.start()
            atexit.register(self.close)
        self._jobs.put(job)

    def _check(self) -> None:
        if self._error is not None:
            raise InputError(
                f"rollouts: {self.path} cannot be written ({self._error}); make room, or write off."
            ) from self._error

    def _work(self) -> None:
        """Do the jobs of the queue, each in a transaction, until None comes: the thread's work."""
        connection = None
        while (job := self._jobs.get()) is not None:
            try:
                if self._error is None:  # after an error, the queue is only emptied
                    connection = connection or self._open()
                    with connection:
                        job(connection)
            except Exception as error:  # `_check` raises it, in the thread of the run
                self._error = error
            self._jobs.task_done()
        if connection is not None:
            connection.close()

    def _open(self) -> sqlite3.Connection:
        """Open the file, which a resumed run goes on with, and write the facts and answers."""
        connection = connect(self.path)
        with connection:
            connection.executescript(SCHEMA)
            _write_facts(connection, self._facts)
            if answers := [(_key(_text(prompt)), answer) for prompt, answer in self._answers]:
                connection.executescript(ANSWERS)
                connection.executemany("INSERT OR IGNORE INTO answers VALUES (?, ?)", answers)
            thinned = connection.execute("SELECT value FROM run WHERE key = 'thinned'").fetchone()
        if thinned:  # the run had reached the cap before it was resumed: stay as sparse (`_thin`)
            self._interval *= int(thinned[0])
        return connection

    def _thin(self, connection: sqlite3.Connection) -> None:
        """Delete every other recorded generation of training, until the file fits the cap.

        Each pass doubles the interval. Where it leaves nothing to delete, recording ends. The fact
        `thinned` tells a resumed run how often the interval of the config fits into this one.
        """
        # what is deleted leaves free pages in the file, which are used again and do not count
        used_bytes = (
            "SELECT (page_count - freelist_count) * page_size "
            "FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
        )
        cap = self._config.cap * 1e9
        while self._interval and connection.execute(used_bytes).fetchone()[0] > cap:
            self._interval *= 2
            if _delete(connection, "split LIKE 'train%' AND generation % ?", self._interval):
                _write_facts(connection, {"thinned": self._interval // self._config.every})
                what_it_keeps = f"1 in {self._interval} generations of training"
            else:
                self._interval = 0
                what_it_keeps = "nothing more"
            print(
                f"{self.path} has reached {self._config.cap} GB: it keeps {what_it_keeps}",
                flush=True,
            )


def connect(path: Path, **options: Any) -> sqlite3.Connection:
    """Open a database for short transactions; the options are those of sqlite3.

    The journal WAL lets others read while one process writes, but needs shared memory, which a
    network mount does not have.
    """
    connection = sqlite3.connect(path, timeout=60, **options)
    journal = "DELETE" if _file_system(path).startswith(REMOTE) else "WAL"
    deadline = time.monotonic() + 60
    while True:
        try:
            connection.execute(f"PRAGMA journal_mode = {journal}")
            break
        except sqlite3.OperationalError as error:
            # sqlite3's timeout does not apply while another process changes the journal, too
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.05)
    connection.execute("PRAGMA synchronous = NORMAL")
    return connection


def _file_system(path: Path) -> str:
    """Return the type of the file system that a file lies on, such as "ext4"; "": unknown."""
    import psutil

    types = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    for folder in path.resolve().parents:  # from the nearest one up, to the first mount point
        if folder in types:
            return types[folder]
    return ""


def right_answers(*sides: Any) -> Iterator[tuple[Any, str]]:
    """Yield the prompt and the right answer of each row that has both; a side may be None."""
    for rows in sides:
        if not rows or not {"prompt", "answer"} <= rows[0].keys():
            continue
        for row in rows:
            if row["answer"] is not None:
                yield row["prompt"], str(row["answer"])


def trained_with(path: str | Path, text: str) -> bool:
    """Return whether a recorded completion of training contains `text`; without a record, True."""
    if not Path(path).is_file():
        return True
    with closing(sqlite3.connect(path)) as connection:
        condition = "split LIKE 'train%' AND instr(completion, ?)"
        (is_there,) = connection.execute(
            f"SELECT EXISTS (SELECT 1 FROM rollouts WHERE {condition})", (text,)
        ).fetchone()
    return bool(is_there)


def _key(prompt: str) -> int:
    """Return the id of a prompt: 63 bits of a hash."""
    return int.from_bytes(blake2b(prompt.encode(), digest_size=8).digest()) >> 1


def _finite(value: float | None) -> float | None:
    """Return a number, None where there is none or it is not finite."""
    return None if value is None or not isfinite(value) else float(value)


def _text(value: Any) -> str:
    """Return a text as it is, a single message as its text, and other conversations as JSON."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0].get("content"), str):
        value = value[0]["content"]
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _write_facts(connection: sqlite3.Connection, facts: Mapping[str, Any]) -> None:
    """Write facts into the table `run`: texts as they are, other values as JSON."""
    rows = []
    for key, value in facts.items():
        rows.append((key, value if isinstance(value, str) else json.dumps(value, default=str)))
    connection.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", rows)


def _delete(connection: sqlite3.Connection, condition: str, *values: int | str) -> int:
    """Delete rollouts, and prompts without any left; return how many rollouts were deleted."""
    deleted = connection.execute(f"DELETE FROM rollouts WHERE {condition}", values).rowcount
    if deleted:
        connection.execute("DELETE FROM prompts WHERE id NOT IN (SELECT prompt_id FROM rollouts)")
    return deleted
