"""The registered operators: torch's own checks of them, the compiler, checkpoints and second derivatives."""

import itertools

import pytest
import torch
from attention_cases import FAST, TRANSFORMS, Case, diagonal_call
from torch.utils.checkpoint import checkpoint

import scaleinv
from scaleinv.ops import operator
from scaleinv.ops.call import DiagonalCall, checked

every_engine = pytest.mark.parametrize("engine", [name for name in FAST if name in operator.ENGINES])
OPERATOR_CASES = [
    Case(33, batch=2, heads=4, kv_heads=2, dim=8, value_dim=5),
    Case(20, 33, transform="table-heads", window=9, offset=30),
    Case(3, 33, transform="alibi", mask="blind", batch=2),
    Case(33, transform="scale-invariant-heads", documents="huge", mask="some", causal=False),
]


def arguments(case, dtype=torch.float32, transposed=False, learn=True):
    """The operator's arguments, as `attention` would pass them."""
    given = {"query": None, "key": None, "value": None}
    for name, x in zip(given, case.tensors(dtype)[:3], strict=True):
        given[name] = (x.transpose(1, 2).contiguous().transpose(1, 2) if transposed else x).requires_grad_()
    flat = operator._Flat.of(diagonal_call(case, dtype, **given))
    return flat._replace(gain=flat.gain.detach().requires_grad_(learn), shift=flat.shift.detach().requires_grad_(learn))


def test_the_operators_take_a_flattened_call():
    """The one place where names are written twice."""
    fields = list(operator._Flat._fields)
    for op in (operator.blocked_forward, operator.blocked_backward):
        names = [argument.name for argument in op._opoverload._schema.arguments]
        assert names[-len(fields) :] == fields


class TestOpcheck:
    @every_engine
    @pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
    @pytest.mark.parametrize("learn", [True, False], ids=["tables learn", "tables fixed"])
    def test_forward(self, engine, case, learn):
        torch.library.opcheck(operator.blocked_forward, (engine, *arguments(case, learn=learn)))

    @every_engine
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
    def test_forward_of_transposed_inputs(self, engine, dtype):
        given = arguments(OPERATOR_CASES[0], dtype, transposed=True)
        torch.library.opcheck(operator.blocked_forward, (engine, *given))

    @every_engine
    @pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
    @pytest.mark.parametrize("table_grads", [True, False])
    @pytest.mark.parametrize("transposed", [True, False])
    def test_backward(self, engine, case, table_grads, transposed):
        given = [x.detach() if isinstance(x, torch.Tensor) else x for x in arguments(case, transposed=transposed)]
        out, lse = operator.blocked_forward(engine, *given)
        grads = torch.randn(out.shape), torch.randn(lse.shape)
        torch.library.opcheck(operator.blocked_backward, (engine, *grads, out, lse, table_grads, *given))


@pytest.mark.parametrize("case", OPERATOR_CASES, ids=str)
def test_gradcheck_of_the_operator(case):
    small = Case(**(vars(case) | {"queries": min(case.queries, 7), "keys": 9, "dim": 3, "value_dim": 2, "offset": 2}))
    flat = arguments(small, torch.float64)
    hidden = flat.shift == -torch.inf

    def function(query, key, value, gain, shift):
        tables = {"gain": gain.masked_fill(hidden, 0), "shift": shift.masked_fill(hidden, -torch.inf)}
        given = flat._replace(query=query, key=key, value=value, **tables)
        out, lse = operator.blocked_forward("blocked-torch", *given)
        return out, lse.masked_fill(lse == -torch.inf, 0)

    finite = flat.shift.detach().masked_fill(hidden, 0).requires_grad_()
    assert torch.autograd.gradcheck(function, (flat.query, flat.key, flat.value, flat.gain, finite))


@every_engine
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [None, 25])
def test_parts_of_the_keys_give_the_gradients_of_the_whole(engine, causal, window):
    """What context parallelism does: forward in parts, merge, backward of each part with the merged logsumexp."""
    case = Case(40, 60, heads=4, kv_heads=2, causal=causal, window=window, transform="scale-invariant-heads")
    query, key, value, grad_out, grad_lse = case.tensors(torch.float32)
    logits, cuts = case.logits(), (0, 13, 14, 60)

    def call(low, high):
        part = {"window": window, "causal": causal, "query_offset": 20 - low}
        given = dict.fromkeys(("document_ids", "key_mask", "scale")) | part
        return checked(query, key[:, :, low:high], value[:, :, low:high], logits, return_lse=True, **given)

    def diagonals(low, high):
        whole = call(low, high)
        tables = whole.geometry.diagonal_tables(logits, torch.float32, query.device)
        return DiagonalCall(query, whole.key, whole.value, *tables, None, None, whole.scale, whole.geometry)

    want_out, want_lse = operator.block_forward(engine, diagonals(0, 60))
    parts = [diagonals(low, high) for low, high in itertools.pairwise(cuts)]
    outs, lses = zip(*(operator.block_forward(engine, part) for part in parts), strict=True)
    lse = torch.stack(lses).logsumexp(0)
    out = sum(x * (y - lse).exp()[..., None] for x, y in zip(outs, lses, strict=True))
    torch.testing.assert_close(lse, want_lse)
    torch.testing.assert_close(out, want_out)

    delta = operator.row_delta(grad_out, grad_lse, out, lse)
    want = operator.block_backward(engine, diagonals(0, 60), grad_out, want_lse, delta, table_grads=True)
    got = [operator.block_backward(engine, part, grad_out, lse, delta, table_grads=True) for part in parts]
    torch.testing.assert_close(sum(x.query for x in got), want.query)
    torch.testing.assert_close(torch.cat([x.key for x in got], 2), want.key)
    torch.testing.assert_close(torch.cat([x.value for x in got], 2), want.value)
    for name in ("gain", "shift"):  # key n of a part is key n + low of the whole, and so are the diagonals
        total = torch.zeros_like(getattr(want, name))
        for low, grads in zip(cuts, got, strict=False):
            table = getattr(grads, name)
            total[:, low : low + table.shape[1]] += table
        torch.testing.assert_close(total, getattr(want, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", ["learnable", "logn-visible", "table-shift-heads"])
def test_gradcheck_of_the_parameters(transform):
    case = Case(5, 7, dim=3, heads=2, kv_heads=1, transform=transform)
    tensors = [x.requires_grad_() for x in case.tensors(torch.float64)[:3]]
    logits = case.logits().double()
    names = [name for name, _ in logits.named_parameters()]

    def function(query, key, value, *parameters):
        class Call(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.logits = logits

            def forward(self):
                return scaleinv.attention(query, key, value, self.logits, backend="blocked-torch", return_lse=True)

        given = {f"logits.{name}": x for name, x in zip(names, parameters, strict=True)}
        return torch.func.functional_call(Call(), given, ())

    parameters = [x.detach().clone().requires_grad_() for x in logits.parameters()]
    assert torch.autograd.gradcheck(function, (*tensors, *parameters))


@pytest.mark.parametrize("backend", FAST)
def test_a_second_derivative_raises(backend):
    """Not offered: better an error than zeros."""
    query, key, value = (x.requires_grad_() for x in Case(9).tensors(torch.float32)[:3])
    out = scaleinv.attention(query, key, value, backend=backend)
    (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(grad.square().sum(), key)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("reentrant", [True, False])
def test_activation_checkpointing(backend, reentrant):
    logits = scaleinv.ScaleInvariant(heads=2, learnable=True)

    def gradients(wrapped):
        leaves = [x.requires_grad_() for x in Case(40).tensors(torch.float32)[:3]]

        def block(*tensors):
            return scaleinv.attention(*tensors, logits, backend=backend)

        out = checkpoint(block, *leaves, use_reentrant=reentrant) if wrapped else block(*leaves)
        return torch.autograd.grad(out.square().sum(), [*leaves, logits.log_tau]) if not reentrant else backward(out)

    def backward(out):
        logits.zero_grad()
        out.square().sum().backward()
        return [logits.log_tau.grad.clone()]

    assert all(torch.equal(x, y) for x, y in zip(gradients(True), gradients(False), strict=True))


class TestCompile:
    """fullgraph=True: any break in the graph raises."""

    @pytest.fixture(autouse=True)
    def _fresh(self):
        torch.compiler.reset()
        yield
        torch.compiler.reset()

    @staticmethod
    def check(compiled, logits, case):
        """Compiled and eager agree on outputs and gradients."""
        results = []
        for function in (compiled, scaleinv.attention):
            leaves = [x.requires_grad_() for x in case.tensors(torch.float32)[:3]]
            out, lse = function(*leaves, logits, return_lse=True, **case.options())
            loss = out.square().sum() + lse.masked_fill(lse == -torch.inf, 0).sum()
            results.append([out, lse, *torch.autograd.grad(loss, [*leaves, *logits.parameters()])])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("transform", [x for x in TRANSFORMS if x != "table-scale-heads"])
    def test_every_transform(self, transform):
        compiled = torch.compile(scaleinv.attention, fullgraph=True, backend="aot_eager")
        case = Case(33, transform=transform, kv_heads=1)
        self.check(compiled, case.logits(), case)

    @pytest.mark.parametrize("transform", ["scale-invariant", "logn-visible"])
    def test_dynamic_lengths(self, transform):
        compiled = torch.compile(scaleinv.attention, fullgraph=True, backend="aot_eager", dynamic=True)
        logits = Case(1, transform=transform).logits()
        for n in (33, 50, 71):
            self.check(compiled, logits, Case(n, transform=transform, documents="packed", mask="some", batch=2))
        torch.compiler.set_stance("fail_on_recompile")
        try:
            self.check(compiled, logits, Case(90, transform=transform, documents="packed", mask="some", batch=2))
        finally:
            torch.compiler.set_stance("default")

    @pytest.mark.slow
    @pytest.mark.parametrize("backend", FAST)
    def test_inductor_with_transposed_inputs(self, backend):
        """As a model calls it: [B, N, H, D] from a projection, transposed, with learnt lengthscales."""
        torch.manual_seed(0)
        logits = scaleinv.ScaleInvariant(heads=2, learnable=True)
        x = torch.randn(2, 40, 3, 2, 8, requires_grad=True)

        def block(x):
            query, key, value = x.unbind(2)
            heads = (y.transpose(1, 2) for y in (query * 2, key, value))
            return scaleinv.attention(*heads, logits, window=30, backend=backend).transpose(1, 2).flatten(2)

        results = []
        for function in (torch.compile(block, fullgraph=True), block):
            out = function(x)
            results.append([out, *torch.autograd.grad(out.square().sum(), [x, logits.log_tau])])
        for got, want in zip(*results, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
