"""`scaleinv generate`: text from a trained model."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from scaleinv.cli.common import command


def add(commands: Any) -> None:
    parser = command(
        commands,
        "generate",
        run,
        "Write text with a trained model, as it is made.",
        'scaleinv generate runs/si --prompt "def main("',
    )
    option = parser.add_argument
    option("run_folder", metavar="RUN", help="a run's folder")
    option("--prompt", default="", help="what the text begins with; default: a new document")
    option("--tokens", type=int, default=300, help="tokens to write at most; default: 300")
    option("--temperature", type=float, default=0.8, help="0 takes the likeliest token each time; default: 0.8")
    option("--top-k", type=int, help="choose among the k likeliest tokens")
    option("--top-p", type=float, help="choose among the likeliest tokens that make up this probability")
    option("--seed", type=int, help="for the same text again")
    option("--method", help="run a RoPE-trained model as rope+ntk or yarn")
    option("--device", default="cpu", help="default: cpu")


def run(options: argparse.Namespace) -> None:
    import torch

    from scaleinv.eval import generate
    from scaleinv.train.store import load_model, run_tokenizer

    model, _ = load_model(options.run_folder, options.device)
    if options.method:
        model.use_method(options.method)
    tokenizer = run_tokenizer(options.run_folder)
    prompt = [tokenizer.end_of_text, *(int(token) for token in tokenizer.encode(options.prompt))]
    ids: list[int] = []
    shown = ""
    sys.stdout.write(options.prompt)
    for token in generate(
        model,
        torch.tensor(prompt),
        options.tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=tokenizer.end_of_text,
        vocabulary=tokenizer.vocab_size,
    ):
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # a character may take several tokens
            sys.stdout.write(text[len(shown) :])
            sys.stdout.flush()
            shown = text
    sys.stdout.write(tokenizer.decode(ids)[len(shown) :] + "\n")
