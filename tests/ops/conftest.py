import importlib.util
import zlib

import pytest
import torch

KEPT = 32
"""Of the shared cases, one in so many runs on the Triton kernels by default: their interpreter is slow."""


def _runs_triton(item) -> bool:
    given = getattr(item, "callspec", None)
    return given is not None and "triton" in (given.params.get("backend"), given.params.get("engine"))


def pytest_collection_modifyitems(items):
    for item in items:
        if _runs_triton(item) and zlib.crc32(item.nodeid.encode()) % KEPT:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.exhaustive)


@pytest.fixture(autouse=True)
def _triton_blocks(request, monkeypatch):
    """The shared cases run on few and large blocks: an interpreter takes as long for a small one."""
    if _runs_triton(request.node) and importlib.util.find_spec("triton"):
        from scaleinv.ops.triton import configs

        monkeypatch.setattr(configs, "choose", lambda *_: configs.Config(64, 64, 4, 1))


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory):
    """Every operator test runs on poisoned memory."""


@pytest.fixture(autouse=True, scope="package")
def _one_thread():
    """These calls are small, and threads that wait for each other on a busy machine are slow."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
