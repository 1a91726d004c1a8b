"""What the shipped configurations compile to: no GPU is needed, and nothing runs."""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

from scaleinv.ops.triton import configs

QUICK = [("forward", "sm_80", 64, 2), ("forward", "sm_90", 128, 2), ("keys-values", "sm_80", 64, 2)]
EVERY_PATH = [(kernel, "sm_80", 32, 2, mode) for kernel in configs.KERNELS for mode in ("plain", "everything", "logn")]
EVERY_PATH += [(kernel, "gfx942", 32, 2, "everything") for kernel in configs.KERNELS]
EVERY_PATH += [(kernel, target, 64, 2) for kernel in ("pack", "delta", "merge") for target in ("sm_80", "gfx942")]
PROGRAM = """
import json, sys
from scaleinv.ops.triton import aot
for given in json.loads(sys.argv[1]):
    build = aot.compiled(*given)
    print(json.dumps([given, aot.faults(build), build.registers, sum(build.loop.values())]), flush=True)
"""


def faults(wanted):
    """In a process of its own: in this one the kernels are interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", PROGRAM, json.dumps(wanted)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(wanted):
    found = faults(wanted)
    assert len(found) == len(wanted)
    assert {str(given): texts for given, texts, *_ in found if texts} == {}
    for given, _, registers, instructions in found:
        assert 16 <= registers <= (512 if given[1] == "gfx942" else 255)
        assert instructions > 50


@pytest.mark.slow
def test_some_configurations():
    check(QUICK)


@pytest.mark.slow
def test_every_path_compiles():
    """The interpreter takes programs that the compiler does not."""
    assert len(faults(EVERY_PATH)) == len(EVERY_PATH)


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("target", configs.TARGETS)
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_every_configuration(kernel, target):
    check([given for given in configs.shipped() if given[:2] == (kernel, target)])


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("target", configs.TARGETS)
@pytest.mark.parametrize("kernel", configs.KERNELS)
def test_every_option_fits_the_shared_memory(kernel, target):
    check([(*given, "everything") for given in configs.shipped() if given[:2] == (kernel, target)])


@pytest.mark.slow
def test_a_configuration_that_spills_is_found():
    """128 × 64 on 4 warps with head dimension 128 does not fit an A100's registers."""
    program = "from scaleinv.ops.triton import aot, configs\n"
    program += "print(aot.faults(aot.compiled('forward', 'sm_80', 128, 2, 'table', configs.Config(128, 64, 4, 3))))"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert "bytes spilled, 64 allowed" in done.stdout
