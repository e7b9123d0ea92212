"""`rlhf-trl check-launch`: whether a launch makes the update that one process makes.

All ranks train a small model on fixed data; the first one keeps the weights, and the others end.
Then it runs the reference in a process of its own, and compares. Nobody waits in a collective.
"""

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf_trl.compare.launch.inputs import Subject, small_model
from rlhf_trl.compare.launch.report import Cell, Report, judge
from rlhf_trl.compare.launch.training import Training
from rlhf_trl.compare.launch.watch import watched
from rlhf_trl.errors import InputError
from rlhf_trl.run import launch
from rlhf_trl.run.config_files import read_command_line, read_config
from rlhf_trl.run.processes import end_with_launcher
from rlhf_trl.run.stages import stage_of_config

BUILDING = 600.0  # seconds in which DeepSpeed's first start may build an extension
LAUNCHED, REFERENCE = "launched.pickle", "reference.pickle"
OF_LAUNCHERS = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "ACCELERATE_", "TORCHELASTIC_"),
)
"""What names of variables begin with that would make the reference one of the launch's ranks."""


def check_launch(config: str, words: Sequence[str], limit: float) -> None:
    """Check the launch that this process is a rank of, and print what is found.

    Args:
        config: the path of a training config.
        words: further options that change it.
        limit: seconds after which a training hangs.

    Raises:
        InputError: the config does not load, the launch cannot be checked, or its update differs.
    """
    if not 0 < limit <= threading.TIMEOUT_MAX:
        raise InputError(f"--limit is {limit:g}; write a number of seconds above 0.")
    with tempfile.TemporaryDirectory(prefix="rlhf_trl-launch-") as name:
        folder = Path(name)
        with watched(max(limit, BUILDING)):
            subject, note = read_subject(["--config", config, *words], folder / "model")
        cell = Cell(subject, str(folder / "model"))
        train_cells([cell], folder, limit)
        if os.environ["RANK"] != "0":
            return
        (report,) = judge_cells([cell], folder, limit)
    print(f"check-launch: {config}; {note}\n{report.text}", flush=True)
    if not report.is_same:
        raise InputError(
            "this launch does not make the reference's update; see the lines above, and train with "
            "another accelerate config or another version until this command finds nothing."
        )


def read_subject(words: Sequence[str], model: Path) -> tuple[Subject, str]:
    """Read a config as its recipe does, and make its small model; return a line about that, too."""
    path, options = read_command_line([*words])
    written = read_config(path)
    written |= {option: value.untyped() for option, value in options if "." not in option}
    stage = stage_of_config(written, path)
    if stage.name == "rejection_sampling":
        raise InputError(
            f"{path} samples answers before it trains, which check-launch does not; name a config "
            "of recipes/sft.py with the same precision and accumulation."
        )
    note = small_model(written, model)  # before anything turns ZeRO-3 on
    check_deepspeed_can_build(written)
    loaded = stage.load([*words])
    args = loaded.trl
    precision = args.mixed_precision
    if launch.launched_for() == "fsdp" and args.device.type == "cpu":
        raise InputError(
            "FSDP cannot run on a CPU: accelerate would fall back to DDP; run check-launch on "
            "GPUs, or launch with configs/accelerate/cpu_2proc.yaml or zero2.yaml."
        )
    if args.deepspeed_plugin:
        from rlhf_trl.run import deepspeed

        precision = deepspeed.precision(args)
        if deepspeed.innermost_optimizer(args) == "DeepSpeedCPUAdam":
            from deepspeed.ops.op_builder import CPUAdamBuilder

            CPUAdamBuilder().load(verbose=False)  # here, since a training that builds looks hung
    row = (loaded.row.algorithm or "", loaded.row.formulation) if loaded.row else ("", "")
    subject = Subject(
        row=row,
        given=loaded.given | {"use_cpu": args.device.type == "cpu", "bf16": precision == "bf16"},
        stage=stage.name,
        reads=loaded.row.row.trainer_reads if loaded.row else frozenset(),
        launched=args.world_size,
        precision=precision,
        clips_at=float(args.max_grad_norm or 0),
    )
    return subject, note


def check_deepspeed_can_build(given: Any) -> None:
    """Stop where DeepSpeed would build an extension, for CPUs or offload, and no compiler is."""
    if launch.launched_for() != "deepspeed":
        return
    tools = [os.environ.get("CXX", "c++"), "ninja"]
    missing = [tool for tool in tools if shutil.which(tool) is None]
    is_on_cpu = given.get("use_cpu") or not torch.accelerator.is_available()
    if missing and is_on_cpu:
        raise InputError(
            f"DeepSpeed builds an extension on its first start, and {' and '.join(missing)} is not "
            "on PATH; install a C++ compiler and ninja (scripts/setup.sh deepspeed)."
        )


def train_cells(cells: Sequence[Cell], folder: Path, limit: float) -> None:
    """Train cells on all ranks of this launch.

    Args:
        cells: what to train; they keep what came of it.
        folder: of this process, for files.
        limit: seconds after which a training hangs.
    """
    for number, cell in enumerate(cells):
        cell_folder = folder / f"launched-{number}"
        cell_folder.mkdir(parents=True)
        with watched(limit):
            cell.train(cell_folder, launch.world_size())


def judge_cells(cells: Sequence[Cell], folder: Path, limit: float) -> list[Report]:
    """Train the references of cells, in the first process of a launch, and return its reports.

    A reference may take `limit` seconds for each cell.
    """
    counts = [cell.subject.reference_processes for cell in cells]
    references: dict[int, Cell] = {}
    for processes in sorted({*counts}):
        numbers = [number for number, count in enumerate(counts) if count == processes]
        trained = train_references([cells[number] for number in numbers], folder, limit, processes)
        references |= dict(zip(numbers, trained, strict=True))
    return [judge(cell, references[number]) for number, cell in enumerate(cells)]


def train_references(
    cells: Sequence[Cell], folder: Path, limit: float, processes: int
) -> list[Cell]:
    """Train the references of cells in processes that no launcher of this one knows of."""
    folder = folder / f"reference-{processes}"
    folder.mkdir()
    (folder / LAUNCHED).write_bytes(pickle.dumps([*cells]))
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)
    }
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    elif torch.cuda.is_available():  # several would be one process's DataParallel
        visible = environment.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    words += ["-m", "rlhf_trl.compare.launch.check_launch", str(folder)]
    limit = limit * len(cells)
    options = {"env": environment, "timeout": limit, "capture_output": True, "text": True}
    try:
        done = subprocess.run(words, **options, check=False)
    except subprocess.TimeoutExpired as error:
        raise InputError(f"the reference did not end within {limit:g} s; raise --limit.") from error
    if done.returncode:
        reasons = [line for line in done.stderr.splitlines() if "rror: " in line]
        reason = reasons[0] if reasons else f"exit code {done.returncode}"
        raise InputError(f"the reference failed ({reason}); run the config on one process.")
    return pickle.loads((folder / REFERENCE).read_bytes())


def main(folder: Path) -> None:
    """Be the reference of the cells in a folder."""
    end_with_launcher()
    rank, processes = int(os.environ.get("RANK", 0)), launch.world_size()
    references = []
    cells: list[Cell] = pickle.loads((folder / LAUNCHED).read_bytes())
    for number, launched in enumerate(cells):
        cell = replace(launched, configured=Training(), sgd=Training())
        cell_folder = folder / f"reference-{number}-{rank}"
        cell_folder.mkdir()
        cell.train(cell_folder, processes, of=launched)
        references.append(cell)
    if rank == 0:
        (folder / REFERENCE).write_bytes(pickle.dumps(references))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
