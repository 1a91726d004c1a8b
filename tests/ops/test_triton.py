"""The Triton kernels in the interpreter: production blocks and odd offsets, small blocks, skipped blocks, decoding."""

from unittest import mock

import hypothesis
import pytest

pytest.importorskip("triton")

import torch
from attention_cases import Case, cases, check
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import scaleinv
from scaleinv.ops import triton as backend
from scaleinv.ops.masks import Geometry
from scaleinv.ops.triton import configs, interpreter, launch, operator, tables
from scaleinv.ops.triton.segments import segments

ODD = [
    Case(131, 143, offset=-7, causal=False, transform="scale-invariant-heads", dim=64),
    Case(150, 143, offset=-7, causal=False, transform="table-heads", dim=64),
    Case(131, 197, offset=61, transform="table-heads", dim=64, heads=2, kv_heads=1),
    Case(197, 131, offset=-33, transform="scale-invariant-heads", dim=16, value_dim=40),
    Case(129, transform="learnable", window=65, dim=16, batch=2),
    Case(67, 199, offset=101, documents="packed", mask="some", transform="alibi", dim=16),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", [ODD[0], *(pytest.param(case, marks=pytest.mark.slow) for case in ODD[1:])], ids=str)
def test_production_blocks_at_odd_offsets(case, dtype):
    check(case, "triton", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [37, 3], ids=["forward", "decoding"])
@pytest.mark.parametrize("dim", [24, 80, 96, 128, 160, 192, 256])
def test_wide_and_odd_heads(dim, rows, dtype):
    """At the shipped blocks; what lies between the powers of two is padded."""
    check(Case(rows, 50, dim=dim, value_dim=min(dim + 8, 256), heads=1, transform="table"), "triton", dtype)


@pytest.mark.slow
@pytest.mark.parametrize("blocks", [(16, 32), (32, 16)], ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case(70, transform="table-heads", causal=False, offset=-3),
        Case(70, heads=2, kv_heads=1, transform="plain", window=21),
        Case(50, 71, transform="logn-visible", documents="scattered", mask="some", offset=20, heads=1),
    ],
    ids=str,
)
def test_many_small_tiles(case, blocks, monkeypatch):
    m, n = blocks
    small = configs.Config(m, n, 4, 1), configs.Config(m, m, 4, 1)
    monkeypatch.setattr(configs, "choose", lambda kernel, *_: small[kernel == "tables"])
    check(case, "triton", torch.float32)


@pytest.mark.exhaustive
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(case=cases(), m=st.sampled_from([32, 64, 128]), n=st.sampled_from([64, 128]))
def test_any_call_in_any_blocks(case, m, n):
    block, square = configs.Config(m, n, 4, 1), configs.Config(n, n, 4, 1)
    with mock.patch.object(configs, "choose", lambda kernel, *_: square if kernel == "tables" else block):
        check(case, "triton", torch.float32)


@pytest.mark.parametrize(
    "case",
    [
        Case(1, 700, dim=16),
        pytest.param(Case(16, 515, heads=4, kv_heads=2, transform="table-heads", window=300), marks=pytest.mark.slow),
        pytest.param(Case(3, 601, heads=6, kv_heads=1, offset=555, mask="some"), marks=pytest.mark.slow),
        Case(2, 600, documents="packed", transform="logn-visible"),
        Case(5, 333, causal=False, offset=-40, transform="plain"),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_decoding_in_parts(case, dtype):
    low, high = 0, case.length
    assert launch.split(high - low, case.heads, 64, 8)[0] > 1
    check(case, "triton", dtype)


@pytest.mark.slow
def test_a_million_keys(monkeypatch):
    """In blocks far larger than a GPU's: the interpreter counts blocks, not keys."""
    monkeypatch.setattr(configs, "choose", lambda *_: configs.Config(16, 8192, 4, 1))
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 1, 2, 16), torch.randn(1, 1, 10**6, 16), torch.randn(1, 1, 10**6, 16)
    out, lse = scaleinv.attention(query, key, value, backend="triton", return_lse=True)
    exact = scaleinv.attention(*(x.double() for x in (query, key, value)), backend="reference", return_lse=True)
    same = scaleinv.attention(query, key, value, backend="reference", return_lse=True)
    for got, own, want in zip((out, lse), same, exact, strict=True):
        error, allowed = ((x - want).abs().max().item() for x in (got, own))
        assert error <= 3 * allowed + 16 * torch.finfo(torch.float32).eps * want.abs().max().item()


@pytest.mark.parametrize("keys", [1, 63, 64, 1000, 10**6])
@pytest.mark.parametrize("programs", [1, 8, 5000])
def test_the_parts_cover_the_keys_once(keys, programs):
    parts, chunk = launch.split(keys, programs, 64, 108)
    assert (parts - 1) * chunk < keys <= parts * chunk
    assert chunk % 64 == 0
    assert 1 <= parts <= 64


def test_tiles_stay_inside_the_padded_table():
    """A tile at the border reaches BLOCK_M + BLOCK_N - 2 past the last distance."""
    for kernel, target, head_dim, item_bytes in configs.shipped():
        config = configs.choose(kernel, target, head_dim, item_bytes)
        assert config.block_m + config.block_n < tables.PAD


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry.of(50, 70, 20, True, None),
        Geometry.of(50, 70, -7, False, None),
        Geometry.of(70, 50, 0, True, 13),
        Geometry.of(3, 5, 10**12, True, None),
        Geometry.of(3, 5, -(10**12), False, None),
    ],
    ids=str,
)
def test_the_packed_table_holds_every_distance(geometry):
    torch.manual_seed(0)
    start, stop = geometry.table_range()
    gain, shift = torch.randn(2, stop - start), torch.randn(1, stop - start)
    near = launch.nearby(geometry)
    packed = tables.pack(gain, shift, near, 0.3).view(torch.float32).unflatten(-1, (-1, 2))
    assert packed.shape == (2, geometry.queries + geometry.keys - 1 + 2 * tables.PAD, 2)
    for i in range(geometry.queries):
        for j in range(geometry.keys):
            t = geometry.offset + i - j
            a, m = packed[1, i - j + geometry.keys - 1 + tables.PAD].tolist()
            if geometry.min_distance <= t <= geometry.max_distance:
                assert a == pytest.approx(gain[1, abs(t) - start].item() * 0.3 * tables.LOG2E, rel=1e-6)
                assert m == pytest.approx(shift[0, abs(t) - start].item() * tables.LOG2E, rel=1e-6)
            else:
                assert (a, m) == (0.0, -float("inf"))


@pytest.mark.parametrize("masked", [False, True])
def test_spans_of_documents(masked):
    """Against the definition: the first and the last key that a query's document has, and the other way round."""
    torch.manual_seed(0)
    ids = torch.randint(4, (2, 40)) * 10**12 - 7
    mask = torch.rand(2, 40) < 0.5 if masked else None
    geometry = Geometry.of(25, 40, 11, True, None)
    found = segments(ids, mask, geometry)
    seen = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    for b in range(2):
        for i in range(25):
            keys = [j for j in range(40) if ids[b, j] == ids[b, i + 11] and seen[b, j]]
            span = (found.first_key[b, i].item(), found.last_key[b, i].item())
            assert span == ((keys[0], keys[-1]) if keys else (2**31 - 1, -1))
            equal = [j for j in range(40) if found.key[b, j] == found.query[b, i]]
            assert equal == keys
        for j in range(40):
            queries = [i for i in range(25) if ids[b, i + 11] == ids[b, j]]
            span = (found.first_query[b, j].item(), found.last_query[b, j].item())
            assert span == ((queries[0], queries[-1]) if queries else (2**31 - 1, -1))


@pytest.mark.parametrize(
    "options", [{"document_ids": (torch.arange(192) // 96)[None]}, {"window": 20}], ids=["documents", "window"]
)
def test_blocks_that_nobody_sees_are_not_read(options, monkeypatch):
    """0 × NaN is NaN: had the kernel multiplied the first block of keys, the last rows would show it."""
    monkeypatch.setattr(configs, "choose", lambda *_: configs.Config(32, 32, 4, 1))
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 192, 16)
    value[:, :, :64] = torch.nan
    out = scaleinv.attention(query, key, value, backend="triton", **options)
    assert out[:, :, 128:].isfinite().all()
    assert out[:, :, :64].isnan().all()


def test_bfloat16_rounds_to_nearest_in_the_interpreter():
    torch.manual_seed(0)
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 3.4e38, 1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0, 1e-40])
    x = torch.cat([torch.randn(1000) * 10 ** (5 * torch.randn(1000)), special])
    bits = interpreter.to_bfloat16(x.numpy())
    got = torch.from_numpy(bits.view("int16")).view(torch.bfloat16)
    torch.testing.assert_close(got, x.bfloat16(), rtol=0, atol=0, equal_nan=True)
    wide = torch.from_numpy(interpreter.to_float32(bits))
    torch.testing.assert_close(wide, x.bfloat16().float(), rtol=0, atol=0, equal_nan=True)


def test_rows_that_lie_far_apart():
    """Kernels count the elements of a tile in 32 bits: rows that are too far apart for that are copied."""
    narrow = torch.randn(1, 1, 3, 16)
    far = torch.zeros(1, 1, 2, launch.MAX_STRIDE, dtype=torch.float16)[..., :16]
    assert launch.rows(narrow) is narrow
    assert launch.rows(far).stride(2) < launch.MAX_STRIDE
    widest = max(configs.choose(*given).block_m + configs.choose(*given).block_n for given in configs.shipped())
    assert widest * launch.MAX_STRIDE < 2**31


class Layer(torch.nn.Module):
    """A projection and attention with learned lengthscales."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(32, 96)
        self.logits = scaleinv.ScaleInvariant(heads=2, learnable=True)

    def forward(self, x):  # [B, N, 32]
        query, key, value = self.project(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        return scaleinv.attention(query, key, value, self.logits, backend="triton").square().sum()


def test_fully_sharded(tmp_path):
    """FSDP gathers the parameters for the kernel and shards its gradients."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        whole, sharded, x = Layer(), Layer(), torch.randn(2, 20, 32)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        whole(x).backward()
        sharded(x).backward()
        for want, got in zip(whole.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(got.grad.full_tensor(), want.grad)
    finally:
        distributed.destroy_process_group()


def operator_arguments(case, learn):
    query, key, value = (x.requires_grad_() for x in case.tensors(torch.float32)[:3])
    offset = case.length - case.queries if case.offset is None else case.offset
    geometry = Geometry.of(case.queries, case.length, offset, case.causal, case.window)
    gain, shift = case.logits().table_range(*geometry.table_range(), dtype=torch.float32, device=query.device)
    held = [x.detach().requires_grad_(learn) for x in (gain, shift)]
    c = torch.rand(1, case.heads, case.queries, requires_grad=True)
    where = geometry.offset, geometry.min_distance, geometry.max_distance
    return query, key, value, c, *held, *case.masks().values(), 0.3, *where, learn


@pytest.mark.slow
@pytest.mark.parametrize("learn", [True, False])
@pytest.mark.parametrize(
    "case", [Case(20, 33, heads=2, kv_heads=1, window=9, offset=30), Case(3, 33, mask="some")], ids=str
)
def test_opcheck(case, learn):
    given = operator_arguments(case, learn)
    torch.library.opcheck(operator.triton_forward, given)
    fixed = [x.detach() if isinstance(x, torch.Tensor) else x for x in given]
    out, lse = operator.triton_forward(*fixed)
    grads = torch.randn(out.shape), torch.randn(lse.shape)
    torch.library.opcheck(operator.triton_backward, (*grads, *fixed[:8], out, lse, *fixed[8:12], learn))


@pytest.mark.slow
@pytest.mark.parametrize("transform", ["scale-invariant", "learnable", "logn-visible"])
def test_compiles_whole(transform):
    torch.compiler.reset()
    case = Case(40, transform=transform)
    logits = case.logits()
    compiled = torch.compile(scaleinv.attention, fullgraph=True, backend="aot_eager")
    results = []
    for function in (compiled, scaleinv.attention):
        leaves = [x.requires_grad_() for x in case.tensors(torch.float32)[:3]]
        out, lse = function(*leaves, logits, backend="triton", return_lse=True)
        results.append(
            [out, lse, *torch.autograd.grad(out.square().sum() + lse.sum(), [*leaves, *logits.parameters()])]
        )
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


class TestObstacles:
    def test_dtype_and_head_dim(self):
        x = torch.zeros(1, 1, 4, 300)
        with pytest.raises(ValueError, match="head dimensions up to 256, not 300"):
            scaleinv.attention(x, x, x, backend="triton")
        with pytest.raises(ValueError, match="float64"):
            scaleinv.attention(x.double(), x.double(), x.double(), backend="triton")

    def test_on_cpu_it_is_for_tests_only(self, monkeypatch):
        x = torch.zeros(1, 1, 4, 16)
        assert scaleinv.which_backend(x, x, x) != "triton"
        assert scaleinv.which_backend(x, x, x, backend="triton") == "triton"
        monkeypatch.setattr(backend, "interpreted", lambda: False)
        with pytest.raises(ValueError, match="TRITON_INTERPRET"):
            scaleinv.attention(x, x, x, backend="triton")

    def test_without_triton(self, monkeypatch):
        x = torch.zeros(1, 1, 4, 16)
        monkeypatch.setattr(backend.importlib.util, "find_spec", lambda name: None)
        with pytest.raises(ValueError, match=r'pip install "scaleinv\[triton\]"'):
            scaleinv.attention(x, x, x, backend="triton")
