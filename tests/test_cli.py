"""The command line, as a user types it."""

import json

import pytest

from scaleinv.cli import COMMANDS, main

COMMON = ["--batch-tokens", "128", "--train-length", "32", "--val-tokens", "512", "--device", "cpu"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def book(tmp_path):
    folder = tmp_path / "books"
    folder.mkdir()
    for number in range(12):
        (folder / f"{number}.txt").write_text("".join(f"line {n} of book {number}\n" for n in range(60)))
    return str(folder / "*.txt")


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--method", "alibii"], "did you mean alibi"),
        (["train", "--preset", "big"], "unknown preset 'big'"),
        (["train", "--data", "nowhere/*.txt"], "nowhere"),
        (["train", "--resume", "nowhere"], "nowhere holds no run"),
        (["train", "--resume", "nowhere", "--seed", "3"], "--seed cannot be changed"),
        (["train", "--resume", "nowhere", "--preset", "mini"], "--preset cannot be changed"),
        (["train", "--resume", "nowhere", "--method", "alibi", "--steps", "9"], ": --method cannot be changed"),
        (
            ["train", "--resume", "nowhere", "--train-length", "64", "--tau", "10", "--learnable-tau", "--out", "x"],
            "--train-length, --tau, --learnable-tau, --out cannot be changed",
        ),
        (["evaluate", "nowhere"], "nowhere holds no run"),
        (["generate", "nowhere"], "nowhere holds no run"),
        (["compare", "--out", "x", "--sweep", "rho=3"], "--sweep takes tau="),
        (["compare", "--out", "x", "--methods", "rope,yarm"], "unknown method 'yarm'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_explained_in_one_line(arguments, message, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


@pytest.mark.parametrize("command", ["", *(module.__name__.rpartition(".")[2] for module in COMMANDS)])
def test_help_teaches(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([*([command] if command else []), "--help"])
    assert stop.value.code == 0
    printed = capsys.readouterr().out
    assert "example:" in printed or "COMMAND" in printed
