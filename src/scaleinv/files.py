"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def write_atomically(path: str | Path, *parts: bytes | memoryview) -> None:
    """Write the parts to a file that appears under its name only when it is whole and on disk."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """`write_atomically` for text, as UTF-8."""
    write_atomically(path, text.encode("utf-8"))
