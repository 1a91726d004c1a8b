"""A warm start: each attention layer of a converted model learns, alone, to give what the stock layer gives.

Outside of its attention a converted model is the stock model. So where every attention layer's output is replaced by
the stock model's, every layer also reads what the stock layer reads: the layers are independent regressions, and one
forward pass of each model serves them all.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import get_linear_schedule_with_warmup

from scaleinv.files import UnreadableFile, replacing
from scaleinv.hf.convert import uses_interface
from scaleinv.hub import reason
from scaleinv.progress import Progress, Report
from scaleinv.train.distributed import World


def match(
    model: Any,
    teacher: Any,
    windows: Callable[[int], Tensor],
    steps: int,
    rows: int,
    lr: float,
    here: World,
    path: Path,
    label: str,
    progress: Progress,
) -> None:
    """Fit the attention layers to the teacher's and write their weights to ``path``; every rank calls this.

    AdamW and its schedule are those of the training that follows, without clipping.

    Args:
        windows: the tokens ``[B, N]`` of a step that are this rank's.
        teacher: the stock model; where it is in bfloat16, the model computes in it too.
        rows: windows per forward pass.
        path: written whole, when all steps are done; a killed run begins again.
    """
    model.to(here.device).eval()
    weights = attention_weights(model)
    optimizer = torch.optim.AdamW(weights.values(), lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    lines: list[dict[str, float]] = []
    with only(model, weights):
        for step in range(steps):
            began = time.monotonic()
            parts = windows(step).to(here.device).split(rows)
            error = torch.stack([layer_errors(model, teacher, part, 1 / len(parts)) for part in parts]).mean()
            for weight in weights.values():
                if weight.grad is not None:
                    weight.grad = here.mean(weight.grad)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            now = here.mean(error).item()
            rate = sum(part.numel() for part in parts) * here.size / max(time.monotonic() - began, 1e-9)
            lines.append({"matching": now, "tokens_per_second": round(rate, 1)})
            words = f"{label}  matching {step + 1}/{steps}  error {now:.4f}"
            progress(Report(words, passing=True, kind="matching", step=step + 1, steps=steps, error=now))
    first, last = lines[0]["matching"], lines[-1]["matching"]
    progress(f"{label}: matched its attention layers, error {first:.4f} to {last:.4f}")
    here.on_first(_write, path, {name: weight.detach().cpu() for name, weight in weights.items()}, lines)


def layer_errors(model: Any, teacher: Any, inputs: Tensor, scale: float) -> Tensor:
    """The mean over layers of the error of an attention layer's output; adds ``scale`` times each layer's gradient.

    Call it where `only` the attention is trained. The error is the mean square relative to the variance of the
    teacher's output, for each window ``[N]`` of ``inputs [B, N]`` by itself: how windows are batched does not matter.
    """
    targets: list[Tensor] = []
    errors: list[Tensor] = []

    def record(_: nn.Module, __: Any, output: Any) -> None:
        targets.append(_first(output))

    def compare(_: nn.Module, __: Any, output: Any) -> Any:
        target = targets[len(errors)]
        wanted = target.float()
        apart = (_first(output).float() - wanted).square().mean((1, 2))
        error = (apart / wanted.var((1, 2)).clamp_min(torch.finfo(torch.float32).tiny)).mean()
        (scale * error).backward()
        errors.append(error.detach())
        return (target, *output[1:]) if isinstance(output, tuple) else target

    with _hooked(teacher, record), torch.no_grad():
        teacher.base_model(input_ids=inputs, use_cache=False)
    lower = teacher.dtype == torch.bfloat16
    with _hooked(model, compare), torch.autocast(inputs.device.type, torch.bfloat16, enabled=lower):
        model.base_model(input_ids=inputs, use_cache=False)
    return torch.stack(errors).mean()


def attention_weights(model: Any) -> dict[str, nn.Parameter]:
    """The weights of the attention layers, those that are trained."""
    inside = {id(weight) for layer in _layers(model) for weight in layer.parameters() if weight.requires_grad}
    return {name: weight for name, weight in model.named_parameters() if id(weight) in inside}


def load_matched(model: Any, path: Path) -> list[dict[str, float]]:
    """Give a model the weights that `match` wrote; returns the error of each step, and its tokens per second."""
    weights = attention_weights(model)
    try:
        with safe_open(path, "pt") as file, torch.no_grad():
            for name, weight in weights.items():
                weight.copy_(file.get_tensor(name))
            return json.loads(file.metadata()["steps"])
    except (SafetensorError, KeyError, TypeError, RuntimeError, ValueError) as error:
        raise UnreadableFile(path, f"holds no matched weights ({reason(error)})", "delete it to match again") from error


def _write(path: Path, weights: dict[str, Tensor], lines: list[dict[str, float]]) -> None:
    with replacing(path) as temporary:
        save_file(weights, temporary, metadata={"steps": json.dumps(lines)})


def _layers(model: Any) -> list[nn.Module]:
    text = model.config.get_text_config()
    return [module for module in model.modules() if uses_interface(module) and module.config is text]


def _first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


@contextlib.contextmanager
def _hooked(model: Any, hook: Callable[..., Any]) -> Iterator[None]:
    handles = [layer.register_forward_hook(hook) for layer in _layers(model)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def only(model: Any, weights: dict[str, nn.Parameter]) -> Iterator[None]:
    """Train no weights but these, so that no layer keeps activations for others."""
    inside = {id(weight) for weight in weights.values()}
    others = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in inside]
    for weight in others:
        weight.requires_grad_(False)
    try:
        yield
    finally:
        for weight in others:
            weight.requires_grad_(True)
