import pytest
import torch


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
