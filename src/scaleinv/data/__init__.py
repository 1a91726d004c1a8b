"""Corpora, tokenizers and token shards: text in, batches of tokens out."""

from __future__ import annotations

from scaleinv.data.corpus import Corpus, load_corpus
from scaleinv.data.documents import Document, documents
from scaleinv.data.prepare import prepare
from scaleinv.data.shards import open_shard, write_shard
from scaleinv.data.tokenizers import (
    BPETokenizer,
    ByteTokenizer,
    GPT2Tokenizer,
    Tokenizer,
    get_tokenizer,
    load_tokenizer,
)
from scaleinv.data.tokens import TokenData, document_ids

__all__ = [
    "BPETokenizer",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "GPT2Tokenizer",
    "TokenData",
    "Tokenizer",
    "document_ids",
    "documents",
    "get_tokenizer",
    "load_corpus",
    "load_tokenizer",
    "open_shard",
    "prepare",
    "write_shard",
]
