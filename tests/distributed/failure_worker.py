"""One rank of a failure: ``python failure_worker.py RANK RANKS FOLDER SCENARIO``."""

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from scaleinv import ALiBi, LogN, ScaleInvariant, distributed


def scenario(name: str, rank: int, ranks: int) -> None:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    query, key, value = torch.randn(3, 1, 2, 8, 4)
    if name == "another shape on rank 1":
        extra = 2 * (rank == 1)
        query, key, value = torch.randn(3, 1, 2, 8 + extra, 4)
        distributed.attention(query, key, value, mesh=mesh["cp"])
    elif name == "another window on rank 1":
        distributed.attention(query, key, value, mesh=mesh["cp"], window=3 + rank)
    elif name == "another scale on rank 1":
        distributed.attention(query, key, value, mesh=mesh["cp"], scale=0.5 + rank)
    elif name == "another transform on rank 1":
        distributed.attention(query, key, value, ALiBi(2) if rank else LogN(2), mesh=mesh["cp"])
    elif name == "another lengthscale on rank 1":
        distributed.attention(query, key, value, ScaleInvariant(tau=10.0 + rank), mesh=mesh["cp"])
    elif name == "another parameter on rank 1":
        logits = LogN(2, scale=0.5)
        with torch.no_grad():
            logits.scale[1] += 1e-6 * rank
        distributed.attention(query, key, value, logits, mesh=mesh["cp"])
    elif name == "another dtype on rank 1":
        distributed.attention(
            *(x.to(torch.bfloat16 if rank else torch.float32) for x in (query, key, value)), mesh=mesh
        )
    elif name == "another function on rank 1":
        distributed.gather(query, mesh["cp"]) if rank else distributed.attention(query, key, value, mesh=mesh["cp"])
    elif name == "differentiated twice":
        query.requires_grad_()
        out = distributed.attention(query, key, value, mesh=mesh["cp"])
        (grad,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
        (grad.square().sum() + out.sum()).backward()
    elif name == "a part of another length on rank 1":
        distributed.gather(query[:, :, rank:], mesh["cp"])
    elif name == "documents of two integer types":
        ids = torch.zeros(1, 8, dtype=torch.int32 if rank else torch.uint16)
        distributed.attention(query, key, value, mesh=mesh["cp"], document_ids=ids, window=10**30)
    elif name == "no tokens":
        empty = query[:, :, :0].requires_grad_()
        distributed.attention(empty, empty, empty, mesh=mesh["cp"]).sum().backward()
    elif name == "rank 1 dies":
        distributed.attention(query, key, value, mesh=mesh["cp"])
        if rank == 1:
            os._exit(9)
        distributed.attention(query, key, value, mesh=mesh["cp"])
    elif name == "rank 1 is missing":
        if rank == 1:
            raise ValueError("a mistake on this rank alone")
        distributed.attention(query, key, value, mesh=mesh["cp"])
    elif name == "two dimensions":
        square = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "cp"))
        distributed.attention(query, key, value, mesh=square)


def main(rank: int, ranks: int, folder: Path, name: str) -> None:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=20)
    rendezvous = f"file://{folder / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timeout)
    try:
        scenario(name, rank, ranks)
    except (ValueError, RuntimeError, TypeError) as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        os._exit(2)  # as a program that ends with an error, without waiting for the others


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4])
