"""The methods by name."""

import dataclasses

import pytest
import torch

import scaleinv
from scaleinv import methods, rotary

ROWS = {  # SPEC: rotary, logits, what changes at inference, whose model it uses
    "rope": (rotary.RoPE, scaleinv.Plain, None, "rope"),
    "p-rope": (rotary.PRoPE, scaleinv.Plain, None, "p-rope"),
    "nope": (rotary.NoPE, scaleinv.Plain, None, "nope"),
    "rope+ntk": (rotary.RoPE, scaleinv.Plain, "ntk", "rope"),
    "yarn": (rotary.RoPE, scaleinv.Plain, "yarn", "rope"),
    "logn+rope": (rotary.RoPE, scaleinv.LogN, None, "logn+rope"),
    "logn+p-rope": (rotary.PRoPE, scaleinv.LogN, None, "logn+p-rope"),
    "logn+ntk": (rotary.RoPE, scaleinv.LogN, "ntk", "logn+rope"),
    "alibi": (rotary.NoPE, scaleinv.ALiBi, None, "alibi"),
    "scale-invariant-p-rope": (rotary.PRoPE, scaleinv.ScaleInvariant, None, "scale-invariant-p-rope"),
    "scale-invariant-rope": (rotary.RoPE, scaleinv.ScaleInvariant, None, "scale-invariant-rope"),
    "scale-invariant-nope": (rotary.NoPE, scaleinv.ScaleInvariant, None, "scale-invariant-nope"),
    "infini-rope": (rotary.RoPE, scaleinv.Plain, None, "infini-rope"),
    "infini-p-rope": (rotary.PRoPE, scaleinv.Plain, None, "infini-p-rope"),
    "yarn-no-factor": (rotary.RoPE, scaleinv.Plain, "yarn-frequencies", "rope"),
    "scale-invariant-rope+yarn": (rotary.RoPE, scaleinv.ScaleInvariant, "yarn-frequencies", "scale-invariant-rope"),
    "scale-invariant-rope+ntk": (rotary.RoPE, scaleinv.ScaleInvariant, "ntk", "scale-invariant-rope"),
}
every_row = pytest.mark.parametrize("name", ROWS)


def get(name, **changes):
    return methods.get(name, **({"heads": 6, "head_dim": 128} | changes))


def test_names_are_the_papers_methods_in_order_and_then_ours():
    assert methods.names() == list(ROWS)


@every_row
def test_row(name):
    method = get(name)
    encoding, logits, stretch, trained_as = ROWS[name]
    assert type(method.rotary) is encoding
    assert type(method.logits) is logits
    assert (method.name, method.stretch, method.trained_as) == (name, stretch, trained_as)
    assert methods.trained_as(name) == trained_as
    assert method.infini == name.startswith("infini")
    assert method.logits.heads in (None, 6)
    if encoding is not rotary.NoPE:
        assert method.rotary.dim == 128


@every_row
def test_a_row_trained_as_another_is_the_same_model(name):
    method = get(name)
    other = get(method.trained_as)
    assert type(other.rotary) is type(method.rotary)
    assert other.logits.state_dict().keys() == method.logits.state_dict().keys()
    assert other.trained_as == other.name


@every_row
def test_runs_in_attention(name):
    torch.manual_seed(0)
    method = get(name, heads=4, head_dim=16)
    query, key, value = torch.randn(3, 1, 4, 20, 16)
    turned = (method.rotary.apply(x, torch.arange(20)) for x in (query, key))
    assert scaleinv.attention(*turned, value, method.logits).isfinite().all()


@every_row
@pytest.mark.parametrize("length", [1, 4096, 4097, 16_384])
def test_only_ntk_and_yarn_stretch_and_only_beyond_the_training_length(name, length):
    method = get(name)
    stretched = method.rotary_for(length)
    if method.stretch is None or length <= 4096:
        assert stretched is method.rotary
    else:
        change = rotary.ntk if method.stretch == "ntk" else rotary.yarn
        want = change(method.rotary, length, 4096)
        assert torch.equal(stretched.frequencies, want.frequencies)
        assert stretched.attention_factor == (1 if method.stretch == "yarn-frequencies" else want.attention_factor)
        assert not torch.equal(stretched.frequencies, method.rotary.frequencies)


def test_the_training_length_moves_where_stretching_starts():
    assert get("yarn", train_length=8192).rotary_for(8192) is not get("yarn").rotary_for(8192)
    method = get("rope+ntk", train_length=8192)
    assert method.rotary_for(8192) is method.rotary


@pytest.mark.parametrize("train_length", [256, 4096, 65_536])
def test_p_ropes_longest_wavelength_follows_the_training_length(train_length):
    method = get("p-rope", train_length=train_length)
    turning = method.rotary.frequencies[method.rotary.frequencies > 0]
    assert len(turning) == 32
    assert turning.min().item() == pytest.approx(4 / train_length, rel=1e-6)


def test_the_papers_p_rope():
    assert torch.equal(get("scale-invariant-p-rope").rotary.frequencies, rotary.PRoPE(128, 0.5, 1024).frequencies)


def test_options():
    assert get("scale-invariant-rope", tau=3.0).logits.tau.item() == 3
    assert get("scale-invariant-rope").logits.tau.item() == 10
    learnt = get("scale-invariant-rope", tau=3.0, learnable_tau=True).logits
    assert learnt.log_tau.exp().tolist() == pytest.approx([3.0] * 6)
    assert get("rope", rope_base=500_000.0).rotary.base == 500_000
    assert get("p-rope", p=0.25, p_rope_base=64.0).rotary.base == 64
    assert int((get("p-rope", p=0.25).rotary.frequencies > 0).sum()) == 16


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [("scale-invariant-prope", "scale-invariant-p-rope"), ("ropee", "rope"), ("logn", "logn"), ("Yarn", "yarn")],
)
def test_an_unknown_name_gives_the_closest(wrong, meant):
    with pytest.raises(ValueError, match=f"{wrong}.*did you mean.*{meant}"):
        get(wrong)


def test_a_hopeless_name_gives_them_all():
    with pytest.raises(ValueError, match="known: rope, p-rope, nope"):
        get("zzzzzzzz")


@pytest.mark.parametrize(
    ("argument", "name", "given"),
    [
        ("heads", "alibi", {"heads": 0}),
        ("heads", "logn+rope", {"heads": -1}),
        ("dim", "rope", {"head_dim": 7}),
        ("tau", "scale-invariant-rope", {"tau": 0.0}),
        ("train_length", "rope+ntk", {"train_length": 0}),
        ("train_length", "p-rope", {"train_length": 4}),
        ("train_length", "rope", {"train_length": -1}),
    ],
)
def test_bad_arguments(argument, name, given):
    with pytest.raises(ValueError, match=argument):
        get(name, **given)


@pytest.mark.parametrize("field", ["rotary", "logits", "stretch"])
def test_a_row_of_unknown_parts_raises(field, monkeypatch):
    broken = dataclasses.replace(methods.ROWS["yarn"], **{field: "typo"})
    monkeypatch.setitem(methods.ROWS, "broken", broken)
    with pytest.raises(ValueError, match=rf"'broken' has {field}='typo'.*one of"):
        get("broken")


def test_an_unknown_stretch_raises_where_it_would_act():
    method = dataclasses.replace(get("yarn"), stretch="typo")
    with pytest.raises(ValueError, match="stretch='typo'"):
        method.rotary_for(8192)
