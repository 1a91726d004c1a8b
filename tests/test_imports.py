"""What an import costs, and that lazy names are there all the same."""

import subprocess
import sys

import pytest

import scaleinv

HEAVY = ("torch", "numpy", "transformers", "matplotlib", "tiktoken", "pandas", "safetensors")


def loaded_after(code: str) -> list[str]:
    """The heavy packages that a fresh Python has loaded after running the code."""
    end = f"print([name for name in {HEAVY} if name in sys.modules])"
    lines = [
        "import sys, contextlib, io",
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):",
    ]
    program = "\n".join([*lines, *(f"    {line}" for line in code.splitlines()), end])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return eval(done.stdout)


@pytest.mark.parametrize(
    "code",
    [
        "import scaleinv; dir(scaleinv)",
        "import scaleinv.methods, scaleinv.model.config, scaleinv.train.config",
        "from scaleinv.train import TrainConfig, preset; preset('162m')",
        "from scaleinv.cli import main; main(['--help'])",
        "from scaleinv.cli import main; main(['methods'])",
        "from scaleinv.cli import main; main(['train', '--help'])",
        "from scaleinv.cli import main; main(['compare', '--help'])",
    ],
)
def test_nothing_heavy_is_imported(code):
    assert loaded_after(code) == []


def test_the_operator_alone_needs_torch_alone():
    assert set(loaded_after("import scaleinv; scaleinv.attention")) <= {"torch", "numpy"}


def test_every_public_name_is_there():
    assert set(scaleinv.__all__) <= set(dir(scaleinv))
    for name in scaleinv.__all__:
        assert getattr(scaleinv, name) is not None


@pytest.mark.parametrize(
    "name", ["analysis", "data", "distributed", "eval", "hf", "model", "plots", "reports", "train"]
)
@pytest.mark.slow
def test_packages_are_attributes(name):
    loaded_after(f"import scaleinv; assert scaleinv.{name} is sys.modules['scaleinv.{name}']")


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'scaleinv' has no attribute 'atention'"):
        _ = scaleinv.atention
    with pytest.raises(ImportError):
        exec("from scaleinv.train import nothing")
