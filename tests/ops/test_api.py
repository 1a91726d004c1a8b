"""`attention` refuses what it cannot serve, names the argument, and says what it runs."""

import inspect
import math

import pytest
import torch
from attention_cases import EVERY, NATIVE

import scaleinv
from scaleinv.ops import native

B, H, KV, N, D = 2, 4, 2, 6, 8


def call(**changes):
    given = {"query": torch.zeros(B, H, N, D), "key": torch.zeros(B, KV, N, D), "value": torch.zeros(B, KV, N, D)}
    return scaleinv.attention(**(given | changes))


def zeros(*shape, **options):
    return torch.zeros(*shape, **options)


ids = zeros(B, N, dtype=torch.int64)
BAD = {
    "query list": (TypeError, "query", {"query": [1.0]}),
    "key None": (TypeError, "key", {"key": None}),
    "query 3-d": (ValueError, "query", {"query": zeros(H, N, D)}),
    "value 5-d": (ValueError, "value", {"value": zeros(1, B, KV, N, D)}),
    "query int": (TypeError, "query", {"query": zeros(B, H, N, D, dtype=torch.int64)}),
    "query complex": (TypeError, "query", {"query": zeros(B, H, N, D, dtype=torch.complex64)}),
    "key dtype": (TypeError, "key", {"key": zeros(B, KV, N, D, dtype=torch.float64)}),
    "value dtype": (TypeError, "value", {"value": zeros(B, KV, N, D, dtype=torch.bfloat16)}),
    "key device": (ValueError, "key", {"key": zeros(B, KV, N, D, device="meta")}),
    "value device": (ValueError, "value", {"value": zeros(B, KV, N, D, device="meta")}),
    "key batch": (ValueError, "key", {"key": zeros(1, KV, N, D)}),
    "value batch": (ValueError, "value", {"value": zeros(B + 1, KV, N, D)}),
    "key head dim": (ValueError, "key", {"key": zeros(B, KV, N, D + 1)}),
    "value head dim 0": (ValueError, "value", {"value": zeros(B, KV, N, 0)}),
    "query head dim 0": (ValueError, "query", {"query": zeros(B, H, N, 0), "key": zeros(B, KV, N, 0)}),
    "value length": (ValueError, "value", {"value": zeros(B, KV, N + 1, D)}),
    "value heads": (ValueError, "value", {"value": zeros(B, 1, N, D)}),
    "key heads": (ValueError, "key", {"key": zeros(B, 3, N, D), "value": zeros(B, 3, N, D)}),
    "key no heads": (ValueError, "key", {"key": zeros(B, 0, N, D), "value": zeros(B, 0, N, D)}),
    "query no heads": (ValueError, "query", {"query": zeros(B, 0, N, D)}),
    "logits class": (TypeError, "logits", {"logits": scaleinv.Plain}),
    "logits heads": (ValueError, "logits", {"logits": scaleinv.ALiBi(H + 1)}),
    "logits table heads": (ValueError, "logits", {"logits": scaleinv.DistanceTable(zeros(3, N), zeros(1, N))}),
    "table too short": (ValueError, "DistanceTable", {"logits": scaleinv.DistanceTable(zeros(1, 5), zeros(1, 5))}),
    "causal None": (TypeError, "causal", {"causal": None}),
    "window 0": (ValueError, "window", {"window": 0}),
    "window -1": (ValueError, "window", {"window": -1}),
    "window bool": (ValueError, "window", {"window": True}),
    "window float": (ValueError, "window", {"window": 3.0}),
    "offset float": (TypeError, "query_offset", {"query_offset": 1.0}),
    "offset too far": (ValueError, "query_offset", {"query_offset": 10**18}),
    "offset beyond int64": (ValueError, "query_offset", {"query_offset": -(10**30)}),
    "return_lse str": (TypeError, "return_lse", {"return_lse": "yes"}),
    "offset bool": (TypeError, "query_offset", {"query_offset": True}),
    "documents list": (TypeError, "document_ids", {"document_ids": [[0] * N] * B}),
    "documents shape": (ValueError, "document_ids", {"document_ids": ids[:, 1:]}),
    "documents one row": (ValueError, "document_ids", {"document_ids": ids[:1]}),
    "documents float": (TypeError, "document_ids", {"document_ids": ids.float()}),
    "documents bool": (TypeError, "document_ids", {"document_ids": ids.bool()}),
    "documents device": (ValueError, "document_ids", {"document_ids": ids.to("meta")}),
    "documents before": (ValueError, "document_ids", {"document_ids": ids, "query_offset": -1}),
    "documents beyond": (ValueError, "document_ids", {"document_ids": ids, "query_offset": 1}),
    "mask list": (TypeError, "key_mask", {"key_mask": [[True] * N] * B}),
    "mask shape": (ValueError, "key_mask", {"key_mask": ids.bool()[:, 1:]}),
    "mask 4-d": (ValueError, "key_mask", {"key_mask": ids.bool()[:, None, None]}),
    "mask float": (TypeError, "key_mask", {"key_mask": ids.float()}),
    "mask int": (TypeError, "key_mask", {"key_mask": ids}),
    "mask device": (ValueError, "key_mask", {"key_mask": ids.bool().to("meta")}),
    "scale NaN": (ValueError, "scale", {"scale": math.nan}),
    "scale tensor": (ValueError, "scale", {"scale": torch.tensor(1.0)}),
    "scale bool": (ValueError, "scale", {"scale": True}),
    "backend": (ValueError, "backend", {"backend": "cuda"}),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("function", [scaleinv.attention, scaleinv.which_backend], ids=["attention", "which_backend"])
def test_bad_input_names_the_argument(function, name):
    error, argument, changes = BAD[name]
    if function is scaleinv.which_backend and name == "table too short":
        pytest.skip("only the tables know")
    given = {"query": zeros(B, H, N, D), "key": zeros(B, KV, N, D), "value": zeros(B, KV, N, D)}
    with pytest.raises(error, match=rf"\b{argument}\b"):
        function(**(given | changes))


def test_a_table_is_long_enough_for_what_is_visible():
    logits = scaleinv.DistanceTable(torch.rand(1, 3), torch.rand(1, 3))
    assert call(logits=logits, window=3).shape == (B, H, N, D)
    with pytest.raises(ValueError, match="up to 3"):
        call(logits=logits, window=4)


def test_which_backend_takes_what_attention_takes():
    attention = inspect.signature(scaleinv.attention).parameters
    which = inspect.signature(scaleinv.which_backend).parameters
    assert list(which) == [*attention, "detail"]
    assert all(which[name].default == attention[name].default for name in attention)


def test_which_backend():
    tensors = [torch.zeros(1, 1, 4, 32)] * 3
    best = "blocked-native" if NATIVE else "blocked-torch"
    assert scaleinv.which_backend(*tensors) == "blocked"
    assert scaleinv.which_backend(*tensors, detail=True) == best
    assert scaleinv.which_backend(*tensors, backend="blocked", detail=True) == best
    assert scaleinv.which_backend(*tensors, backend="reference") == "reference"
    assert scaleinv.which_backend(*tensors, backend="flex") == "flex"
    assert scaleinv.which_backend(*(x.double() for x in tensors), detail=True) == "blocked-torch"
    for name in EVERY:
        assert scaleinv.which_backend(*tensors, backend=name, detail=True) == name


def test_the_kernel_does_not_pretend_to_compute_in_float64():
    with pytest.raises(ValueError, match=r"blocked-native.*float64"):
        call(**{name: zeros(1, 1, 2, 2).double() for name in ("query", "key", "value")}, backend="blocked-native")


class TestWithoutCompiler:
    @pytest.fixture(autouse=True)
    def _no_kernel(self, monkeypatch):
        monkeypatch.setattr(native, "load", lambda: "no C compiler found, says the test")

    def test_auto_runs_the_twin(self):
        torch.manual_seed(0)
        tensors = torch.randn(3, 1, 2, 10, 8)
        assert scaleinv.which_backend(*tensors, detail=True) == "blocked-torch"
        want = scaleinv.attention(*tensors, backend="reference")
        torch.testing.assert_close(scaleinv.attention(*tensors), want)
        torch.testing.assert_close(scaleinv.attention(*tensors, backend="blocked"), want)

    def test_an_explicit_request_raises_with_the_reason(self):
        with pytest.raises(ValueError, match=r"blocked-native.*says the test"):
            call(backend="blocked-native")
