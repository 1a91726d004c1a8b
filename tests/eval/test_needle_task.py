"""Samples of the needle task: exact lengths, needles word for word, answers alone under the mask, seeds."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from scaleinv.data import BPETokenizer, ByteTokenizer, TokenData, Tokenizer, write_shard
from scaleinv.eval.needle_task import CITIES, NeedleTask, decided, longest_answer, make_sample, score, stack

TEXT = "Four score and seven years ago our fathers brought forth on this continent, a new nation — 1863.\n"


@pytest.fixture(scope="module", params=["bytes", "bpe"])
def tokenizer(request) -> Tokenizer:
    if request.param == "bytes":
        return ByteTokenizer()
    pytest.importorskip("tokenizers")
    return BPETokenizer.train([TEXT * 3, "The special magic Paris number is 12."], 400)


@pytest.fixture(scope="module")
def data(tokenizer, tmp_path_factory) -> TokenData:
    path: Path = tmp_path_factory.mktemp("shards") / "text.bin"
    write_shard(path, np.concatenate([[tokenizer.end_of_text], tokenizer.encode(TEXT * 300)]).astype(np.uint16))
    return TokenData([path], tokenizer.end_of_text)


TASKS = {
    "paper": NeedleTask(),
    "mini": NeedleTask.mini(),
    "three": dataclasses.replace(NeedleTask.mini(), needles=3),
    "five": NeedleTask(needles=5, digits=1, cities=CITIES[:5]),
    "accents": NeedleTask(needles=2, digits=4, cities=("Zürich", "São Paulo", "東京")),
    "end": NeedleTask(needles=2, digits=3, depth=1.0),
}


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("length", [320, 321, 333, 511, 512, 1000, 2048])
def test_samples_are_exact_and_hold_their_needles(name, length, data, tokenizer):
    task = TASKS[name].at(length)
    for index in range(3):
        sample = make_sample(task, data, tokenizer, seed=1, index=index)
        assert sample.tokens.shape == (length,)
        assert sample.tokens.dtype == np.int64
        cities = [needle.city for needle in sample.needles]
        assert len(set(cities)) == task.needles
        assert set(cities) <= set(task.names)
        for needle in sample.needles:
            assert len(needle.number) == task.digits
            assert needle.number[0] != "0"
            hidden = (
                f"#{needle.city}={needle.number}" if "#" in task.needle else f"{needle.city} number is {needle.number}"
            )
            sentence = tokenizer.encode(f" The special magic {hidden}.")
            np.testing.assert_array_equal(sample.tokens[needle.start : needle.start + len(sentence)], sentence)
            assert 0 <= needle.depth <= 1
        assert [n.start for n in sample.needles] == sorted(n.start for n in sample.needles)
        # The answer, and nothing else, lies under the mask, at the very end, after the question.
        assert sample.answer == task.separator.join(f"{n.city}={n.number}" for n in sample.needles)
        assert tokenizer.decode(sample.tokens[sample.mask]) == sample.answer
        assert sample.mask[-1]
        assert tokenizer.decode(sample.tokens[~sample.mask]).endswith(task.question)
        # What is left without needles, question and answer is one piece of the corpus.
        text = sample.tokens[~sample.mask][: -len(tokenizer.encode(task.question))]
        for needle in reversed(sample.needles):
            size = len(tokenizer.encode(task.sentence(needle.city, needle.number)))
            text = np.delete(text, np.s_[needle.start : needle.start + size])
        stream = data.read(0, data.total).astype(np.int64).tobytes()
        assert text.astype(np.int64).tobytes() in stream


def test_a_sample_depends_on_seed_length_and_index_alone(data, tokenizer):
    task = NeedleTask(length=512)

    def tokens(length=512, **key):
        return make_sample(task.at(length), data, tokenizer, **{"seed": 0, "index": 5, **key}).tokens.tolist()

    once = tokens()
    for other in range(3):
        make_sample(task, data, tokenizer, seed=9, index=other)
    assert tokens() == once
    others = [tokens(seed=1), tokens(index=6), tokens(split="train"), tokens(length=513)]
    assert all(other != once for other in others)


def test_places_are_uniform_and_fixed_depths_are_kept(data, tokenizer):
    task = NeedleTask.mini()
    depths = [make_sample(task, data, tokenizer, seed=0, index=i).needles[0].depth for i in range(1000)]
    counts, _ = np.histogram(depths, bins=10, range=(0, 1))
    assert ((counts - 100) ** 2 / 100).sum() < 27.9  # chi-square with 9 degrees of freedom, 0.999
    for depth in (0.0, 0.25, 0.5, 1.0):
        fixed = NeedleTask(needles=3, digits=2, length=1000, depth=depth)
        sample = make_sample(fixed, data, tokenizer, seed=0, index=0)
        assert all(abs(needle.depth - depth) < 1e-2 for needle in sample.needles)
    assert make_sample(NeedleTask(depth=0.0), data, tokenizer, seed=0, index=0).needles[0].start == 0


def test_stack(data, tokenizer):
    samples = [make_sample(NeedleTask(length=400), data, tokenizer, seed=0, index=i) for i in range(3)]
    tokens, mask = stack(samples)
    assert tokens.shape == mask.shape == (3, 400)
    for row, sample in enumerate(samples):
        assert tokenizer.decode(tokens[row][mask[row]].tolist()) == sample.answer


def test_longest_answer_bounds_every_answer(data, tokenizer):
    for task in TASKS.values():
        bound = longest_answer(task, tokenizer)
        for index in range(50):
            sample = make_sample(task.at(512), data, tokenizer, seed=0, index=index)
            assert sample.mask.sum() <= bound


@pytest.fixture(scope="module", params=[";", "#"])
def three(tmp_path_factory, request):
    path = tmp_path_factory.mktemp("shards") / "text.bin"
    write_shard(path, ByteTokenizer().encode(TEXT * 10))
    task = NeedleTask(needles=3, digits=2, cities=("Oslo", "Lima", "Rome"), length=400, separator=request.param)
    return make_sample(task, TokenData([path], 256), ByteTokenizer(), seed=0, index=0)


def test_score_is_per_needle(three):
    first, second, last = three.answer.split(three.separator)
    for text, right in {
        f"{first};{second};{last}": [True, True, True],
        f"{first};{second};{last}; and so on": [True, True, True],
        f"{first[:-1]}x;{second};{last}": [False, True, True],
        f"{first}0;{second};{last}": [False, True, True],  # a digit too many
        f"Atlantis=1;{second};{last}": [False, True, True],
        f"{second};{first};{last}": [False, False, True],
        f"{first};{second}": [True, True, False],
        f"{first};{second};{last[:-1]}": [True, True, False],
        f"{first}{second};{last}": [False, False, False],
        "": [False, False, False],
    }.items():
        assert score(text.replace(";", three.separator), three) == right, text


def test_decided_means_that_nothing_can_change(three):
    first, second, last = three.answer.split(three.separator)
    for text, settled in {
        "": False,
        first: False,
        f"x;{second};": False,
        f"x;{second};{last[:-1]}": False,
        f"x;{second};{last}": True,
        f"x;{second};{last[:-1]}?": True,
        f"x;y;{last[:2]}\ufffd": False,  # half a character
    }.items():
        assert decided(text.replace(";", three.separator), three) is settled, text


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("needles", 0),
        ("needles", 2.5),
        ("digits", 0),
        ("separator", ""),
        ("separator", "="),
        ("separator", "7"),
        ("separator", ", "),
        ("length", -1),
        ("cities", 0),
        ("cities", 10_000),
        ("cities", 2),
        ("cities", "Paris"),
        ("cities", ("Paris", "Paris", "Oslo")),
        ("cities", ("a=b", "Paris", "Oslo")),
        ("cities", ("a;b", "Paris", "Oslo")),
        ("cities", ("", "Paris", "Oslo")),
        ("depth", -0.1),
        ("depth", 1.5),
        ("depth", float("nan")),
        ("needle", "The number is {number}."),
    ],
)
def test_bad_tasks_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument):
        NeedleTask(**{argument: value})


def test_bad_samples_are_refused_by_name(data, tokenizer):
    with pytest.raises(ValueError, match="length must leave room"):
        make_sample(NeedleTask(length=20), data, tokenizer, seed=0, index=0)
    with pytest.raises(ValueError, match=r"length .* but the split has"):
        make_sample(NeedleTask(length=10**6), data, tokenizer, seed=0, index=0)
    with pytest.raises(ValueError, match="index"):
        make_sample(NeedleTask(), data, tokenizer, seed=0, index=-1)
    with pytest.raises(ValueError, match="split"):
        make_sample(NeedleTask(), data, tokenizer, seed=0, index=0, split="test")
