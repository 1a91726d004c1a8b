"""Continued training of one model on `transformers.Trainer`: resumable, on one rank or many."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

from scaleinv.adaptation import BASE, AdaptConfig
from scaleinv.data import TokenData
from scaleinv.distributed import RankLost
from scaleinv.hf.adapt.data import Windows
from scaleinv.hf.adapt.variants import as_variant
from scaleinv.hf.settings import Fit
from scaleinv.hf.source import load_pretrained
from scaleinv.hub import reason
from scaleinv.machine import arithmetic, is_about_memory
from scaleinv.progress import Progress, Report, clock
from scaleinv.train.distributed import World


@dataclasses.dataclass(frozen=True)
class Steps:
    """How a model's training tokens are cut."""

    count: int
    windows: int
    """Windows per step, over all ranks."""
    rows: int
    """Windows per forward pass of one rank."""
    length: int

    @classmethod
    def of(cls, config: AdaptConfig, length: int, ranks: int) -> Steps:
        windows = max(1, config.batch_tokens // length)
        if windows % ranks:
            raise ValueError(
                f"batch_tokens {config.batch_tokens:,} makes {windows} windows of {length:,} tokens per step, which "
                f"{ranks} ranks cannot share: give a multiple of {ranks * length:,}"
            )
        own = windows // ranks
        most = max(1, config.micro_tokens // length)
        rows = max(rows for rows in range(1, own + 1) if own % rows == 0 and rows <= most)
        count = math.ceil(config.training_tokens / (windows * length))
        return cls(count, windows, rows, length)

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.windows * self.length


class AdaptTrainer(Trainer):
    """`Trainer` whose loss may be how far the predictions are from a teacher's."""

    teacher: Any = None

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        if self.teacher is None:
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        outputs = model(input_ids=inputs["input_ids"], use_cache=False)
        with torch.no_grad():
            target = self.teacher(input_ids=inputs["input_ids"], use_cache=False).logits
        loss = divergence(outputs.logits, target)
        return (loss, outputs) if return_outputs else loss


def divergence(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """KL(target ‖ model) in nats per token, of logits ``[B, N, vocabulary]``."""
    log_p, log_q = (x.float().log_softmax(-1).flatten(0, 1) for x in (target, logits))
    return F.kl_div(log_q, log_p, reduction="batchmean", log_target=True)


class Watcher(TrainerCallback):
    """Reports each step."""

    def __init__(self, model: Any, name: str, steps: Steps, progress: Progress) -> None:
        self.model, self.name, self.steps, self.progress = model, name, steps, progress
        self.began = self.last = time.monotonic()
        self.first: int | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        state.save_steps = args.save_steps  # a checkpoint brings that of the run that wrote it

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.first is None:
            self.first, self.began, self.last = state.global_step, time.monotonic(), time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if not logs or "loss" not in logs:
            return
        now = time.monotonic()
        rate, self.last = self.steps.tokens / max(now - self.last, 1e-9), now
        state.log_history[-1]["tokens_per_second"] = round(rate, 1)  # kept with the checkpoint
        done = state.global_step - (self.first or 0)
        left = clock((now - self.began) / max(done, 1) * (state.max_steps - state.global_step))
        self.progress(
            Report(
                f"{self.name}  step {state.global_step}/{state.max_steps}  loss {logs['loss']:.4f}  "
                f"lr {logs['learning_rate']:.2g}  {rate:,.0f} tokens/s  {left} left",
                passing=True,
                kind="step",
                method=self.name,
                step=state.global_step,
                steps=state.max_steps,
                loss=logs["loss"],
            )
        )


def train(
    config: AdaptConfig,
    name: str,
    seed: int,
    data: TokenData,
    steps: Steps,
    here: World,
    folder: Path,
    out: Path,
    progress: Progress,
    fit: Fit | None = None,
) -> list[dict[str, Any]]:
    """Train a variant and save it to ``out``, with its weights in the type that they had; returns a line per step.

    Every rank calls this.

    Args:
        folder: for checkpoints. If there is one, training goes on from it.
        fit: as for `as_variant`.
    """
    set_seed(seed)  # of dropout, and of LoRA's first matrices
    model = load_pretrained(config.model)
    dtype, use_cache = model.dtype, getattr(model.config, "use_cache", None)
    on_gpu = here.device.type == "cuda"
    kind = getattr(torch, arithmetic(config.precision, here.device.type))
    if kind == torch.float32 or not config.lora:
        model.float()
    as_variant(model, name, config, steps.length, fit)
    trained = _with_lora(model, config.lora) if config.lora else model
    label = f"{name} seed {seed}"
    arguments = TrainingArguments(
        str(folder),
        max_steps=steps.count,
        per_device_train_batch_size=steps.rows,
        gradient_accumulation_steps=steps.windows // here.size // steps.rows,
        gradient_checkpointing=config.gradient_checkpointing and not config.fsdp,
        learning_rate=config.lr,
        lr_scheduler_type="linear",
        warmup_steps=steps.count // 10,
        weight_decay=0.0,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        train_sampling_strategy="sequential",  # the windows are in random order already
        bf16=kind == torch.bfloat16,
        use_cpu=not on_gpu,
        fsdp=True if config.fsdp else None,  # type: ignore[arg-type]  # its annotation is older; FSDP2, layer by layer
        fsdp_config={"activation_checkpointing": config.gradient_checkpointing} if config.fsdp else None,
        seed=seed,
        logging_steps=1,
        logging_nan_inf_filter=False,
        save_steps=config.checkpoint_every,
        save_total_limit=1,
        disable_tqdm=True,
        report_to=[],
    )
    arguments._n_gpu = 1  # otherwise Trainer gives each of several visible GPUs a batch of this size
    windows = Windows(data, steps.length, steps.count * steps.windows, seed)
    trainer = AdaptTrainer(trained, arguments, train_dataset=windows)
    trainer.remove_callback(PrinterCallback)
    watcher = Watcher(model, label, steps, progress)
    trainer.add_callback(watcher)
    if config.distill and name != BASE:
        trainer.teacher, trainer.loss_is_scaled_for_ga = load_teacher(config.model, here.device, kind), False
    here.on_first(remove_unfinished, folder)
    last = _agreed(newest(folder), folder, here)
    if last is not None:
        progress(f"{label}: resumed from {last.name}")
    try:
        with here.watched():
            trainer.train(resume_from_checkpoint=None if last is None else str(last))
    except Exception as error:
        if last is None or watcher.first is not None or of_the_machine(error):
            raise
        raise ValueError(
            f"{last} cannot be resumed from ({reason(error)}): if it is damaged, delete it to begin again"
        ) from error
    if use_cache is not None:
        model.config.use_cache = use_cache  # Trainer turns it off
    if config.lora:
        merged = trainer.accelerator.unwrap_model(trainer.model).merge_and_unload()
        here.on_first(lambda: merged.to(dtype).save_pretrained(out))
    else:
        trainer.save_model(str(out))  # all ranks: the weights may be sharded
        twice = config.fsdp and model.config.tie_word_embeddings  # what is gathered holds tied weights twice
        here.on_first(_tidy, out, dtype, twice)
    kept = ("loss", "learning_rate", "tokens_per_second")
    lines = (line for line in trainer.state.log_history if "loss" in line)
    return [{"step": line["step"], **{key: line.get(key) for key in kept}} for line in lines]


def of_the_machine(error: Exception) -> bool:
    """Whether memory, a disk or another rank failed, which says nothing of what a checkpoint holds."""
    disk = isinstance(error, OSError) and error.errno is not None and not isinstance(error, FileNotFoundError)
    return disk or isinstance(error, RankLost) or is_about_memory(error)


def newest(folder: Path) -> Path | None:
    """The newest finished checkpoint."""
    found = [path for path in folder.glob("checkpoint-*") if _finished(path)]
    return max(found, key=_step, default=None)


def _agreed(checkpoint: Path | None, folder: Path, here: World) -> Path | None:
    """The checkpoint that rank 0 found."""
    step = _step(checkpoint) if here.first and checkpoint is not None else 0
    step = int(here.sum(torch.tensor(step, device=here.device)))
    return folder / f"checkpoint-{step}" if step else None


def remove_unfinished(folder: Path) -> None:
    """Delete checkpoints that a killed run left half written."""
    for path in folder.glob("checkpoint-*"):
        if not _finished(path):
            shutil.rmtree(path)


def _finished(checkpoint: Path) -> bool:
    """Whether `Trainer` wrote its state, which comes last, and what it needs to go on is still there."""
    if not (checkpoint / "scheduler.pt").exists() or not any(checkpoint.glob("optimizer*")):
        return False
    try:
        state = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))
        return state["global_step"] == _step(checkpoint)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _step(checkpoint: Path) -> int:
    number = checkpoint.name.rpartition("-")[2]
    return int(number) if number.isdecimal() else -1


def _tidy(folder: Path, dtype: torch.dtype, again: bool) -> None:
    """Leave the model's own files, with weights in this type; ``again`` saves them anew even if they have it."""
    (folder / "training_args.bin").unlink(missing_ok=True)
    if again or dtype != torch.float32:
        load_pretrained(folder).to(dtype).save_pretrained(folder)


def load_teacher(model: str, device: torch.device, dtype: torch.dtype) -> Any:
    """The stock model, which does not learn."""
    return load_pretrained(model, dtype).to(device).eval().requires_grad_(False)


def require_peft() -> Any:
    """The package peft; ImportError says how to get it."""
    try:
        import peft
    except ImportError as error:
        raise ImportError('lora needs peft: pip install "scaleinv[lora]"') from error
    return peft


def _with_lora(model: Any, rank: int) -> Any:
    peft = require_peft()
    options = {"r": rank, "lora_alpha": 2 * rank, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    return peft.get_peft_model(model, peft.LoraConfig(**options))
