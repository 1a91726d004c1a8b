"""Files that are there whole or not at all."""

import os

import pytest

from scaleinv.files import write_atomically, write_text


def test_text_is_utf8_and_replaces_what_was_there(tmp_path):
    path = tmp_path / "a.json"
    write_atomically(path, b"old ", memoryview(b"bytes"))
    assert path.read_bytes() == b"old bytes"
    write_text(path, "τ = 10\n")
    assert path.read_bytes() == "τ = 10\n".encode()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("step", ["fsync", "replace"])
def test_a_failure_keeps_the_old_file(step, tmp_path, monkeypatch):
    path = tmp_path / "a.txt"
    write_text(path, "old")

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, step, full)
    with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
        write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
