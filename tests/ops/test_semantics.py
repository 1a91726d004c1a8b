"""What holds for every backend: decoding, chunks, splits, packing, extremes and layouts."""

import math

import pytest
import torch
from attention_cases import EVERY, FAST, TRANSFORMS, close, gradients, tensors, transform_of

import scaleinv

every_backend = pytest.mark.parametrize("backend", EVERY)
every_transform = pytest.mark.parametrize("transform", [name for name in TRANSFORMS if name != "logn-context"])


@every_backend
@every_transform
@pytest.mark.parametrize("options", [{}, {"window": 20}], ids=str)
class TestCache:
    def test_a_decoding_step_is_the_last_row(self, backend, transform, options):
        query, key, value = tensors()
        logits = transform_of(transform)
        whole = scaleinv.attention(query, key, value, logits, backend=backend, return_lse=True, **options)
        for rows in (1, 4, 8, 9):  # up to 8 rows × 2 heads the kernel takes its decoding path
            step = scaleinv.attention(
                query[:, :, -rows:], key, value, logits, backend=backend, return_lse=True, **options
            )
            for got, want in zip(step, whole, strict=True):
                close(got, want[:, :, -rows:])

    def test_chunked_prefill_is_the_whole(self, backend, transform, options):
        query, key, value = tensors()
        logits = transform_of(transform)
        whole = scaleinv.attention(query, key, value, logits, backend=backend, **options)
        chunks = []
        for start, stop in ((0, 33), (33, 34), (34, 70)):
            seen = key[:, :, :stop], value[:, :, :stop]
            chunks.append(scaleinv.attention(query[:, :, start:stop], *seen, logits, backend=backend, **options))
        close(torch.cat(chunks, 2), whole)


@every_backend
def test_a_preallocated_cache_with_an_offset_is_the_whole(backend):
    query, key, value = tensors()
    whole = scaleinv.attention(query, key, value, backend=backend)
    for position in (0, 5, 69):
        row = slice(position, position + 1)
        step = scaleinv.attention(query[:, :, row], key, value, query_offset=position, backend=backend)
        close(step, whole[:, :, row])


@every_backend
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("split", [1, 31, 69])
def test_parts_of_the_keys_merge_through_the_logsumexp(backend, causal, split):
    """What ring attention does. The second part's keys start at `split`, so its queries start that much earlier."""
    query, key, value = tensors()
    options = {"causal": causal, "backend": backend, "return_lse": True}
    whole, whole_lse = scaleinv.attention(query, key, value, **options)
    first = scaleinv.attention(query, key[:, :, :split], value[:, :, :split], query_offset=0, **options)
    second = scaleinv.attention(query, key[:, :, split:], value[:, :, split:], query_offset=-split, **options)
    lse = torch.logaddexp(first[1], second[1])
    close(lse, whole_lse)
    close(sum(out * (part - lse).exp()[..., None] for out, part in (first, second)), whole)


@every_backend
@every_transform
@pytest.mark.parametrize("causal", [True, False])
def test_packed_documents_are_the_documents_alone(backend, transform, causal):
    query, key, value = tensors(batch=1)
    logits = transform_of(transform)
    lengths, ids = (20, 1, 49), (7, -5, 7_000_000_000)
    document_ids = torch.cat([torch.full((1, n), i) for n, i in zip(lengths, ids, strict=True)], 1)
    packed = scaleinv.attention(query, key, value, logits, causal=causal, document_ids=document_ids, backend=backend)
    parts = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
    alone = [scaleinv.attention(*part, logits, causal=causal, backend=backend) for part in parts]
    close(packed, torch.cat(alone, 2))


@every_backend
@every_transform
def test_padding_changes_nothing(backend, transform):
    query, key, value = tensors()
    logits = transform_of(transform)
    short = [x[:, :, :50] for x in (query, key, value)]
    key_mask = torch.arange(70).expand(2, 70) < 50
    padded = scaleinv.attention(query, key, value, logits, key_mask=key_mask, backend=backend)
    close(padded[:, :, :50], scaleinv.attention(*short, logits, backend=backend))


@every_backend
@pytest.mark.parametrize("rows", [1, 70])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores(backend, rows, size):
    query, key, value = tensors(queries=rows)
    exact = gradients([x.double() for x in (query, key, value)], "reference", scale=size)
    for got, want in zip(gradients([query, key, value], backend, scale=size), exact, strict=True):
        assert got.isfinite().all()
        if got.dim() == 3:  # the logsumexp is as large as the scores
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=0.05)


@every_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("offset", [10**7, 10**9, 10**12])
def test_far_away(backend, dtype, offset):
    """Tables hold only what is visible: a table of all distances would not fit into memory."""
    if backend in ("blocked-native", "triton") and dtype == torch.float64:
        pytest.skip("float32 arithmetic")
    query, key, value = (x.to(dtype) for x in tensors(batch=1, queries=2, keys=5))
    out, lse = scaleinv.attention(query, key, value, query_offset=offset, backend=backend, return_lse=True)
    S = query.double() @ key.double().repeat_interleave(2, 1).mT / 4
    t = (offset + torch.arange(2)[:, None] - torch.arange(5)).double()
    L = torch.sqrt(1 + 2 * torch.log(1 + t / 10)) * S - 2 * torch.log(1 + t / 10)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(lse.double(), L.logsumexp(-1), rtol=min(tolerance, 2e-6), atol=0.0)
    want = L.softmax(-1) @ value.double().repeat_interleave(2, 1)
    torch.testing.assert_close(out.double(), want, rtol=tolerance, atol=tolerance)


@every_backend
@pytest.mark.parametrize(
    ("options", "sees"),
    [
        ({"query_offset": 10**9, "window": 5}, False),
        ({"query_offset": 3 * 10**9, "window": 10**9}, False),
        ({"query_offset": -(10**9)}, False),
        ({"query_offset": 2, "window": 10**15}, True),
        ({"query_offset": -(10**9), "causal": False}, True),
        ({"query_offset": 10**9, "causal": False, "window": 10**9}, True),
    ],
    ids=str,
)
def test_huge_offsets_and_windows(backend, options, sees):
    query, key, value = tensors(batch=1, queries=2, keys=5)
    out, lse, *grads = gradients([query, key, value], backend, **options)
    assert (lse[:, :, -1] > -torch.inf).all() == sees
    assert all(x.isfinite().all() for x in (out, *grads))


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "channels first": lambda x: x.mT.contiguous().mT,
    "a slice": lambda x: x.repeat_interleave(2, 2).repeat_interleave(3, 3)[:, :, ::2, ::3],
    "part of a wider one": lambda x: torch.cat([x, x], -1)[..., : x.shape[-1]],
    "expanded": lambda x: x[:1].expand(x.shape),
}


@every_backend
@pytest.mark.parametrize("rows", [3, 70])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_of_the_inputs_does_not_matter(backend, layout, rows):
    given = [LAYOUTS[layout](x) for x in tensors(queries=rows)]
    assert not all(x.is_contiguous() for x in given)

    def outputs(inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = scaleinv.attention(*leaves, backend=backend)
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    for got, want in zip(outputs(given), outputs([x.contiguous() for x in given]), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("layout", ["transposed", "expanded"])
def test_layout_of_the_incoming_gradient_does_not_matter(backend, layout):
    leaves = [x.requires_grad_() for x in tensors()]
    out = scaleinv.attention(*leaves, backend=backend)
    grad = LAYOUTS[layout](torch.randn(out.shape))
    got = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    want = torch.autograd.grad(out, leaves, grad.contiguous())
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y)


@every_backend
@pytest.mark.parametrize("wanted", ["query", "key", "value", "tables", "lengthscale"])
def test_only_one_input_needs_a_gradient(backend, wanted):
    query, key, value = tensors()
    logits = scaleinv.ScaleInvariant(heads=4, learnable=True)
    if wanted == "tables":
        logits = scaleinv.DistanceTable(torch.rand(4, 70).requires_grad_(), torch.rand(1, 70).requires_grad_())
    else:
        logits.log_tau.requires_grad_(wanted == "lengthscale")
    given = {"query": query, "key": key, "value": value}
    if wanted in given:
        given[wanted].requires_grad_()
    exact = scaleinv.attention(**given, logits=logits, backend="reference")
    out = scaleinv.attention(**given, logits=logits, backend=backend)
    leaves = [x for x in (query, key, value, *logits.parameters(), *logits.buffers()) if x.requires_grad]
    assert len(leaves) == (2 if wanted == "tables" else 1)
    got, want = (torch.autograd.grad(x.square().sum(), leaves) for x in (out, exact))
    for x, y in zip(got, want, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-4)


class Unregistered(scaleinv.LogitTransform):
    """A user's transform whose table is a plain attribute, unknown to nn.Module."""

    def __init__(self, table):
        super().__init__()
        self.held = [table]

    def tables(self, length, *, dtype, device):
        return torch.ones(1, length, dtype=dtype, device=device), self.held[0][None, :length].to(dtype)


@every_backend
def test_gradients_reach_a_table_that_no_module_knows(backend):
    table = torch.randn(70, requires_grad=True)
    scaleinv.attention(*tensors(), Unregistered(table), backend=backend).square().sum().backward()
    assert table.grad is not None
    assert table.grad.abs().sum() > 0


class Misshapen(scaleinv.LogitTransform):
    """A user's transform that does not keep to the shapes it is asked for."""

    def __init__(self, table=None, gain=None):
        super().__init__()
        self.table, self.gain = table, gain
        self.counts = None if gain is None else "visible"

    def tables(self, length, *, dtype, device):
        shape = (1, length) if self.table is None else self.table(length)
        return torch.ones(shape, dtype=dtype, device=device), torch.zeros(shape, dtype=dtype, device=device)

    def query_gain(self, count):
        return torch.ones(self.gain(*count.shape))


MISSHAPEN = {
    "short": Misshapen(lambda length: (1, length - 3)),
    "long": Misshapen(lambda length: (1, length + 3)),
    "empty": Misshapen(lambda length: (1, 0)),
    "heads": Misshapen(lambda length: (3, length)),
    "1-d": Misshapen(lambda length: (length,)),
    "query_gain batch": Misshapen(gain=lambda batch, queries: (batch + 4, 1, queries)),
    "query_gain heads": Misshapen(gain=lambda batch, queries: (batch, 9, queries)),
    "query_gain 2-d": Misshapen(gain=lambda batch, queries: (batch, queries)),
    "query_gain queries": Misshapen(gain=lambda batch, queries: (batch, 1, queries + 1)),
}


@every_backend
@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("name", MISSHAPEN)
def test_a_transform_that_gives_other_shapes_is_refused(backend, name, rows):
    with pytest.raises(ValueError, match=r"logits \(Misshapen"):
        scaleinv.attention(*tensors(batch=1, queries=rows, keys=8), MISSHAPEN[name], backend=backend)


@every_backend
def test_a_table_may_hide_every_key(backend):
    table = scaleinv.DistanceTable(torch.ones(1, 8), torch.full((1, 8), -math.inf))
    inputs = [x.requires_grad_() for x in tensors(batch=1, queries=8, keys=8)]
    out, lse = scaleinv.attention(*inputs, table, backend=backend, return_lse=True)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()
    assert all((grad == 0).all() for grad in torch.autograd.grad(out.square().sum(), inputs))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8])
def test_documents_of_any_integer_type(dtype):
    inputs, ids = tensors(batch=2, queries=8, keys=8), torch.arange(8).div(3, rounding_mode="floor").expand(2, 8)
    logits = scaleinv.LogN(inputs[0].shape[1])
    want = scaleinv.attention(*inputs, logits, document_ids=ids)
    torch.testing.assert_close(scaleinv.attention(*inputs, logits, document_ids=ids.to(dtype)), want)


@every_backend
@pytest.mark.parametrize("rows", [1, 70])
def test_two_runs_are_bitwise_equal(backend, rows):
    options = {"key_mask": torch.rand(2, 70) < 0.8}
    first = gradients(tensors(queries=rows), backend, **options)
    second = gradients(tensors(queries=rows), backend, **options)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
