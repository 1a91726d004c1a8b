"""Gradients of one training pass, alone or under torchrun: ``gradient_worker.py OUT.pt ddp|fsdp CONTEXT [float64]``."""

import faulthandler
import sys
import warnings
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from scaleinv.model import GPT, GPTConfig, gpt
from scaleinv.train.checkpoint import to_cpu
from scaleinv.train.distributed import replicate, shard, world


def norm(x: Tensor) -> Tensor:
    """The model's norm with float32's epsilon: by default it is the dtype's own, and float64 another function."""
    return F.rms_norm(x, x.shape[-1:], eps=torch.finfo(torch.float32).eps)


def losses(model: torch.nn.Module, inputs: Tensor, targets: Tensor, ids: Tensor) -> Tensor:
    """What the model gives if it has targets, but in the model's dtype: its own are always float32."""
    return F.cross_entropy(model(inputs, document_ids=ids).flatten(0, 1), targets.flatten(), reduction="none")


def main(out: Path, parallel: str, context: int, dtype: str = "float32") -> None:
    """The loss is that of `scaleinv.train.loop`: each rank's mean, and the mean over ranks."""
    faulthandler.dump_traceback_later(240, exit=True)  # if it hangs, show where
    warnings.filterwarnings("error", message="FSDP2-wrapped module")  # an output that is a view
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPTConfig(layers=2, width=32, heads=2, vocab_size=64, train_length=48, method="scale-invariant-rope")
    config.learnable_tau = True
    tokens = torch.randint(64, (4, 49))
    with world("cpu", context) as here:
        model = GPT(config)
        torch.manual_seed(1)
        for parameter in model.parameters():  # some start at zero, and hide the gradients of others
            torch.nn.init.normal_(parameter, std=0.1)
        if dtype == "float64":
            model.double()
            gpt.norm = norm
        model.context = here.context
        if parallel == "fsdp":
            shard(model, here, model.blocks)
        forward = replicate(model, here, parallel)
        rows = tokens.chunk(here.groups)[here.group]
        inputs, targets = rows[:, :-1], rows[:, 1:]
        if here.context is not None:
            split = here.context.split(48)
            inputs, targets = (split.take(x, here.context.rank, 1) for x in (inputs, targets))
        ids = here.document_ids(inputs, 3)
        single = dtype == "float32"
        found = forward(inputs, targets, document_ids=ids) if single else losses(forward, inputs, targets, ids)
        loss = found.sum() / inputs.numel()
        loss.backward()
        grads = to_cpu({name: x.grad for name, x in model.named_parameters()})
        grads["loss"] = here.mean(loss.detach())
        if here.first:
            torch.save(grads, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), *sys.argv[4:])
