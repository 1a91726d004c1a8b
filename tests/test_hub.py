"""A model's folder or its id: what is wrong is said in one line, without a network."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub
from huggingface_hub.errors import RepositoryNotFoundError

from scaleinv import hub


def answer(monkeypatch: pytest.MonkeyPatch, result: object) -> None:
    """Let the hub raise ``result``, or call it."""

    def model_info(self: object, name: str, timeout: float) -> None:
        if isinstance(result, Exception):
            raise result
        result()  # type: ignore[operator]

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)


def test_a_folder_and_a_known_model_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, OSError("not asked"))
    hub.check_source(tmp_path)
    answer(monkeypatch, lambda: None)
    hub.check_source("someone/some-model")


def test_what_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, OSError("not asked"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file must be a model's folder, got a file"):
        hub.check_source(tmp_path / "file")
    with pytest.raises(ValueError, match="nothing' is neither a folder nor the id of a model"):
        hub.check_source(tmp_path / "nothing")


def test_without_a_network_both_possibilities_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, OSError("Name or service not known\nsecond line"))
    expected = r"nope is not a folder, and the Hugging Face hub cannot be reached \(Name or service not known\)$"
    with pytest.raises(ValueError, match=expected):
        hub.check_source("nope")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match="nope is not a folder, and the Hugging Face hub is not asked"):
        hub.check_source("nope")


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    answer(monkeypatch, done.wait)
    monkeypatch.setattr(hub, "ANSWER", 0.01)
    with pytest.raises(ValueError, match="nope is not a folder, and the Hugging Face hub cannot be reached"):
        hub.check_source("nope")
    done.set()


def test_a_model_that_the_hub_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    error = RepositoryNotFoundError.__new__(RepositoryNotFoundError)
    error.response = SimpleNamespace(status_code=404)
    answer(monkeypatch, error)
    with pytest.raises(ValueError, match="nope is not a folder, and the Hugging Face hub has no public model"):
        hub.check_source("nope")
