import torch
from torch.nn import functional as F

from scaleinv.logits import Plain
from scaleinv.model.infini import empty_state, infini_attention


def inputs(length: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 8, generator=generator, dtype=torch.float64) for _ in range(5)]


def literal(query, key, value, rotated_query, rotated_key, gate, segment):
    """The paper's equations, one batch entry, head and segment at a time."""
    out = torch.zeros_like(value)
    for b in range(2):
        for h in range(3):
            memory, norm = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
            for start in range(0, query.shape[2], segment):
                part = slice(start, start + segment)
                q, k, v = (x[b, h, part] for x in (query, key, value))
                local = F.scaled_dot_product_attention(
                    rotated_query[b, h, part][None], rotated_key[b, h, part][None], v[None], is_causal=True
                )[0]
                phi_q, phi_k = F.elu(q) + 1, F.elu(k) + 1
                read = (phi_q @ memory) / (phi_q @ norm)[:, None] if start else torch.zeros_like(v)
                share = torch.sigmoid(gate[h])
                out[b, h, part] = share * read + (1 - share) * local
                known = (phi_k @ memory) / (phi_k @ norm)[:, None] if start else torch.zeros_like(v)
                memory = memory + phi_k.T @ (v - known)
                norm = norm + phi_k.sum(0)
    return out


def test_equals_the_papers_equations():
    data = inputs(23)
    gate = torch.tensor([-1.0, 0.0, 2.0], dtype=torch.float64)
    out, state = infini_attention(*data, gate, Plain(), 5, empty_state(data[1], data[2]))
    torch.testing.assert_close(out, literal(*data, gate, 5), rtol=1e-5, atol=1e-5)  # the memory is in float32
    assert state.key.shape[2] == 3


def test_any_split_gives_the_same():
    data = inputs(23)
    gate = torch.zeros(3, dtype=torch.float64)
    whole, end = infini_attention(*data, gate, Plain(), 6, empty_state(data[1], data[2]))
    state, pieces, start = empty_state(data[1], data[2]), [], 0
    for size in (1, 4, 1, 1, 9, 7):
        piece, state = infini_attention(*(x[:, :, start : start + size] for x in data), gate, Plain(), 6, state)
        pieces.append(piece)
        start += size
    torch.testing.assert_close(torch.cat(pieces, 2), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state.memory, end.memory)


def test_delta_rule_adds_nothing_that_the_memory_knows():
    key = torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(1)).expand(1, 1, 2, 8)
    value = torch.ones(1, 1, 2, 8)
    gate = torch.zeros(1)
    _, once = infini_attention(key, key, value, key, key, gate, Plain(), 2, empty_state(key, value))
    _, twice = infini_attention(key, key, value, key, key, gate, Plain(), 2, once)
    torch.testing.assert_close(twice.memory, once.memory)
    torch.testing.assert_close(twice.norm, 2 * once.norm)
