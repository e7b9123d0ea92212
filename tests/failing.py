"""A reward that fails, hangs or signals its own process at a step that the environment names."""

import os
import random
import time

import numpy as np
import torch


def fails(completions, trainer_state, **kwargs):
    """Reward some texts more than others; where it fails, move every random state first."""
    step = str(trainer_state.global_step)
    if step == os.environ.get("FAILS_AT"):
        random.random(), np.random.rand(), torch.rand(1)
        raise RuntimeError("the judge is gone")
    if step == os.environ.get("HANGS_AT"):
        time.sleep(1e6)
    if step == os.environ.get("SIGNALS_AT"):
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
    return [sum(map(ord, said["content"])) % 7 / 6 for (said,) in completions]
