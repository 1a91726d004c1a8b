import importlib.util
import zlib

import pytest
import torch
from attention_cases import Case

QUICK, IN_CI = 24, 3
"""Of the shared cases on the Triton kernels, one in so many runs by default and one in so many in CI, where every value
of every parameter and field occurs; the interpreter is slow."""


def _runs_triton(item) -> bool:
    return "triton" in (_params(item).get("backend"), _params(item).get("engine"))


def pytest_collection_modifyitems(items):
    shared = {}
    for item in items:
        if _runs_triton(item):
            shared.setdefault((item.path, item.originalname), []).append(item)
    for group in shared.values():
        group.sort(key=_hash)
        seen = set()
        for rank, item in enumerate(group):
            features = set(_features(_params(item)))
            left_out = rank * IN_CI >= len(group) and features <= seen
            if left_out:
                item.add_marker(pytest.mark.exhaustive)
            if left_out or _hash(item) % QUICK:
                item.add_marker(pytest.mark.slow)
            seen |= features


def _hash(item):
    return zlib.crc32(item.nodeid.encode())


def _params(item):
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec else {}


def _features(params):
    """What a case shows, but not its sizes."""
    for name, value in params.items():
        if isinstance(value, Case):
            fields = vars(value).items()
            yield from ((field, x if isinstance(x, str | bool) else x is None) for field, x in fields)
        else:
            yield name, str(value)


@pytest.fixture(autouse=True)
def _triton_blocks(request, monkeypatch):
    """The shared cases in float32 run on few and large blocks: an interpreter takes as long for a small one.

    In half precision the blocks are the shipped ones, which are large enough.
    """
    in_half = getattr(_params(request.node).get("dtype"), "itemsize", 4) == 2
    if _runs_triton(request.node) and not in_half and importlib.util.find_spec("triton"):
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
