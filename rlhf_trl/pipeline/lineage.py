"""The runs in a folder, and what each was made from: by the path, and by the hash of weights."""

import fcntl
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlhf_trl import output
from rlhf_trl.errors import InputError
from rlhf_trl.run.config_files import read_config
from rlhf_trl.run.folders import model_folder
from rlhf_trl.run.origins import model_in, sources, weights_files, weights_sha256
from rlhf_trl.run.stages import stage_of_config

ASIDE = ".deleted-"  # how the name begins of what a deletion has renamed and not yet removed
PARTS = ("checkpoint-", "earlier-", "round-", ASIDE)  # folders in a run's that are no other runs
# A run's folder has a config and one of these.
MARKS = ("summary.json", output.LOCK, output.RECORD, "model", "checkpoint-*")
LOST = ("changed", "gone")  # what a path is that does not hold the weights any more


class Origin(NamedTuple):
    """A model that a run was made from."""

    role: str  # the config's key
    path: str  # as the config has it
    folder: Path  # where that is now
    sha256: str | None  # of the weights that were read; None: a run of an earlier version

    def now(self, digest: Callable[[Path], str | None] = weights_sha256) -> str:
        """Return what has become of it: "unchanged", "changed", "gone", or "unknown"."""
        if not weights_files(self.folder):
            return "gone"
        if self.sha256 is None:
            return "unknown"
        return "unchanged" if digest(self.folder) == self.sha256 else "changed"


class Run:
    """The folder of a run, and what its files say."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.config = read_config(folder / "config.yaml")
        self.summary = _read_json(folder / "summary.json")  # empty until it has ended

    @property
    def algorithm(self) -> str:
        """Its algorithm, or the recipe of one that has none."""
        return self.config.get("algorithm") or stage_of_config(self.config, str(self.folder)).name

    @property
    def state(self) -> Literal["running", "finished", "stopped"]:
        """Whether a process writes to it, it has all that a run leaves, or neither."""
        try:
            with not_running(self.folder):
                return "finished" if output.finished(self.folder) else "stopped"
        except InputError:
            return "running"

    @cached_property
    def origins(self) -> list[Origin]:
        """What it was made from, as it wrote that down, or else as its config names it."""
        written = self.summary.get("made_from")
        if written is None:  # it has not ended, or is of an earlier version
            checkpoints = output.whole_checkpoints(self.folder)
            if checkpoints:
                manifest = checkpoints[max(checkpoints)] / output.MANIFEST
                written = _read_json(manifest).get("made_from")
        if written is None:
            named = [(role, path, None) for role, path in sources(self.config)]
        else:
            named = [(one["role"], one["path"], one["sha256"]) for one in written]
        origins = [Origin(role, path, self._find(path), sha) for role, path, sha in named]
        return [origin for origin in origins if origin.sha256 or _was_folder(origin)]

    def _find(self, path: str) -> Path:
        """Return the folder of a model; a relative path was one from where the run started."""
        for parent in [*self.folder.resolve().parents, Path()]:
            folder = parent / Path(path).expanduser()
            if folder.is_dir():
                return model_in(folder)
        return Path(path)


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _was_folder(origin: Origin) -> bool:
    """Tell whether the path of an origin is or was a folder, and is no name on the hub."""
    try:
        return origin.folder.is_dir() or not model_folder(origin.role, origin.path)
    except InputError:  # there is no such folder
        return True


@contextmanager
def not_running(folder: Path) -> Iterator[None]:
    """Keep processes from beginning to write to a run's folder; refuse one that is in use."""
    if not (folder / output.LOCK).is_file():  # no run of this version ever wrote to it
        yield
        return
    with (folder / output.LOCK).open(encoding="utf-8") as stream:
        try:
            fcntl.lockf(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            holder = stream.read() or "unknown"
            raise InputError(
                f"{folder} is in use ({holder}); wait until that run has ended, or stop it."
            ) from error
        except OSError:  # a file system without locks
            pass
        yield


def is_run(folder: Path) -> bool:
    """Tell whether a folder is a run's."""
    marks = (path for mark in MARKS for path in folder.glob(mark))
    return (folder / "config.yaml").is_file() and any(marks)


def folders_in(root: Path, seen: set[Path]) -> Iterator[Path]:
    """Yield a folder and those in it but for parts of runs, behind links, too, each once."""
    if root.resolve() in seen:
        return
    seen.add(root.resolve())
    yield root
    try:
        children = sorted(root.iterdir())
    except OSError as error:  # it may hold runs that were made from others
        raise InputError(
            f"{root} cannot be read ({error.strerror}); name a folder without it, or get access."
        ) from error
    for child in children:
        if child.is_dir() and not child.name.startswith(PARTS):
            yield from folders_in(child, seen)


def runs_in(root: Path) -> list[Run]:
    """Return the runs in a folder, at any depth."""
    if not root.is_dir():
        raise InputError(f"{root}: there is no such folder; name one that holds runs.")
    return [Run(folder) for folder in folders_in(root, set()) if is_run(folder)]


def leftovers(root: Path) -> list[Path]:
    """Return what deletions that were ended have renamed, or left of a database, in a folder."""
    left = []
    for folder in folders_in(root, set()):
        left += folder.glob(f"{ASIDE}*")
        if not (folder / output.RECORD).exists():
            left += folder.glob(f"{output.RECORD}-*")
    return sorted(left)


def owner_of(path: Path, runs: Sequence[Run]) -> Run | None:
    """Return the run, the innermost of several, that a path is or lies in."""
    owners = [run for run in runs if path.resolve().is_relative_to(run.folder.resolve())]
    return max(owners, key=lambda run: len(run.folder.resolve().parts), default=None)


def lineage(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return what each run was made from, for programs.

    Of each model, `now` is what has become of its path, and `run` the run that it is in: that of
    its path, or, if that holds other weights now or none, one whose summary names the weights.
    """
    digest = cache(weights_sha256)  # several runs are made from one model
    entries = []
    for run in runs:
        made_from = []
        for origin in run.origins:
            now = origin.now(digest)
            holder = owner_of(origin.folder, runs)
            if origin.sha256 and now in LOST:
                same = (one for one in runs if one.summary.get("model_sha256") == origin.sha256)
                holder = next(same, holder)
            made_from.append(
                {
                    "role": origin.role,
                    "path": origin.path,
                    "sha256": origin.sha256,
                    "now": now,
                    "run": str(holder.folder) if holder else None,
                }
            )
        entries.append(
            {
                "run": str(run.folder),
                "algorithm": run.algorithm,
                "start": run.config.get("model_name_or_path"),
                "model_sha256": run.summary.get("model_sha256"),
                "made_from": made_from,
            }
        )
    return entries


def tree(content: Sequence[dict[str, Any]]) -> str:
    """Draw what `lineage` returns: below each run, or other model, those made from it."""
    if not content:
        return "no runs"
    entries = {entry["run"]: entry for entry in content}
    below: dict[str, list[tuple[str, str]]] = defaultdict(list)  # a relation, and a run
    for name, entry in entries.items():
        for origin in entry["made_from"]:
            holder = origin["run"] or origin["path"]
            below[holder].append((_relation(origin, holder), name))
    made = {name for edges in below.values() for _, name in edges}
    lines: list[str] = []
    drawn: set[str] = set()

    def draw(name: str, relation: str = "", indent: str = "") -> None:
        """Write a line, and below it, where the name stands first, those made from it."""
        about = f"  {_about(entries[name])}" if name in entries else ""
        lines.append(f"{indent}{name}{about}" + (f"  ({relation})" if relation else ""))
        if name not in drawn:
            drawn.add(name)
            for edge, child in below.get(name, ()):
                draw(child, edge, indent + "    ")

    # first what was made from nothing else; what is left then was made from each other, in a circle
    for name in sorted(below.keys() | entries.keys(), key=lambda name: (name in made, name)):
        if name not in drawn:
            draw(name)
    return "\n".join(lines)


def _relation(origin: dict[str, Any], holder: str) -> str:
    """Say what a model was to a run, its path if that is not plain, and what has become of it."""
    relation = origin["role"]
    if origin["path"] not in (holder, f"{holder}/model"):
        relation += f" {origin['path']}"
    return f"{relation}, {origin['now']} since" if origin["now"] in LOST else relation


def _about(entry: dict[str, Any]) -> str:
    """Say of which algorithm a run is, where it started if from no folder, and its hash."""
    roles = [origin["role"] for origin in entry["made_from"]]
    start = "" if "model_name_or_path" in roles else f" from {entry['start']}"
    digest = entry["model_sha256"]
    return f"{entry['algorithm']}{start}" + (f", {digest[:12]}" if digest else "")
