"""Several ranks as processes of this machine."""

import os
import subprocess
import sys
from pathlib import Path


def start_ranks(worker: str, ranks: int, folder: Path, *arguments: str, timeout: float = 120) -> list[tuple[int, str]]:
    """Run ``worker`` once for each rank; exit codes and outputs. None may outlive the timeout."""
    path = os.pathsep.join([*sys.path, os.environ.get("PYTHONPATH", "")])
    script = str(Path(__file__).with_name(worker))
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(ranks), str(folder), *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        outputs = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, output) for process, output in zip(processes, outputs, strict=True)]
