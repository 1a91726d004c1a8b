"""One world for all tests of damage, and limits that keep a bad case from taking the machine with it."""

import resource

import pytest
import torch
from world import World


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield World(tmp_path_factory.mktemp("hostile"))
    torch.set_num_threads(threads)


@pytest.fixture
def world(made):
    """The world, with the working directory in it, and memory for 4 GB more than the process has."""
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + (4 << 30), hard))
    made.reset()
    with made.inside():
        yield made
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
