"""The commands, as a user types them."""

import json

from scaleinv.cli import main

COMMON = ["--batch-tokens", "128", "--train-length", "32", "--val-tokens", "512", "--device", "cpu"]


def test_train_resume_evaluate_generate(book, tmp_path, capsys):
    assert (
        main(["train", "--method", "rope", "--data", book, "--steps", "2", "--out", "run", "--seed", "1", *COMMON]) == 0
    )
    printed = capsys.readouterr().out
    assert "attention backend" in printed
    assert "tokens/s" in printed
    assert "ETA" in printed
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2]
    assert main(["train", "--resume", "run", "--steps", "3"]) == 0
    assert main(["evaluate", "run", "--lengths", "1x,64", "--methods", "rope,yarn", "--tokens", "512"]) == 0
    result = json.loads((tmp_path / "run" / "evaluations" / "yarn-seed1.json").read_text())
    assert result["model"] == "rope"
    assert set(result["lengths"]) == {"1x", "64"}
    capsys.readouterr()
    assert main(["generate", "run", "--prompt", "line", "--tokens", "5", "--seed", "0", "--method", "rope+ntk"]) == 0
    assert capsys.readouterr().out.startswith("line")


def test_a_glob_that_the_shell_spread_is_one_corpus(book, tmp_path):
    files = sorted(str(path) for path in (tmp_path / "books").iterdir())
    assert main(["train", "--steps", "1", "--out", "run", *COMMON, "--data", *files]) == 0
    assert json.loads((tmp_path / "run" / "config.json").read_text())["train"]["data"] == ",".join(files)


def test_prepare_writes_shards_that_train_reads(book, tmp_path, capsys):
    assert main(["prepare", "--text", book, "--tokenizer", "bytes", "--out", "shards", "--workers", "1"]) == 0
    assert "train_000001.bin" in capsys.readouterr().out
    assert main(["train", "--data", "shards/*.bin", "--steps", "1", "--out", "run", *COMMON]) == 0
