"""Reading what a run left behind."""

import json
import subprocess
from pathlib import Path


def losses(folder: str | Path) -> dict[int, float]:
    """Step to loss, from a run's metrics."""
    lines = (Path(folder) / "metrics.jsonl").read_text().splitlines()
    return {json.loads(line)["step"]: json.loads(line)["loss"] for line in lines}


def finish(process: subprocess.Popen) -> str:
    """Wait for a run; its output."""
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    return output
