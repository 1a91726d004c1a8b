"""Certified decoding in trained models: what it changes in the loss, what it reads, and how fast a step is.

    python benchmarks/decoding_model.py runs/si runs/rope                   # several models in one figure
    scaleinv needle runs/si --lengths 1x --samples 1 --out runs/needle      # fine-tunes a model to answer
    python benchmarks/decoding_model.py runs/needle/needle/models/scale-invariant-p-rope-seed0 --needles 50

The loss is that of the same held-out windows, read token by token (teacher-forced) with exact and with certified
attention. Its change is shown beside what the certificates allow to first order: the sum over layers, heads and
positions of an output's certified error times the norm of the loss's gradient there. Writes model.json and model.png
after each model, and prints the tables of results/README.md. With --needles, fine-tuned models answer instead, with
exact and with certified attention: needle.json.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import scaleinv
from scaleinv.eval.certified import CertifiedReader
from scaleinv.eval.needle import default_task
from scaleinv.eval.needle_decode import read_samples
from scaleinv.eval.needle_task import make_sample
from scaleinv.files import write_json
from scaleinv.lengths import parse
from scaleinv.machine import cpu_name
from scaleinv.model import GPT, CertifiedKVCache
from scaleinv.plots.style import METHODS
from scaleinv.train.store import load_model, run_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", help="folders of trained models")
    parser.add_argument("--lengths", default="1x,4x,16x")
    parser.add_argument("--windows", type=int, default=4, help="windows at each length")
    parser.add_argument("--tolerances", default="0.01,0.001")
    parser.add_argument("--steps-at", default="8192,32768,65536", help="keys at which a decoding step is timed")
    parser.add_argument("--needles", type=int, help="ask so many haystacks at each length, and do nothing else")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path("results/decode"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    models: list[dict[str, Any]] = []
    for run in options.runs:
        models.append(ask(run, options) if options.needles else study(run, options))
        stamp = {"torch": torch.__version__, "cpu": cpu_name(), "threads": options.threads}
        write_json(options.out / ("needle.json" if options.needles else "model.json"), {**stamp, "models": models})
        if not options.needles:
            draw(models, options.out / "model.png")
    if not options.needles:
        print(tables(models))


def study(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Losses at each length and the times of a step, of one model."""
    model, config = load_model(run)
    model.eval()
    data = run_corpus(config).val
    tolerances = [float(text) for text in options.tolerances.split(",")]
    print(f"{run}: {config.model.method}", flush=True)
    losses: list[dict[str, Any]] = []
    for label, length in parse(options.lengths, config.model.train_length).items():
        count = min(options.windows, (data.total - 1) // length)
        tokens = torch.from_numpy(data.read(0, count * length + 1).astype("int64"))
        inputs, targets = tokens[:-1].view(count, length), tokens[1:].view(count, length)
        for row in compare(model, inputs, targets, tolerances):
            losses.append({"length": label, "tokens": length, "windows": count, **row})
            print(losses[-1], flush=True)
    steps = []
    for keys in (int(text) for text in options.steps_at.split(",") if text):
        text = torch.from_numpy(data.read(0, keys).astype("int64"))[None]
        steps += step_times(model, text, tolerances)
    return {"method": config.model.method, "train_length": config.model.train_length, "losses": losses, "steps": steps}


def ask(run: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Accuracy on the same haystacks with exact and certified attention, and how many answers are the same."""
    model, config = load_model(run)
    model.eval()
    corpus, (task, _) = run_corpus(config), default_task(config.model)
    samples, tolerances = options.needles, [float(text) for text in options.tolerances.split(",")]
    rows = []
    for label, length in parse(options.lengths, config.model.train_length).items():
        chosen = [make_sample(task.at(length), corpus.val, corpus.tokenizer, seed=0, index=n) for n in range(samples)]
        texts: list[str] = []
        for tolerance in (None, *tolerances):
            readings = [read_samples(model, [x], task.at(length), corpus.tokenizer, tolerance)[0] for x in chosen]
            texts = texts or [reading.text for reading in readings]
            right = [correct for reading in readings for correct in reading.correct]
            same = sum(reading.text == text for reading, text in zip(readings, texts, strict=True))
            loss = statistics.mean(reading.loss for reading in readings)
            rows.append({"length": label, "tokens": length, "samples": samples, "tolerance": tolerance})
            rows[-1] |= {"accuracy": sum(right) / len(right), "same_answers": same, "answer_loss": loss}
            print(rows[-1], flush=True)
    return {"method": config.model.method, "answers": rows}


def compare(model: GPT, inputs: Tensor, targets: Tensor, tolerances: list[float]) -> list[dict[str, Any]]:
    """Loss with exact and with certified attention, window by window, and what the certificates allow."""
    exact, gradients = [], []
    for x, y in zip(inputs, targets, strict=True):
        loss, norms = gradient_norms(model, x[None], y[None])
        exact.append(loss)
        gradients.append(norms)
    rows = []
    for tolerance in tolerances:
        changes, allowed, reads = [], [], []
        for x, y, loss, norms in zip(inputs, targets, exact, gradients, strict=True):
            reader = CertifiedReader(model, tolerance, keep=True)
            with torch.no_grad():
                changes.append(float(reader(x[None], y[None]).double().mean()) - loss)
            errors = reader.certificates
            allowed.append(sum(float((errors[layer].error * norm).sum()) for layer, norm in norms.items()))
            reads.append(reader.read)
        rows.append(
            {
                "tolerance": tolerance,
                "loss": statistics.mean(exact),
                "change": statistics.mean(changes),
                "largest_change": max(abs(change) for change in changes),
                "allowed": statistics.mean(allowed),
                "read": statistics.mean(reads),
            }
        )
    return rows


def gradient_norms(model: GPT, tokens: Tensor, targets: Tensor) -> tuple[float, dict[int, Tensor]]:
    """The mean loss, and the norm of its gradient at each attention output: ``[1, H, N]`` by layer."""
    outputs: dict[int, Tensor] = {}

    def keep(layer: int) -> Callable:
        def hook(module: Any, inputs: tuple[Tensor, ...]) -> None:
            outputs[layer] = inputs[0]
            inputs[0].retain_grad()

        return hook

    handles = [block.attention.project.register_forward_pre_hook(keep(n)) for n, block in enumerate(model.blocks)]
    model.zero_grad()
    loss = model(tokens, targets).double().mean()
    loss.backward()
    for handle in handles:
        handle.remove()
    heads = model.config.heads
    norms = {n: x.grad.double().unflatten(-1, (heads, -1)).norm(dim=-1).transpose(1, 2) for n, x in outputs.items()}
    model.zero_grad()
    return float(loss.detach()), norms


class Recording(CertifiedKVCache):
    """Remembers the query of the last step of each layer."""

    def attend(self, layer: int, query: Tensor, *arguments: Any) -> Tensor:
        if not hasattr(self, "queries"):
            self.queries: dict[int, Tensor] = {}
        self.queries[layer] = query
        return super().attend(layer, query, *arguments)


@torch.no_grad()
def step_times(model: GPT, tokens: Tensor, tolerances: list[float]) -> list[dict[str, Any]]:
    """A decoding step of each layer on the model's own queries, keys and values."""
    cache = Recording(tolerances[0])
    model.hidden(tokens[:, :-1], cache=cache)
    model.hidden(tokens[:, -1:], cache=cache)
    rows = []
    for (layer, held), tolerance in itertools.product(cache.certified.items(), tolerances):
        held.tolerance = tolerance
        query, (key, value) = cache.queries[layer], held.tensors()
        contestants: dict[str, Callable[[], Any]] = {
            "sdpa": functools.partial(F.scaled_dot_product_attention, query, key, value),
            "exact": functools.partial(scaleinv.attention, query, key, value, held.logits),
            "certified": functools.partial(held.attend, query),
        }
        times: dict[str, list[float]] = {name: [] for name in contestants}
        # One thread's own time leaves out what other programs take; of several threads only the wall clock can tell.
        clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
        for turn in range(22):
            for name, run in contestants.items():
                start = clock()
                run()
                if turn:
                    times[name].append((clock() - start) * 1e3)
        medians = {name: statistics.median(values) for name, values in times.items()}
        read = float(held.attend(query)[1].read.mean())
        rows.append({"keys": tokens.shape[1], "tolerance": tolerance, "layer": layer, "read": read, **medians})
        print(rows[-1], flush=True)
    return rows


def tables(models: list[dict[str, Any]]) -> str:
    """Both tables of results/README.md, in Markdown."""
    lines = ["| model | length | tolerance | loss | largest change in a window | allowed, to first order | keys read |"]
    lines.append("| --- " * 7 + "|")
    for method, row in ((model["method"], row) for model in models for row in model["losses"]):
        cells = [method, f"{row['length']} ({row['tokens']:,})", f"{row['tolerance']:g}", f"{row['loss']:.4f}"]
        cells += [f"{row['largest_change']:.1e}", f"{row['allowed']:.2g}", f"{row['read']:.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "| model | keys | tolerance | keys read | over SDPA | over our exact decoding |", "| --- " * 6 + "|"]
    for model in models:
        for keys, tolerance in dict.fromkeys((row["keys"], row["tolerance"]) for row in model["steps"]):
            layers = [row for row in model["steps"] if (row["keys"], row["tolerance"]) == (keys, tolerance)]
            spans = [[row["read"] for row in layers]]
            spans += [[row[rival] / row["certified"] for row in layers] for rival in ("sdpa", "exact")]
            cells = [model["method"], f"{keys:,}", f"{tolerance:g}", f"{min(spans[0]):.1%} – {max(spans[0]):.1%}"]
            cells += [f"{min(span):.1f} – {max(span):.1f} ×" for span in spans[1:]]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(models: list[dict[str, Any]], path: Path) -> None:
    """Change of the loss, share read and speed-up against context length: colours are models, dashes tolerances."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 4), layout="constrained")
    change, read, speed = figure.subplots(1, 3)
    for model in models:
        look = METHODS[model["method"]]
        for tolerance, dashes in zip(
            sorted({row["tolerance"] for row in model["losses"]}), ("-", "--", ":"), strict=False
        ):
            losses = [row for row in model["losses"] if row["tolerance"] == tolerance]
            steps = [row for row in model["steps"] if row["tolerance"] == tolerance]
            tokens, keys = [row["tokens"] for row in losses], sorted({row["keys"] for row in steps})
            style = {"color": look.color, "linestyle": dashes, "marker": look.marker, "markersize": 4}
            label = f"{look.label}, {tolerance:g}"
            change.plot(tokens, [row["largest_change"] for row in losses], label=label, **style)
            change.plot(tokens, [row["allowed"] for row in losses], **{**style, "alpha": 0.3})
            read.plot(tokens, [100 * row["read"] for row in losses], label=label, **style)
            ratios = [[row["sdpa"] / row["certified"] for row in steps if row["keys"] == count] for count in keys]
            speed.plot(keys, [statistics.mean(ratio) for ratio in ratios], label=label, **style)
    for axes, field, rows in ((change, "tokens", "losses"), (read, "tokens", "losses"), (speed, "keys", "steps")):
        axes.set_xscale("log")
        ticks = sorted({row[field] for model in models for row in model[rows]})
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.minorticks_off()
        axes.legend(fontsize=7)
    change.set(yscale="log", xlabel="tokens", ylabel="nats per token", title="change of the loss (pale: allowed)")
    read.set(yscale="log", xlabel="tokens", ylabel="keys read in full (%)", title="all positions")
    speed.set(xlabel="keys", ylabel="times as fast as SDPA", title="a decoding step, mean of the layers")
    speed.axhline(1, color="#999999", linewidth=0.8)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
