"""`scaleinv doctor`: what it finds, and that it finds what is wrong."""

import json
from types import SimpleNamespace

import pytest
import torch

from scaleinv import doctor
from scaleinv.cli import main
from scaleinv.ops import reference, registry


@pytest.fixture
def few_backends(monkeypatch):
    """Without the Triton interpreter, which is slow."""
    kept = tuple(x for x in registry.BACKENDS if x.name in ("flex", "blocked-torch", "reference"))
    monkeypatch.setattr(registry, "BACKENDS", kept)
    return kept


def test_a_healthy_machine(few_backends, capsys):
    assert main(["doctor", "--quick", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "flex: cannot serve: FlexAttention on CPU has no backward" in out
    assert "blocked-torch: agrees with the reference" in out
    assert "× SDPA" in out
    assert "auto, float32: blocked-torch (flex is not for cpu)" in out
    assert out.strip().endswith("All is well.\n```")


def test_json(few_backends, capsys):
    assert main(["doctor", "--quick", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["wrong"] == []
    assert [x["name"] for x in found["backends"]] == ["flex", "blocked-torch", "reference"]
    assert {x["what"] for x in found["backends"][1]["timings"]} == {"forward", "backward", "decoding"}
    own = found["backends"][2]["errors"]["float32"]
    assert own["error"] == own["same_precision"] <= own["limit"]
    assert torch.__version__ in found["machine"]["torch"]


def test_a_wrong_backend_is_an_error(few_backends, monkeypatch, capsys):
    def run(call):
        out, lse = reference.run(call)
        return out * 1.01, lse

    wrong = SimpleNamespace(run=run, obstacle=lambda call: None, __name__="wrong", __file__=__file__)
    monkeypatch.setattr(registry, "BACKENDS", (registry.Backend("new", wrong, auto_on=()), *few_backends))
    assert main(["doctor", "--quick", "--device", "cpu"]) == 1
    assert "WRONG: new: self-attention, float32, head dim 64: output off by" in capsys.readouterr().out


def test_a_backend_that_fails_is_an_error(few_backends, monkeypatch):
    def run(call):
        raise RuntimeError("no kernel image")

    broken = SimpleNamespace(run=run, obstacle=lambda call: None)
    monkeypatch.setattr(registry, "BACKENDS", (registry.Backend("new", broken, auto_on=()), *few_backends))
    report = doctor.examine(torch.device("cpu"), quick=True)
    assert any("RuntimeError: no kernel image" in text for text in report.wrong)


def test_what_is_infinite_is_null_in_json(few_backends, monkeypatch, capsys):
    def run(call):
        out, lse = reference.run(call)
        return out + torch.inf, lse

    wrong = SimpleNamespace(run=run, obstacle=lambda call: None, __name__="wrong", __file__=__file__)
    monkeypatch.setattr(registry, "BACKENDS", (registry.Backend("new", wrong, auto_on=()), *few_backends))
    assert main(["doctor", "--quick", "--json", "--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "Infinity" not in out
    assert "NaN" not in out
    found = json.loads(out)
    assert found["backends"][0]["errors"]["float32"]["error"] is None
    assert "output off by inf" in found["wrong"][0]


def test_interpreted_kernels_cannot_be_compiled(capsys):
    pytest.importorskip("triton")
    assert main(["doctor", "--aot", "sm_80"]) == 2
    assert "TRITON_INTERPRET" in capsys.readouterr().err


def test_an_unknown_target(capsys):
    pytest.importorskip("triton")
    assert main(["doctor", "--aot", "sm_42"]) == 2
    assert "--aot takes sm_80, sm_90, sm_120, gfx942, got 'sm_42'" in capsys.readouterr().err
