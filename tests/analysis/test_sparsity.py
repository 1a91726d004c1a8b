"""How much of a cache is needed: against a plain count, on layers made by hand and on models."""

import pytest
import torch

import scaleinv
from scaleinv.analysis.capture import Layer
from scaleinv.analysis.sparsity import needed_share, read_share, sparsity
from scaleinv.model import GPT, GPTConfig


def layer(transform=None, window=None, keys=300, **changes) -> Layer:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, keys, 16, generator=generator)
    key = torch.randn(2, 2, keys, 16, generator=generator)
    return Layer(0, query, key, None, transform or scaleinv.ScaleInvariant(), 0.25, window, **changes)


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("transform", [scaleinv.Plain(), scaleinv.ScaleInvariant(), scaleinv.LogN(4)], ids=str)
def test_the_fewest_keys_are_those_of_a_plain_count(transform, window):
    case = layer(transform, window)
    positions, tolerance = torch.tensor([290, 299]), 0.02
    weights = case.logits(positions).softmax(-1)
    expected = torch.zeros(4, dtype=torch.float64)
    for b in range(2):
        for h in range(4):
            for row, position in enumerate(positions.tolist()):
                ordered = weights[b, h, row].sort(descending=True).values
                fewest = next(n for n in range(1, 301) if 1 - ordered[:n].sum() <= tolerance)
                expected[h] += fewest / min(position + 1, window or 300) / 4
    torch.testing.assert_close(needed_share(case, positions, tolerance).detach(), expected)


def test_certified_decoding_reads_at_least_what_is_needed():
    case = layer(keys=1500)
    positions = torch.arange(1490, 1500)
    needed, read = needed_share(case, positions, 1e-2), read_share(case, positions, 1e-2)
    assert bool((needed <= read).all() & (read < 1).all())


def test_soft_caps_and_sinks_have_no_certificate():
    for changes in ({"softcap": 2.0}, {"sinks": torch.zeros(4)}):
        assert bool(read_share(layer(**changes), torch.arange(290, 300), 1e-2).isnan().all())


def test_files_hold_every_length_layer_and_head(tmp_path):
    model = GPT(GPTConfig(layers=2, width=32, heads=2, train_length=64))
    found = sparsity(model, torch.arange(600) % 50, [128, 300], windows=1, queries=4)
    assert found.needed.shape == found.read.shape == (2, 2, 2)
    table, document = found.save(tmp_path)
    assert len(table.read_text().splitlines()) == 1 + 8
    assert document.name == "sparsity.json"
