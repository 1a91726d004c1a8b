"""Runs that train in a moment."""

from pathlib import Path

SMALL = {"steps": 2, "train_length": 32, "layers": 1, "width": 32, "val_tokens": 512, "device": "cpu"}


def make_texts(folder: Path) -> str:
    """A folder of short texts; returns its path."""
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text("".join(f"line {n} of text {number}\n" for n in range(80)))
    return str(folder)
