"""Logit transforms as modules: their tables, parameters, copies, casts and errors."""

import copy
import io
import math
import pickle

import pytest
import torch
from torch import nn

import scaleinv
from scaleinv import schedule
from scaleinv.logits import alibi_slopes

CPU = torch.device("cpu")
MAKE = {
    "plain": scaleinv.Plain,
    "scale-invariant": lambda: scaleinv.ScaleInvariant(tau=3.0),
    "scale-invariant-heads": lambda: scaleinv.ScaleInvariant([1.0, 2.0, 30.0]),
    "learnable": lambda: scaleinv.ScaleInvariant([1.0, 2.0, 30.0], learnable=True),
    "fitted": lambda: scaleinv.FittedScaleInvariant([-1.0, 0.0, 2.0], [0.5, 1.0, 9.0], tau=3.0),
    "logn": lambda: scaleinv.LogN(3),
    "alibi": lambda: scaleinv.ALiBi(3),
    "table": lambda: scaleinv.DistanceTable(torch.rand(3, 40), nn.Parameter(torch.rand(1, 40))),
}
every_transform = pytest.mark.parametrize("name", MAKE)


def tables(logits, length=40, dtype=torch.float64):
    return [x.detach() for x in logits.tables(length, dtype=dtype, device=CPU)]


def equal(first, second):
    return all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


class TestTables:
    @every_transform
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
    def test_shape_and_dtype(self, name, dtype):
        for length in (1, 2, 3, 33, 40):
            for table in tables(MAKE[name](), length, dtype):
                assert table.dtype == dtype
                assert table.shape in [(1, length), (3, length)]

    @every_transform
    def test_growing_and_shrinking_give_the_same_entries(self, name):
        logits = MAKE[name]()
        long = tables(logits, 40)
        for length in (1, 40, 7, 33):
            assert equal(tables(logits, length), [x[:, :length] for x in long])

    @every_transform
    @pytest.mark.parametrize("kept", [None, 4], ids=["cached", "computed"])
    def test_a_range_is_part_of_the_table(self, name, kept, monkeypatch):
        logits = MAKE[name]()
        long = tables(logits)
        if kept is not None:
            monkeypatch.setattr(type(logits), "KEPT", kept, raising=False)
            logits = copy.deepcopy(logits)  # without its cache
        for start, stop in ((0, 3), (5, 6), (7, 40), (9, 9)):
            got = logits.table_range(start, stop, dtype=torch.float64, device=CPU)
            assert equal([x.detach() for x in got], [x[:, start:stop] for x in long])

    @pytest.mark.parametrize("start", [2**53 - 7, 2**53])
    def test_a_range_is_whole_where_float64_skips_numbers(self, start):
        for logits in (scaleinv.ScaleInvariant(), scaleinv.ScaleInvariant(heads=2, learnable=True), scaleinv.ALiBi(2)):
            for table in logits.table_range(start, start + 9, dtype=torch.float64, device=CPU):
                assert table.shape[1] == 9

    def test_scale_invariant_is_the_schedule(self):
        t = torch.arange(40)
        want = schedule.coefficients(t, 3.0, 1.2, 0.9)
        got = tables(scaleinv.ScaleInvariant(3.0, 1.2, 0.9))
        assert equal(got, [x[None] for x in want])
        rounded = tables(scaleinv.ScaleInvariant(3.0, 1.2, 0.9), dtype=torch.float32)
        assert equal(rounded, [x[None].float() for x in want])

    def test_are_computed_once(self, monkeypatch):
        logits = scaleinv.ScaleInvariant()
        tables(logits, 33)
        monkeypatch.setattr(logits, "compute", None)
        tables(logits, 64)
        with pytest.raises(TypeError):
            tables(logits, 65)

    def test_learnable_follows_its_parameter(self):
        logits = scaleinv.ScaleInvariant(10.0, heads=2, learnable=True)
        before = tables(logits)
        with torch.no_grad():
            logits.log_tau[0] += 1
        after = tables(logits)
        assert torch.equal(before[1][1], after[1][1])
        torch.testing.assert_close(after[1][0], schedule.coefficients(torch.arange(40), logits.tau[0].item())[1])

    @every_transform
    def test_inference_then_training(self, name):
        """A table made under inference_mode must serve a training step."""
        logits = MAKE[name]()
        query, key, value = torch.randn(3, 1, 3, 20, 8)
        with torch.inference_mode():
            scaleinv.attention(query, key, value, logits)
        leaf = query.clone().requires_grad_()
        scaleinv.attention(leaf, key, value, logits).sum().backward()
        assert leaf.grad.isfinite().all()
        with torch.inference_mode():
            scaleinv.attention(query, key, value, logits)

    def test_cached_tables_do_not_track_gradients(self):
        assert not any(x.requires_grad for x in scaleinv.ScaleInvariant().tables(5, dtype=torch.float32, device=CPU))


class TestModule:
    @every_transform
    def test_copies_are_equal_and_independent(self, name):
        logits = MAKE[name]()
        want = tables(logits)
        for other in (copy.deepcopy(logits), pickle.loads(pickle.dumps(logits))):
            assert equal(tables(other), want)
            for mine, theirs in zip(logits.parameters(), other.parameters(), strict=True):
                assert mine is not theirs
                assert torch.equal(mine, theirs)
            assert repr(other) == repr(logits)

    @every_transform
    def test_state_dict_round_trip(self, name):
        torch.manual_seed(0)
        logits = MAKE[name]()
        for parameter in logits.parameters():
            nn.init.normal_(parameter)
        file = io.BytesIO()
        torch.save(logits.state_dict(), file)
        file.seek(0)
        other = MAKE[name]()
        other.load_state_dict(torch.load(file))
        assert equal(tables(other), tables(logits))
        assert equal(other.parameters(), logits.parameters())

    def test_what_a_checkpoint_holds(self):
        held = {name: sorted(make().state_dict()) for name, make in MAKE.items()}
        fixed = ("plain", "scale-invariant", "scale-invariant-heads", "fitted", "alibi")
        learnt = {"learnable": ["log_tau"], "logn": ["scale"], "table": ["scale", "shift"]}
        assert held == {name: [] for name in fixed} | learnt

    @pytest.mark.parametrize("name", ["plain", "scale-invariant", "scale-invariant-heads", "alibi", "logn"])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_a_cast_does_not_touch_fixed_tables(self, name, dtype):
        assert equal(tables(MAKE[name]().to(dtype)), tables(MAKE[name]()))

    @pytest.mark.parametrize("name", ["learnable", "logn", "table"])
    def test_a_cast_rounds_parameters_and_nothing_else(self, name):
        logits = MAKE[name]().to(torch.bfloat16)
        assert all(p.dtype == torch.bfloat16 for p in logits.parameters())
        assert all(x.dtype == torch.float64 for x in tables(logits))
        rounded = MAKE[name]()
        rounded.load_state_dict(logits.state_dict())
        if name != "table":  # the round trip of a random table is another one
            assert equal(tables(rounded), tables(logits))

    @every_transform
    def test_heads(self, name):
        assert MAKE[name]().heads == (None if name in ("plain", "scale-invariant") else 3)

    @every_transform
    def test_repr_says_what_it_is(self, name):
        logits = MAKE[name]()
        assert repr(logits).startswith(type(logits).__name__ + "(")

    def test_learnable_starts_at_tau(self):
        logits = scaleinv.ScaleInvariant(30.0, heads=4, learnable=True)
        torch.testing.assert_close(logits.tau, torch.full((4,), 30.0, dtype=torch.float64), rtol=1e-6, atol=0.0)
        assert logits.log_tau.requires_grad
        assert logits.log_tau.is_contiguous()

    def test_logn_can_be_frozen(self):
        assert not scaleinv.LogN(2, learnable=False).scale.requires_grad
        assert scaleinv.LogN(2).scale.tolist() == pytest.approx([0.4, 0.4])

    def test_a_caller_keeps_the_tensor_it_gave(self):
        tau = torch.tensor([1.0, 2.0])
        logits = scaleinv.ScaleInvariant(tau)
        tau.fill_(100)
        assert logits.tau.tolist() == [1, 2]


class TestLogN:
    def test_query_gain(self):
        logits = scaleinv.LogN(2, scale=0.5)
        c = logits.query_gain(torch.tensor([[0, 1, 10, 70_000]]))
        assert c.shape == (1, 2, 4)
        torch.testing.assert_close(c[0, 0], torch.tensor([0, 0, 0.5 * math.log(10), 0.5 * math.log(70_000)]).to(c))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_a_cast_rounds_the_parameter_but_not_the_count(self, dtype):
        c = scaleinv.LogN(1, scale=0.5).to(dtype).query_gain(torch.tensor([[70_001]]))
        assert c.item() == pytest.approx(0.5 * math.log(70_001), rel=1e-6)


class TestALiBi:
    @pytest.mark.parametrize("heads", [1, 2, 3, 6, 8, 12, 16, 20])
    def test_slopes(self, heads):
        """The paper's recursive rule, written as its code is."""

        def slopes(n):
            if math.log2(n).is_integer():
                start = 2 ** (-(2 ** -(math.log2(n) - 3)))
                return [start * start**i for i in range(n)]
            closest = 2 ** math.floor(math.log2(n))
            return slopes(closest) + slopes(2 * closest)[0::2][: n - closest]

        assert alibi_slopes(heads).tolist() == pytest.approx(slopes(heads), rel=1e-12)


class TestErrors:
    @pytest.mark.parametrize("tau", [None, [[1.0, 2.0]]], ids=str)
    def test_type_of_tau(self, tau):
        with pytest.raises(TypeError, match="tau"):
            scaleinv.ScaleInvariant(tau)

    @pytest.mark.parametrize("tau", [0.0, -3.0, math.nan, math.inf, [1.0, -1.0], []], ids=str)
    def test_tau(self, tau):
        with pytest.raises(ValueError, match="tau"):
            scaleinv.ScaleInvariant(tau)

    @pytest.mark.parametrize(
        ("argument", "given"),
        [
            ("alpha", {"alpha": 0.0}),
            ("beta", {"beta": -1.0}),
            ("beta", {"alpha": 5.0, "beta": 1.0}),
            ("heads", {"learnable": True}),
            ("heads", {"heads": 0}),
            ("heads", {"heads": True}),
            ("heads", {"heads": 2.0}),
            ("tau", {"tau": [1.0, 2.0], "heads": 3}),
            ("tau", {"tau": torch.ones(1, 2)}),
            ("beta", {"alpha": 2.0, "beta": 2 * math.log(2), "heads": 1, "learnable": True}),
        ],
        ids=str,
    )
    def test_scale_invariant(self, argument, given):
        with pytest.raises(ValueError, match=argument):
            scaleinv.ScaleInvariant(**given)

    @pytest.mark.parametrize(
        ("argument", "given"),
        [
            ("heads", {"heads": 0}),
            ("scale", {"heads": 1, "scale": math.nan}),
            ("counts", {"heads": 1, "counts": "all"}),
        ],
        ids=str,
    )
    def test_logn(self, argument, given):
        with pytest.raises(ValueError, match=argument):
            scaleinv.LogN(**given)

    @pytest.mark.parametrize("heads", [0, -1, 1.0, True, None])
    def test_alibi(self, heads):
        with pytest.raises(ValueError, match="heads"):
            scaleinv.ALiBi(heads)

    @pytest.mark.parametrize(
        ("error", "argument", "scale", "shift"),
        [
            (TypeError, "scale", [[1.0]], torch.zeros(1, 1)),
            (TypeError, "shift", torch.zeros(1, 1), torch.zeros(1, 1, dtype=torch.int64)),
            (ValueError, "scale", torch.zeros(4), torch.zeros(4)),
            (ValueError, "shift", torch.zeros(1, 4), torch.zeros(1, 0)),
            (ValueError, "shift", torch.zeros(1, 4), torch.zeros(1, 5)),
            (ValueError, "heads", torch.zeros(2, 4), torch.zeros(3, 4)),
        ],
        ids=lambda x: getattr(x, "__name__", None) or (str(tuple(x.shape)) if hasattr(x, "shape") else str(x)),
    )
    def test_distance_table(self, error, argument, scale, shift):
        with pytest.raises(error, match=argument):
            scaleinv.DistanceTable(scale, shift)

    def test_distance_table_too_short(self):
        logits = scaleinv.DistanceTable(torch.zeros(1, 4), torch.zeros(1, 4))
        with pytest.raises(ValueError, match=r"DistanceTable.*0 … 3.*up to 4"):
            logits.tables(5, dtype=torch.float32, device=CPU)

    def test_the_base_class_says_what_is_missing(self):
        logits = scaleinv.LogitTransform()
        with pytest.raises(NotImplementedError):
            logits.tables(1, dtype=torch.float32, device=CPU)
        logits.counts = "visible"
        with pytest.raises(NotImplementedError, match="query_gain"):
            logits.query_gain(torch.ones(1, 1))


class TestFitted:
    def test_each_head_has_the_coefficients_of_its_scores(self):
        a, m = tables(scaleinv.FittedScaleInvariant([-1.0, 2.0], torch.tensor([0.5, 9.0]), tau=3.0))
        for head, (mean, variance) in enumerate(((-1.0, 0.5), (2.0, 9.0))):
            expected = scaleinv.schedule.fitted_coefficients(torch.arange(a.shape[1]), mean, variance, 3.0)
            torch.testing.assert_close(torch.stack([a[head], m[head]]), torch.stack(expected), atol=0, rtol=0)

    def test_standard_scores_give_scale_invariant_logits(self):
        for found, expected in zip(
            tables(scaleinv.FittedScaleInvariant([0.0], [1.0])), tables(scaleinv.ScaleInvariant()), strict=True
        ):
            torch.testing.assert_close(found, expected)

    @pytest.mark.parametrize(
        ("mean", "variance", "message"),
        [
            ([], [], "heads must be a positive integer"),
            ([0.0], [1.0, 1.0], "as many heads, got 1 and 2"),
            ([0.0], [0.0], "variance must be positive and finite"),
            ([math.nan], [1.0], "mean must be finite"),
            (0.0, [1.0], "mean must hold one number for each head"),
            ([[0.0]], [1.0], "mean must hold one number for each head"),
        ],
    )
    def test_nonsense_is_refused_by_name(self, mean, variance, message):
        with pytest.raises(ValueError, match=message):
            scaleinv.FittedScaleInvariant(mean, variance)
