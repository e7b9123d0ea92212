"""Deleting a run or a part of one: refused where something needs it, renamed before it is removed.

What was renamed and not removed, because the deletion was ended, is a leftover; nothing else is
ever half there.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rlhf_trl.errors import InputError
from rlhf_trl.models import ADAPTER
from rlhf_trl.output import RECORD
from rlhf_trl.pipeline.lineage import (
    ASIDE,
    LOST,
    PARTS,
    Run,
    folders_in,
    is_run,
    leftovers,
    not_running,
    owner_of,
    runs_in,
)
from rlhf_trl.pipeline.sizes import readable, size_of
from rlhf_trl.run.origins import weights_files, weights_sha256

MODELS = ("model", "value_model")  # of a run, which is none without them
# What can be deleted, as the remedy of errors.
NAME_DELETABLE = f"name a run, or in one a checkpoint-N, a copy of its model, or {RECORD}"


class Target(NamedTuple):
    """What is to be deleted: a run's folder, or a file or folder in it."""

    path: Path
    run: Run  # the run that the path is, or lies in

    @property
    def is_whole_run(self) -> bool:
        """Whether it is a run's folder, and no part of one."""
        return self.path.resolve() == self.run.folder.resolve()

    def files(self) -> list[Path]:
        """Return what is renamed: the path, and with a database the files that SQLite adds."""
        beside = [self.path.with_name(f"{RECORD}{end}") for end in ("-wal", "-shm")]
        is_record = self.path.name == RECORD and not self.is_whole_run
        return [self.path, *(path for path in beside if is_record and path.exists())]


def targets(root: Path, paths: Sequence[str]) -> list[Target]:
    """Return what the paths name, each thing once, sorted from the youngest run to the oldest.

    A run is younger than the runs that it was made from. So if the deletion is interrupted, no run
    that is left lacks a run that it was made from.

    Raises:
        InputError: a path names something that cannot be deleted, or that another run needs.
    """
    runs = runs_in(root)
    if paths and is_run(root):
        raise InputError(
            f"{root} is a run's folder; before --delete, name the one that holds all your runs, "
            "where those made from this one are looked for."
        )
    all_targets = [_target(root, Path(path), runs) for path in paths]
    by_path = {target.path.resolve(): target for target in all_targets}
    # a target inside another one is deleted with that one
    outermost = [target for path, target in by_path.items() if not by_path.keys() & {*path.parents}]
    deleted_runs = [target.run for target in outermost if target.is_whole_run]
    staying = [run for run in runs if run not in deleted_runs]
    if outermost:
        _refuse_while_a_run_begins(root)  # which may be made from a target
    for target in outermost:
        with not_running(target.run.folder):
            _refuse_if_needed(target, [run for run in staying if run is not target.run])
    return sorted(outermost, key=lambda target: -_began(target.run))


def _began(run: Run) -> float:
    return (run.folder / "config.yaml").stat().st_mtime


def _target(root: Path, path: Path, runs: Sequence[Run]) -> Target:
    """Return the target that a path names; refuse a path that names nothing that can be deleted."""
    if path.name in ("", ".."):  # as of the current folder
        path = path.resolve()
    if path.is_symlink():
        raise InputError(f"{path} is a link; name what it leads to, or remove the link yourself.")
    if not path.exists():
        raise InputError(f"{path}: there is nothing; {NAME_DELETABLE}.")
    if not path.resolve().is_relative_to(root.resolve()):
        raise InputError(
            f"{path} is not in {root}, where runs that were made from it are looked for; name "
            "the folder of your runs before --delete."
        )
    run = owner_of(path, runs)
    if run is None or path.name.startswith(ASIDE):
        raise InputError(f"{path} is no run's folder, nor in one; {NAME_DELETABLE}.")
    target = Target(path, run)
    if target.is_whole_run:
        inner = [other for other in runs if run.folder.resolve() in other.folder.resolve().parents]
        if inner:
            raise InputError(f"{path} holds another run, {inner[0].folder}; move that elsewhere.")
        return target
    first, *rest = path.resolve().relative_to(run.folder.resolve()).parts
    if first in MODELS:
        raise InputError(f"{path} is what the run {run.folder} was for; delete the whole run.")
    is_checkpoint = first.removeprefix("checkpoint-").isdigit() and not rest
    # the user's or a command's copy of the model: not under a name that a run itself writes (PARTS)
    is_copy_of_model = not first.startswith(PARTS) and _holds_model(path)
    if not (is_checkpoint or is_copy_of_model or first == RECORD):
        raise InputError(
            f"{path} is a part of the run {run.folder} that stays with it; {NAME_DELETABLE}."
        )
    return target


def _holds_model(folder: Path) -> bool:
    has_config = any((folder / name).is_file() for name in ("config.json", ADAPTER))
    return has_config and bool(weights_files(folder))


def _refuse_while_a_run_begins(root: Path) -> None:
    """Refuse while a process holds a folder without a config.

    Such a run has only begun: what it is made from, its config would tell.
    """
    for folder in folders_in(root, set()):
        if not is_run(folder):
            with not_running(folder):
                pass


def _refuse_if_needed(target: Target, others: Sequence[Run]) -> None:
    """Refuse what another run was made from: what its path names, or what holds those weights.

    The latter counts where the path does not hold them (any more), as after a run was moved.
    """
    hashes, digest = cache(_hashes), cache(weights_sha256)
    for run in others:
        for origin in run.origins:
            how = "path"
            if not origin.folder.resolve().is_relative_to(target.path.resolve()):
                how = "hash"
                if origin.now(digest) not in LOST or origin.sha256 not in hashes(target.path):
                    continue
            raise InputError(
                f"{run.folder} was made from {target.path} ({origin.role}, by its {how}), which "
                "therefore stays; delete that run first."
            )


def _hashes(path: Path) -> set[str]:
    """Return the hashes of all models in a folder; a file has none."""
    folders = [path, *path.rglob("*")]
    return {digest for digest in map(weights_sha256, folders) if digest is not None}


def delete(root: Path, paths: Sequence[str], confirmed: bool) -> dict[str, Any]:
    """Delete what is named and all leftovers in a folder; unless confirmed, only say what that is.

    All is checked before anything is renamed, and renamed before anything is removed.
    """
    wanted = targets(root, paths)
    aside = leftovers(root)  # what is removed; the names that others get come to it below
    named = [path for target in wanted for path in target.files()]
    content = {
        "paths": [{"path": str(path), "bytes": size_of(path)} for path in [*named, *aside]],
        "deleted": confirmed,
    }
    if not confirmed:
        return content
    with ExitStack() as stack:
        for folder in {target.run.folder for target in wanted}:
            stack.enter_context(not_running(folder))
        for path in named:
            aside.append(_aside(path))
            try:
                os.rename(path, aside[-1])
            except OSError as error:
                raise InputError(
                    f"{path} cannot be renamed ({error.strerror}), so it and what was to follow "
                    "it are left as they were."
                ) from error
    for path in aside:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
        if path.exists():
            raise InputError(f"{path} could not be removed; see its permissions, and try again.")
    return content


def report(content: dict[str, Any]) -> str:
    """Write what `delete` returns."""
    if not content["paths"]:
        return "nothing is left by a deletion that was ended"
    lines = [f"{readable(entry['bytes']):>9}  {entry['path']}" for entry in content["paths"]]
    total = readable(sum(entry["bytes"] for entry in content["paths"]))
    if content["deleted"]:
        return "\n".join([*lines, f"deleted: {total}"])
    return "\n".join([*lines, f"would be deleted: {total}; add --yes to do it"])


def _aside(path: Path) -> Path:
    """Return a hidden name beside a path that nothing has."""
    name, number = f"{ASIDE}{path.name}", 1
    while os.path.lexists(path.with_name(name)):
        number += 1
        name = f"{ASIDE}{path.name}-{number}"
    return path.with_name(name)
