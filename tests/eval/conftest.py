import pytest
from small_runs import SMALL, make_texts

from scaleinv.eval import Comparison


@pytest.fixture
def text(tmp_path, monkeypatch) -> str:
    """A folder of short texts, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return make_texts(tmp_path / "text")


@pytest.fixture
def plan(text, tmp_path) -> Comparison:
    """Two methods, one model, two seeds, two steps."""
    return Comparison(
        out=tmp_path / "out",
        methods=["rope", "yarn"],
        train={**SMALL, "data": text},
        seeds=2,
        lengths="1x,4x",
        tokens=1024,
        jobs=2,
    )
