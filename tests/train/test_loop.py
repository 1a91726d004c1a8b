import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch
from run_files import losses

from scaleinv import methods, train
from scaleinv.data import document_ids
from scaleinv.model import GPT
from scaleinv.train.optim import build_optimizers
from scaleinv.train.store import load_model, read_config, run_corpus


@pytest.mark.parametrize("method", [name for name in methods.names() if methods.row(name).trained_as is None])
def test_loss_falls_in_twenty_steps(tiny, method):
    config = tiny(method, steps=20, checkpoint_every=100)
    result = train.run(config)
    seen = losses(config.out)
    assert result.finished
    assert result.step == 20
    assert sorted(seen) == list(range(1, 21))
    assert seen[1] == pytest.approx(math.log(config.model.vocab_size), abs=1e-4)  # the output layer starts at 0
    assert seen[20] < 0.75 * seen[1]


@pytest.mark.parametrize("method", ["scale-invariant-p-rope", "infini-p-rope"])
def test_one_batch_is_learnt_by_heart(tiny, method):
    config = tiny(method)
    torch.manual_seed(0)
    model = GPT(config.model)
    optimizers = build_optimizers(model, config)
    tokens = torch.randint(0, 256, (2, 33))
    for _ in range(120):
        loss = model(tokens[:, :-1], tokens[:, 1:]).mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert loss.item() < 0.1


def test_accumulation_gives_the_same_steps(tiny, tmp_path):
    whole = tiny(out=str(tmp_path / "whole"))
    parts = dataclasses.replace(whole, out=str(tmp_path / "parts"), micro_tokens=32)
    train.run(whole)
    train.run(parts)
    assert list(losses(parts.out).values()) == pytest.approx(list(losses(whole.out).values()), rel=1e-5)


def test_seed_decides_the_run(tiny, tmp_path):
    runs = [tiny(out=str(tmp_path / name), seed=seed) for name, seed in (("a", 0), ("b", 0), ("c", 1))]
    for config in runs:
        train.run(config)
    first, again, other = (losses(config.out) for config in runs)
    assert first == again
    assert first != other


def test_validation_uses_the_same_tokens_at_each_length(tiny):
    config = tiny("nope", steps=2)
    result = train.run(config)
    assert {name: found.tokens for name, found in result.validation.items()} == {"1x": 1024, "4x": 1024, "16x": 1024}
    last = json.loads((Path(config.out) / "metrics.jsonl").read_text().splitlines()[-1])
    assert last["validation"] == {name: found.mean for name, found in result.validation.items()}


def test_run_folder_holds_all_that_is_needed(tiny):
    config = tiny()
    train.run(config)
    again, values = read_config(config.out)
    assert again == config
    assert values["corpus"]["sha256"]
    model, _ = load_model(config.out)
    assert not model.training
    tokens = torch.randint(0, 256, (1, 40))
    assert torch.isfinite(model(tokens)).all()
    assert list((Path(config.out) / "tensorboard").glob("events*"))


def test_a_vocabulary_of_bytes_is_fitted_to_the_tokenizer(tiny):
    lines = []
    config = tiny(tokenizer="bpe:300", steps=1)
    train.run(config, progress=lines.append)
    saved, values = read_config(config.out)
    assert 257 < saved.model.vocab_size <= 300
    assert f"data {values['corpus']['description']}" in lines
    with pytest.raises(ValueError, match="vocab_size must be at least"):
        run_corpus(dataclasses.replace(saved, model=dataclasses.replace(saved.model, vocab_size=257)))


def test_document_masks_hide_other_documents(tiny):
    config = tiny(document_masks=True, steps=2)
    assert train.run(config).finished
    ids = document_ids(torch.tensor([[256, 5, 6, 256, 7]]), 256)
    assert ids.tolist() == [[1, 1, 1, 2, 2]]


def test_nan_loss_stops_with_the_step_and_the_checkpoint(tiny):
    config = tiny(lr_matrices=1e30, lr_embedding=1e30, lr_output=1e30, steps=20)
    with pytest.raises(train.Diverged, match=r"(loss|weights) became .* at step \d+: .*checkpoint"):
        train.run(config)


def test_a_folder_is_never_overwritten(tiny):
    config = tiny(steps=2)
    train.run(config)
    with pytest.raises(ValueError, match="already holds a run"):
        train.run(config)
    with pytest.raises(ValueError, match="holds no run to resume"):
        train.run(dataclasses.replace(config, out=config.out + "-other"), resume=True)


def test_unwritable_folder_is_a_clear_error(tiny, tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    with pytest.raises(ValueError, match="out cannot be written to"):
        train.run(tiny(out=str(blocker / "run")))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps must be a positive integer"),
        ({"batch_tokens": 100}, "batch_tokens must be a multiple of the training length"),
        ({"order": "shuffled"}, "order must be 'random' or 'sequential'"),
        ({"schedule": "warm"}, "schedule must be"),
        ({"parallel": "tp"}, "parallel must be"),
        ({"clip": 0.0}, "clip must be positive"),
        ({"val_lengths": ""}, "val_lengths must be text"),
        ({"val_lengths": "4y"}, "val_lengths must read like .* 'none' turns validation off"),
        ({"lr_output": math.nan}, "lr_output must be finite"),
    ],
)
def test_bad_settings_name_the_field(tiny, changes, message):
    with pytest.raises(ValueError, match=message):
        tiny(**changes)


def test_text_shorter_than_a_window_stops_before_training(tiny, tmp_path):
    small = tmp_path / "small.txt"
    small.write_text("too short")
    with pytest.raises(ValueError, match="token"):
        train.run(tiny(data=str(small)))


def test_schedules():
    paper = train.preset("162m")
    assert paper.sequences == 128
    assert paper.learning_rate(0) == paper.learning_rate(3270) == 1
    assert paper.learning_rate(3270 + 654) == pytest.approx(0.5)
    assert paper.learning_rate(4578) == 0
    cosine = train.preset("304m")
    assert cosine.learning_rate(0) == 1
    assert cosine.learning_rate(5450) == pytest.approx(0.5)
    assert cosine.learning_rate(10_900) == pytest.approx(0)
    assert cosine.lr_matrices == pytest.approx(0.015)
