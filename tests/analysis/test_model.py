"""Entropies and shares of a model, against the whole N × N matrix."""

import csv
import json
import math
from pathlib import Path

import pytest
import torch

from builders import layers_of, make_gpt
from scaleinv.analysis import ModelStatistics, model_statistics
from scaleinv.analysis.model import last_positions
from scaleinv.ops.masks import Geometry

TOKENS = torch.randint(50, (600,), generator=torch.Generator().manual_seed(3))


def brute_force(method: str, length: int, windows: int) -> dict[str, torch.Tensor]:
    """All from full matrices: [layers, heads] each."""
    model = make_gpt(method)
    rows = []
    for number in range(windows):
        text = TOKENS[number * length : (number + 1) * length][None]
        for layer in layers_of(model, text):
            S = layer.query @ layer.key.transpose(-1, -2) / math.sqrt(layer.query.shape[-1])  # [1, H, N, N]
            t = Geometry.of(length, length, 0, True, None).distances(S.device)
            a, m = layer.transform.tables(length, dtype=torch.float64, device=S.device)
            if layer.transform.counts is not None:
                count = torch.arange(1, length + 1)[None]
                S = S * layer.transform.query_gain(count)[..., None]
            L = (a[:, t.clamp_min(0)] * S + m[:, t.clamp_min(0)]).masked_fill(t < 0, -torch.inf)[0]
            rows.append(measure(L.detach(), t, length))
    stacked = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: value.unflatten(0, (windows, 2)).mean(0) for name, value in stacked.items()}


def measure(L: torch.Tensor, t: torch.Tensor, length: int) -> dict[str, torch.Tensor]:
    queries = last_positions(length, 64)
    A = L.softmax(-1)[:, queries]  # [H, R, N]
    t = t[queries]
    sink = A[..., 0]
    A = A.clone()
    A[..., 0] = 0
    A = A / A.sum(-1, keepdim=True)

    def inside(start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        B = A * ((t >= start) & (t < stop))
        share = B.sum(-1)
        B = B / share[..., None]
        return share.mean(1), -(torch.special.xlogy(B, B)).sum(-1).nanmean(1)

    decades = [inside(*pair) for pair in ((0, 1), (1, 10), (10, 100), (100, length))]
    return {
        "entropy": inside(0, length)[1],
        "far_entropy": inside(length // 10, length)[1],
        "recent_share": inside(0, 100)[0],
        "sink_share": sink.mean(1),
        "range_share": torch.stack([share for share, _ in decades], -1),
        "range_entropy": torch.stack([entropy for _, entropy in decades], -1),
    }


@pytest.mark.parametrize("method", ["scale-invariant-p-rope", "rope", "logn+p-rope", "alibi"])
def test_against_the_whole_matrix(method: str) -> None:
    found = model_statistics(make_gpt(method), TOKENS, [256], windows=2).at(256)
    assert (found.windows, found.queries) == (2, 32)
    for name, expected in brute_force(method, 256, 2).items():
        torch.testing.assert_close(
            getattr(found, name), expected, atol=1e-6, rtol=1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )


def test_the_block_size_does_not_matter() -> None:
    model = make_gpt()
    whole = model_statistics(model, TOKENS, [200]).at(200)
    for block in (1, 7):
        found = model_statistics(model, TOKENS, [200], block=block).at(200)
        torch.testing.assert_close(found.range_entropy, whole.range_entropy)
        torch.testing.assert_close(found.range_share, whole.range_share)


def test_a_uniform_model_has_the_entropy_of_its_context() -> None:
    model = make_gpt("nope")
    for block in model.blocks:
        torch.nn.init.zeros_(block.attention.query.weight)  # all scores 0
    found = model_statistics(model, TOKENS, [400], queries=1, windows=1).at(400)
    torch.testing.assert_close(found.entropy, torch.full_like(found.entropy, math.log(399)))
    torch.testing.assert_close(found.recent_share, torch.full_like(found.entropy, 100 / 399))
    torch.testing.assert_close(found.sink_share, torch.full_like(found.entropy, 1 / 400))
    torch.testing.assert_close(found.range_share[0, 0], torch.tensor([1, 9, 90, 299], dtype=torch.float64) / 399)
    torch.testing.assert_close(found.range_entropy[1, 1, 1:].exp(), torch.tensor([9.0, 90.0, 299.0]).double())


def test_a_sink_is_seen_and_left_out() -> None:
    model = make_gpt("nope", layers=1)
    tokens = torch.cat([torch.tensor([49]), TOKENS[:255] % 49])
    with torch.no_grad():  # every query looks for what only token 49 has
        unit = torch.eye(32, dtype=torch.float64)
        model.embedding.weight[:, :2] = torch.tensor([1.0, 0.0])
        model.embedding.weight[49] = unit[1]
        for head in (0, 16):
            model.blocks[0].attention.query.weight[head] = 5 * unit[0]
            model.blocks[0].attention.key.weight[head] = 5 * unit[1]
    found = model_statistics(model, tokens, [256], windows=1).at(256)
    plain = model_statistics(model, tokens % 49, [256], windows=1).at(256)
    assert found.sink_share.min() > 0.05 > 5 * plain.sink_share.max()
    torch.testing.assert_close(found.entropy, plain.entropy)  # of the other keys, which are the same
    torch.testing.assert_close(found.range_share, plain.range_share)


def test_saved_and_loaded(tmp_path: Path) -> None:
    lines: list[str] = []
    found = model_statistics(make_gpt(), TOKENS, [128, 512], windows=2, name="mine", progress=lines.append)
    assert lines == [
        "attention: mine, 128 tokens, window 1 of 2",
        "attention: mine, 128 tokens, window 2 of 2",
        "attention: mine, 512 tokens, window 1 of 1",
    ]
    table, document = found.save(tmp_path)
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2 * 8  # lengths, layers, heads; whole, far, recent, four decades, first token
    shares = [float(row["share"]) for row in rows[:8] if row["range"] == "decade"]
    assert sum(shares) == pytest.approx(1)
    assert json.loads(document.read_text())["model"] == "mine"
    for path in (tmp_path, document):
        loaded = ModelStatistics.load(path)
        assert loaded.layers == (0, 1)
        for ours, theirs in zip(found.lengths, loaded.lengths, strict=True):
            assert ours.ranges == theirs.ranges
            torch.testing.assert_close(ours.range_entropy, theirs.range_entropy, rtol=0, atol=0, equal_nan=True)


def test_damaged_statistics_are_named(tmp_path: Path) -> None:
    _, document = model_statistics(make_gpt(), TOKENS, [256]).save(tmp_path)
    whole = json.loads(document.read_text())

    def damaged(**changes: object) -> str:
        return json.dumps({**whole, "lengths": [{**whole["lengths"][0], **changes}]})

    for content, problem in (
        ("{}", "holds no statistics"),
        (document.read_text()[:-40], "is not JSON"),
        (json.dumps({**whole, "lengths": 3}), "holds no statistics"),
        (json.dumps({**whole, "lengths": [3]}), "holds no statistics"),
        (json.dumps({**whole, "layers": [0]}), "holds no statistics.*must have shape"),
        (damaged(entropy=[[1.0]]), "holds no statistics.*must have shape"),
        (damaged(entropy=[[1.0], "a"]), "holds no statistics"),
        (damaged(entropy=3), "holds no statistics"),
        (damaged(ranges=[[0]]), "holds no statistics"),
        (damaged(surprise=1), "holds no statistics"),
    ):
        document.write_text(content)
        with pytest.raises(ValueError, match=rf"attention\.json {problem}"):
            ModelStatistics.load(tmp_path)


def test_errors_name_the_argument() -> None:
    model = make_gpt()
    with pytest.raises(ValueError, match="lengths must exceed recent=100, got"):
        model_statistics(model, TOKENS, [64])
    with pytest.raises(ValueError, match="lengths must lie in 2 … 600"):
        model_statistics(model, TOKENS, [601])
    with pytest.raises(ValueError, match="queries must be at least 1"):
        model_statistics(model, TOKENS, [256], queries=0)
    with pytest.raises(ValueError, match="block must be at least 1"):
        model_statistics(model, TOKENS, [256], block=0)
    with pytest.raises(ValueError, match="length must be one of 256, got 3"):
        model_statistics(model, TOKENS, [256]).at(3)
