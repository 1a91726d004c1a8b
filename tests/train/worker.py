"""A training run in a process of its own: ``python worker.py CONFIG.json [resume]``, also under torchrun."""

import json
import sys
from pathlib import Path

import torch

from scaleinv import train

if __name__ == "__main__":
    torch.set_num_threads(1)
    config = train.TrainConfig.from_json(json.loads(Path(sys.argv[1]).read_text()))
    train.run(config, resume="resume" in sys.argv, progress=lambda text: print(text, flush=True))
