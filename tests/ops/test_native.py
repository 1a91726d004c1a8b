"""The C kernel: how it is built, why it may be missing, and that threads do not change its results."""

import subprocess

import pytest
import torch
from attention_cases import NATIVE

import scaleinv
from scaleinv.ops import native

needs_kernel = pytest.mark.skipif(not NATIVE, reason="no C compiler")


@pytest.fixture
def fresh():
    """`load` as in a new process."""
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.mark.usefixtures("fresh")
class TestBuild:
    def test_no_compiler(self, monkeypatch):
        monkeypatch.delenv("CC", raising=False)
        monkeypatch.setenv("PATH", "/nowhere")
        assert native.load() == "no C compiler found (cc, gcc or clang)"

    def test_a_missing_cc_is_named(self, monkeypatch):
        monkeypatch.setenv("CC", "/nowhere/icc -fast")
        assert native.load() == "no C compiler found (CC=/nowhere/icc -fast)"

    def test_a_broken_cc_is_reported(self, monkeypatch):
        monkeypatch.setenv("CC", "false")
        assert "could not be built" in native.load()
        assert "'false'" in native.load()

    def test_a_compiler_error_is_reported(self, monkeypatch, tmp_path):
        compiler = tmp_path / "cc"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "kernel.c: no such luck" >&2; exit 1\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert native.load() == "the C kernel could not be built: kernel.c: no such luck"
        assert list((tmp_path / "scaleinv").iterdir()) == []
        with pytest.raises(ValueError, match="no such luck"):
            scaleinv.attention(*torch.zeros(3, 1, 1, 1, 1), backend="blocked-native")

    def test_a_hanging_compiler_is_reported(self, monkeypatch):
        def hang(command, **options):
            raise subprocess.TimeoutExpired(command, options["timeout"])

        monkeypatch.setattr(subprocess, "run", hang)
        assert "timed out" in native.load()

    @needs_kernel
    def test_a_broken_library_is_reported(self, monkeypatch, tmp_path):
        broken = tmp_path / "kernel.so"
        broken.write_text("not a library")
        monkeypatch.setattr(native, "_built", lambda *arguments: broken)
        assert str(broken) in native.load()

    @needs_kernel
    @pytest.mark.parametrize("home", ["a file", "none"])
    def test_an_unwritable_cache_gives_way_to_a_temporary_folder(self, monkeypatch, tmp_path, home):
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        if home == "a file":
            (tmp_path / "cache").write_text("in the way")
            monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        else:

            def homeless():
                raise RuntimeError("Could not determine home directory.")

            monkeypatch.setattr(native.Path, "home", homeless)
        monkeypatch.setattr(native.tempfile, "mkdtemp", lambda prefix: str(tmp_path))
        monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:]))
        kernel = native.load()
        assert isinstance(kernel, native.Kernel)
        assert kernel.path.parent == tmp_path

    @needs_kernel
    def test_is_built_once(self, monkeypatch, tmp_path):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(native, "FLAGS", ("-O0", *native.FLAGS[1:]))
        first = native.load()
        built = first.path.stat().st_mtime_ns
        native.load.cache_clear()
        assert native.load().path == first.path
        assert first.path.stat().st_mtime_ns == built


def test_obstacles():
    for kind in ({"dtype": torch.float64}, {"device": "meta"}):
        query = torch.zeros(1, 1, 1, 1, **kind)
        with pytest.raises(ValueError, match=r"blocked-native.*(float64|meta)"):
            scaleinv.which_backend(query, query, query, backend="blocked-native")


@needs_kernel
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("rows", [1, 300])
def test_threads(batch, rows):
    """The same numbers from 1 and 2 threads, bit for bit; but for the gradient of the query (and the tables) when key
    heads × batch do not divide among the threads: then it is summed in parts."""
    torch.manual_seed(0)
    given = [torch.randn(batch, heads, n, 32) for heads, n in ((4, rows), (1, 300), (1, 300))]
    logits = scaleinv.ScaleInvariant(heads=4, learnable=True)

    def outputs(threads):
        torch.set_num_threads(threads)
        leaves = [x.clone().requires_grad_() for x in given]
        out, lse = scaleinv.attention(*leaves, logits, backend="blocked-native", return_lse=True)
        query, key, value, tau = torch.autograd.grad(out.square().sum() + lse.sum(), [*leaves, logits.log_tau])
        return {"out": out, "lse": lse, "key": key, "value": value, "query": query, "tau": tau}

    try:
        one, two = outputs(1), outputs(2)
    finally:
        torch.set_num_threads(1)
    for name in one:
        if batch % 2 == 0 or name not in ("query", "tau"):
            assert torch.equal(one[name], two[name]), name
        torch.testing.assert_close(one[name], two[name])


@needs_kernel
def test_a_long_decoding_step_spans_many_chunks():
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 4, 2, 33), torch.randn(1, 2, 5000, 33), torch.randn(1, 2, 5000, 20)
    for options in ({}, {"window": 3000}, {"key_mask": torch.arange(5000)[None] % 3000 < 500}):
        exact = scaleinv.attention(*(x.double() for x in (query, key, value)), backend="reference", **options)
        out = scaleinv.attention(query, key, value, backend="blocked-native", **options)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)
