"""What `scaleinv adapt` keeps, removes and refuses in its folder, and what it does when a run ends early."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, TrainingArguments

from hf_folders import byte_tokenizer, model_folder, small_model, text_folder
from scaleinv.adaptation import AdaptConfig
from scaleinv.analysis.paired import read_evaluations
from scaleinv.distributed import RankLost
from scaleinv.eval.summary import read_summary
from scaleinv.files import locked, read_lines
from scaleinv.hf.adapt import adapt, folders, training
from scaleinv.hf.adapt.run import _line, check_shared, fingerprint
from scaleinv.hf.adapt.training import Watcher, load_teacher, newest, of_the_machine
from scaleinv.hf.source import load_pretrained
from scaleinv.reports.comparison import read_results
from scaleinv.train.distributed import World

HERE = World(0, 1, torch.device("cpu"))
SIZE = {"tokens": "128", "batch_tokens": 64, "train_length": 16, "val_tokens": 64, "lengths": "1x", "lr": 1e-2}

pytestmark = pytest.mark.slow


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two steps of a small model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, data = model_folder(tmp_path / "model"), text_folder(tmp_path / "text")
    return {"model": str(model), "data": str(data), "out": str(tmp_path / "out"), "variants": "stock", **SIZE}


class SeveralGPUs(TrainingArguments):
    def __post_init__(self) -> None:
        super().__post_init__()
        self._n_gpu = 4


def run(asked: dict[str, Any], **changes: Any) -> Any:
    return adapt(AdaptConfig(**{**asked, **changes}))


def test_a_model_is_known_by_all_of_its_weights_and_its_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    first = fingerprint(load_pretrained(folder))
    shutil.copytree(folder, tmp_path / "copy")
    described = json.loads((folder / "config.json").read_text())
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**described, "transformers_version": "5.0.1"}))
    assert fingerprint(load_pretrained(tmp_path / "copy")) == first
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        changed = load_pretrained(folder)
        changed.get_parameter(name).data.mul_(1.01)
        assert fingerprint(changed) != first
    (tmp_path / "copy" / "config.json").write_text(json.dumps({**described, "rms_norm_eps": 1e-3}))
    assert fingerprint(load_pretrained(tmp_path / "copy")) != first


def test_another_model_needs_another_folder(asked: dict[str, Any], tmp_path: Path) -> None:
    run(asked)
    other = small_model()
    other.get_parameter("model.layers.1.mlp.down_proj.weight").data.mul_(1.01)  # its embedding is the same
    other.save_pretrained(asked["model"])
    with pytest.raises(ValueError, match=r"with model_sha256=.*: choose another out"):
        run(asked)


def test_a_folder_that_does_not_say_its_precision_is_of_the_usual_one(asked: dict[str, Any]) -> None:
    run(asked)
    path = Path(asked["out"]) / folders.CLAIM
    held = json.loads(path.read_text())
    del held["precision"]
    path.write_text(json.dumps(held))
    with pytest.raises(ValueError, match="precision=float32, but precision=bfloat16 is asked for"):
        run(asked, variants="p-rope", precision="bfloat16")
    run(asked)
    path.unlink()
    with pytest.raises(ValueError, match=r"holds models, but no adapt\.json that says what they are of"):
        run(asked)


def test_the_report_pairs_what_the_summary_holds(asked: dict[str, Any]) -> None:
    """A later command with fewer held-out tokens and other lengths: evaluations of the earlier one do not mix in."""
    both = {"variants": "stock,p-rope", "val_tokens": 512}
    run(asked, **both, seeds=2, lengths="1x,2x")
    found = run(asked, **{**both, "val_tokens": 64}, lengths="1x,4x")
    results = read_results(Path(asked["out"]))
    table = results.tables["differences"]
    assert table is not None
    for record in table.records:
        assert record["length"] in ("1x", "4x")
        means = [found.loss[name][record["length"]].value for name in ("p-rope", "stock")]
        assert record["difference"] == pytest.approx(means[0] - means[1], abs=1e-5)


def test_a_half_precision_teacher_has_the_stock_models_rotary(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    stock, teacher = load_pretrained(folder), load_teacher(str(folder), HERE.device, torch.bfloat16)
    assert {weight.dtype for weight in teacher.parameters()} == {torch.bfloat16}
    assert torch.equal(teacher.model.rotary_emb.inv_freq, stock.model.rotary_emb.inv_freq)
    assert not any(weight.requires_grad for weight in teacher.parameters())


def test_one_process_uses_one_gpu(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where several are visible, `Trainer` would give each of them a batch."""
    batches = []
    monkeypatch.setattr(training, "TrainingArguments", SeveralGPUs)
    monkeypatch.setattr(
        Watcher, "on_train_end", lambda _, args, *__, **___: batches.append((args.n_gpu, args.train_batch_size))
    )
    run(asked)
    assert batches == [(1, 4)]


def test_added_variants_join_the_summary(asked: dict[str, Any]) -> None:
    out = Path(asked["out"])
    run(asked, seeds=2)
    before = read_summary(out / "before" / "summary.json")
    assert (before.settings["seeds"], before.settings["stderr"]) == (1, "over validation windows")
    (out / "checkpoints" / "p-rope-seed0").mkdir(parents=True)  # of another command, which is not finished
    leftover = out / "evaluations" / f".{'0' * 32}.stock-seed0.json"
    leftover.write_text("{")
    found = run(asked, variants="yarn")
    assert list(found.loss) == ["stock", "yarn"]
    assert found.settings["base"] == "stock"
    assert (found.settings["seeds"], found.settings["stderr"]) == (2, "over seeds")
    assert found.loss["stock"]["1x"].record["seeds"] == 2
    assert found.settings["parameters"].keys() == {"stock"}
    assert found.settings["batch_tokens"] == 64
    assert not leftover.exists()
    assert (out / "checkpoints" / "p-rope-seed0").exists()
    assert list(run(asked, variants="yarn", val_tokens=128).loss) == ["yarn"]  # stock was not measured on these
    results = read_results(out)
    assert results.summary.settings["base"] is None
    assert results.tables["differences"] is None


def test_a_model_trained_again_replaces_what_was_made_of_it(asked: dict[str, Any]) -> None:
    out = Path(asked["out"])
    run(asked, variants="stock,yarn")
    weights = out / "models" / "yarn-seed0" / "model.safetensors"
    old = read_evaluations(out / "evaluations")
    shutil.rmtree(out / "models" / "stock-seed0")
    for path in (out / "evaluations").iterdir():
        path.write_text(path.read_text().replace('"seed"', '"stale": 1,\n "seed"'))
    weights.write_bytes(b"of the earlier model")
    run(asked, variants="stock,yarn")
    assert weights.samefile(out / "models" / "stock-seed0" / "model.safetensors")
    assert read_evaluations(out / "evaluations") == old
    assert not any("stale" in path.read_text() for path in (out / "evaluations").iterdir())


def test_tokenizers_with_several_chat_templates(asked: dict[str, Any]) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tools": "{{ tools }}"}
    tokenizer.save_pretrained(asked["model"])
    run(asked, variants="yarn")
    saved = Path(asked["out"]) / "models" / "yarn-seed0"
    assert any(path.is_dir() for path in saved.iterdir())
    assert AutoTokenizer.from_pretrained(saved).chat_template == tokenizer.chat_template


def test_checkpoints_as_often_as_asked_for_after_resuming(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are also not blamed for memory that runs out, and not deleted."""
    saved: list[int] = []

    def on_save(self: Watcher, args: Any, state: Any, control: Any, **_: Any) -> None:
        saved.append(state.global_step)
        if len(saved) == 1:
            raise KeyboardInterrupt

    def no_memory(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Watcher, "on_save", on_save)
    asked = {**asked, "tokens": "384"}
    with pytest.raises(KeyboardInterrupt):
        run(asked, checkpoint_every=1)
    last = newest(Path(asked["out"]) / "checkpoints" / "stock-seed0")
    assert last is not None
    with monkeypatch.context() as broken:
        broken.setattr(training.AdaptTrainer, "_load_from_checkpoint", no_memory)
        with pytest.raises(torch.OutOfMemoryError):
            run(asked)
    weights = (last / "model.safetensors").read_bytes()
    (last / "model.safetensors").write_bytes(b"junk")
    with pytest.raises(ValueError, match=r"cannot be resumed from .*: if it is damaged, delete it"):
        run(asked)
    (last / "model.safetensors").write_bytes(weights)
    run(asked, checkpoint_every=2)
    assert saved == [1, 2, 4, 6]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (MemoryError(), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (RankLost("rank 1 lost another rank"), True),
        (FileNotFoundError(errno.ENOENT, "No such file", "optimizer.pt"), False),
        (OSError("Unable to load weights"), False),
        (ValueError("size mismatch"), False),
    ],
    ids=lambda x: type(x).__name__,
)
def test_which_errors_say_nothing_of_a_checkpoint(error: Exception, expected: bool) -> None:
    assert of_the_machine(error) is expected


def test_every_rank_must_see_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="out must be a folder that all nodes share"):
        check_shared(tmp_path, HERE)
    with locked(tmp_path):
        check_shared(tmp_path, HERE)


def test_checkpoints_of_finished_models_go(tmp_path: Path) -> None:
    for name in ("checkpoints/stock-seed0/checkpoint-1", "checkpoints/p-rope-seed0", "models/stock-seed0"):
        (tmp_path / name).mkdir(parents=True)
    folders.remove_checkpoints(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["p-rope-seed0"]
    (tmp_path / "models" / "p-rope-seed0").mkdir()
    folders.remove_checkpoints(tmp_path)
    assert not (tmp_path / "checkpoints").exists()


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path) -> None:
    line = _line({"step": 3, "loss": float("nan"), "learning_rate": None})
    assert line == '{"step": 3, "loss": null}'
    (tmp_path / "a.jsonl").write_text(f"{line}\n")
    assert read_lines(tmp_path / "a.jsonl") == [{"step": 3, "loss": None}]
