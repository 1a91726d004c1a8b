"""The warm start of `scaleinv adapt`: attention layers fitted to those of the stock model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_folders import VOCABULARY, small_model
from scaleinv.adaptation import AdaptConfig
from scaleinv.hf.adapt.matching import attention_weights, layer_errors, load_matched, match, only
from scaleinv.hf.adapt.variants import as_variant
from scaleinv.progress import silent
from scaleinv.train.distributed import World

HERE = World(0, 1, torch.device("cpu"))
STEPS = 30

pytestmark = pytest.mark.slow


def pair(model_type: str = "llama") -> tuple[Any, Any]:
    """A converted model, and the stock model."""
    model, teacher = (small_model(model_type, initializer_range=0.3) for _ in range(2))
    return as_variant(model, "scale-invariant-p-rope", AdaptConfig(model="m"), 32), teacher.requires_grad_(False)


def windows(step: int) -> Tensor:
    return torch.randint(2, VOCABULARY, (4, 32), generator=torch.Generator().manual_seed(step))


def test_an_error_is_that_of_the_layer_on_the_stock_models_input() -> None:
    """Each attention module is called by itself, on what the stock module read; float64, with gradients."""
    model, teacher = (x.double() for x in pair())
    inputs = windows(0)
    read: list[Tensor] = []
    gave: list[Tensor] = []
    options: list[dict[str, Any]] = []
    for stock, own in zip(teacher.model.layers, model.model.layers, strict=True):
        stock.self_attn.register_forward_pre_hook(
            lambda _, __, given: read.append(given["hidden_states"]), with_kwargs=True
        )
        stock.self_attn.register_forward_hook(lambda _, __, output: gave.append(output[0]))
        own.self_attn.register_forward_pre_hook(lambda _, __, given: options.append(given), with_kwargs=True)
    with torch.no_grad():
        teacher(inputs, use_cache=False)
        model(inputs, use_cache=False)
    own_options = list(options)  # the next calls append theirs
    errors = []
    for layer, x, y, given in zip(model.model.layers, read, gave, own_options, strict=True):
        output = layer.self_attn(**{**given, "hidden_states": x})[0]
        errors += [((a - b) ** 2).mean() / b.var() for a, b in zip(output, y, strict=True)]
    expected = torch.stack(errors).mean()
    weights = attention_weights(model)
    gradients = torch.autograd.grad(len(model.model.layers) * expected, list(weights.values()))
    with only(model, weights):
        found = layer_errors(model, teacher, inputs, 1.0)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
    for weight, gradient in zip(weights.values(), gradients, strict=True):
        torch.testing.assert_close(weight.grad, gradient, rtol=1e-4, atol=1e-5 * gradient.abs().max().item())


def test_an_error_does_not_depend_on_the_batch() -> None:
    model, teacher = pair()
    found = []
    for rows in (1, 2, 4):
        parts = windows(0).split(rows)
        with only(model, attention_weights(model)):
            error = torch.stack([layer_errors(model, teacher, part, 1 / len(parts)) for part in parts]).mean()
        gradients = [weight.grad.clone() for weight in attention_weights(model).values()]  # type: ignore[union-attr]
        model.zero_grad()
        found.append((error, gradients))
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "phi"])
def test_matching_lowers_the_error_and_leaves_the_rest_alone(model_type: str, tmp_path: Path) -> None:
    model, teacher = pair(model_type)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    lines: list[str] = []
    path = tmp_path / "folder" / "matched.safetensors"
    match(model, teacher, windows, STEPS, 2, 1e-2, HERE, path, "name", lines.append)
    assert all(weight.requires_grad for weight in model.parameters())
    changed = {name for name, weight in model.named_parameters() if not torch.equal(weight, before[name])}
    assert changed <= attention_weights(model).keys()
    assert {name for name in before if "q_proj.weight" in name or "v_proj.weight" in name} <= changed

    fresh, _ = pair(model_type)
    steps = load_matched(fresh, path)
    errors = [line["matching"] for line in steps]
    assert len(errors) == STEPS
    assert all(line["tokens_per_second"] > 0 for line in steps)
    with only(fresh, attention_weights(fresh)):
        assert layer_errors(fresh, teacher, windows(0), 1.0) < 0.9 * errors[0]
    assert lines[-1] == f"name: matched its attention layers, error {errors[0]:.4f} to {errors[-1]:.4f}"
    for name, weight in model.named_parameters():
        assert torch.equal(weight, fresh.get_parameter(name))


def test_a_killed_matching_leaves_nothing_behind(tmp_path: Path) -> None:
    """It begins again, and ends where it would have ended."""
    path = tmp_path / "matched.safetensors"

    def killed(step: int) -> Tensor:
        if step == 2:
            raise KeyboardInterrupt
        return windows(step)

    ends = []
    for source in (windows, killed, windows):
        model, teacher = pair()
        try:
            match(model, teacher, source, 4, 4, 1e-2, HERE, path, "name", silent)
        except KeyboardInterrupt:
            assert list(tmp_path.iterdir()) == []
            continue
        ends.append([weight.detach() for weight in attention_weights(model).values()])
        path.unlink()
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
