import copy
import dataclasses
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from run_files import losses

from scaleinv import methods, train
from scaleinv.model import GPT
from scaleinv.train import loop
from scaleinv.train.optim import build_optimizers
from scaleinv.train.store import load_model, read_config, run_corpus
from scaleinv.train.validation import LengthLoss


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


@pytest.mark.parametrize("method", ["scale-invariant-p-rope", "infini-p-rope", "alibi"])
def test_bfloat16_trains_nearly_the_same_model(tiny, tmp_path, method):
    exact = tiny(method, out=str(tmp_path / "exact"), steps=20)
    rounded = dataclasses.replace(exact, out=str(tmp_path / "rounded"), precision="bfloat16")
    train.run(exact)
    train.run(rounded)
    expected, found = (list(losses(config.out).values()) for config in (exact, rounded))
    assert found != expected
    assert found == pytest.approx(expected, rel=0.02)
    model, config = load_model(Path(rounded.out))
    assert config.precision == "bfloat16"
    assert {weight.dtype for weight in model.parameters()} == {torch.float32}


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


def test_a_run_finds_its_data_from_any_folder(tiny, book, tmp_path, monkeypatch):
    corpus = run_corpus(tiny(tokenizer="bpe:300"), fit=True)
    (tmp_path / "own").mkdir()
    corpus.tokenizer.save(tmp_path / "own")
    (tmp_path / "val.txt").write_text("A fox that is in no book.\n" * 400)
    monkeypatch.chdir(tmp_path)
    config = tiny(data=book.name, val_data="val.txt", tokenizer="own", steps=1)
    train.run(config)
    monkeypatch.chdir(tmp_path.parent)
    saved, values = read_config(config.out)
    assert run_corpus(saved).sha256 == values["corpus"]["sha256"]


def test_a_vocabulary_of_bytes_is_fitted_to_the_tokenizer(tiny):
    lines = []
    config = tiny(tokenizer="bpe:300", steps=1)
    train.run(config, progress=lines.append)
    saved, values = read_config(config.out)
    assert 257 < saved.model.vocab_size <= 300
    assert f"data {values['corpus']['description']}" in lines
    with pytest.raises(ValueError, match="vocab_size must be at least"):
        run_corpus(dataclasses.replace(saved, model=dataclasses.replace(saved.model, vocab_size=257)))


def test_document_masks_hide_other_documents(tiny, monkeypatch):
    """Every pass of a run gets masks under which another document before one's own changes nothing."""
    passes = []
    forward = GPT.forward

    def spy(self, tokens, targets=None, **more):
        passes.append((tokens, targets, more["document_ids"]))
        return forward(self, tokens, targets, **more)

    with monkeypatch.context() as patch:
        patch.setattr(GPT, "forward", spy)
        config = tiny(document_masks=True, steps=40, checkpoint_every=100)
        train.run(config)
    model, _ = load_model(config.out)
    end = run_corpus(config).train.end_of_text
    split = 0
    for tokens, targets, ids in passes:
        for row in range(len(tokens)):
            starts = (tokens[row] == end).nonzero().flatten().tolist()
            if not starts or starts[-1] == 0:
                continue
            split += 1
            first = starts[-1]  # of the last document
            here, answers, documents = (x[row : row + 1] for x in (tokens, targets, ids))
            other = here.clone()
            other[:, :first] = (other[:, :first] + 1) % 256
            with torch.no_grad():
                one, two = (model(x, answers, document_ids=documents)[:, first:] for x in (here, other))
                seen = model(other, answers)[:, first:]
            torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-5)
            assert (one - seen).abs().max() > 1e-3  # without masks they are seen
    assert split


def test_nan_loss_stops_with_the_step_and_the_checkpoint(tiny):
    config = tiny(lr_matrices=1e30, lr_embedding=1e30, lr_output=1e30, steps=20)
    with pytest.raises(train.Diverged, match=r"(loss|weights) became .* at step \d+: .*checkpoint"):
        train.run(config)


def test_validation_that_is_not_finite_stops_it(tiny, monkeypatch):
    """At the last step too, and in a run that resumes after it."""
    config = tiny(steps=2)

    def broken(model, data, length, tokens, **more):
        return LengthLoss(length, math.nan if length > 32 else 1.0, None, 1, [])

    with monkeypatch.context() as patch:
        patch.setattr(loop, "loss_at_length", broken)
        with pytest.raises(train.Diverged, match="validation loss at 4x became nan at step 2: there is no checkpoint"):
            train.run(config)
    train.run(config, resume=True)
    monkeypatch.setattr(loop, "loss_at_length", broken)
    with pytest.raises(train.Diverged, match="validation loss at 4x became nan at step 2: the last good checkpoint"):
        train.run(config, resume=True)


def test_the_callers_config_is_left_alone(tiny):
    config = tiny(tokenizer="bpe:300", steps=1)
    before = copy.deepcopy(config)
    train.run(config)
    assert config == before
    assert read_config(config.out)[0].model.vocab_size > config.model.vocab_size


@pytest.mark.parametrize(
    ("lengths", "found"), [("1x", ["1x"]), ("0.5x,48", ["0.5x", "48"]), ("1x,64x", ["1x"]), ("none", [])]
)
def test_validation_at_the_lengths_asked_for_that_fit(tiny, lengths, found):
    lines: list[str] = []
    config = tiny(steps=2, val_every=1, val_lengths=lengths)
    assert list(train.run(config, progress=lines.append).validation) == found
    metrics = [json.loads(line) for line in (Path(config.out) / "metrics.jsonl").read_text().splitlines()]
    assert [list(line.get("validation", {})) for line in metrics] == [found, found]
    left_out = [line for line in lines if line.startswith("no validation at")]
    assert left_out == (
        ["no validation at 64x: there are only 1,024 tokens to validate on"] if "64x" in lengths else []
    )
    assert list(train.run(config, resume=True).validation) == found


def test_a_small_text_can_be_trained_with_the_mini_preset(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "text.txt").write_text("".join(f"{n} little words in a short text. " for n in range(1800))[:60_000])
    settings = {"data": str(tmp_path / "text.txt"), "out": str(tmp_path / "run"), "steps": 1, "device": "cpu"}
    lines: list[str] = []
    result = train.run(train.preset("mini", layers=1, width=16, **settings), progress=lines.append)
    assert list(result.validation) == ["1x", "4x"]
    assert any(line.startswith("no validation at 16x") for line in lines)


def test_validation_that_cannot_be_done_at_any_length_is_refused(tiny):
    config = tiny(val_tokens=16)
    with pytest.raises(ValueError, match=r"validation at length 32 needs val_tokens of at least 32"):
        train.run(config)


@pytest.mark.parametrize(("name", "value"), [("tau", 3.0), ("learnable_tau", True)])
def test_a_lengthscale_for_a_method_without_one_is_refused(tiny, name, value):
    config = tiny("rope")
    config.model = dataclasses.replace(config.model, **{name: value})
    with pytest.raises(ValueError, match=f"{name} must be left unset for 'rope', which has none, got {value}"):
        train.run(config)
    assert not Path(config.out).exists()


@pytest.mark.parametrize(
    "changes", [{"data": "nowhere/*.txt"}, {"tokenizer": "nowhere"}, {"wandb": "project"}], ids=str
)
def test_a_run_that_cannot_begin_leaves_no_folder(tiny, tmp_path, monkeypatch, changes):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = tiny(out=str(tmp_path / "new" / "run"), **changes)
    with pytest.raises((ValueError, RuntimeError)):
        train.run(config)
    assert not (tmp_path / "new").exists()
    (tmp_path / "new" / "run").mkdir(parents=True)
    with pytest.raises((ValueError, RuntimeError)):
        train.run(config)
    assert list((tmp_path / "new" / "run").iterdir()) == []  # a folder that was there stays


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
        ({"micro_tokens": -1}, "micro_tokens must be a positive integer"),
        ({"out": ""}, "out must be text that is not empty"),
        ({"data": " "}, "data must be text that is not empty"),
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
