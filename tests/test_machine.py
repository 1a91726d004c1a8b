"""The machine we run on."""

from pathlib import Path

import pytest

from scaleinv.data import load_corpus
from scaleinv.machine import cache_folder, cpu_name


@pytest.mark.parametrize("value", [None, ""], ids=["unset", "empty"])
def test_cache_is_in_the_home_folder_unless_told(value, monkeypatch):
    if value is None:
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    else:
        monkeypatch.setenv("XDG_CACHE_HOME", value)
    assert cache_folder() == Path.home() / ".cache" / "scaleinv"


def test_corpora_are_kept_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("a text of some length\n" * 20)
    corpus = load_corpus(str(tmp_path / "a.txt"))
    assert (tmp_path / "cache" / "scaleinv" / "data") in corpus.train.paths[0].parents


@pytest.mark.parametrize("lines", ["processor : 0\nmodel name\t: Chip 5: the fast one\n", "processor : 0\n", None])
def test_cpu_name(lines, monkeypatch):
    def read(path):
        if lines is None:
            raise FileNotFoundError(path)
        return lines

    monkeypatch.setattr(Path, "read_text", read)
    assert cpu_name()
    if lines is not None and "model name" in lines:
        assert cpu_name() == "Chip 5: the fast one"
