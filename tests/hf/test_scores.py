"""The scores of a model's heads, measured; and logits fitted to them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import scaleinv.hf
from hf_folders import model_folder, text_folder
from scaleinv.analysis import score_statistics
from scaleinv.cli import main
from scaleinv.hf import scores
from scaleinv.hf.adapt.variants import fit_to_text

Stock = Callable[[str], PreTrainedModel]
TEXT = torch.randint(0, 61, (3, 40), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "gpt_oss", "smollm3"])
def test_moments_are_those_of_the_analysis(stock: Stock, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GQA, QK-norm, sliding windows, soft caps and layers without a rotary; the model is as it was."""
    model = stock(model_type).train()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = scaleinv.hf.measure_scores(model, TEXT)
    expected = score_statistics(model, TEXT.flatten(), 40, windows=3).rotary
    torch.testing.assert_close(found.mean, expected.mean, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(found.variance, expected.variance, atol=1e-6, rtol=1e-6)
    assert model.training
    assert scaleinv.hf.conversion(model) is None
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    monkeypatch.setattr(scores, "QUERIES", 13)
    fewer = scaleinv.hf.measure_scores(model, TEXT)
    assert not torch.equal(fewer.variance, found.variance)
    torch.testing.assert_close(fewer.variance, found.variance, rtol=0.5, atol=0)


@pytest.mark.parametrize("model_type", ["llama", "gemma2", "olmo2"])
def test_each_head_has_the_coefficients_of_its_scores(stock: Stock, model_type: str) -> None:
    """A fitted model's attention layers are called with the tables of the theory; a unit fit is no fit."""
    model = stock(model_type).double()
    plain = scaleinv.hf.convert(stock(model_type).double(), p=None)
    fit = torch.zeros(2, 4), torch.ones(2, 4)
    unit = scaleinv.hf.convert(model, p=None, fit=fit)
    torch.testing.assert_close(unit(TEXT).logits, plain(TEXT).logits, atol=1e-12, rtol=1e-10)
    scaleinv.hf.revert(model)
    mean, variance = torch.linspace(-2, 2, 8).reshape(2, 4).double(), torch.linspace(0.2, 9, 8).reshape(2, 4).double()
    scaleinv.hf.convert(model, p=None, tau=3.0, fit=(mean, variance))
    for layer, transform in enumerate(model.config.get_text_config().logit_transforms):
        a, m = transform.tables(50, dtype=torch.float64, device=torch.device("cpu"))
        for head in range(4):
            expected = scaleinv.schedule.fitted_coefficients(
                torch.arange(50), mean[layer, head], variance[layer, head], 3.0
            )
            assert torch.equal(a[head], expected[0])
            assert torch.equal(m[head], expected[1])
    scaleinv.hf.check(model)


def test_folders_keep_the_fit(stock: Stock, tmp_path: Path) -> None:
    model = stock("llama")
    fit = scaleinv.hf.measure_scores(model, TEXT)
    scaleinv.hf.convert(model, p=None, stretch="yarn", train_length=16, fit=fit)
    model.save_pretrained(tmp_path / "fitted")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "fitted")
    assert torch.equal(loaded(TEXT).logits, model(TEXT).logits)
    conversion = scaleinv.hf.conversion(loaded)
    assert conversion is not None
    assert conversion.fit is not None
    assert torch.equal(torch.tensor(conversion.fit[1], dtype=torch.float64), fit.variance)
    again = scaleinv.hf.convert(scaleinv.hf.revert(loaded), p=None, stretch="yarn", train_length=16, fit=conversion.fit)
    assert torch.equal(again(TEXT).logits, model(TEXT).logits)
    scaleinv.hf.convert(stock("llama")).save_pretrained(tmp_path / "plain")
    kept = json.loads((tmp_path / "plain" / "config.json").read_text())["scaleinv"]
    assert not {"score_mean", "score_variance"} & kept.keys()  # earlier versions read it


UNIT = (torch.zeros(2, 4), torch.ones(2, 4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fit": (torch.zeros(2, 3), torch.ones(2, 3))}, r"means of fit must have shape .* = \[2, 4\], got \[2, 3\]"),
        ({"fit": (torch.zeros(2, 4), torch.ones(2))}, r"variances of fit must have shape"),
        ({"fit": (torch.zeros(2, 4),)}, "fit must hold the means and the variances of the scores, got 1 parts"),
        ({"fit": (torch.zeros(2, 4), torch.zeros(2, 4))}, "variance must be positive and finite"),
        ({"fit": UNIT, "logits": "plain"}, "fit goes with logits='scale-invariant'"),
        ({"fit": UNIT, "calibration": torch.ones(2, 4)}, "without calibration"),
    ],
)
def test_a_bad_fit_is_refused_and_the_model_stays(stock: Stock, options: dict, message: str) -> None:
    model = stock("llama")
    with pytest.raises(ValueError, match=message):
        scaleinv.hf.convert(model, **options)
    assert scaleinv.hf.conversion(model) is None


@pytest.mark.parametrize(
    "tokens", [TEXT[0], TEXT[:, :2], TEXT[:0], TEXT.float()], ids=["1-D", "short", "none", "float"]
)
def test_bad_tokens(stock: Stock, tokens: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="tokens must be integers"):
        scaleinv.hf.measure_scores(stock("llama"), tokens)


def test_scores_that_do_not_vary_are_refused(stock: Stock) -> None:
    model = stock("llama")
    model.model.layers[1].self_attn.q_proj.weight.data.zero_()
    with pytest.raises(ValueError, match="the scores of layer 1, head 0 do not vary"):
        scaleinv.hf.measure_scores(model, TEXT)
    assert scaleinv.hf.conversion(model) is None


@pytest.mark.slow
def test_the_command_fits_to_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder, text = model_folder(tmp_path / "model"), text_folder(tmp_path / "text")
    words = ["convert", str(folder), "--stretch", "yarn", "--fit", str(text)]
    assert main([*words, "--out", str(tmp_path / "fitted")]) == 0
    found = scaleinv.hf.conversion(AutoModelForCausalLM.from_pretrained(tmp_path / "fitted"))
    assert found is not None
    assert found.stretch == "yarn"
    assert found.fit == tuple(tuple(map(tuple, x.tolist())) for x in fit_to_text(str(folder), str(text)))
