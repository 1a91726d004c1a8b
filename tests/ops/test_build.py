"""The cache of compiled kernels: built once, for us alone, never loaded damaged, and never in the way."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import scaleinv
from scaleinv.ops import build, native

COMPILER = any(shutil.which(name) for name in ("cc", "gcc", "clang"))
needs_compiler = pytest.mark.skipif(not COMPILER, reason="no C compiler")
SMALL = "int answer(void) { return 42; }"


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source" / "small.c"
    path.parent.mkdir()
    path.write_text(SMALL)
    return path


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of our own, and an empty temporary folder."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return tmp_path / "cache" / "scaleinv" / "kernels"


def built(source):
    path = build.build(source, lambda path: path, ("-shared", "-fPIC"))
    assert isinstance(path, Path), path
    return path


@needs_compiler
class TestCache:
    def test_is_ours_alone_whatever_the_umask(self, source, cache):
        before = os.umask(0)
        try:
            path = built(source)
        finally:
            os.umask(before)
        assert path.parent == cache
        for x in (cache, path, path.with_suffix(".sha256")):
            assert x.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH) == 0

    def test_is_built_once(self, source, cache):
        when = built(source).stat().st_mtime_ns
        assert built(source).stat().st_mtime_ns == when
        assert len(list(cache.iterdir())) == 2  # the library and its hash

    @pytest.mark.parametrize("damage", ["truncated", "empty", "flipped", "no note", "writable", "a link"])
    def test_what_is_damaged_is_built_again(self, source, cache, damage, tmp_path):
        path = built(source)
        whole = path.read_bytes()
        if damage == "truncated":
            path.write_bytes(whole[:5000])
        elif damage == "empty":
            path.write_bytes(b"")
        elif damage == "flipped":
            path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        elif damage == "no note":
            path.with_suffix(".sha256").unlink()
            path.write_bytes(b"planted")
        elif damage == "writable":
            path.chmod(0o777)
        else:
            path.rename(tmp_path / "elsewhere.so")
            path.symlink_to(tmp_path / "elsewhere.so")
        assert built(source) == path
        assert path.read_bytes() == whole
        assert build._unharmed(path)

    @pytest.mark.parametrize("folder", ["kernels", "scaleinv"])
    def test_a_folder_that_others_write_to_is_not_used(self, source, cache, folder):
        cache.mkdir(parents=True, mode=0o700)
        spoilt = cache if folder == "kernels" else cache.parent
        spoilt.chmod(0o777)
        path = built(source)
        assert path.parent.parent == Path(tempfile.gettempdir())
        assert path.parent.stat().st_mode & 0o777 == 0o700

    def test_a_folder_of_somebody_else_is_not_used(self, source, cache, monkeypatch):
        cache.mkdir(parents=True)
        mine = os.getuid()
        monkeypatch.setattr(build, "_user", lambda: mine + 1)
        assert not build._is_private(cache)

    @pytest.mark.parametrize("home", ["a file", "none"])
    def test_without_a_cache_all_processes_share_a_private_folder(self, source, cache, monkeypatch, home):
        if home == "a file":
            cache.parent.parent.write_text("in the way")
        else:

            def homeless():
                raise RuntimeError("Could not determine home directory.")

            monkeypatch.setattr(build, "cache_folder", homeless)
        first = built(source)
        assert first.parent.parent == Path(tempfile.gettempdir())
        when = first.stat().st_mtime_ns
        assert built(source) == first
        assert first.stat().st_mtime_ns == when

    def test_the_last_resort_is_removed(self, tmp_path):
        """Both folders are in somebody's hands: a folder for this process, and nothing stays behind."""
        temporary = tmp_path / "tmp"
        temporary.mkdir()
        code = (
            "from scaleinv.ops import build; build._candidates = lambda: iter(()); "
            "folder = build.private_folder(); (folder / 'x').write_text(''); print(folder)"
        )
        done = run(code, TMPDIR=str(temporary))
        assert Path(done.stdout.strip()).parent == temporary
        assert list(temporary.iterdir()) == []


def run(code, **environment):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=os.environ | environment
    )


@needs_compiler
@pytest.mark.slow
def test_a_truncated_kernel_does_not_kill_the_process(tmp_path):
    code = (
        "import torch, scaleinv; from scaleinv.ops import build, native; build.FLAGS = ('-O0', *build.FLAGS[1:]); "
        "print(scaleinv.attention(*torch.ones(3, 1, 1, 2, 1)).sum().item(), native.load().path)"
    )
    given = {"XDG_CACHE_HOME": str(tmp_path), "CC": ""}
    first = run(code, **given)
    value, path = first.stdout.split()
    whole = Path(path).read_bytes()
    Path(path).write_bytes(whole[: len(whole) // 2])  # the loader maps it all, and reads past the end
    second = run(code, **given)
    assert second.returncode == 0, second.stderr
    assert second.stdout.split() == [value, path]
    assert Path(path).read_bytes() == whole


class TestCompiler:
    @pytest.fixture(autouse=True)
    def _cache(self, cache):
        native.load.cache_clear()
        yield
        native.load.cache_clear()

    def test_none(self, monkeypatch):
        monkeypatch.setenv("PATH", "/nowhere")
        assert native.load() == "no C compiler found (cc, gcc or clang)"

    @pytest.mark.parametrize("command", ['"', "'", "/nowhere/icc -fast", '""', "a\\"])
    def test_a_cc_that_is_none_is_named_once(self, monkeypatch, caplog, command):
        monkeypatch.setenv("CC", command)
        tensors = torch.zeros(3, 1, 1, 1, 1)
        for _ in range(3):
            assert scaleinv.which_backend(*tensors, detail=True) == "blocked-torch"
            scaleinv.attention(*tensors)
        assert [command in record.message for record in caplog.records] == [True]
        with pytest.raises(ValueError, match="no C compiler found"):
            scaleinv.attention(*tensors, backend="blocked-native")

    def test_one_that_fails_is_reported(self, monkeypatch):
        monkeypatch.setenv("CC", "false")
        assert "could not be built" in native.load()
        assert "'false'" in native.load()

    def test_its_error_is_reported(self, monkeypatch, tmp_path, cache):
        compiler = tmp_path / "cc"
        compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "kernel.c: no such luck" >&2; exit 1\n')
        compiler.chmod(0o755)
        monkeypatch.setenv("CC", str(compiler))
        assert native.load() == "the C kernel could not be built: kernel.c: no such luck"
        assert list(cache.iterdir()) == []
        with pytest.raises(ValueError, match="no such luck"):
            scaleinv.attention(*torch.zeros(3, 1, 1, 1, 1), backend="blocked-native")

    def test_one_that_hangs_is_reported(self, monkeypatch):
        def hang(command, **options):
            raise subprocess.TimeoutExpired(command, options["timeout"])

        monkeypatch.setattr(subprocess, "run", hang)
        assert "timed out" in native.load()

    @needs_compiler
    def test_a_library_that_does_not_load_is_reported(self, monkeypatch, tmp_path):
        broken = tmp_path / "kernel.so"
        broken.write_text("not a library")
        monkeypatch.setattr(build, "_library", lambda *_: broken)
        assert str(broken) in native.load()
