"""Where the heads of a fine-tuned model look while it copies a needle's number: why some models miss it.

    scaleinv needle runs/rope --lengths 1x --out runs/needle
    python examples/needle_heads.py runs/needle/needle/models/rope-seed0

To copy a digit, a head must put its weight on that digit and not on the one beside it, and for this the keys have to
know which token precedes them: some head in an earlier layer must look one token back. Each line of the table has, for
one model, the share of digits that are right after the right beginning; the head that puts most weight on the digit to
copy, with its weight there and on the digits beside it; and the head that puts most weight one token back. Means over
haystacks at the training length.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from scaleinv.analysis.capture import Layer, capture
from scaleinv.eval.needle_task import EQUALS, NeedleTask, Sample, make_sample, stack
from scaleinv.eval.needle_train import SETTINGS
from scaleinv.train.store import load_model, run_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="+", help="fine-tuned models: needle/models/METHOD-seedN")
    parser.add_argument("--samples", type=int, default=50, help="haystacks; default: 50")
    parser.add_argument("--seed", type=int, default=0, help="of the haystacks; default: 0")
    options = parser.parse_args()
    print(
        "| model | digits right | head that copies | weight on the digit | on its neighbours | head that looks back "
        "| weight one token back |\n| --- | --- | --- | --- | --- | --- | --- |"
    )
    for folder in options.models:
        print(study(folder, options.samples, options.seed), flush=True)


@torch.no_grad()
def study(folder: Path, count: int, seed: int) -> str:
    """A line of the table."""
    if not (folder / SETTINGS).is_file():
        raise SystemExit(f"{folder} is no fine-tuned model: `scaleinv needle` makes them, in needle/models/")
    model, config = load_model(folder)
    corpus = run_corpus(config)
    if corpus.tokenizer.name != "bytes":
        raise SystemExit(f"{folder}: its tokens are {corpus.tokenizer.name}, and a digit must be a token of its own")
    task = NeedleTask(**json.loads((folder / SETTINGS).read_text())["task"])
    samples = [make_sample(task, corpus.val, corpus.tokenizer, seed=seed, index=index) for index in range(count)]
    copied, beside, back = [], [], []
    right = digits = 0
    for sample in samples:
        tokens = stack([sample])[0]
        asked, wanted = digit_places(sample, task)
        right += int((model(tokens)[0, asked].argmax(-1) == tokens[0, asked + 1]).sum())
        digits += len(asked)
        weights: list[Tensor] = []

        def keep(layer: Layer, weights: list[Tensor] = weights) -> None:
            weights.append(layer.logits(torch.arange(layer.length)).softmax(-1)[0])  # [H, N, N], by distance

        capture(model, tokens, keep)
        at = torch.stack(weights)  # [L, H, N, N]
        copied.append(at[:, :, asked, asked - wanted].mean(-1))
        beside.append((at[:, :, asked, asked - wanted - 1] + at[:, :, asked, asked - wanted + 1]).mean(-1))
        back.append(at[:, :, 1:, 1].mean(-1))
    mean_copied, mean_beside, mean_back = (torch.stack(values).mean(0) for values in (copied, beside, back))
    reader, looker = largest(mean_copied), largest(mean_back)
    cells = [
        folder.name,
        f"{right / digits:.2f}",
        "layer {}, head {}".format(*reader),
        f"{mean_copied[reader]:.2f}",
        f"{mean_beside[reader]:.2f}",
        "layer {}, head {}".format(*looker),
        f"{mean_back[looker]:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def largest(weights: Tensor) -> tuple[int, int]:
    """Layer and head with the most weight."""
    place = int(weights.argmax())
    return place // weights.shape[1], place % weights.shape[1]


def digit_places(sample: Sample, task: NeedleTask) -> tuple[Tensor, Tensor]:
    """Tokens after which a digit of the answer has to follow, and where that digit stands in its needle."""
    asked: list[int] = []
    wanted: list[int] = []
    end = sample.answer_start
    for needle in sample.needles:
        first = needle.start + task.sentence(needle.city, needle.number).encode().rindex(needle.number.encode())
        end += len((needle.city + EQUALS).encode())
        asked += range(end - 1, end - 1 + len(needle.number))
        wanted += range(first, first + len(needle.number))
        end += len(needle.number) + len(sample.separator)
    return torch.tensor(asked), torch.tensor(wanted)


if __name__ == "__main__":
    main()
