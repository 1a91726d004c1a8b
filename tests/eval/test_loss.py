import math

import numpy as np
import pytest
import torch
from torch import nn

from scaleinv.data import TokenData, write_shard
from scaleinv.train.validation import loss_at_length, usable_tokens


class Oracle(nn.Module):
    """Its loss for a token is the token's place in the whole text, divided by 1000: known wherever it is cut."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, tokens, targets, *, document_ids=None):
        return targets.float() / 1000


@pytest.fixture
def data(tmp_path) -> TokenData:
    write_shard(tmp_path / "val.bin", np.arange(1, 1026, dtype=np.uint16))
    return TokenData([tmp_path / "val.bin"], end_of_text=0)


@pytest.mark.parametrize("length", [1, 32, 128, 512])
def test_mean_and_error_over_windows(data, length):
    result = loss_at_length(Oracle(), data, length, 1024 if length < 512 else 512)
    count = result.tokens
    losses = torch.arange(2, count + 2, dtype=torch.float64).view(-1, length).div(1000)
    assert result.mean == pytest.approx(losses.mean().item())
    if result.windows > 1:
        expected = losses.mean(1).std().item() / math.sqrt(result.windows)
        assert result.stderr == pytest.approx(expected)
    else:
        assert result.stderr is None
    assert result.losses == pytest.approx(losses.mean(1).tolist(), abs=1e-6)
    for low, high, mean in result.positions:
        assert mean == pytest.approx(losses[:, low:high].mean().item())
    assert result.positions[0][0] == 0
    assert result.positions[-1][1] == length


def test_same_tokens_at_every_length(data):
    means = {loss_at_length(Oracle(), data, length, 1024).mean for length in (1, 2, 64, 1024)}
    assert max(means) - min(means) < 1e-9


def test_usable_tokens():
    assert usable_tokens(total=1000, wanted=900, lengths=[32, 128]) == 896
    assert usable_tokens(total=129, wanted=900, lengths=[32, 128]) == 128
    with pytest.raises(ValueError, match="needs at least 129 tokens, but there are 128"):
        usable_tokens(total=128, wanted=900, lengths=[32, 128])


def test_bad_count(data):
    with pytest.raises(ValueError, match="tokens must be a positive multiple of length 100"):
        loss_at_length(Oracle(), data, 100, 1024)
