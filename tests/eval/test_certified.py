"""Losses, answers and texts of a model that decodes with a certified cache."""

import pytest
import torch

from scaleinv.eval import generate
from scaleinv.eval.certified import CertifiedReader
from scaleinv.model import GPT, GPTConfig

TOKENS = torch.randint(0, 50, (2, 301), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def model() -> GPT:
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=2, width=32, heads=2, vocab_size=50, train_length=64))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@torch.no_grad()
def test_losses_at_tolerance_0_are_the_models_own(model):
    reader = CertifiedReader(model, 0.0)
    losses = reader(TOKENS[:, :-1], TOKENS[:, 1:])
    torch.testing.assert_close(losses, model(TOKENS[:, :-1], TOKENS[:, 1:]), rtol=1e-4, atol=1e-4)
    assert reader.read == 1


@torch.no_grad()
def test_certificates_cover_every_position(model):
    reader = CertifiedReader(model, 0.05, keep=True)
    reader(TOKENS[:, :-1], TOKENS[:, 1:])
    assert 0 < reader.read < 1
    for certificate in reader.certificates.values():
        assert certificate.error.shape == (2, 2, 300)
        assert bool((certificate.mass <= 0.05).all())


def test_documents_are_refused(model):
    with pytest.raises(ValueError, match="document masks"):
        CertifiedReader(model, 0.05)(TOKENS, TOKENS, document_ids=TOKENS)


def test_text_at_tolerance_0_is_the_same(model):
    prompt = TOKENS[0, :100]
    exact = list(generate(model, prompt, 30, temperature=0))
    assert list(generate(model, prompt, 30, temperature=0, tolerance=0.0)) == exact


@pytest.mark.parametrize(("tolerance", "method"), [(1e-3, "infini-rope"), (1.0, "rope"), (-1e-3, "rope")])
def test_a_tolerance_that_cannot_be_kept_is_refused_at_once(tolerance, method):
    config = GPTConfig(layers=1, width=16, heads=2, vocab_size=30, method=method, train_length=8)
    with pytest.raises(ValueError, match="tolerance"):
        generate(GPT(config), torch.zeros(3, dtype=torch.long), 2, tolerance=tolerance)
