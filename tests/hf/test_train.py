"""Trainer steps, and torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, StaticCache, Trainer, TrainingArguments

import scaleinv.hf

Stock = Callable[[str], PreTrainedModel]


def test_trainer_steps_save_and_reload_bitwise(stock: Stock, model_type: str, tokens: Tensor, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    model = scaleinv.hf.convert(stock(model_type))
    before = {name: x.clone() for name, x in model.named_parameters()}
    rows = [{"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in tokens.repeat(2, 1)]
    arguments = TrainingArguments(
        str(tmp_path),
        max_steps=2,
        per_device_train_batch_size=2,
        gradient_checkpointing=True,
        report_to=[],
        use_cpu=True,
        save_steps=2,
        disable_tqdm=True,
    )
    Trainer(model, arguments, train_dataset=rows).train()
    assert any(not torch.equal(x, before[name]) for name, x in model.named_parameters())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    model.eval()
    with torch.no_grad():
        assert torch.equal(again(tokens).logits, model(tokens).logits)
    assert scaleinv.hf.conversion(again) == scaleinv.hf.conversion(model)


@pytest.mark.slow
def test_compiles_in_one_graph(stock: Stock, model_type: str, tokens: Tensor) -> None:
    model = scaleinv.hf.convert(stock(model_type))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")

    if model_type == "gpt_oss":  # on a CPU the backward of its stock experts does not compile: forward alone
        model.requires_grad_(False)

    def gradients(forward: Callable, **inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
        model.zero_grad()
        loss = forward(tokens, labels=tokens, use_cache=False, **inputs).loss
        if loss.requires_grad:
            loss.backward()
        return loss, [x.grad.clone() for x in model.parameters() if x.grad is not None]

    left = torch.ones_like(tokens)
    left[1, :7] = 0
    packed = torch.cat([torch.arange(13), torch.arange(27)])[None].expand(2, -1)
    variants: list[dict] = [{"position_ids": packed}]
    if model_type == "llama":
        variants += [{}, {"attention_mask": left}]
    for inputs in variants:
        loss, expected = gradients(model, **inputs)
        got, found = gradients(compiled, **inputs)
        torch.testing.assert_close(got, loss)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.slow
def test_compiles_for_any_length(stock: Stock, tokens: Tensor) -> None:
    model = scaleinv.hf.convert(stock("llama"))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for length in (40, 33):
            expected = model(tokens[:, :length], use_cache=False).logits
            torch.testing.assert_close(compiled(tokens[:, :length], use_cache=False).logits, expected)


def test_compiles_decoding_with_a_static_cache(stock: Stock, tokens: Tensor) -> None:
    model = scaleinv.hf.convert(stock("llama"))
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = model(tokens, use_cache=False).logits
        cache = StaticCache(config=model.config, max_cache_len=48)
        model(tokens[:, :36], past_key_values=cache)
        for place in range(36, 40):
            step = compiled(tokens[:, place : place + 1], past_key_values=cache).logits
            torch.testing.assert_close(step[:, 0], expected[:, place], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "dropout"), [("gemma2", 0.0), ("llama", 0.1), ("gpt_neox", 0.1), ("gpt_oss", 0.1)]
)
def test_autocast_trains_what_has_a_soft_cap_or_dropout(stock: Stock, model_type: str, dropout: float) -> None:
    """Under bfloat16 autocast the gradients are those of float32, but for rounding."""
    gradients = {}
    for enabled in (False, True):
        model = stock(model_type)
        model.config.attention_dropout = dropout
        for module in model.modules():
            if hasattr(module, "attention_dropout"):
                module.attention_dropout = dropout
        scaleinv.hf.convert(model, p=None).train()
        torch.manual_seed(0)
        tokens = torch.randint(0, 61, (2, 24))
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        gradients[enabled] = torch.cat([x.grad.flatten() for x in model.parameters() if x.grad is not None])
    assert gradients[True].isfinite().all()
    assert (gradients[True] - gradients[False]).norm() < 0.1 * gradients[False].norm()
