"""Moments and quantiles of scores, against scipy on all pairs and against known distributions; calibration."""

import csv
import logging
from pathlib import Path

import pytest
import torch
from scipy import stats

from builders import layers_of, make_gpt
from scaleinv.analysis import Calibration, Layer, calibrate, score_statistics, scores
from scaleinv.analysis.scores import NORMAL
from scaleinv.logits import Plain

TOKENS = torch.randint(50, (600,), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("rotary", [True, False])
def test_against_all_pairs(rotary: bool) -> None:
    model = make_gpt("rope")
    found = score_statistics(model, TOKENS, 100, windows=2, queries=None, kept=1 << 20)
    assert found.pairs == 2 * 99 * 100 // 2
    result = found.rotary if rotary else found.without_rotary
    assert result is not None
    texts = [layers_of(model, TOKENS[start : start + 100][None]) for start in (0, 100)]
    causal = torch.ones(100, 100, dtype=torch.bool).tril()
    causal[:, 0] = False
    for layer in (0, 1):
        for head in (0, 1):
            matrices = [text[layer].scores(torch.arange(100), rotary)[0, head] for text in texts]
            x = torch.cat([matrix[causal] for matrix in matrices]).numpy()
            at = (layer, head)
            assert result.mean[at].item() == pytest.approx(x.mean(), abs=1e-9)
            assert result.variance[at].item() == pytest.approx(x.var(), rel=1e-9)
            assert result.skew[at].item() == pytest.approx(stats.skew(x), abs=1e-8)
            assert result.kurtosis[at].item() == pytest.approx(stats.kurtosis(x), abs=1e-8)
            expected = torch.from_numpy(x).quantile(torch.tensor(stats.norm.cdf(NORMAL)))
            torch.testing.assert_close(result.quantiles[at], expected, atol=1e-6, rtol=1e-6)


def test_the_block_size_does_not_matter() -> None:
    model = make_gpt()
    whole = score_statistics(model, TOKENS, 150, queries=40, kept=500)
    for block in (1, 7):
        found = score_statistics(model, TOKENS, 150, queries=40, kept=500, block=block)
        for name in ("mean", "variance", "skew", "kurtosis", "quantiles"):
            torch.testing.assert_close(getattr(found.rotary, name), getattr(whole.rotary, name))


def fake_capture(monkeypatch: pytest.MonkeyPatch, factor: float = 1.0, shift: float = 0.0, **options: object) -> None:
    """Any model becomes one layer of independent Gaussian queries and keys with variance 1."""

    def capture(model: object, tokens: torch.Tensor, consume: object) -> None:
        generator = torch.Generator().manual_seed(int(tokens.sum()))
        shape = (1, 4, tokens.shape[1], 64)
        query, key = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        query = query * factor
        query[..., 0], key[..., 0] = shift * 8, 1.0
        key[:, :, 0] = 1000.0  # the first token: an outlier
        consume(Layer(3, query, key, None, Plain(), 1 / 8, **options))

    monkeypatch.setattr(scores, "capture", capture)


def test_gaussian_scores_look_gaussian(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_capture(monkeypatch)
    found = score_statistics(make_gpt(), TOKENS, 300, windows=2)
    assert found.layers == (3,)
    assert found.without_rotary is None
    assert found.warnings == ()
    assert found.rotary.mean.abs().max() < 0.05
    assert (found.rotary.variance - 1).abs().max() < 0.1
    assert found.rotary.skew.abs().max() < 0.1
    assert found.rotary.kurtosis.abs().max() < 0.3  # products of 64 channels: 6/64 expected
    inner = slice(5, -5)  # -2.5 … 2.5
    assert (found.rotary.quantiles[..., inner] - torch.tensor(NORMAL)[inner]).abs().max() < 0.25


def test_a_large_mean_costs_no_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_capture(monkeypatch)
    centred = score_statistics(make_gpt(), TOKENS, 300, block=11).rotary
    fake_capture(monkeypatch, shift=1e5)
    found = score_statistics(make_gpt(), TOKENS, 300, block=11).rotary
    torch.testing.assert_close(found.mean, centred.mean + 1e5)
    for name in ("variance", "skew", "kurtosis"):
        torch.testing.assert_close(getattr(found, name), getattr(centred, name), atol=1e-5, rtol=1e-5)


def test_a_sliding_window_hides_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_capture(monkeypatch, window=5)
    kept: list[torch.Tensor] = []
    original = scores._Pairs.__init__

    def spy(self: object, *args: object) -> None:
        original(self, *args)
        kept.append(self.positions[self.rows] - self.keys)
        assert int(self.keys.min()) >= 1

    monkeypatch.setattr(scores._Pairs, "__init__", spy)
    score_statistics(make_gpt(), TOKENS, 300, windows=1, queries=None, kept=1 << 16)
    assert kept[0].unique().tolist() == [0, 1, 2, 3, 4]
    assert len(kept[0]) == 1 + 2 + 3 + 4 + 5 * 295


def test_scores_times_three_are_calibrated_by_a_third(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fake_capture(monkeypatch)
    one = calibrate(make_gpt(), TOKENS, 300)
    fake_capture(monkeypatch, factor=3)
    with caplog.at_level(logging.WARNING):
        found = score_statistics(make_gpt(), TOKENS, 300, name="hot")
    assert found.rotary.far_from_unit.all()
    assert "hot: the variance of the scores is far from 1 in 4 of 4 heads" in found.warnings[0]
    assert found.warnings[0] in caplog.text
    three = Calibration.of(found)
    torch.testing.assert_close(three.scale, one.scale / 3)
    torch.testing.assert_close(three.scale, torch.full((1, 4), 1 / 3, dtype=torch.float64), atol=0.03, rtol=0)


def test_calibration_is_a_mapping_and_a_file(tmp_path: Path) -> None:
    found = calibrate(make_gpt(), TOKENS, 128)
    assert list(found) == [0, 1]
    assert found[1] is not None
    torch.testing.assert_close(torch.stack(list(found.values())), found.scale)
    loaded = Calibration.load(found.save(tmp_path / "deep" / "calibration.json"))
    assert (loaded.model, loaded.layers) == ("scale-invariant-p-rope", (0, 1))
    torch.testing.assert_close(loaded.scale, found.scale, rtol=0, atol=0)
    with pytest.raises(ValueError, match="scale must be positive"):
        Calibration("x", (0,), torch.tensor([[-1.0]]))
    with pytest.raises(ValueError, match=r"scale must have shape \[2, heads\]"):
        Calibration("x", (0, 1), torch.ones(1, 4))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ('{"scale": [[1]]}', "holds no calibration"),
        ('{"model": "x", "layers": [0], "scale": [[1, "a"]]}', "holds no calibration"),
        ('{"model": "x", "layers": [0], "scale": [[1], [1, 2]]}', "holds no calibration"),
        ('{"model": "x", "layers": ["a"], "scale": [[1]]}', "holds no calibration"),
        ('{"model": "x", "layers": 7, "scale": [[1]]}', "holds no calibration"),
        ('{"model": "x", "layers": [0], "scale": [[1e999]]}', "holds no calibration"),
        ('{"model": "x", "layers": [0], "sca', "is not JSON"),
        ("[]", "must hold a JSON object"),
    ],
)
def test_a_damaged_calibration_is_named(tmp_path: Path, content: str, problem: str) -> None:
    path = tmp_path / "factors.json"
    path.write_text(content)
    with pytest.raises(
        ValueError, match=rf"factors\.json {problem}.*; `scaleinv analyze model` writes it again"
    ) as found:
        Calibration.load(path)
    assert "\n" not in str(found.value)


def test_a_head_without_variance_keeps_one(caplog: pytest.LogCaptureFixture) -> None:
    model = make_gpt("nope")
    torch.nn.init.zeros_(model.blocks[1].attention.query.weight)
    assert calibrate(model, TOKENS, 128).scale[1].tolist() == [1.0, 1.0]
    assert "do not vary in 2 heads" in caplog.text


def test_saved(tmp_path: Path) -> None:
    table, _ = score_statistics(make_gpt(), TOKENS).save(tmp_path)  # 64 tokens, the training length
    with table.open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["rotary"], row["layer"], row["head"]) for row in rows[3:5]] == [
        ("with", "1", "1"),
        ("without", "0", "0"),
    ]
    assert float(rows[0]["quantile -3.0"]) < float(rows[0]["quantile +0.0"]) < float(rows[0]["quantile +3.0"])


def test_errors_name_the_argument() -> None:
    model = make_gpt()
    for options, words in (
        ({"length": 2}, "length must be at least 3"),
        ({"queries": 0}, "queries must be at least 1"),
        ({"kept": 1, "windows": 3}, "kept must be at least 1 for each of 3 windows"),
        ({"length": 601}, "lengths must lie in 2 … 600"),
    ):
        with pytest.raises(ValueError, match=words):
            score_statistics(model, TOKENS, **options)
