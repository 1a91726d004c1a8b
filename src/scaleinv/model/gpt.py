"""The paper's GPT: RMSNorm without gain everywhere, QK-norm, squared-ReLU MLP, no biases, untied output."""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaleinv.distributed.context import Context
from scaleinv.methods import Method, trained_as
from scaleinv.model.cache import CertifiedKVCache, KVCache
from scaleinv.model.config import GPTConfig
from scaleinv.model.infini import empty_state, infini_attention
from scaleinv.model.loss import linear_cross_entropy
from scaleinv.ops.api import attention
from scaleinv.rotary import NoPE, rotate


class GPT(nn.Module):
    """A decoder whose attention is any of `scaleinv.methods`.

    >>> model = GPT(GPTConfig(layers=1, width=32, heads=2, vocab_size=100, train_length=64))
    >>> model(torch.zeros(1, 10, dtype=torch.long)).shape
    torch.Size([1, 10, 100])
    """

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = dataclasses.replace(config)  # its own: `use_method` changes it
        self.backend = "auto"
        """Attention backend, as in `scaleinv.attention`."""
        self.context: Context | None = None
        """Ranks that share each sequence, each running its own part (context parallelism)."""
        self.method = config.sized_method().encoding
        """The method's name and rotary. Each layer has a logit transform of its own: ``blocks[i].attention.logits``."""
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.layers))
        self.output = nn.Linear(config.width, config.vocab_size, bias=False)
        nn.init.zeros_(self.output.weight)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        *,
        cache: KVCache | None = None,
        document_ids: Tensor | None = None,
        key_mask: Tensor | None = None,
        context_length: int | None = None,
    ) -> Tensor:
        """Logits ``[B, N, vocabulary]`` for tokens ``[B, N]``; with targets ``[B, N]``, the loss of each in nats.

        The other arguments are those of `hidden`. Losses ``[B, N]`` are float32 and never need all logits at once.
        """
        hidden = self.hidden(
            tokens, cache=cache, document_ids=document_ids, key_mask=key_mask, context_length=context_length
        )
        if targets is None:
            return self.output(hidden)
        losses = linear_cross_entropy(hidden.flatten(0, 1), self.output.weight, targets.flatten())
        return losses.unflatten(0, targets.shape).clone()  # FSDP's hooks need an output that is no view

    def hidden(
        self,
        tokens: Tensor,
        *,
        cache: KVCache | None = None,
        document_ids: Tensor | None = None,
        key_mask: Tensor | None = None,
        context_length: int | None = None,
        last: int | None = None,
    ) -> Tensor:
        """What the output layer reads, ``[B, N, width]``.

        Args:
            tokens: ids ``[B, N]``; with a cache, those that follow what it holds.
            cache: the past; these tokens are added to it.
            document_ids: ``[B, N]``, for packed documents that must not see each other; not with a cache.
            key_mask: bool ``[B, N]``, over the cache's past too: False for padding.
            context_length: for NTK and YaRN, the length to stretch the rotary for; None for the text's own.
            last: only the last so many tokens are of interest: ``[B, last, width]``. The last block then computes
                nothing but keys and values for the others.
        """
        self._check(tokens, cache, document_ids, key_mask)
        if last is not None and last < 1:
            raise ValueError(f"last must be positive, got {last}")
        asked, start = min(tokens.shape[1], last or tokens.shape[1]), 0
        if cache is not None:
            tokens = self._with_past(tokens, cache, context_length)
            start, context_length = cache.length, cache.context_length or context_length
        length = start + tokens.shape[1]
        positions = torch.arange(start, length, device=tokens.device)
        if self.context is not None:
            length *= self.context.ranks
            positions = self.context.positions(tokens.shape[1], tokens.device)
        rotary = self.method.rotary_for(max(length, context_length or 0))
        turn = None if isinstance(rotary, NoPE) else rotary.cos_sin(positions)
        x = norm(self.embedding(tokens))
        for block in self.blocks:
            wanted = asked if block is self.blocks[-1] else x.shape[1]
            x = block(x, turn, cache, document_ids, key_mask, self.backend, self.context, wanted)
        if cache is not None:
            if self.method.stretch is not None:
                cache.remember(tokens)
            cache.length = length
        return norm(x)

    def count_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())

    def use_method(self, name: str) -> None:
        """Switch to another method that uses the same trained model: "rope" to "rope+ntk" or "yarn", and back."""
        own = trained_as(self.config.method)
        if trained_as(name) != own:
            raise ValueError(f"a model trained as {own!r} cannot serve as {name!r}")
        self.config.method = name
        self.method = self.config.sized_method().encoding

    def _with_past(self, tokens: Tensor, cache: KVCache, context_length: int | None) -> Tensor:
        """The tokens to run: these, or the whole text if NTK or YaRN must rotate the past again."""
        if self.method.stretch is None:
            return tokens
        past = cache.tokens
        if context_length is not None and past is None:
            cache.context_length = context_length
        text = tokens if past is None else torch.cat([past, tokens], dim=1)
        fits = text.shape[1] <= max(self.config.train_length, cache.context_length or 0)
        if fits and (past is None or cache.length == past.shape[1]):
            return tokens
        if not fits:
            cache.context_length = text.shape[1]
        cache.reset()
        cache.tokens = past  # if this step fails, the next one reads the whole text
        return text

    def _check(
        self, tokens: Tensor, cache: KVCache | None, document_ids: Tensor | None, key_mask: Tensor | None
    ) -> None:
        if tokens.dim() != 2 or tokens.is_floating_point():
            raise ValueError(
                f"tokens must be integers of shape [batch, length], got {tokens.dtype} {list(tokens.shape)}"
            )
        if tokens.shape[1] == 0:
            raise ValueError("tokens must hold at least one token, got an empty text")
        if document_ids is not None and cache is not None:
            raise ValueError("document_ids cannot be used with a cache")
        if self.context is not None and cache is not None:
            raise ValueError("a cache cannot be used while several ranks share the sequence (model.context)")
        if self.context is not None and self.method.infini:
            raise ValueError("Infini-attention cannot share a sequence over several ranks: its memory is sequential")
        if isinstance(cache, CertifiedKVCache) and self.method.infini:
            raise ValueError("Infini-attention keeps no keys of the past to certify: use a KVCache")
        for name, mask in (("document_ids", document_ids), ("key_mask", key_mask)):
            if mask is not None and self.method.infini:
                raise ValueError(f"{name} cannot be used with Infini-attention: its memory takes in the whole window")


class Block(nn.Module):
    """Attention and MLP, each on the normalised stream and added to it, for the last ``wanted`` tokens."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        self.attention = Attention(config, layer)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)
        nn.init.zeros_(self.down.weight)

    def forward(
        self,
        x: Tensor,
        turn: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        document_ids: Tensor | None,
        key_mask: Tensor | None,
        backend: str,
        context: Context | None,
        wanted: int,
    ) -> Tensor:
        x = x[:, -wanted:] + self.attention(norm(x), turn, cache, document_ids, key_mask, backend, context, wanted)
        return x + self.down(F.relu(self.up(norm(x))).square())


class Attention(nn.Module):
    """Attention of one layer with the configured method."""

    def __init__(self, config: GPTConfig, layer: int) -> None:
        super().__init__()
        method: Method = config.sized_method()
        self.layer, self.heads = layer, config.heads
        self.query, self.key, self.value, self.project = (
            nn.Linear(config.width, config.width, bias=False) for _ in range(4)
        )
        nn.init.zeros_(self.project.weight)
        self.logits = method.logits
        self.segment = (config.segment or math.ceil(config.train_length / 4)) if method.infini else None
        if method.infini:
            self.gate = nn.Parameter(torch.zeros(config.heads))

    def forward(
        self,
        x: Tensor,  # [B, N, width]
        turn: tuple[Tensor, Tensor] | None,
        cache: KVCache | None,
        document_ids: Tensor | None,
        key_mask: Tensor | None,
        backend: str,
        context: Context | None,
        wanted: int,
    ) -> Tensor:
        asking = x if self.segment is not None or context is not None else x[:, -wanted:]
        query, key, value = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, y in ((self.query, asking), (self.key, x), (self.value, x))
        )  # [B, H, N, D]
        query, key = norm(query), norm(key)
        rotated = (query, key)
        if turn is not None:
            rotated = (rotate(query, *(part[-asking.shape[1] :] for part in turn)), rotate(key, *turn))
        if self.segment is not None:
            state = cache.infini.get(self.layer) if cache is not None else None
            out, state = infini_attention(
                query,
                key,
                value,
                *rotated,
                self.gate,
                self.logits,
                self.segment,
                state or empty_state(key, value),
                backend,
            )
            if cache is not None:
                cache.infini[self.layer] = state
        elif cache is not None:
            out = cache.attend(self.layer, *rotated, value, self.logits, key_mask, backend)
        elif context is not None:
            out = context.attention(*rotated, value, self.logits, document_ids, key_mask, backend)
        else:
            out = attention(*rotated, value, self.logits, document_ids=document_ids, key_mask=key_mask, backend=backend)
        return self.project(out.transpose(1, 2).flatten(2)[:, -wanted:])


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the channels, without gain."""
    return F.rms_norm(x, x.shape[-1:])
