"""The machine we run on."""

from pathlib import Path

import pytest
import torch

from scaleinv.data import load_corpus
from scaleinv.machine import cache_folder, cpu_name, find_device


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


def test_devices_by_name(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto") == find_device("cpu") == torch.device("cpu")
    with pytest.raises(ValueError, match="device cuda is not available: torch finds no CUDA devices"):
        find_device("cuda")
    with pytest.raises(ValueError, match="device must be auto, cpu, cuda or cuda:N, got 'gpu'"):
        find_device("gpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert [str(find_device(name)) for name in ("auto", "cuda:1", "cpu")] == ["cuda", "cuda:1", "cpu"]
    with pytest.raises(ValueError, match="device cuda:2 is not available: torch finds 2 CUDA devices"):
        find_device("cuda:2")
