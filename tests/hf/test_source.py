"""A damaged folder: one line that names it."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

import scaleinv.hf
from scaleinv.hf.source import load_pretrained


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def change(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


DAMAGE: dict[str, Callable[[Path], None]] = {
    "no config": lambda folder: (folder / "config.json").unlink(),
    "half a config": lambda folder: cut(folder / "config.json"),
    "a list for a config": lambda folder: (folder / "config.json").write_text("[]") and None,
    "no weights": lambda folder: (folder / "model.safetensors").unlink(),
    "half the weights": lambda folder: cut(folder / "model.safetensors"),
    "a number for the conversion": lambda folder: change(folder / "config.json", scaleinv=3),
    "no stock type": lambda folder: change(folder / "config.json", scaleinv={"tau": 10.0}),
    "a word for p": lambda folder: change(folder / "config.json", scaleinv={"p": "half", "stock_model_type": "llama"}),
    "a word for a width": lambda folder: change(folder / "config.json", hidden_size="wide"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_folder_is_named(damage: str, stock: Callable[[str], PreTrainedModel], tmp_path: Path) -> None:
    scaleinv.hf.convert(stock("llama")).save_pretrained(tmp_path)
    load_pretrained(tmp_path)
    DAMAGE[damage](tmp_path)
    with pytest.raises(ValueError, match=rf"{tmp_path} cannot be loaded: \S") as found:
        load_pretrained(tmp_path)
    assert "\n" not in str(found.value)


def test_missing_weights_are_named_and_not_drawn_at_random(
    stock: Callable[[str], PreTrainedModel], tmp_path: Path
) -> None:
    stock("llama").save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    del weights["model.layers.1.self_attn.q_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"{tmp_path} lacks weights .*: model.layers.1.self_attn.q_proj.weight$"):
        load_pretrained(tmp_path)
    change(tmp_path / "config.json", num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"lacks weights that its config asks for: .* and 7 more"):
        load_pretrained(tmp_path)
