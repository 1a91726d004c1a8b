"""The reference as a GPU computes it in half precision: float32 between the products, whose factors are rounded."""

import torch

from scaleinv.ops.masks import pair_mask


class RoundedGradient(torch.autograd.Function):
    """The identity, with a gradient that is rounded to a dtype."""

    @staticmethod
    def forward(ctx, x, dtype):
        ctx.dtype = dtype
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.to(ctx.dtype).to(grad.dtype), None


class Product(torch.autograd.Function):
    """softmax(logits) @ value: weights and output are rounded, and the backward starts from the rounded output."""

    @staticmethod
    def forward(ctx, logits, value, dtype):
        weights = logits.softmax(-1).nan_to_num(0)  # a row without keys has none
        rounded = weights.to(dtype).to(weights.dtype)
        out = (rounded @ value).to(dtype)
        ctx.save_for_backward(weights, rounded, value, out)
        return out

    @staticmethod
    def backward(ctx, grad):
        weights, rounded, value, out = ctx.saved_tensors
        grad = grad.to(weights.dtype)
        delta = (grad * out).sum(-1, keepdim=True)
        return weights * (grad @ value.mT - delta), rounded.mT @ grad, None


def run(call):
    """As `scaleinv.ops.reference.run`."""
    dtype, geometry = call.value.dtype, call.geometry
    visible = pair_mask(geometry, call.document_ids, call.key_mask, call.device)
    blind = ~visible.any(dim=-1)
    group = call.query.shape[1] // call.key.shape[1]
    key, value = (x.float().repeat_interleave(group, 1) for x in (call.key, call.value))
    start, stop = geometry.table_range()
    a, m = call.logits.table_range(start, stop, dtype=torch.float32, device=call.device)
    t = (geometry.distances(call.device).abs() - start).clamp(0, stop - start - 1)
    scores = call.scale * RoundedGradient.apply(call.query.float() @ key.mT, dtype)
    if call.query_gain is not None:
        scores = scores * call.query_gain[..., None]
    logits = (a[:, t] * scores + m[:, t]).masked_fill(~visible, -torch.inf)
    lse = logits.masked_fill(blind[..., None], 0).logsumexp(-1).masked_fill(blind, -torch.inf)
    return Product.apply(logits, value, dtype), lse
