"""A training run in a process of its own: ``python worker.py CONFIG.json [resume]``, also under torchrun.

With the word ``killed`` or ``raises`` rank 1 fails in step 4.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from scaleinv import train
from scaleinv.train import loop


def fail_in_step(number: int, killed: bool) -> None:
    """Rank 1 alone is killed in that step, or raises an error."""
    steps = iter(range(1, number + 1))
    step = loop.optim.step

    def failing(*given: object) -> None:
        if next(steps) == number:
            if killed:
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError("a mistake on this rank alone")
        step(*given)

    if os.environ["RANK"] == "1":
        loop.optim.step = failing


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "killed" in sys.argv or "raises" in sys.argv:
        fail_in_step(4, "killed" in sys.argv)
    config = train.TrainConfig.from_json(json.loads(Path(sys.argv[1]).read_text()))
    train.run(config, resume="resume" in sys.argv, progress=lambda text: print(text, flush=True))
