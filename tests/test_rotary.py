"""Rotary encodings against Hugging Face's own, and the property that they exist for."""

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from scaleinv import rotary

TRAINED = 4096
dims = pytest.mark.parametrize("dim", [8, 64, 128])


def config(dim, base=10_000.0, **rope):
    return LlamaConfig(
        hidden_size=2 * dim,
        num_attention_heads=2,
        head_dim=dim,
        max_position_embeddings=TRAINED,
        rope_parameters={"rope_type": "default", "rope_theta": base} | rope,
    )


def close(got, want):
    torch.testing.assert_close(got, want.to(got.dtype), rtol=1e-5, atol=0.0)


class TestFrequencies:
    @dims
    @pytest.mark.parametrize("base", [10_000.0, 500_000.0])
    def test_rope(self, dim, base):
        inv_freq, factor = LlamaRotaryEmbedding.compute_default_rope_parameters(config(dim, base))
        ours = rotary.RoPE(dim, base)
        close(ours.frequencies, inv_freq)
        assert ours.attention_factor == factor == 1
        assert ours.frequencies.dtype == torch.float32
        assert ours.dim == dim

    @dims
    @pytest.mark.parametrize("length", [4096, 4097, 16_384, 65_536])
    def test_dynamic_ntk(self, dim, length):
        hf = config(dim, rope_type="dynamic", factor=1.0)
        inv_freq, factor = ROPE_INIT_FUNCTIONS["dynamic"](hf, "cpu", seq_len=length)
        ours = rotary.ntk(rotary.RoPE(dim), length, TRAINED)
        close(ours.frequencies, inv_freq)
        assert ours.attention_factor == factor == 1

    @dims
    @pytest.mark.parametrize("length", [8192, 16_384, 65_536])
    @pytest.mark.parametrize("base", [10_000.0, 500_000.0])
    def test_yarn(self, dim, length, base):
        stretch = length / TRAINED
        hf = config(dim, base, rope_type="yarn", factor=stretch, original_max_position_embeddings=TRAINED)
        inv_freq, factor = ROPE_INIT_FUNCTIONS["yarn"](hf, "cpu")
        ours = rotary.yarn(rotary.RoPE(dim, base), length, TRAINED)
        close(ours.frequencies, inv_freq)
        assert ours.attention_factor == pytest.approx(factor)
        assert ours.attention_factor == pytest.approx(0.1 * math.log(stretch) + 1)
        without = rotary.yarn(rotary.RoPE(dim, base), length, TRAINED, attention_factor=False)
        assert torch.equal(without.frequencies, ours.frequencies)
        assert without.attention_factor == 1

    @pytest.mark.parametrize("beta_fast", [16.0, 64.0])
    def test_yarns_ramp(self, beta_fast):
        given = {"factor": 4.0, "original_max_position_embeddings": TRAINED, "beta_fast": beta_fast, "beta_slow": 2.0}
        inv_freq, _ = ROPE_INIT_FUNCTIONS["yarn"](config(128, rope_type="yarn", **given), "cpu")
        close(rotary.yarn(rotary.RoPE(128), 4 * TRAINED, TRAINED, beta_fast, 2.0).frequencies, inv_freq)

    @dims
    def test_p_rope(self, dim):
        base = 1024 ** ((dim / 2) / (dim / 4 - 1))
        hf = config(dim, base, rope_type="proportional", partial_rotary_factor=0.5)
        inv_freq, factor = ROPE_INIT_FUNCTIONS["proportional"](hf, "cpu")
        ours = rotary.PRoPE(dim)
        close(ours.frequencies, inv_freq)
        assert ours.attention_factor == factor == 1

    @pytest.mark.parametrize(("dim", "p"), [(128, 0.5), (128, 0.25), (128, 1.0), (16, 0.75)])
    @pytest.mark.parametrize("base", [64.0, 1024.0])
    def test_p_rope_spans_one_to_one_over_base(self, dim, p, base):
        frequencies = rotary.PRoPE(dim, p, base).frequencies.double()
        kept = int(p * dim / 2)
        assert torch.all(frequencies[kept:] == 0)
        assert frequencies[0] == 1
        assert frequencies[kept - 1].item() == pytest.approx(1 / base, rel=1e-6)
        ratios = frequencies[1:kept] / frequencies[: kept - 1]
        torch.testing.assert_close(ratios, ratios[:1].expand_as(ratios), rtol=1e-5, atol=0.0)

    def test_p_rope_at_its_ends(self):
        assert torch.all(rotary.PRoPE(16, p=0.0).frequencies == 0)
        assert rotary.PRoPE(8, p=0.25).frequencies.tolist() == [1, 0, 0, 0]

    @pytest.mark.parametrize("change", [rotary.ntk, rotary.yarn])
    def test_nothing_changes_up_to_the_training_length(self, change):
        rope = rotary.RoPE(64)
        assert change(rope, 1, TRAINED) is rope
        assert change(rope, TRAINED, TRAINED) is rope

    def test_the_default_device_and_dtype_do_not_matter(self):
        want = rotary.PRoPE(16).frequencies
        with torch.device("meta"):
            ours = rotary.PRoPE(16).frequencies, rotary.RoPE(16).frequencies
        assert torch.equal(ours[0], want)
        assert torch.equal(ours[1], rotary.RoPE(16).frequencies)


class TestApply:
    @pytest.mark.parametrize("offset", [0, 1000])
    def test_against_llama(self, offset):
        torch.manual_seed(0)
        query, key = torch.randn(2, 2, 4, 30, 64)
        positions = offset + torch.arange(30)
        cos, sin = LlamaRotaryEmbedding(config(64))(query, positions[None])
        want = apply_rotary_pos_emb(query, key, cos, sin)
        rope = rotary.RoPE(64)
        for x, y in zip((query, key), want, strict=True):
            torch.testing.assert_close(rope.apply(x, positions), y, rtol=1e-3, atol=3e-4)  # float32 angles there

    def test_yarn_against_llama(self):
        torch.manual_seed(0)
        x = torch.randn(1, 2, 30, 64)
        hf = config(64, rope_type="yarn", factor=4.0, original_max_position_embeddings=TRAINED)
        cos, sin = LlamaRotaryEmbedding(hf)(x, torch.arange(30)[None])
        ours = rotary.yarn(rotary.RoPE(64), 4 * TRAINED, TRAINED).apply(x, torch.arange(30))
        torch.testing.assert_close(ours, apply_rotary_pos_emb(x, x, cos, sin)[0], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("make", [rotary.RoPE, rotary.PRoPE])
    @pytest.mark.parametrize("start", [0, 1000, 1_000_000])
    def test_scores_depend_on_the_distance_alone(self, make, start):
        torch.manual_seed(0)
        query, key = torch.randn(2, 1, 1, 1, 64, dtype=torch.float64)
        rope, distance = make(64), 37

        def score(position):
            turned = rope.apply(query, torch.tensor([position])), rope.apply(key, torch.tensor([position - distance]))
            return (turned[0] * turned[1]).sum()

        torch.testing.assert_close(score(start + distance), score(distance), rtol=1e-5, atol=1e-5)

    def test_angles_are_exact_far_out(self):
        position = 10_000_019
        rope = rotary.RoPE(8)
        cos, sin = rope.cos_sin(torch.tensor([position]))
        for k, frequency in enumerate(rope.frequencies.tolist()):
            assert cos[0, k].item() == pytest.approx(math.cos(position * frequency), abs=1e-6)
            assert sin[0, k].item() == pytest.approx(math.sin(position * frequency), abs=1e-6)

    def test_norms_are_kept(self):
        x = torch.randn(1, 1, 50, 32)
        turned = rotary.PRoPE(32).apply(x, torch.arange(50))
        torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))
        still = [*range(8, 16), *range(24, 32)]  # the pairs (k, k + 16) of frequency 0
        assert torch.equal(turned[..., still], x[..., still])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
    def test_dtypes(self, dtype):
        torch.manual_seed(0)
        x = torch.randn(1, 2, 5, 16).to(dtype)
        positions = 100_000 + torch.arange(5)
        got = rotary.RoPE(16).apply(x, positions)
        assert got.dtype == dtype
        exact = rotary.RoPE(16).apply(x.double(), positions)
        rounding = 4 * max(torch.finfo(dtype).eps, 1e-16)
        torch.testing.assert_close(got.double(), exact, rtol=rounding, atol=rounding)

    def test_positions_for_each_sequence(self):
        torch.manual_seed(0)
        x = torch.randn(3, 2, 5, 16)
        positions = torch.tensor([[0, 1, 2, 3, 4], [7, 8, 9, 10, 11], [0, 0, 5, 5, 2]])
        rope = rotary.RoPE(16)
        together = rope.apply(x, positions)
        for b in range(3):
            assert torch.equal(together[b : b + 1], rope.apply(x[b : b + 1], positions[b]))
        assert torch.equal(rope.apply(x, positions[:1]), rope.apply(x, positions[0]))

    def test_nope_is_the_identity(self):
        x = torch.randn(1, 1, 4, 6)
        assert rotary.NoPE().apply(x, torch.arange(4)) is x

    def test_gradients_turn_back(self):
        x = torch.randn(1, 1, 4, 8, requires_grad=True)
        positions = torch.arange(4)
        rope = rotary.RoPE(8)
        (rope.apply(x, positions) * rope.apply(x.detach(), positions)).sum().backward()
        torch.testing.assert_close(x.grad, x.detach())


class TestErrors:
    @pytest.mark.parametrize("make", [rotary.RoPE, rotary.PRoPE])
    @pytest.mark.parametrize(
        ("argument", "given"),
        [
            ("dim", {"dim": 7}),
            ("dim", {"dim": 0}),
            ("dim", {"dim": 8.0}),
            ("base", {"dim": 8, "base": 1.0}),
            ("base", {"dim": 8, "base": math.nan}),
        ],
        ids=str,
    )
    def test_make(self, make, argument, given):
        with pytest.raises(ValueError, match=argument):
            make(**given)

    @pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
    def test_p(self, p):
        with pytest.raises(ValueError, match=r"\bp\b"):
            rotary.PRoPE(8, p)

    @pytest.mark.parametrize("change", [rotary.ntk, rotary.yarn])
    def test_changes(self, change):
        with pytest.raises(TypeError, match="rope"):
            change(rotary.PRoPE(8), 10, 5)
        with pytest.raises(ValueError, match=r"\blength\b"):
            change(rotary.RoPE(8), 0, 5)
        with pytest.raises(ValueError, match="train_length"):
            change(rotary.RoPE(8), 10, 0)

    def test_ntk_of_one_pair(self):
        with pytest.raises(ValueError, match="rope"):
            rotary.ntk(rotary.RoPE(2), 10, 5)

    def test_yarns_ramp(self):
        with pytest.raises(ValueError, match="beta_fast"):
            rotary.yarn(rotary.RoPE(8), 10, 5, beta_fast=1.0, beta_slow=1.0)

    @pytest.mark.parametrize("positions", [torch.zeros(4), torch.ones(4, dtype=torch.bool)], ids=["float", "bool"])
    def test_positions_dtype(self, positions):
        with pytest.raises(TypeError, match="positions"):
            rotary.RoPE(8).apply(torch.zeros(2, 1, 4, 8), positions)

    @pytest.mark.parametrize("shape", [(), (3,), (1,), (3, 4), (2, 1, 4)], ids=str)
    def test_positions_shape(self, shape):
        with pytest.raises(ValueError, match="positions"):
            rotary.RoPE(8).apply(torch.zeros(2, 1, 4, 8), torch.zeros(shape, dtype=torch.int64))

    def test_head_dimension(self):
        with pytest.raises(ValueError, match=r"\bx\b"):
            rotary.RoPE(8).apply(torch.zeros(1, 1, 4, 6), torch.arange(4))
