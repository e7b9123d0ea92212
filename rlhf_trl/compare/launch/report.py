"""What a check of a launch reports: its updates against those of its reference, and every fault."""

from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlhf_trl.compare.launch import faults as launch_faults
from rlhf_trl.compare.launch.faults import TOLERANCES, Difference
from rlhf_trl.compare.launch.inputs import STEPS, Subject
from rlhf_trl.compare.launch.training import MOVES, CameUp, Training, train
from rlhf_trl.run.stages import STAGES

FIRST_STEP = "SGD, one step"


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
        self.configured = train(config, stage, {})
        if of is None:
            rates = [self.configured.sgd_rates(MOVES[self.subject.precision])]
            torch.distributed.broadcast_object_list(rates)  # the others have no weights
            self.sgd = train(config, stage, rates[0])
        else:
            batches = [batch for witness in of.sgd.witnesses for batch in witness.batches]
            self.sgd = train(config, stage, of.sgd.rates, batches)


@dataclass
class Report:
    """What a check of a cell says."""

    came_up: CameUp
    reference: str = "one process"
    differences: dict[str, list[Difference]] = field(default_factory=dict)  # by what was trained
    faults: list[str] = field(default_factory=list)  # what explains them, and what else is wrong

    @property
    def is_same(self) -> bool:
        """Whether the launch makes the reference's update."""
        verdicts = [d.verdict for differences in self.differences.values() for d in differences]
        return not self.faults and {*verdicts} == {"same"}

    @property
    def text(self) -> str:
        """The report in lines."""
        lines = [f"came up: {self.came_up.line}", f"reference: {self.reference}"]
        for what, differences in self.differences.items():
            for d in differences:
                lines.append(
                    f"{what}, {d.part}: {d.text} (relative difference {d.apart:.1e}, ratio "
                    f"{d.ratio:.4g}, cosine {d.cosine:.4f}; worst parameter {d.worst})"
                )
        lines += [f"fault: {fault}" for fault in self.faults]
        return "\n".join(lines)


def judge(launched: Cell, reference: Cell) -> Report:
    """Compare a launch's trainings with those of its reference."""
    subject = launched.subject
    tolerance = TOLERANCES[subject.precision]
    assert launched.sgd.came_up is not None
    report = Report(launched.sgd.came_up)
    if subject.depends_on:
        report.reference = f"DDP on {subject.launched} processes, since {subject.depends_on}"
    before = reference.sgd.weights[0]
    for title, steps in ((FIRST_STEP, 1), (f"SGD, {STEPS} steps", STEPS)):
        changes = launched.sgd.change(0, steps), reference.sgd.change(0, steps)
        report.differences[title] = launch_faults.compare(*changes, before, tolerance)
    ours, theirs = launched.configured, reference.configured
    if ours.moment and theirs.moment:
        differences = launch_faults.compare(ours.moment, theirs.moment, {}, tolerance)
        report.differences[f"{ours.asked}, first moment"] = differences
    else:
        changes = ours.change(0, 1), theirs.change(0, 1)
        differences = launch_faults.compare(*changes, before, tolerance)
        report.differences[f"{ours.asked}, one step"] = differences
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
        launched = training.came_up
        assert launched is not None
        if launched.optimizer != training.asked:
            faults.append(f"{launched.optimizer} steps in place of {training.asked}")
        if launched.accumulation != cell.subject.accumulation:
            faults.append(
                f"gradients are accumulated over {launched.accumulation} micro-batches, not over "
                f"{cell.subject.accumulation}"
            )
    return [*dict.fromkeys(faults)]


def of_updates(launched: Cell, reference: Cell, report: Report, tolerance: float) -> list[str]:
    """Explain what differs in the first SGD step, and name later steps that change nothing."""
    faults = []
    subject = launched.subject
    ours, theirs = launched.sgd, reference.sgd
    if any(
        not torch.allclose(ours.weights[0][name], weight, rtol=tolerance, atol=tolerance)
        for name, weight in theirs.weights[0].items()
    ):
        faults.append("the launch starts with other weights than the reference")
    for step in range(1, STEPS + 1):
        if not any(bool(moved.any()) for moved in ours.change(step - 1, step).values()):
            faults.append(f"optimizer step {step} of {STEPS} changes nothing: its window is lost")
    if any(len(witness.batches) != subject.accumulation for witness in ours.witnesses):
        return faults  # `of_set_up` names it; nothing can be fitted
    sizes = len(ours.witnesses), subject.accumulation
    tokens = [launch_faults.tokens_of(b.inputs) for w in ours.witnesses for b in w.batches]
    by_part = launch_faults.parts([*theirs.columns])
    clips_differ = clipped_norms_differ(subject.clips_at, ours.norm, theirs.norm, tolerance)
    for difference in report.differences[FIRST_STEP]:
        if difference.verdict == "same" and not clips_differ:
            continue
        names = by_part[difference.part]
        rate = ours.rates[difference.part]
        columns = torch.cat([theirs.columns[name] for name in names])
        step = launch_faults.Step(
            launched=launch_faults.flat(ours.change(0, 1), names) / -rate,
            reference=launch_faults.flat(theirs.change(0, 1), names) / -rate,
            columns=columns.double().unflatten(1, sizes),
            tokens=torch.tensor(tokens).view(sizes),
            norms=(ours.norm, theirs.norm),
            clips_at=subject.clips_at,
        )
        sentence = step.explanation(difference.part, len(by_part) == 1, tolerance)
        if sentence is not None or difference.verdict != "same":
            nothing = f"the {difference.part} differs by no weight of a micro-batch"
            faults.append(sentence or nothing)
    return faults


def clipped_norms_differ(
    clips_at: float, ours: float | None, theirs: float | None, tolerance: float
) -> bool:
    """Tell whether clipping hides that one gradient is a multiple of the other."""
    if not clips_at or not ours or not theirs:
        return False
    return max(ours, theirs) > clips_at and abs(ours / theirs - 1) > tolerance
