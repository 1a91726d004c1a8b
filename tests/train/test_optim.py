"""Which parameter gets which optimiser, and the states under their names."""

import dataclasses

import pytest
import torch

from scaleinv.model import GPT, GPTConfig
from scaleinv.train import TrainConfig, optim
from scaleinv.train.muon import Muon


@pytest.fixture
def config() -> TrainConfig:
    model = GPTConfig(layers=2, width=16, heads=2, method="scale-invariant-p-rope", train_length=16, learnable_tau=True)
    return TrainConfig(model=model, batch_tokens=32, lr_matrices=0.1, lr_embedding=0.2, lr_output=0.3)


@pytest.fixture
def model(config) -> GPT:
    torch.manual_seed(0)
    return GPT(config.model)


def gradients(model: GPT) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_every_parameter_has_one_optimizer(model, config):
    rates = {}
    for optimizer in optim.build_optimizers(model, config):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                assert parameter not in rates
                rates[parameter] = (type(optimizer), group["lr"])
    for name, parameter in model.named_parameters():
        if name.startswith("embedding."):
            assert rates[parameter] == (torch.optim.Adam, 0.2)
        elif name.startswith("blocks.") and parameter.dim() == 2:
            assert rates[parameter] == (Muon, 0.1)
        else:
            assert rates[parameter] == (torch.optim.Adam, 0.3)
    assert len(rates) == len(list(model.parameters()))
    assert {kind for kind, _ in rates.values()} == {Muon, torch.optim.Adam}


def test_a_step_scales_every_rate_and_drops_the_gradients(model, config):
    optimizers = optim.build_optimizers(model, config)
    gradients(model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optim.step(optimizers, 0.0)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    gradients(model)
    optim.step(optimizers, 0.5)
    assert sorted({group["lr"] for optimizer in optimizers for group in optimizer.param_groups}) == [0.05, 0.1, 0.15]
    assert all(not torch.equal(before[name], value) for name, value in model.named_parameters())
    gradients(model)
    optim.step(optimizers, 1.0)
    assert {group["lr"] for optimizer in optimizers for group in optimizer.param_groups} == {0.1, 0.2, 0.3}


def test_states_are_live_and_named_after_their_parameters(model, config):
    optimizers = optim.build_optimizers(model, config)
    tensors = optim.state_tensors(model, optimizers)
    states = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")
    for name, _ in model.named_parameters():
        assert f"model.{name}" in tensors
        assert any(f"optimizer.{name}.{state}" in tensors for state in states)
    before = {name: value.clone() for name, value in tensors.items()}
    gradients(model)
    optim.step(optimizers, 1.0)
    assert all(not torch.equal(before[name], value) for name, value in tensors.items() if value.is_floating_point())


def test_going_on_from_the_states_is_the_same_step(model, config):
    """States of a fresh optimiser, overwritten with those of one that has moved, go on like it."""
    optimizers = optim.build_optimizers(model, config)
    gradients(model)
    optim.step(optimizers, 1.0)
    other = GPT(config.model)
    others = optim.build_optimizers(other, config)
    saved = optim.state_tensors(model, optimizers)
    for name, value in optim.state_tensors(other, others).items():
        value.copy_(saved[name])
    for one, its in ((model, optimizers), (other, others)):
        gradients(one)
        optim.step(its, 1.0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_weights_are_found_among_the_states(model, config):
    tensors = optim.state_tensors(model, optim.build_optimizers(model, config))
    weights = optim.weights_of({**tensors, "rng": torch.zeros(1)})
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())
    assert optim.weights_of(optim.as_states(weights)).keys() == weights.keys()


def test_betas_and_momentum_are_those_of_the_config(model, config):
    changed = dataclasses.replace(config, betas=(0.5, 0.6), momentum=0.7)
    muon, adam = optim.build_optimizers(model, changed)
    assert {group["momentum"] for group in muon.param_groups} == {0.7}
    assert {group["betas"] for group in adam.param_groups} == {(0.5, 0.6)}
