"""Loss by window length, against the model called window by window."""

import math

import numpy as np
import pytest
import torch

from builders import make_gpt
from scaleinv.data import TokenData
from scaleinv.data.shards import write_shard
from scaleinv.model import GPT
from scaleinv.train import validation
from scaleinv.train.validation import fitting, loss_at_length, usable_tokens

END = 256


@pytest.fixture
def data(tmp_path) -> TokenData:
    tokens = np.random.default_rng(0).integers(0, 256, 700)
    tokens[::50] = END
    write_shard(tmp_path / "val.bin", tokens.astype(np.uint16))
    return TokenData([tmp_path / "val.bin"], END)


@pytest.fixture
def model() -> GPT:
    return make_gpt("rope", train_length=32, vocab_size=257).train()


def by_hand(model, data, length, count):
    tokens = torch.cat([x for x, _ in data.windows(1, 699)] + [torch.tensor([0])])
    losses = []
    with torch.no_grad():
        for number in range(count):
            window = tokens[number * length : (number + 1) * length + 1]
            losses.append(model(window[None, :-1], window[None, 1:])[0])
    return torch.stack(losses).double()


@pytest.mark.parametrize("length", [1, 7, 32, 100])
def test_against_window_by_window(model, data, length, monkeypatch):
    monkeypatch.setattr(validation, "WINDOW_TOKENS", 3 * length)  # several batches, the last not full
    count = 600 // length
    expected = by_hand(model, data, length, count)
    found = loss_at_length(model, data, length, count * length)
    assert (found.length, found.windows, found.tokens) == (length, count, count * length)
    assert found.mean == pytest.approx(expected.mean().item(), rel=1e-9)
    assert found.stderr == pytest.approx(expected.mean(1).std().item() / math.sqrt(count), rel=1e-6)
    assert found.positions[0][0] == 0
    assert found.positions[-1][1] == length
    for low, high, mean in found.positions:
        assert mean == pytest.approx(expected[:, low:high].mean().item(), rel=1e-9)
    assert model.training


def test_a_single_window_has_no_error(model, data):
    assert loss_at_length(model, data, 500, 500).stderr is None


def test_documents_are_hidden_where_asked(model, data):
    """With masks, what comes before a document does not change its loss; without them it does."""
    plain, masked = (loss_at_length(model, data, 100, 600, document_masks=masks).mean for masks in (False, True))
    alone = loss_at_length(model, data, 50, 600).mean  # each window is one document
    assert masked == pytest.approx(alone, rel=1e-6)
    assert abs(plain - alone) > 1e-4


@pytest.mark.parametrize("tokens", [0, 99, 150])
def test_tokens_are_whole_windows(model, data, tokens):
    with pytest.raises(ValueError, match=f"tokens must be a positive multiple of length 100, got {tokens}"):
        loss_at_length(model, data, 100, tokens)


def test_progress_counts_windows(model, data, monkeypatch):
    monkeypatch.setattr(validation, "WINDOW_TOKENS", 200)
    seen = []
    loss_at_length(model, data, 100, 600, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(2, 6), (4, 6), (6, 6)]


def test_the_same_tokens_at_every_length():
    assert usable_tokens(10_000, 5000, [32, 128, 512]) == 4608
    assert usable_tokens(1000, 5000, [32, 128]) == 896
    assert usable_tokens(1025, 5000, [32, 1024]) == 1024
    assert usable_tokens(2000, 5000, [999, 1000]) == 1000  # no common multiple fits: the longest length's
    with pytest.raises(ValueError, match=r"validation at length 512 needs at least 513 tokens, but there are 512"):
        usable_tokens(512, 5000, [512])


def test_lengths_that_do_not_fit_are_left_out():
    lengths = {"1x": 32, "4x": 128, "16x": 512}
    assert fitting(lengths, 513, 10_000) == lengths
    assert list(fitting(lengths, 512, 10_000)) == ["1x", "4x"]
    assert list(fitting(lengths, 10_000, 127)) == ["1x"]
    assert fitting({}, 5, 5) == {}
    with pytest.raises(ValueError, match=r"validation at length 32 needs val_tokens of at least 32 and 33 tokens"):
        fitting(lengths, 32, 10_000)
