"""The recipe of GRPO, which waits in a phase of its run until a signal has been sent to it.

Its word is a folder with job.json: the `words` of the run, the `phase` (null: never wait), and
`itself`, a signal for the last process to send to itself. Each process writes its number there
once it waits, to waiting.RANK, until there is a file `sent`; and its exit code to code.RANK.
"""

import json
import os
import runpy
import sys
import time
from pathlib import Path

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import GenerationMixin

from rlhf_trl.evaluation.held_out import AnswersHeldOut

ROOT = Path(__file__).parent.parent


class Waits:
    """Waits at the first event of a phase from the second step on."""

    def __init__(self, folder, phase, itself):
        self.folder, self.phase, self.itself = folder, phase, itself
        self.rank = int(os.environ.get("RANK", 0))
        self.steps, self.evaluating, self.waited = 0, False, False
        register_optimizer_step_pre_hook(lambda *_: self.on_step())
        evaluate, generate, save = AnswersHeldOut.evaluate, GenerationMixin.generate, torch.save

        def evaluating(*args, **kwargs):
            self.at("evaluation")
            self.evaluating = True
            metrics = evaluate(*args, **kwargs)
            self.evaluating = False
            return metrics

        def generating(*args, **kwargs):
            if not self.evaluating:
                self.at("generation")
            return generate(*args, **kwargs)

        def saving(*args, **kwargs):
            self.at("saving")
            return save(*args, **kwargs)

        AnswersHeldOut.evaluate, GenerationMixin.generate = evaluating, generating
        torch.save = saving

    def on_step(self):
        """Count the optimizer's steps."""
        self.steps += 1
        self.at("step")

    def at(self, phase):
        """Wait where it is time to."""
        if self.waited or self.steps < 2 or phase != self.phase:
            return
        self.waited = True
        if self.itself is not None:
            if self.rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
                os.kill(os.getpid(), self.itself)
            return
        (self.folder / f"waiting.{self.rank}").write_text(str(os.getpid()))
        until = time.time() + 60
        while not (self.folder / "sent").exists() and time.time() < until:
            time.sleep(0.02)


def main():
    """Do the job; the exit code is the run's unless the job is for forks of the tests."""
    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    waits = Waits(folder, job["phase"], job["itself"])
    sys.argv = ["grpo", *job["words"]]
    os.chdir(ROOT)
    code = 0
    try:
        runpy.run_path("recipes/grpo.py", run_name="__main__")
    except SystemExit as stop:
        code = stop.code
    (folder / f"code.{waits.rank}").write_text(str(code))
    if not job["forked"]:
        sys.exit(code)


if __name__ == "__main__":
    main()
