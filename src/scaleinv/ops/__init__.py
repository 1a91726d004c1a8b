"""Attention with affine logits: the call (api), the oracle (reference) and the fast paths (blocked, native, flex)."""
