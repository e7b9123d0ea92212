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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from rlhf_trl.compare import launch_faults
from rlhf_trl.compare.launch_faults import MODEL, POLICY, TOLERANCES, Difference
from rlhf_trl.compare.launch_inputs import STEPS, Subject, small_model
from rlhf_trl.compare.launch_training import CONFIGURED, SGD, CameUp, Training, train
from rlhf_trl.compare.launch_watch import watched
from rlhf_trl.errors import InputError
from rlhf_trl.run import launch
from rlhf_trl.run.config_files import read_command_line, read_config
from rlhf_trl.run.stages import STAGES, stage_of_config

LAUNCHED, REFERENCE = "launched.pickle", "reference.pickle"
OF_LAUNCHERS = ("LOCAL_", "GROUP_", "ROLE_", "MASTER_", "ACCELERATE_", "TORCHELASTIC_")
"""What names of variables begin with that would make the reference one of the launch's ranks."""


@dataclass
class Cell:
    """A config and a seed: two trainings of the launch, and two of the reference."""

    subject: Subject
    model: str  # its folder
    seed: int = 0
    configured: Training = field(default_factory=Training)
    sgd: Training = field(default_factory=Training)

    def train(self, folder: Path, processes: int, of: "Cell | None" = None) -> None:
        """Train on as many processes; `of` is the launch's cell where this is its reference."""
        config = self.subject.write(folder, self.model, processes, self.seed)
        stage = self.subject.stage
        self.configured = train(config, stage, CONFIGURED, {})
        rates = self.configured.rates() if of is None else of.configured.rates()
        if of is None and processes > 1:
            sent = [rates]
            torch.distributed.broadcast_object_list(sent)  # the others have no weights
            (rates,) = sent
        batches = []
        for witness in of.sgd.witnesses if of else ():
            batches += witness.batches
        self.sgd = train(config, stage, SGD, rates, batches)


@dataclass
class Report:
    """What a check of a cell says."""

    came_up: CameUp
    differences: dict[str, list[Difference]] = field(default_factory=dict)  # by what was trained
    faults: list[str] = field(default_factory=list)  # what explains them, and what else is wrong

    @property
    def is_same(self) -> bool:
        """Whether the launch makes the reference's update."""
        verdicts = [d.verdict for found in self.differences.values() for d in found]
        return not self.faults and {*verdicts} == {"same"}

    @property
    def text(self) -> str:
        """The report in lines."""
        lines = [f"came up: {self.came_up.line}"]
        for what, found in self.differences.items():
            for d in found:
                lines.append(
                    f"{what}, {d.part}: {d.text} (relative difference {d.apart:.1e}, ratio "
                    f"{d.ratio:.4g}, cosine {d.cosine:.4f}; worst parameter {d.worst})"
                )
        lines += [f"fault: {fault}" for fault in self.faults]
        return "\n".join(lines)


def check_launch(config: str, words: Sequence[str], limit: float) -> None:
    """Check the launch that this process is a rank of, and print what is found.

    Args:
        config: the path of a training config.
        words: further options that change it.
        limit: seconds after which a training hangs.

    Raises:
        InputError: the config does not load, the launch cannot be checked, or its update differs.
    """
    with tempfile.TemporaryDirectory(prefix="rlhf_trl-launch-") as name:
        folder = Path(name)
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
    subject = Subject(
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
    rank, processes = int(os.environ["RANK"]), launch.world_size()
    for number, cell in enumerate(tqdm(cells, "trainings", disable=rank > 0 or len(cells) == 1)):
        cell_folder = folder / f"launched-{number}"
        cell_folder.mkdir(parents=True)
        with watched(limit, rank, processes):
            cell.train(cell_folder, processes)


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
    names = {"RANK", "WORLD_SIZE"}
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in names and not name.startswith(OF_LAUNCHERS)
    }
    package = str(Path(__file__).parents[2])
    environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")])
    words = [sys.executable]
    if processes > 1:
        words += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    elif torch.cuda.is_available():  # several would be one process's DataParallel
        visible = environment.get("CUDA_VISIBLE_DEVICES", "0")
        environment["CUDA_VISIBLE_DEVICES"] = visible.partition(",")[0]
    words += ["-m", "rlhf_trl.compare.check_launch", str(folder)]
    limit = limit * len(cells)
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired as error:
            process.terminate()  # of several, their launcher ends the others
            raise InputError(
                f"the reference did not end within {limit:g} s; raise --limit."
            ) from error
    if process.returncode:
        last = [line for line in printed.splitlines() if line.strip()][-1:] or ["no reason"]
        raise InputError(f"the reference failed ({last[0]}); run the config on one process.")
    return pickle.loads((folder / REFERENCE).read_bytes())


def judge(launched: Cell, reference: Cell) -> Report:
    """Compare a launch's trainings with those of its reference."""
    subject = launched.subject
    tolerance = TOLERANCES[subject.precision]
    assert launched.sgd.came_up is not None
    report = Report(launched.sgd.came_up)
    before = reference.sgd.weights[0]
    for steps in (1, STEPS):
        title = "SGD, one step" if steps == 1 else f"SGD, {steps} steps"
        changes = [
            launch_faults.change(training.weights[0], training.weights[steps])
            for training in (launched.sgd, reference.sgd)
        ]
        report.differences[title] = launch_faults.compare(*changes, before, tolerance)
    title = f"{launched.configured.asked}, first moment"
    moments = [launched.configured.moment, reference.configured.moment]
    rounded: Any = {}
    if not all(moments):
        title = f"{launched.configured.asked}, one step"
        moments = [
            launch_faults.change(training.weights[0], training.weights[1])
            for training in (launched.configured, reference.configured)
        ]
        rounded = before
    report.differences[title] = launch_faults.compare(*moments, rounded, tolerance)
    report.faults = [
        *of_ranks(launched),
        *of_set_up(launched),
        *of_updates(launched, reference, report, tolerance),
    ]
    return report


def of_ranks(cell: Cell) -> list[str]:
    """Name ranks that have other weights, or the same samples, than another one."""
    faults = []
    witnesses = cell.sgd.witnesses
    first = witnesses[0]
    for rank, witness in enumerate(witnesses):
        if witness.before != first.before:
            faults.append(f"rank {rank} starts with other weights than rank 0")
        elif witness.after != first.after:
            faults.append(f"rank {rank} ends with other weights than rank 0")
    samples = [set().union(*(b.examples for b in witness.batches)) for witness in witnesses]
    for rank, own in enumerate(samples):
        for other in range(rank):
            if len(own & samples[other]) > len(own) / 2:  # more than chance makes alike
                faults.append(f"rank {rank} trains on the same samples as rank {other}")
    if STAGES[cell.subject.stage].prompted:
        for rank, witness in enumerate(witnesses):
            states = [other.random_state for other in witnesses[:rank]]
            if witness.random_state in states:
                twin = states.index(witness.random_state)
                faults.append(f"rank {rank} draws the same random numbers as rank {twin}")
    return faults


def of_set_up(cell: Cell) -> list[str]:
    """Name what came up otherwise than it was asked for."""
    faults = []
    for training in (cell.sgd, cell.configured):
        found = training.came_up
        assert found is not None
        if found.optimizer != training.asked:
            faults.append(f"{found.optimizer} steps in place of {training.asked}")
        if found.accumulation != cell.subject.accumulation:
            faults.append(
                f"gradients are accumulated over {found.accumulation} micro-batches, not over "
                f"{cell.subject.accumulation}"
            )
    return [*dict.fromkeys(faults)]


def of_updates(launched: Cell, reference: Cell, report: Report, tolerance: float) -> list[str]:
    """Explain what differs in the first SGD step, and name later steps that change nothing."""
    faults = []
    ours, theirs = launched.sgd, reference.sgd
    if any(
        not torch.allclose(ours.weights[0][name], weight, rtol=tolerance, atol=tolerance)
        for name, weight in theirs.weights[0].items()
    ):
        faults.append("the launch starts with other weights than the reference")
    for step in range(1, STEPS + 1):
        moved = launch_faults.change(ours.weights[step - 1], ours.weights[step])
        if not any(bool(tensor.any()) for tensor in moved.values()):
            faults.append(f"optimizer step {step} of {STEPS} changes nothing: its window is lost")
    assert theirs.columns is not None
    rates = launched.configured.rates()
    sizes = len(ours.witnesses), launched.subject.accumulation
    tokens = [launch_faults.tokens_of(b.inputs) for w in ours.witnesses for b in w.batches]
    changes = [launch_faults.change(t.weights[0], t.weights[1]) for t in (ours, theirs)]
    names = [*theirs.weights[0]]
    place, places = 0, {}
    for name in names:
        places[name] = slice(place, place + theirs.weights[0][name].numel())
        place += theirs.weights[0][name].numel()
    by_part = launch_faults.parts(names)
    norms = [training.norm for training in (ours, theirs)]
    is_scaled_before = (
        all(norms) and abs(norms[0] / norms[1] - 1) > tolerance and launched.subject.clips_at > 0
    )
    for difference in report.differences["SGD, one step"]:
        if difference.verdict == "same" and not is_scaled_before:
            continue
        part = by_part[difference.part]
        rows = torch.cat([torch.arange(place, dtype=torch.long)[places[name]] for name in part])
        rate = rates.get(difference.part, rates.get(POLICY, rates.get(MODEL, 1.0)))
        step = launch_faults.Step(
            launched=launch_faults.flat(changes[0], part) / -rate,
            reference=launch_faults.flat(changes[1], part) / -rate,
            columns=theirs.columns[rows].double().unflatten(1, sizes),
            tokens=torch.tensor(tokens).view(sizes),
            norms=(ours.norm, theirs.norm),
            clips_at=launched.subject.clips_at,
        )
        sentence = step.explanation(difference.part, len(by_part) == 1, tolerance)
        if sentence is not None or difference.verdict != "same":
            nothing = f"the {difference.part} differs by no weight of a micro-batch"
            faults.append(sentence or nothing)
    return faults


def main(folder: Path) -> None:
    """Be the reference of the cells in a folder."""
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
