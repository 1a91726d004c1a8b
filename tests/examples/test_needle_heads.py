"""`examples/needle_heads.py`: the digits that it watches, and its table for a fine-tuned model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from scaleinv.data import ByteTokenizer, TokenData, write_shard
from scaleinv.eval.needle_task import NeedleTask, make_sample, stack
from scaleinv.eval.needle_train import NeedleTraining, finetune
from scaleinv.model import GPTConfig
from scaleinv.train import TrainConfig, run


@pytest.fixture(scope="module")
def example(load_example):
    return load_example("needle_heads")


@pytest.mark.parametrize(
    "task",
    [NeedleTask.mini(), NeedleTask(3, 5, length=700), NeedleTask(2, 4, cities=("Zürich", "São Paulo"), length=400)],
    ids=["mini", "three", "accents"],
)
def test_the_digits_it_watches_are_those_of_needle_and_answer(example, task, tmp_path):
    tokenizer = ByteTokenizer()
    write_shard(tmp_path / "text.bin", tokenizer.encode("Call me 1234. " * 200).astype(np.uint16))
    data = TokenData([tmp_path / "text.bin"], tokenizer.end_of_text)
    for index in range(5):
        sample = make_sample(task, data, tokenizer, seed=0, index=index)
        asked, wanted = example.digit_places(sample, task)
        tokens = stack([sample])[0][0]
        digits = "".join(needle.number for needle in sample.needles)
        assert tokenizer.decode(tokens[wanted].tolist()) == digits
        assert torch.equal(tokens[asked + 1], tokens[wanted])
        assert (asked + 1 >= sample.answer_start).all()


def test_a_line_for_a_model(example, tmp_path):
    model = GPTConfig(layers=1, width=32, heads=2, vocab_size=257, train_length=128)
    run(TrainConfig(model, data="stdlib", out=str(tmp_path / "run"), steps=1, batch_tokens=128, val_tokens=128))
    task = NeedleTask.mini().at(128)
    finetune(tmp_path / "run", tmp_path / "tuned", task, NeedleTraining.mini().scaled(3))
    name, right, reader, copied, beside, looker, back = example.study(tmp_path / "tuned", 2, 0).strip("| ").split(" | ")
    assert name == "tuned"
    assert reader.startswith("layer 0, head ")
    assert looker.startswith("layer 0, head ")
    assert all(0 <= float(x) <= 1 for x in (right, copied, beside, back))
