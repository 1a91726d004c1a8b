"""Training speed: the scale-invariant model beside the same model with RoPE and torch's own attention (SDPA).

All take optimiser steps in turn in one process, the scale-invariant one also in bfloat16; the table gives tokens per
second and the ratio of the medians. Cases: the mini preset, and one block of the 162m preset at 4,096 tokens.

    python benchmarks/training.py

Writes results/bench/training.csv.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention import say
from scaleinv import train
from scaleinv.machine import Precision, cpu_name
from scaleinv.model import GPT, GPTConfig, preset
from scaleinv.model import gpt as gpt_module
from scaleinv.train.optim import build_optimizers
from scaleinv.train.passes import precision


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("results/bench"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    say(f"torch {torch.__version__}, {cpu_name()}, {options.threads} threads")
    rows: list[dict[str, Any]] = []
    for name, shape, batch in (
        ("mini", preset("mini"), 8),
        ("162m block", preset("162m", layers=1, vocab_size=512), 1),
    ):
        rows += compare(name, shape, batch, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    stamp = {"torch": torch.__version__, "cpu": cpu_name(), "threads": options.threads}
    with (options.out / "training.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, [*rows[0], *stamp])
        writer.writeheader()
        writer.writerows({**row, **stamp} for row in rows)
    say(f"wrote {options.out / 'training.csv'}")


def compare(name: str, shape: GPTConfig, batch: int, rounds: int) -> list[dict[str, Any]]:
    contestants = {
        "rope, SDPA": stepper(shape, "rope", batch, sdpa),
        "rope, ours": stepper(shape, "rope", batch, None),
        "scale-invariant-p-rope": stepper(shape, "scale-invariant-p-rope", batch, None),
        "scale-invariant-p-rope, bfloat16": stepper(shape, "scale-invariant-p-rope", batch, None, "bfloat16"),
    }
    times: dict[str, list[float]] = {contestant: [] for contestant in contestants}
    for turn in range(rounds + 1):
        for contestant, step in contestants.items():
            start = time.perf_counter()
            step()
            if turn:  # the first is for warming up
                times[contestant].append(time.perf_counter() - start)
    tokens = batch * shape.train_length
    base = statistics.median(times["rope, SDPA"])
    rows = []
    for contestant, values in times.items():
        median = statistics.median(values)
        say(f"{name:12}{contestant:34}{tokens / median:10,.0f} tokens/s  {base / median:5.2f} of RoPE with SDPA")
        rows.append(
            {
                "model": name,
                "contestant": contestant,
                "length": shape.train_length,
                "tokens_per_second": tokens / median,
                "best_tokens_per_second": tokens / min(values),
                "rate_to_rope_sdpa": base / median,
            }
        )
    return rows


def stepper(
    shape: GPTConfig,
    method: str,
    batch: int,
    attention: Callable[..., Tensor] | None,
    arithmetic: Precision = "float32",
) -> Callable[[], None]:
    """A function that takes one optimiser step."""
    config = train.TrainConfig(
        model=GPTConfig(**{**vars(shape), "method": method}), batch_tokens=batch * shape.train_length
    )
    torch.manual_seed(0)
    model = GPT(config.model)
    optimizers = build_optimizers(model, config)
    tokens = torch.randint(0, shape.vocab_size, (batch, shape.train_length + 1))

    def step() -> None:
        own = gpt_module.attention
        gpt_module.attention = attention or own
        try:
            with precision(tokens.device, arithmetic):
                loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
            loss.backward()
        finally:
            gpt_module.attention = own
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    return step


def sdpa(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, is_causal=True)


if __name__ == "__main__":
    main()
