import math

import pytest
import torch
from small_gpt import TOKENS, small
from torch.nn import functional as F

import scaleinv
from scaleinv import methods
from scaleinv.model import GPT, GPTConfig, KVCache, preset


@pytest.mark.parametrize(("name", "millions"), [("162m", 162), ("304m", 304)])
def test_parameter_counts_of_the_paper(name, millions):
    with torch.device("meta"):
        count = GPT(preset(name)).count_parameters()
    assert round(count / 1e6) == millions


def test_presets_for_a_cpu_are_small():
    assert GPT(preset("mini")).count_parameters() <= 2_000_000
    with torch.device("meta"):
        assert 9_500_000 <= GPT(preset("small")).count_parameters() <= 10_500_000


def test_p_rope_base_follows_the_training_length():
    assert GPT(preset("162m", layers=1, width=64, heads=2, vocab_size=8)).method.rotary.base == 1024
    assert small(train_length=512).method.rotary.base == 128
    assert small(p_rope_base=77.0).method.rotary.base == 77


def test_each_layer_has_the_only_transform_it_uses():
    model = small("logn+p-rope")
    assert not hasattr(model.method, "logits")
    assert (model.method.name, model.method.train_length) == ("logn+p-rope", 32)
    tokens = torch.randint(0, 50, (1, 20), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        before = model(tokens)
        for block in model.blocks:
            (learned,) = block.attention.logits.parameters()
            learned.mul_(3)
            after = model(tokens)
            assert not torch.allclose(after, before, atol=1e-3)
            before = after


def test_forward_reads_like_the_paper():
    """An independent forward pass from the description of the model."""
    model = small("rope", layers=1)
    tokens = torch.randint(0, 50, (2, 11), generator=torch.Generator().manual_seed(1))

    def rms(x):
        return x / (x.pow(2).mean(-1, keepdim=True) + torch.finfo(x.dtype).eps).sqrt()

    x = rms(model.embedding.weight[tokens])
    block = model.blocks[0]
    q, k, v = (
        (rms(x) @ layer.weight.T).view(2, 11, 2, 16).transpose(1, 2)
        for layer in (block.attention.query, block.attention.key, block.attention.value)
    )
    angle = torch.arange(11)[:, None] * 10_000.0 ** (-torch.arange(8) / 8)

    def turn(x):
        a, b = rms(x).chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    out = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
    x = x + out.transpose(1, 2).reshape(2, 11, 32) @ block.attention.project.weight.T
    x = x + F.relu(rms(x) @ block.up.weight.T) ** 2 @ block.down.weight.T
    torch.testing.assert_close(model(tokens), rms(x) @ model.output.weight.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", methods.names())
def test_no_token_sees_the_future(method):
    model = small(method)
    tokens = torch.randint(0, 50, (1, 40), generator=torch.Generator().manual_seed(2))
    changed = tokens.clone()
    changed[:, 25:] = (changed[:, 25:] + 1) % 50
    with torch.no_grad():
        torch.testing.assert_close(model(tokens)[:, :25], model(changed)[:, :25], rtol=1e-4, atol=1e-4)
        assert not torch.allclose(model(tokens)[:, 25:], model(changed)[:, 25:], atol=1e-2)


@pytest.mark.parametrize("method", ["scale-invariant-p-rope", "logn+rope", "alibi"])
def test_packed_documents_equal_documents_alone(method):
    model = small(method)
    generator = torch.Generator().manual_seed(3)
    first, second = (torch.randint(0, 50, (1, n), generator=generator) for n in (13, 20))
    ids = torch.tensor([[0] * 13 + [1] * 20])
    with torch.no_grad():
        packed = model(torch.cat([first, second], 1), document_ids=ids)
        torch.testing.assert_close(packed[:, :13], model(first), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(packed[:, 13:], model(second), rtol=1e-4, atol=1e-4)


def test_losses_are_the_cross_entropy_of_the_logits():
    model = small()
    tokens = torch.randint(0, 50, (2, 31), generator=torch.Generator().manual_seed(4))
    targets = tokens.roll(-1, 1)
    expected = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none").view(2, 31)
    torch.testing.assert_close(model(tokens, targets), expected)


def test_every_parameter_learns():
    for method in methods.names():
        model = small(method, learnable_tau="scale-invariant" in method)
        model(torch.randint(0, 50, (1, 40)), torch.randint(0, 50, (1, 40))).mean().backward()
        idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
        assert not idle, (method, idle)


@pytest.mark.parametrize(("trained", "used"), [("rope", "yarn"), ("scale-invariant-rope", "scale-invariant-rope+yarn")])
def test_methods_share_a_model_only_where_they_are_trained_alike(trained, used):
    model = small(trained)
    tokens = torch.randint(0, 50, (1, 100))
    with torch.no_grad():
        plain = model(tokens)
        model.use_method(used)
        stretched = model(tokens)
        model.use_method(trained)
        assert torch.equal(model(tokens), plain)
    assert not torch.allclose(plain, stretched, atol=1e-2)
    with pytest.raises(ValueError, match="cannot serve as 'alibi'"):
        model.use_method("alibi")


def test_a_model_has_a_config_of_its_own():
    config = GPTConfig(layers=1, width=32, heads=2, vocab_size=50, train_length=32, method="rope")
    model = GPT(config)
    model.use_method("yarn")
    assert (model.config.method, config.method) == ("yarn", "rope")


def test_bfloat16_model_runs():
    model = small().to(torch.bfloat16)
    assert model(torch.zeros(1, 5, dtype=torch.long)).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 30, "heads": 4}, "width 30 must split"),
        ({"layers": 0}, "layers must be an integer from 1"),
        ({"tau": math.nan}, "tau must be positive"),
        ({"segment": 0}, "segment must be an integer from 1"),
        ({"method": "ropee"}, "did you mean rope"),
    ],
)
def test_bad_shapes_name_the_field(changes, message):
    with pytest.raises(ValueError, match=message):
        GPTConfig(**changes)


def test_bad_tokens_are_refused():
    model = small()
    with pytest.raises(ValueError, match="tokens must be integers of shape"):
        model(torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="at least one token"):
        model(torch.zeros(1, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="Infini-attention"):
        small("infini-rope")(torch.zeros(1, 3, dtype=torch.long), document_ids=torch.zeros(1, 3, dtype=torch.long))


def test_public_names():
    assert scaleinv.GPT is GPT
    assert scaleinv.GPTConfig is GPTConfig


@pytest.mark.parametrize("method", methods.names())
def test_the_last_tokens_alone_equal_all(method):
    model = small(method).double()
    every, last = model.hidden(TOKENS), model.hidden(TOKENS, last=7)
    torch.testing.assert_close(last, every[:, -7:])
    wanted, found = (torch.autograd.grad(x[:, -7:].sum(), model.embedding.weight)[0] for x in (every, last))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("method", methods.names())
@torch.no_grad()
def test_the_last_tokens_alone_fill_the_cache(method):
    model = small(method).double()
    every, last = KVCache(), KVCache()
    for start, stop in ((0, 41), (41, 42), (42, 90)):
        piece = TOKENS[:, start:stop]
        torch.testing.assert_close(
            model.hidden(piece, cache=last, last=3), model.hidden(piece, cache=every)[:, -3:], msg=f"{start}"
        )


def test_more_than_there_are_is_all():
    model = small()
    assert torch.equal(model.hidden(TOKENS, last=91), model.hidden(TOKENS))
    with pytest.raises(ValueError, match="last must be positive, got 0"):
        model.hidden(TOKENS, last=0)


def test_packed_documents_and_padding_for_the_last_tokens():
    model = small().double()
    documents = torch.arange(90).expand(2, 90) // 30
    shown = torch.arange(90).expand(2, 90) >= torch.tensor([[0], [50]])
    for options in ({"document_ids": documents}, {"key_mask": shown}):
        torch.testing.assert_close(model.hidden(TOKENS, last=5, **options), model.hidden(TOKENS, **options)[:, -5:])
