"""An empty folder to work in, a small corpus and a small run."""

import shutil

import pytest

from builders import write_books
from scaleinv.cli import main

TINY = ["--batch-tokens", "128", "--train-length", "32", "--val-tokens", "512", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own_folder(tmp_path, tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def book(tmp_path):
    return f"{write_books(tmp_path / 'books', range(12), lines=15)}/*.txt"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A run of two steps."""
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        data = f"{write_books(folder / 'books', range(12), lines=15)}/*.txt"
        options = ["--method", "rope", "--data", data, "--steps", "2", "--out", str(folder / "run"), *TINY]
        assert main(["train", *options]) == 0
    return folder / "run"


@pytest.fixture
def run(trained, tmp_path):
    """A copy of the run, in the folder ``run``."""
    return shutil.copytree(trained, tmp_path / "run")
