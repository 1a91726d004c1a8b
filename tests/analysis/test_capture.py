"""What reaches attention: the same queries, keys and logits with which the model computes its output."""

import pytest
import torch
from torch import nn

from builders import layers_of, make_gpt
from scaleinv import attention, methods
from scaleinv.analysis.capture import Layer, capture, windows_of

ROWS = [name for name in methods.names() if not methods.row(name).infini]


@pytest.mark.parametrize("method", ROWS)
def test_a_gpt_attends_with_these_queries_keys_and_logits(method: str) -> None:
    model = make_gpt(method)
    tokens = torch.randint(50, (2, 90), generator=torch.Generator().manual_seed(1))  # beyond the training length
    layers = layers_of(model, tokens)
    assert [layer.index for layer in layers] == [0, 1]
    outputs = []
    handles = [
        block.attention.project.register_forward_pre_hook(lambda module, x: outputs.append(x[0]))
        for block in model.blocks
    ]
    values = [
        block.attention.value.register_forward_hook(lambda module, x, out: outputs.append(out))
        for block in model.blocks
    ]
    with torch.no_grad():
        model.hidden(tokens)
    for handle in [*handles, *values]:
        handle.remove()
    positions = torch.arange(90)
    for layer in layers:
        value, out = outputs[2 * layer.index : 2 * layer.index + 2]
        value = value.unflatten(-1, (2, -1)).transpose(1, 2)
        weights = layer.logits(positions).softmax(-1)  # by distance
        place = positions[:, None] - positions
        by_key = torch.zeros_like(weights).scatter_add(-1, place.clamp_min(0).expand_as(weights), weights)
        got = (by_key @ value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(got, out, atol=1e-10, rtol=1e-10)


def test_the_rotary_keeps_lengths_and_changes_scores() -> None:
    (layer, _) = layers_of(make_gpt("rope"), torch.arange(40)[None] % 50)
    assert layer.unrotated is not None
    torch.testing.assert_close(layer.query.norm(dim=-1), layer.unrotated[0].norm(dim=-1), atol=1e-6, rtol=1e-6)
    last = torch.tensor([39])
    assert not torch.allclose(layer.scores(last), layer.scores(last, rotary=False))
    assert layer.scores(last)[..., 39].allclose(layer.scores(last, rotary=False)[..., 39], atol=1e-6)  # distance 0
    (layer, _) = layers_of(make_gpt("nope"), torch.arange(40)[None] % 50)
    torch.testing.assert_close(layer.scores(last), layer.scores(last, rotary=False))


def test_grouped_queries_windows_and_caps_agree_with_attention() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 30, 8, dtype=torch.float64, generator=generator) for heads in (4, 2, 2))
    from scaleinv.logits import LogN, ScaleInvariant

    for transform in (ScaleInvariant(), LogN(4), LogN(4, counts="context")):
        layer = Layer(0, query, key, None, transform, 0.3, window=7)
        positions = torch.arange(30)
        lse = layer.logits(positions).logsumexp(-1)
        _, expected = attention(query, key, value, transform, window=7, scale=0.3, return_lse=True)
        torch.testing.assert_close(lse, expected.detach())
    capped = Layer(0, query, key, None, transform, 3.0, softcap=2.0).scores(torch.arange(30))
    assert capped.abs().max() <= 2
    with pytest.raises(ValueError, match="rotary=False is not available in layer 0"):
        layer.scores(torch.arange(3), rotary=False)


def test_the_model_comes_back_as_it_was() -> None:
    model = make_gpt().train()

    def fail(layer: Layer) -> None:
        raise RuntimeError("enough")

    with pytest.raises(RuntimeError, match="enough"):
        capture(model, torch.zeros(1, 5, dtype=torch.long), fail)
    assert model.training
    assert not any(block.attention._forward_pre_hooks for block in model.blocks)


def test_windows_follow_on_one_another() -> None:
    tokens = torch.arange(10)
    assert [w.tolist() for w in windows_of(tokens, 4, 9)] == [[[0, 1, 2, 3]], [[4, 5, 6, 7]]]
    assert [w.tolist() for w in windows_of(tokens, 4, 2, bos=77)] == [[[77, 0, 1, 2]], [[77, 3, 4, 5]]]
    assert next(windows_of(list(range(5)), 5, 1)).dtype == torch.int64
    for wrong, words in (
        ((tokens[None], 4, 1), r"tokens must be integers of shape \[T\]"),
        ((tokens.float(), 4, 1), "tokens must be integers"),
        ((tokens, 11, 1), "lengths must lie in 2 … 10"),
        ((tokens, 4, 0), "windows must be at least 1"),
    ):
        with pytest.raises(ValueError, match=words):
            windows_of(*wrong)


def test_what_cannot_be_captured_is_named() -> None:
    with pytest.raises(ValueError, match="infini-rope"):
        capture(make_gpt("infini-rope"), torch.zeros(1, 5, dtype=torch.long), lambda layer: None)
    with pytest.raises(TypeError, match="Linear"):
        capture(nn.Linear(2, 2), torch.zeros(1, 5, dtype=torch.long), lambda layer: None)
