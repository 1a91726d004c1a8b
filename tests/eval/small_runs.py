"""Runs that train in a moment."""

from pathlib import Path

from builders import write_books

SMALL = {"steps": 2, "train_length": 32, "layers": 1, "width": 32, "val_tokens": 512, "device": "cpu"}


def make_texts(folder: Path) -> str:
    """A folder of short texts; returns its path."""
    return str(write_books(folder, range(12), lines=20))
