"""One rank of the ring tests: runs every case, and saves what it found for the parent to judge.

python ring_worker.py RANK RANKS FOLDER
"""

import dataclasses
import datetime
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from attention_cases import Case
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

import scaleinv
from scaleinv import distributed
from scaleinv.distributed.layout import LAYOUTS


@dataclasses.dataclass(frozen=True)
class RingCase:
    """A call of `attention`, and the layout that spreads it."""

    case: Case
    layout: str = "zigzag"
    recompute: bool = False
    """Activation checkpointing: the forward runs again in the backward."""

    def __str__(self) -> str:
        return f"{self.case}-{self.layout}" + "-recompute" * self.recompute


def cases(ranks: int) -> list[RingCase]:
    """What 2, 3 and 4 ranks compute: every transform, and every way to hide keys, in both layouts."""
    odd, even = 7 * ranks, 12 * ranks
    found = [Case(even, transform=transform, heads=3) for transform in TRANSFORMS]
    found += [
        Case(odd, heads=4, kv_heads=2, dim=8, value_dim=5, batch=2),
        Case(even, causal=False),
        Case(even, window=5),
        Case(odd, window=1),
        Case(even, window=9, causal=False, transform="learnable", heads=3),
        Case(even, documents="packed", batch=2),
        Case(even, documents="scattered", transform="logn-visible", batch=2),
        Case(even, documents="packed", window=6, mask="some", transform="learnable"),
        Case(odd, mask="blind", batch=2, transform="logn-visible"),
        Case(even, mask="some", causal=False, heads=4, kv_heads=1),
        Case(ranks, dim=4),  # one token on each rank
        Case(even, scale=0.5, transform="table-heads"),
    ]
    recomputed = RingCase(Case(even, heads=3, transform="learnable", documents="packed"), recompute=True)
    return [*(RingCase(case, layout) for case in found for layout in LAYOUTS), recomputed]


DTYPES = (torch.float32, torch.float64)
TRANSFORMS = ("plain", "scale-invariant", "learnable", "logn-visible", "logn-context", "alibi", "table")


def run(case: RingCase, mesh: DeviceMesh, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Output, logsumexp and gradients of the whole call, put together from all ranks; and what this rank sent."""
    tensors = case.case.tensors(torch.float32)
    query, key, value, weights, lse_weights = (
        distributed.shard(x.to(dtype), mesh, dim=2, layout=case.layout) for x in tensors
    )
    leaves = {"query": query, "key": key, "value": value}
    for x in leaves.values():
        x.requires_grad_()
    logits = case.case.logits().to(dtype)
    options = case.case.options()
    options.pop("query_offset")
    for name in ("document_ids", "key_mask"):
        if options[name] is not None:
            options[name] = distributed.shard(options[name], mesh, dim=1, layout=case.layout)
    with distributed.counted() as traffic:

        def attend(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return distributed.attention(*tensors, logits, mesh=mesh, layout=case.layout, return_lse=True, **options)

        if case.recompute:
            out, lse = checkpoint(attend, query, key, value, use_reentrant=False)
        else:
            out, lse = attend(query, key, value)
        seen = lse.masked_fill(lse == -torch.inf, 0)
        ((out * weights).sum() + (seen * lse_weights).sum()).backward()
    found = {"output": out.detach(), "logsumexp": lse.detach()}
    found |= {f"grad {name}": x.grad for name, x in leaves.items()}
    found = {name: distributed.gather(x, mesh, dim=2, layout=case.layout) for name, x in found.items()}
    for name, parameter in logits.named_parameters():
        grad = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
        dist.all_reduce(grad)  # as DDP does with every parameter
        found[f"grad {name}"] = grad
    found["traffic"] = torch.tensor([traffic.messages, traffic.bytes])
    return found


def main(rank: int, ranks: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'rendezvous'}",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))["cp"]
    results = {str(case): {dtype: run(case, mesh, dtype) for dtype in DTYPES} for case in cases(ranks)}
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    assert scaleinv.__file__
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
