"""The mask function: nothing of size N × N in a regular step, the right distances in any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel, StaticCache
from transformers.masking_utils import create_causal_mask

import scaleinv.hf
from scaleinv.hf import mask as masks
from scaleinv.hf.attention import attention_forward, by_distance
from scaleinv.hf.config import ATTENTION
from scaleinv.hf.mask import HIDDEN, Regular

Stock = Callable[[str], PreTrainedModel]
PADDED = torch.tensor([[1] * 40, [0] * 9 + [1] * 31])


def run(model: PreTrainedModel, tokens: Tensor, how: str) -> Tensor:
    inputs: dict[str, Any] = {
        "plain": {},
        "left-padded": {"attention_mask": PADDED, "position_ids": (PADDED.cumsum(1) - 1).clamp_min(0)},
        "right-padded": {"attention_mask": PADDED.flip(1)},
        "packed": {"position_ids": torch.cat([torch.arange(13), torch.arange(27)])[None].expand(2, -1)},
        "dynamic-cache": {"past_key_values": DynamicCache(config=model.config), "use_cache": True},
        "static-cache": {"past_key_values": StaticCache(config=model.config, max_cache_len=50), "use_cache": True},
    }[how]
    inputs = {"use_cache": False, **inputs}
    with torch.no_grad():
        if "cache" in how:  # a second chunk, so that the offset is not 0
            model(tokens[:, :18], **inputs)
            return model(tokens[:, 18:], **inputs).logits
        return model(tokens, **inputs).logits


@pytest.mark.parametrize("how", ["plain", "left-padded", "right-padded", "packed", "dynamic-cache", "static-cache"])
def test_regular_steps_build_nothing_quadratic_and_agree_with_the_general_path(
    stock: Stock, model_type: str, tokens: Tensor, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = scaleinv.hf.convert(stock(model_type))
    made: list[Any] = []

    def watched(**kwargs: Any) -> Any:
        made.append(masks.attention_mask(**kwargs))
        return made[-1]

    AttentionMaskInterface.register(ATTENTION, watched)
    try:
        fast = run(model, tokens, how)
        assert made
        for mask in made:
            assert isinstance(mask, Regular)
            for part in (mask.key_mask, mask.document_ids):
                assert part is None or part.numel() <= 2 * 50
        monkeypatch.setattr(masks, "_pattern", lambda *_: None)
        made.clear()
        general = run(model, tokens, how)
        assert all(isinstance(mask, Tensor) and mask.dtype == masks.MARKED for mask in made)
    finally:
        AttentionMaskInterface.register(ATTENTION, masks.attention_mask)
    if how == "packed" and model_type == "gpt_oss":
        return  # transformers does not tell the mask function of GPT-OSS that the row is packed
    visible = {"left-padded": PADDED.bool(), "right-padded": PADDED.flip(1).bool()}.get(how, ...)
    torch.testing.assert_close(fast[visible], general[visible], atol=1e-4, rtol=0)


def test_regular_step_goes_through_scaleinv_attention(
    stock: Stock, tokens: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scaleinv.hf import attention as module

    calls = []
    original = module.attention
    monkeypatch.setattr(module, "attention", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    monkeypatch.setattr(module, "by_distance", lambda *_, **__: pytest.fail("the general path"))
    model = scaleinv.hf.convert(stock("gemma3_text"))
    model.train()
    model(tokens, labels=tokens).loss.backward()
    assert len(calls) == 2  # one for each layer


def distances(**kwargs: Any) -> Tensor:
    mask = masks.attention_mask(batch_size=1, **kwargs)
    assert isinstance(mask, Tensor)
    return mask[0, 0].view(torch.int32)


def test_distances_of_a_decoding_step() -> None:
    assert distances(q_length=1, kv_length=4, q_offset=3).tolist() == [[3, 2, 1, 0]]
    static = distances(q_length=1, kv_length=6, q_offset=torch.tensor(3))
    assert static.tolist() == [[3, 2, 1, 0, HIDDEN, HIDDEN]]
    padded = torch.tensor([[False, True, True, False, True]])  # left padding and a hole
    assert distances(q_length=1, kv_length=5, q_offset=4, attention_mask=padded).tolist() == [[HIDDEN, 2, 1, HIDDEN, 0]]


def test_holes_are_not_regular() -> None:
    padded = torch.tensor([[True, True, False, True, True]])
    got = distances(q_length=2, kv_length=5, q_offset=3, attention_mask=padded)
    assert got.tolist() == [[2, 1, HIDDEN, 0, HIDDEN], [3, 2, HIDDEN, 1, 0]]


def test_unknown_patterns_take_the_general_path(stock: Stock, tokens: Tensor) -> None:
    """Blocks that see each other in both directions, as of images: the distance is |i - j|."""
    model = scaleinv.hf.convert(stock("llama"))
    blocks = torch.tensor([[-1, 0, 0, -1]])
    mask = create_causal_mask(model.config, torch.empty(1, 4, 0), None, None, block_sequence_ids=blocks)
    assert mask[0, 0].view(torch.int32).tolist() == [[0, -1, -1, -1], [1, 0, 1, -1], [2, 1, 0, -1], [3, 2, 1, 0]]
    mask = create_causal_mask(
        model.config, torch.empty(1, 3, 0), None, None, and_mask_function=lambda b, h, i, j: j > 0
    )
    assert mask[0, 0].view(torch.int32).tolist() == [[-1, -1, -1], [-1, 0, -1], [-1, 1, 0]]


def test_refuses_what_carries_no_positions(stock: Stock, tokens: Tensor) -> None:
    model = scaleinv.hf.convert(stock("llama"))
    for dtype in (torch.bool, torch.int32, torch.int64, torch.float32):
        with pytest.raises(ValueError, match="4-D mask"):
            model(tokens, attention_mask=torch.ones(2, 1, 40, 40, dtype=dtype))
    with pytest.raises(AttributeError, match="asks its attention mask for 'dtype'"):
        Regular(0).dtype  # noqa: B018
    layer = model.model.layers[0].self_attn
    x = torch.zeros(1, 4, 3, 8)
    with pytest.raises(ValueError, match="attention_mask must come from the mask function"):
        attention_forward(layer, x, x, x, None)
    with pytest.raises(ValueError, match="not causal"):
        attention_forward(layer, x, x, x, Regular(0), is_causal=False)
    with pytest.raises(ValueError, match="position_ids"):
        attention_forward(layer, x, x, x, Regular(0), position_ids=torch.zeros(3, 1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="position_bias"):
        attention_forward(layer, x, x, x, Regular(0), position_bias=x)


def test_a_mask_means_one_document(stock: Stock, model_type: str, tokens: Tensor) -> None:
    """Positions that jump are packed documents only where no mask is given, as in the stock model."""
    positions = torch.cat([torch.arange(17), torch.arange(100, 123)])[None]
    mask = torch.ones_like(tokens)
    inputs = {"position_ids": positions, "attention_mask": mask, "use_cache": False}
    model = stock(model_type)
    with torch.no_grad():
        expected = model(tokens, **inputs).logits
        scaleinv.hf.convert(model, tau=1e12, p=None)
        got = model(tokens, **inputs).logits
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    model.train()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(model(tokens, **inputs).logits, expected, atol=1e-4, rtol=0)


def test_hooks_move_what_the_layers_share() -> None:
    """Of a model on several devices."""
    operations = pytest.importorskip("accelerate.utils.operations")
    ids = torch.zeros(1, 3, dtype=torch.long)
    moved = operations.send_to_device({"mask": Regular(0, 5, ids.bool(), ids)}, "meta")["mask"]
    assert (moved.key_mask.device.type, moved.document_ids.device.type, moved.window) == ("meta", "meta", 5)


def test_attention_dropout(stock: Stock, tokens: Tensor) -> None:
    """Dropout acts on the weights, in training only."""
    model = scaleinv.hf.convert(stock("llama"))
    expected = model(tokens).logits
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.5
    assert torch.equal(model(tokens).logits, expected)
    model.train()
    torch.manual_seed(0)
    assert not torch.allclose(model(tokens).logits, expected, atol=0.1)


def test_registered() -> None:
    assert ATTENTION in AttentionInterface().valid_keys()


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_hidden_keys_may_hold_anything_on_the_general_path(softcap: float | None, garbage: float) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 8)
    distance = (torch.arange(6)[:, None] - torch.arange(6)).expand(2, 1, 6, 6).clone()
    distance[1, :, :, 2] = -1  # padding

    def results(filler: float) -> list[Tensor]:
        k, v = key.clone(), value.clone()
        k[1, :, 2] = v[1, :, 2] = filler
        leaves = [x.clone().requires_grad_() for x in (query, k, v)]
        logits = scaleinv.ScaleInvariant()
        out = by_distance(*leaves, logits, distance, scale=0.3, softcap=softcap)
        return [out, *torch.autograd.grad(out.square().sum(), leaves)]

    for got, want in zip(results(garbage), results(0.0), strict=True):
        torch.testing.assert_close(got, want)
