"""The check that stands before `auto`: it finds what is wrong, once, and remembers the answer."""

import warnings
from types import SimpleNamespace

import pytest
import torch

import scaleinv
from scaleinv.ops import agreement, blocked, native, reference, registry, triton

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    agreement._remembered.cache_clear()
    yield
    agreement._remembered.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("module", [reference, blocked, native], ids=lambda module: module.__name__)
def test_right_backends_agree(module, dtype):
    assert agreement.differs(module, CPU, dtype, 16) is None


@pytest.mark.slow
@pytest.mark.parametrize("module", [triton, triton.blocks], ids=["triton", "triton in blocks"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_triton_kernel_agrees(module, dtype):
    pytest.importorskip("triton")
    assert agreement.differs(module, CPU, dtype, 16) is None


def spoiled(which):
    """A backend that is wrong in one way."""

    def run(call):
        out, lse = reference.run(call)
        if which == "output":
            return out * 1.01, lse
        if which == "gradient":
            return out + 0.05 * (call.key.sum() - call.key.detach().sum()), lse
        if which == "nan":
            return out.masked_fill(out == out.max(), torch.nan), lse
        raise RuntimeError("no kernel image\nis available")

    return SimpleNamespace(run=run, obstacle=lambda call: None, __name__=f"spoiled.{which}", __file__=__file__)


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("output", "output off by"),
        ("gradient", "gradient of key off by"),
        ("nan", "output off by"),
        ("raises", "no kernel image"),
    ],
)
def test_wrong_backends_are_found(which, says):
    found = agreement.differs(spoiled(which), CPU, torch.float32, 16)
    assert says in found
    assert "\n" not in found
    assert "head dim 16" in found


class TestAuto:
    """`auto` on CPU, as if a backend stood there that has to prove itself."""

    @pytest.fixture
    def put_first(self, monkeypatch):
        def put(module):
            monkeypatch.setitem(agreement.sys.modules, module.__name__, module)
            first = registry.Backend("new", module, auto_on=("cpu",), proven=True)
            monkeypatch.setattr(registry, "BACKENDS", (first, *registry.BACKENDS))
            monkeypatch.setattr(registry, "NAMES", ("new", *registry.NAMES))

        return put

    def test_a_right_one_is_taken_after_one_check(self, put_first, monkeypatch):
        calls = []
        right = SimpleNamespace(run=reference.run, obstacle=lambda call: None, __name__="right", __file__=__file__)
        put_first(right)
        monkeypatch.setattr(agreement, "differs", lambda *given: calls.append(given))
        x = torch.randn(1, 2, 5, 16)
        assert scaleinv.which_backend(x, x, x) == "new"
        assert scaleinv.which_backend(x, x, x) == "new"
        agreement._remembered.cache_clear()  # another process: the answer is in the cache folder
        assert scaleinv.which_backend(x, x, x) == "new"
        assert len(calls) == 1
        scaleinv.which_backend(x.bfloat16(), x.bfloat16(), x.bfloat16())
        assert len(calls) == 2

    def test_one_that_computes_blocks_is_checked_in_blocks(self, monkeypatch):
        calls = []
        monkeypatch.setattr(agreement, "differs", lambda module, *given: calls.append(module))
        monkeypatch.setattr(triton.blocks, "obstacle", lambda call: None)
        first = registry.Backend("triton", triton, auto_on=("cpu",), proven=True, engine=triton.blocks)
        monkeypatch.setattr(registry, "BACKENDS", (first, *registry.BACKENDS))
        x = torch.randn(1, 2, 5, 16)
        assert registry.choose("auto", agreement.plain_call(x, x, x), in_blocks=True).name == "triton"
        assert calls == [triton.blocks]

    def test_a_wrong_one_is_left_with_one_warning(self, put_first):
        put_first(spoiled("output"))
        x = torch.randn(1, 2, 5, 16)
        with pytest.warns(UserWarning, match="output off by"):
            assert scaleinv.which_backend(x, x, x) != "new"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert scaleinv.which_backend(x, x, x) != "new"
        assert scaleinv.which_backend(x, x, x, backend="new") == "new"

    def test_inside_a_compiled_function(self, put_first):
        put_first(spoiled("output"))
        torch.compiler.reset()
        x = torch.randn(1, 2, 40, 16)
        with pytest.warns(UserWarning, match="output off by"):
            out = torch.compile(scaleinv.attention, fullgraph=True, backend="aot_eager")(x, x, x)
        torch.testing.assert_close(out, scaleinv.attention(x, x, x, backend="reference"))

    def test_random_numbers_are_left_alone(self, put_first):
        put_first(spoiled("output"))
        torch.manual_seed(3)
        want = torch.rand(4)
        torch.manual_seed(3)
        with pytest.warns(UserWarning, match="wrong on this machine"):
            scaleinv.which_backend(*torch.ones(3, 1, 2, 5, 16))
        assert torch.equal(torch.rand(4), want)

    @pytest.mark.parametrize(
        "damage",
        ["", "{", "[]", "null", '{"differs": null}', b"\xff\xfe", lambda text: text.replace("null", "7"), None],
        ids=["empty", "half", "list", "null", "part", "no text", "wrong kind", "folder"],
    )
    def test_a_damaged_answer_is_found_again(self, damage, put_first, monkeypatch, tmp_path):
        calls = []
        put_first(SimpleNamespace(run=reference.run, obstacle=lambda call: None, __name__="right", __file__=__file__))
        monkeypatch.setattr(agreement, "differs", lambda *given: calls.append(given))
        x = torch.randn(1, 2, 5, 16)
        assert scaleinv.which_backend(x, x, x) == "new"
        (path,) = tmp_path.rglob("agreement/*.json")
        if damage is None:
            path.unlink()
            path.mkdir()
        else:
            text = damage(path.read_text()) if callable(damage) else damage
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
        agreement._remembered.cache_clear()
        assert scaleinv.which_backend(x, x, x) == "new"
        assert len(calls) == 2

    def test_full_memory_is_not_remembered(self, put_first, tmp_path):
        def run(call):
            raise torch.OutOfMemoryError("CUDA out of memory\nof 80 GB")

        put_first(SimpleNamespace(run=run, obstacle=lambda call: None, __name__="big", __file__=__file__))
        x = torch.randn(1, 2, 5, 16)
        with pytest.warns(UserWarning, match="big could not be checked: CUDA out of memory; another backend is used"):
            assert scaleinv.which_backend(x, x, x) != "new"
        assert list(tmp_path.rglob("agreement/*.json")) == []

    def test_defaults_of_the_caller_do_not_matter(self, put_first):
        put_first(SimpleNamespace(run=reference.run, obstacle=lambda call: None, __name__="right", __file__=__file__))
        x = torch.randn(1, 2, 5, 16)
        with torch.device("meta"), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert scaleinv.which_backend(x, x, x) == "new"

    def test_an_unwritable_cache_folder_does_no_harm(self, put_first, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", "/proc/nowhere")
        put_first(spoiled("output"))
        x = torch.randn(1, 2, 5, 16)
        with pytest.warns(UserWarning, match="output off by"):
            scaleinv.which_backend(x, x, x)
