"""What runs of the stages and the recorded losses execute of TRL, transformers and accelerate."""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tqdm import tqdm

from rlhf_trl.compare.drift import surface
from rlhf_trl.compare.drift.sources import LIBRARIES, Module, Place, outer_name
from rlhf_trl.errors import InputError
from rlhf_trl.run.folders import home
from rlhf_trl.run.stages import STAGES

STEPS = ("--eval_steps", "2", "--save_strategy", "steps", "--save_steps", "2")
"""What makes a run short, with an evaluation and a checkpoint."""

SIZES = ("--dataset.size", "128", "--dataset.eval_size", "16", "--warmup_steps", "1")

LORA = ("--use_peft", "true", "--lora_target_modules", "q_proj", "v_proj")
"""An adapter, whose reference is the model without it."""

OF_STAGE = {"distill": ("--teacher_models", "tiny"), "rejection_sampling": ("--answers", "answers")}


class Trace:
    """What has been executed of the libraries while it was on."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.classes: set[type] = set()  # those whose generated methods ran, which have no file

    def _note(self, frame: FrameType, _event: str, _argument: Any) -> None:
        """Note a function that is called; returns None, so that its lines are not traced."""
        self.codes.add(frame.f_code)
        if frame.f_code.co_filename == "<string>" and "self" in frame.f_locals:
            self.classes.add(type(frame.f_locals["self"]))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Note what is called, in all threads."""
        threading.settrace(self._note)
        sys.settrace(self._note)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def places(self) -> set[Place]:
        """Return the functions that ran, the classes that own them, and constants they name."""
        modules = {
            module.__file__: Module(name)
            for name, module in [*sys.modules.items()]
            if name.partition(".")[0] in LIBRARIES and getattr(module, "__file__", None)
        }
        places: set[Place] = set()
        for code in [*self.codes]:  # a thread that was started while it was on goes on noting
            module = modules.get(code.co_filename)
            if module is None:
                continue
            name = outer_name(code)
            if name not in module.nodes:  # the module's own body, or a lambda in it
                continue
            owner = name.rpartition(".")[0]
            constants = {*code.co_names} & module.constants
            places |= {(module.name, used) for used in {name, owner, *constants} if used}
        for cls in [*self.classes]:
            for base in cls.__mro__:
                if base.__module__.partition(".")[0] in LIBRARIES:
                    places.add((base.__module__, base.__qualname__))
        return places


@dataclass(frozen=True)
class Run:
    """A run that is traced."""

    stage: str  # "": the recorded losses
    words: Sequence[str] = ()  # further options
    processes: int = 1

    def program(self, result: Path, folder: Path) -> list[str]:
        """Return the command that writes what the run executes to `result`."""
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        program = [sys.executable, *(launcher if self.processes > 1 else [])]
        program += ["-m", "rlhf_trl.compare.drift.tracing", str(result), self.stage]
        if not self.stage:
            return program
        is_further = self.words and "--resume_from_checkpoint" not in self.words
        output_dir = folder / (f"further-{hash(self)}" if is_further else self.stage)
        config = home() / f"configs/tiny/{'opd' if self.stage == 'distill' else self.stage}.yaml"
        program += ["--config", str(config), "--output_dir", str(output_dir)]
        steps = () if "--max_steps" in self.words else ("--max_steps", "4")
        own = OF_STAGE.get(self.stage, ())
        return [*program, *SIZES, *STEPS, *steps, *own, *self.words]


def further_runs() -> list[Run]:
    """Return runs that execute what the first one of their stage does not."""
    resumed = ("--max_steps", "6", "--resume_from_checkpoint", "auto")
    inside_trl = ("--num_iterations", "2", "--formulation", "trl", "--beta", "0.1")
    return [
        *(Run(stage, resumed) for stage in ("sft", "grpo", "ppo", "reward")),
        Run("grpo", (*LORA, *inside_trl)),
        Run("sft", (*LORA, "--gradient_checkpointing", "true")),
        *(Run(stage, LORA) for stage in ("dpo", "kto")),
        Run("dpo", ("--precompute_ref_log_probs", "true")),
        *(Run(stage, ("--seed", "1"), processes=2) for stage in ("sft", "grpo", "dpo")),
    ]


def executed() -> dict[str, set[Place]]:
    """Return what is executed, by stage, and under "" by the recorded losses.

    Each run has a process of its own, so that it imports what it needs. Takes minutes, and needs a
    checkout of the project with its configs.

    Raises:
        InputError: a run fails.
    """
    runs = [Run(""), *(Run(stage) for stage in STAGES), *further_runs()]
    places: dict[str, set[Place]] = {run.stage: set() for run in runs}
    with tempfile.TemporaryDirectory(prefix="rlhf_trl-sources-") as name:
        folder, result = Path(name), Path(name, "places")
        for run in tqdm(runs, "runs traced"):
            program = run.program(result, folder)
            done = subprocess.run(
                program, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
            )
            if done.returncode:
                last_lines = done.stdout.strip()[-2000:]
                raise InputError(f"{' '.join(program)} failed:\n{last_lines}")
            places[run.stage] |= pickle.loads(result.read_bytes())
    return places


def main(result: Path, stage: str, words: Sequence[str]) -> None:
    """Run a stage, or compute the recorded losses, and write the places that were executed."""
    trace = Trace()
    if stage:
        sys.argv = [f"recipes/{stage}.py", *words]
        for part in ("run", "trainer"):  # what an import executes is not noted
            STAGES[stage].part(part)
        with trace.on():
            STAGES[stage].main()
    else:
        surface.relied_on()  # imports our trainers
        with trace.on():
            surface.read()
    if os.environ.get("RANK", "0") == "0":
        result.write_bytes(pickle.dumps(trace.places()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
