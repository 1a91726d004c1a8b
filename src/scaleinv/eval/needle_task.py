"""The needle task (arXiv 2505.17083, section on needle in a haystack): sentences hidden in text, and a question.

A sample is natural text cut to the exact length, with needles "The special magic {city} number is {number}." inserted,
then a question and the answer "city1=number1;city2=number2;…" in the order of the needles. It is put together from
token ids and never encoded again, so its length is exact. It depends only on the seed, the length and its index.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from scaleinv.data import TokenData, Tokenizer

CITIES = (
    "Paris", "Oslo", "Lima", "Cairo", "Tokyo", "Rome", "Delhi", "Quito", "Berlin", "Madrid", "Vienna", "Athens",
    "London", "Dublin", "Prague", "Warsaw", "Lisbon", "Boston", "Nairobi", "Seoul", "Hanoi", "Bogota", "Havana",
    "Sydney", "Toronto", "Chicago", "Denver", "Seattle", "Houston", "Moscow", "Istanbul", "Mumbai", "Lagos", "Accra",
    "Tunis", "Dakar", "Beirut", "Baghdad", "Tehran", "Kabul", "Karachi", "Bangkok", "Manila", "Jakarta", "Osaka",
    "Shanghai", "Santiago", "Montreal", "Helsinki", "Stockholm",
)  # fmt: skip
"""Real cities, for the needles."""

SPLITS = {"train": 0, "val": 1}
EQUALS = "="


@dataclasses.dataclass(frozen=True)
class NeedleTask:
    """What is hidden where. The defaults are the paper's; `mini` is a task that the mini model learns.

    >>> task = NeedleTask(needles=2, digits=4, cities=("Paris", "Oslo", "Lima"), length=512)
    >>> task.answer([("Oslo", "4821"), ("Lima", "9317")])
    'Oslo=4821;Lima=9317'
    """

    needles: int = 3
    digits: int = 7
    cities: int | Sequence[str] = len(CITIES)
    """Names to choose from, or how many of `CITIES` to take."""
    length: int = 4096
    """Tokens of a whole sample: text, needles, question and answer."""
    depth: float | None = None
    """Where all needles are: 0 at the text's start, 1 right before the question; None for uniformly random places."""
    needle: str = " The special magic {city} number is {number}."
    question: str = "\nThe special magic numbers are: "
    separator: str = ";"
    """One character, between the needles of an answer."""

    def __post_init__(self) -> None:
        for name in ("needles", "digits", "length"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if isinstance(self.cities, int):
            if not 1 <= self.cities <= len(CITIES):
                raise ValueError(f"cities must be a number from 1 to {len(CITIES)}, or names, got {self.cities}")
        elif isinstance(self.cities, str):
            raise ValueError(f"cities must be a number or a sequence of names, got the text {self.cities!r}")
        if not isinstance(self.separator, str) or len(self.separator) != 1 or self.separator in EQUALS + "0123456789":
            raise ValueError(f"separator must be one character, no digit and not {EQUALS!r}, got {self.separator!r}")
        for city in self.names:
            if not isinstance(city, str) or not city.strip() or self.separator in city or EQUALS in city:
                raise ValueError(f"cities must be names without {self.separator!r} and {EQUALS!r}, got {city!r}")
        if len(set(self.names)) != len(self.names):
            raise ValueError(f"cities must differ, got {', '.join(self.names)}")
        if len(self.names) < self.needles:
            raise ValueError(f"cities must be at least as many as the {self.needles} needles, got {len(self.names)}")
        if self.depth is not None and not (math.isfinite(self.depth) and 0 <= self.depth <= 1):
            raise ValueError(f"depth must lie in [0, 1] or be None for random places, got {self.depth}")
        for field in ("{city}", "{number}"):
            if self.needle.count(field) != 1:
                raise ValueError(f"needle must hold {field} once, got {self.needle!r}")
        object.__setattr__(self, "cities", self.names)

    @classmethod
    def mini(cls) -> NeedleTask:
        """For models of a million parameters on bytes: one short needle, asked for in its own words.

        "#" and "=" are rare in text, as a city is among the tokens of a larger model; a space before the city is not.
        """
        needle, question = " The special magic #{city}={number}.", "\nThe special magic #"
        return cls(needles=1, digits=4, length=512, needle=needle, question=question, separator="#")

    @property
    def names(self) -> tuple[str, ...]:
        """The cities to choose from."""
        return CITIES[: self.cities] if isinstance(self.cities, int) else tuple(self.cities)

    def at(self, length: int) -> NeedleTask:
        """The same task at another length in tokens."""
        return dataclasses.replace(self, length=length)

    def sentence(self, city: str, number: str) -> str:
        return self.needle.format(city=city, number=number)

    def answer(self, pairs: Sequence[tuple[str, str]]) -> str:
        """What the model has to say, for (city, number) in the order of the needles."""
        return self.separator.join(f"{city}{EQUALS}{number}" for city, number in pairs)


@dataclasses.dataclass(frozen=True)
class Needle:
    """One hidden sentence."""

    city: str
    number: str
    start: int
    """Its first token in the sample."""
    depth: float
    """Share of the text that lies before it, 0 … 1."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """A haystack with its question and answer, as token ids."""

    index: int
    tokens: np.ndarray
    """int64 ``[length]``; the last of them are the answer."""
    answer_start: int
    needles: tuple[Needle, ...]
    answer: str
    separator: str

    @property
    def mask(self) -> np.ndarray:
        """Which tokens are the answer's, bool ``[length]``."""
        return np.arange(len(self.tokens)) >= self.answer_start


def make_sample(
    task: NeedleTask,
    data: TokenData,
    tokenizer: Tokenizer,
    *,
    seed: int,
    index: int,
    split: Literal["train", "val"] = "val",
) -> Sample:
    """Sample ``index`` of a task, independent of all other samples.

    Args:
        data: where the text comes from: the held-out split to evaluate, the training split to fine-tune.
        split: keeps the random numbers of training and evaluation apart.
    """
    if seed < 0 or index < 0:
        raise ValueError(f"seed and index must not be negative, got {seed} and {index}")
    if split not in SPLITS:
        raise ValueError(f"split must be 'train' or 'val', got {split!r}")
    random = np.random.default_rng([seed, task.length, index, SPLITS[split]])
    cities = [task.names[i] for i in random.choice(len(task.names), task.needles, replace=False)]
    numbers = [_number(random, task.digits) for _ in cities]
    answer = task.answer(list(zip(cities, numbers, strict=True)))
    question, ending = tokenizer.encode(task.question), tokenizer.encode(answer)
    sentences = [tokenizer.encode(task.sentence(*pair)) for pair in zip(cities, numbers, strict=True)]
    text_length = task.length - sum(map(len, sentences)) - len(question) - len(ending)
    if text_length < 1:
        raise ValueError(
            f"length must leave room for text: needles, question and answer take {task.length - text_length} tokens, "
            f"got {task.length}"
        )
    if text_length > data.total:
        raise ValueError(f"length {task.length} needs {text_length:,} tokens of text, but the split has {data.total:,}")
    text = data.read(int(random.integers(data.total - text_length + 1)), text_length)
    if task.depth is None:
        places = np.sort(random.integers(0, text_length + 1, task.needles))
    else:
        places = np.full(task.needles, round(task.depth * text_length))
    pieces, needles, cut, made = [], [], 0, 0
    for city, number, sentence, place in zip(cities, numbers, sentences, map(int, places), strict=True):
        pieces += [text[cut:place], sentence]
        needles.append(Needle(city, number, place + made, place / text_length))
        cut, made = place, made + len(sentence)
    tokens = np.concatenate([*pieces, text[cut:], question, ending]).astype(np.int64)
    return Sample(index, tokens, task.length - len(ending), tuple(needles), answer, task.separator)


def stack(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """Tokens ``[B, length]`` and which of them are answers, bool ``[B, length]``."""
    tokens = torch.from_numpy(np.stack([sample.tokens for sample in samples]))
    return tokens, torch.from_numpy(np.stack([sample.mask for sample in samples]))


def score(text: str, sample: Sample) -> list[bool]:
    """Which needles a generated text gets right: city and number, in their place.

    What follows the last number is ignored: nothing tells a model to stop there.
    """
    wanted = sample.answer.split(sample.separator)
    got = text.split(sample.separator, len(wanted) - 1)
    last = len(wanted) - 1
    return [
        number < len(got) and (got[number].startswith(item) if number == last else got[number] == item)
        for number, item in enumerate(wanted)
    ]


def decided(text: str, sample: Sample) -> bool:
    """Whether no continuation of a generated text can change its `score`."""
    wanted = sample.answer.split(sample.separator)
    got = text.split(sample.separator, len(wanted) - 1)
    if len(got) < len(wanted):
        return False
    last = got[-1].rstrip("\ufffd")  # a character may take several tokens
    return last.startswith(wanted[-1]) or not wanted[-1].startswith(last)


def longest_frame(task: NeedleTask, tokenizer: Tokenizer) -> int:
    """The most tokens that needles, question and answer take together: what a sample has besides its text."""
    number = "9" * task.digits
    sentences = sorted(len(tokenizer.encode(task.sentence(city, number))) for city in task.names)[-task.needles :]
    return sum(sentences) + len(tokenizer.encode(task.question)) + longest_answer(task, tokenizer)


def longest_answer(task: NeedleTask, tokenizer: Tokenizer) -> int:
    """The most tokens that an answer of this form takes, and so the most that a wrong answer may use."""
    widest = max(len(tokenizer.encode(city)) for city in task.names)
    return task.needles * (widest + task.digits + len(task.separator + EQUALS))


def _number(random: np.random.Generator, digits: int) -> str:
    """A uniformly random number of this many digits, without a leading zero."""
    return "".join(str(d) for d in [random.integers(1, 10), *random.integers(0, 10, digits - 1)])
