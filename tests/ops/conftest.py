import pytest


@pytest.fixture(autouse=True)
def _poisoned_memory(poisoned_memory):
    """Every operator test runs on poisoned memory."""
