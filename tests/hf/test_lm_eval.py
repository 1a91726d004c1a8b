"""lm-evaluation-harness on an exported run, through `scaleinv-eval`."""

import json
import math
import subprocess
import sys

import pytest
import torch

from builders import write_books
from scaleinv import train
from scaleinv.hf import gpt
from scaleinv.model import GPTConfig
from scaleinv.train.store import load_model

pytest.importorskip("lm_eval", reason="an extra of forty packages: scaleinv[lm-eval]")

TEXTS = ["some text, number 3; some more", "number 5; and some text."]


def test_bits_per_byte_are_the_models_own(tmp_path):
    corpus = write_books(tmp_path / "text", range(8))
    shape = GPTConfig(layers=2, width=32, heads=2, train_length=32)
    run = tmp_path / "run"
    with torch.enable_grad():
        train.run(
            train.TrainConfig(
                model=shape, data=str(corpus), out=str(run), steps=2, batch_tokens=128, val_tokens=512, device="cpu"
            )
        )
    gpt.export(run, tmp_path / "hf")
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (tmp_path / "speech.yaml").write_text(
        "task: speech\ndataset_path: json\n"
        f"dataset_kwargs: {{data_files: {{test: {documents}}}}}\n"
        "test_split: test\noutput_type: loglikelihood_rolling\n"
        "doc_to_text: ''\ndoc_to_target: '{{text}}'\nmetric_list: [{metric: bits_per_byte}]\n"
    )
    model_arguments = f"pretrained={tmp_path / 'hf'},add_bos_token=False"
    arguments = ["--model", "hf", "--model_args", model_arguments, "--device", "cpu", "--batch_size", "1"]
    arguments += ["--tasks", "speech", "--include_path", str(tmp_path), "--output_path", str(tmp_path / "results")]
    command = [sys.executable, "-c", "import scaleinv.hf; scaleinv.hf.lm_eval_main()", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(next((tmp_path / "results").rglob("*.json")).read_text())["results"]["speech"]

    model, _ = load_model(run)
    nats = 0.0
    for text in TEXTS:
        tokens = torch.tensor([[256, *text.encode()]])  # end of text, then the bytes
        logits = model(tokens[:, :-1])
        nats += torch.nn.functional.cross_entropy(logits[0].double(), tokens[0, 1:], reduction="sum").item()
    size = sum(len(text.encode()) for text in TEXTS)
    assert result["bits_per_byte,none"] == pytest.approx(nats / math.log(2) / size, rel=1e-4)
