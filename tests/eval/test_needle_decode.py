"""Greedy answers: rigged models with known answers, and real ones against decoding without any cache."""

import numpy as np
import pytest
import torch
from torch import nn

from scaleinv.data import ByteTokenizer, TokenData, write_shard
from scaleinv.eval import needle_decode
from scaleinv.eval.needle_decode import read_samples
from scaleinv.eval.needle_task import NeedleTask, longest_answer, make_sample, score
from scaleinv.model import GPT, GPTConfig

TASK = NeedleTask(needles=3, digits=2, cities=("Oslo", "Lima", "Casablanca", "Rome"), length=300)
TOKENIZER = ByteTokenizer()


class Rigged(nn.Module):
    """Answers each sample with a text of ours, however it is asked."""

    def __init__(self, samples, texts, vocab_size=300):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.vocab_size, self.calls = vocab_size, 0
        prompts = [s.tokens[: s.answer_start].tolist() for s in samples]
        self.known = [(p, [*p, *t.encode(), *([ord("~")] * 50)]) for p, t in zip(prompts, texts, strict=True)]

    def hidden(self, tokens, *, cache, last=None):
        self.calls += 1
        cache.remember(tokens)
        cache.length += tokens.shape[1]
        return torch.stack([self.row(row.tolist())[-(last or tokens.shape[1]) :] for row in cache.tokens])

    def row(self, text):
        (full,) = [full for prompt, full in self.known if text[: len(prompt)] == prompt[: len(text)]]
        # The padded id 299 would always win, but stands for no text and must never be chosen.
        logits = torch.zeros(len(text), self.vocab_size)
        logits[:, 299] = 9.0
        logits[torch.arange(len(text)), torch.tensor(full[1 : len(text) + 1])] = 5.0
        return logits

    def output(self, hidden):
        return hidden


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    path = tmp_path_factory.mktemp("shards") / "text.bin"
    write_shard(path, np.random.default_rng(0).integers(32, 127, 4000).astype(np.uint16))
    data = TokenData([path], 256)
    return [make_sample(TASK, data, TOKENIZER, seed=0, index=index) for index in range(6)]


def test_always_and_never(samples):
    right = read_samples(Rigged(samples, [s.answer for s in samples]), samples, TASK, TOKENIZER)
    assert all(reading.correct == [True] * 3 for reading in right)
    assert [reading.tokens for reading in right] == [sample.mask.sum() for sample in samples]
    assert all(reading.tokens_right == reading.tokens for reading in right)
    expected = float(torch.logsumexp(torch.tensor([5.0, 9.0] + [0.0] * 298), 0) - 5)
    assert all(reading.loss == pytest.approx(expected) for reading in right)
    never = read_samples(Rigged(samples, ["?" * 30 for _ in samples]), samples, TASK, TOKENIZER)
    assert all(reading.correct == [False] * 3 and reading.tokens_right == 0 for reading in never)


def test_a_right_answer_costs_two_passes(samples):
    model = Rigged(samples, [s.answer for s in samples])
    read_samples(model, samples, TASK, TOKENIZER)
    assert model.calls == 2


def test_after_a_mistake_the_model_goes_on_freely(samples):
    """Longer, shorter, late and early mistakes, mixed in one batch with right answers."""
    first, second, last = zip(*(sample.answer.split(";") for sample in samples), strict=True)
    texts = [
        samples[0].answer,
        f"Constantinople=7;{second[1]};{last[1]}"[: longest_answer(TASK, TOKENIZER)],
        f"?;{second[2]};{last[2]}",
        f"{first[3]};{second[3]};{last[3][:-1]}x",
        f"{first[4]};{second[4][:-1]};{last[4]}",
        ";;" + last[5],
    ]
    readings = read_samples(Rigged(samples, texts), samples, TASK, TOKENIZER)
    assert [reading.correct for reading in readings] == [
        score(text, sample) for text, sample in zip(texts, samples, strict=True)
    ]
    assert [reading.correct for reading in readings] == [
        [True, True, True],
        [False, True, True],
        [False, True, True],
        [True, True, False],
        [True, False, True],
        [False, False, True],
    ]


METHODS = ["rope", "rope+ntk", "yarn", "nope", "alibi", "logn+p-rope", "scale-invariant-p-rope", "infini-p-rope"]


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_cached_greedy_equals_greedy_without_a_cache(method, samples, monkeypatch):
    torch.manual_seed(0)
    config = GPTConfig(layers=2, width=32, heads=2, vocab_size=300, train_length=128, method=method)
    model = GPT(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    monkeypatch.setattr(needle_decode, "decided", lambda text, sample: False)  # decode to the end
    samples = samples[:3]
    readings = read_samples(model, samples, TASK, TOKENIZER)
    assert len({reading.text for reading in readings}) > 1
    room = longest_answer(TASK, TOKENIZER)
    for sample, reading in zip(samples, readings, strict=True):
        text = sample.tokens[: sample.answer_start].tolist()
        for _ in range(room):
            logits = model(torch.tensor([text]), context_length=TASK.length)[0, -1, : TOKENIZER.vocab_size]
            text.append(int(logits.argmax()))
        plain = TOKENIZER.decode(text[sample.answer_start :])
        assert reading.text.startswith(plain)  # rows with a shorter prompt are given more room
        losses = model(
            torch.from_numpy(sample.tokens[None, :-1]), torch.from_numpy(sample.tokens[None, 1:]), context_length=300
        )[0, sample.answer_start - 1 :]
        assert reading.loss == pytest.approx(losses.mean().item(), rel=1e-4)


def test_batches_do_not_matter(samples):
    torch.manual_seed(1)
    model = GPT(GPTConfig(layers=1, width=32, heads=2, vocab_size=257, train_length=64)).eval()
    nn.init.normal_(model.output.weight)
    together = read_samples(model, samples, TASK, TOKENIZER)
    alone = [read_samples(model, [sample], TASK, TOKENIZER)[0] for sample in samples]
    for one, other in zip(together, alone, strict=True):
        assert (one.correct, one.tokens, one.tokens_right) == (other.correct, other.tokens, other.tokens_right)
        assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_answers_at_tolerance_0_are_the_same(samples):
    torch.manual_seed(1)
    model = GPT(GPTConfig(layers=1, width=32, heads=2, vocab_size=257, train_length=64)).eval()
    nn.init.normal_(model.output.weight)
    exact = read_samples(model, samples, TASK, TOKENIZER)
    for one, other in zip(exact, read_samples(model, samples, TASK, TOKENIZER, tolerance=0.0), strict=True):
        assert (one.text, one.correct, one.tokens_right) == (other.text, other.correct, other.tokens_right)
        assert one.loss == pytest.approx(other.loss, rel=1e-4)
