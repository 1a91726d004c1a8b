"""The report of a model, from a run's folder and from a Hugging Face folder."""

from pathlib import Path

import pytest
import torch

from builders import make_gpt
from scaleinv import analysis
from scaleinv.analysis import Calibration, ModelStatistics
from scaleinv.reports import analyze_model, model_report
from scaleinv.reports.model import _open_run, context_lengths

pytest.importorskip("matplotlib")

TOKENS = torch.randint(50, (600,), generator=torch.Generator().manual_seed(3))
FIGURES = ("qq-rotary", "qq-no-rotary", "figure1-model", "ranges", "sparsity")
FILES = {f"{stem}.{kind}" for stem in FIGURES for kind in ("png", "svg")} | {
    *("scores.csv", "scores.json", "attention.csv", "attention.json", "calibration.json", "model.json"),
    *("sparsity.csv", "sparsity.json"),
}
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom, " * 12


@pytest.mark.slow
def test_report_writes_everything_and_can_be_stopped(tmp_path: Path) -> None:
    lines: list[str] = []
    paths = model_report(make_gpt(), TOKENS, ["2x", 300], tmp_path / "all", progress=lines.append)
    assert {path.name for path in paths} == FILES
    assert all(path.stat().st_size > 0 for path in paths)
    assert [entry.length for entry in ModelStatistics.load(tmp_path / "all").lengths] == [128, 300]
    assert lines[0].startswith("scores: scale-invariant-p-rope, 64 tokens, window 1 of 4")

    def stop(line: str) -> None:
        if "300 tokens" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        model_report(make_gpt(), TOKENS, ["2x", 300], tmp_path / "some", progress=stop)
    assert [entry.length for entry in ModelStatistics.load(tmp_path / "some").lengths] == [128]
    assert {path.name for path in (tmp_path / "some").iterdir()} == {x for x in FILES if "sparsity" not in x}


def test_mistakes_show_before_the_work(tmp_path: Path) -> None:
    lines: list[str] = []
    with pytest.raises(ValueError, match="lengths must exceed recent=100"):
        model_report(make_gpt(), TOKENS, ["1x"], tmp_path, progress=lines.append)
    with pytest.raises(ValueError, match="lengths must lie in 2 … 600"):
        model_report(make_gpt(), TOKENS, ["16x"], tmp_path, progress=lines.append)
    assert lines == []


def test_lengths() -> None:
    model = make_gpt(train_length=64)
    assert context_lengths(["1x", "16x", "100", 64], model) == [64, 100, 1024]
    for wrong in ("x", "4y", "1e3", "infx", "nanx", "", "2.5", "0", "-1x"):
        with pytest.raises(ValueError, match="lengths must read like 4x"):
            context_lengths([wrong], model)
    with pytest.raises(ValueError, match="at least one"):
        context_lengths([], model)


@pytest.mark.slow
def test_a_second_model_does_not_write_over_the_first(tmp_path: Path) -> None:
    model_report(make_gpt(), TOKENS, ["2x"], tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    held = r"out .* holds results of model scale-invariant-p-rope, weights \w+, but these are of model "
    with pytest.raises(ValueError, match=held + "rope, weights"):
        model_report(make_gpt("rope"), TOKENS, ["2x"], tmp_path)
    trained = make_gpt()
    with torch.no_grad():
        trained.output.weight.mul_(1.01)
    with pytest.raises(ValueError, match=held + "scale-invariant-p-rope, weights"):
        model_report(trained, TOKENS, ["2x"], tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    model_report(make_gpt(), TOKENS, [300], tmp_path)  # the same model at another length: its results anew
    assert [entry.length for entry in ModelStatistics.load(tmp_path).lengths] == [300]


def test_a_folder_of_an_earlier_version_is_not_written_over(tmp_path: Path) -> None:
    (tmp_path / "scores.json").write_text('{"model": "alibi"}')
    with pytest.raises(ValueError, match="holds results of model alibi, but these are of model rope"):
        model_report(make_gpt("rope"), TOKENS, ["2x"], tmp_path)


def test_a_damaged_config_is_named(tmp_path: Path) -> None:
    for content in ("{", "[1]", "\udcff"):
        (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
        with pytest.raises(ValueError, match=r"config\.json (is not|must hold)"):
            analyze_model(str(tmp_path), ["1x"], None, tmp_path / "out")


def write_run(folder: Path, data: Path) -> None:
    from scaleinv.data import ByteTokenizer
    from scaleinv.train import preset
    from scaleinv.train.store import run_corpus, write_config, write_weights

    config = preset("mini", "rope", 64)
    config.model.layers, config.model.width = 2, 32
    config.data = str(data)
    folder.mkdir()
    (folder / "tokenizer").mkdir()
    ByteTokenizer().save(folder / "tokenizer")
    model = make_gpt("rope", vocab_size=config.model.vocab_size).float()
    write_config(folder, config, run_corpus(config))
    write_weights(folder, model.state_dict(), 0)


def test_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    book, run = tmp_path / "book.txt", tmp_path / "run"
    book.write_text(TEXT * 8)
    write_run(run, book)
    paths = analyze_model(str(run), ["2x"], None, tmp_path / "own")
    assert {path.name for path in paths} == FILES
    assert ModelStatistics.load(tmp_path / "own").model == "rope"
    _, tokens, bos, _ = _open_run(str(run), ["200"], book)
    assert bos is None
    assert tokens[:6].tolist() == [256, *b"It wa"]
    assert len(tokens) > 800  # four windows
    with pytest.raises(ValueError, match=r"text '.*book.txt' holds .* tokens, but the longest context .* is 999,999"):
        analyze_model(str(run), ["999999"], book, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_hugging_face_folder(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    from transformers import PreTrainedTokenizerFast

    from hf_builders import make_hf

    words = {word: number for number, word in enumerate(["<unk>", "<s>", "</s>", *dict.fromkeys(TEXT.split())])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    folder, book = tmp_path / "tiny-llama", tmp_path / "book.txt"
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", unk_token="<unk>").save_pretrained(folder)
    make_hf("llama").float().save_pretrained(folder)
    book.write_text(TEXT * 2)

    paths = analyze_model(str(folder), ["1x"], book, tmp_path / "out")
    assert {path.name for path in paths} == FILES
    found = ModelStatistics.load(tmp_path / "out")
    assert (found.model, found.lengths[0].length) == ("tiny-llama", 128)
    assert Calibration.load(tmp_path / "out" / "calibration.json").scale.shape == (2, 4)
    with pytest.raises(ValueError, match="text must be given for a Hugging Face model"):
        analyze_model(str(folder), ["1x"], None, tmp_path / "out")
    with pytest.raises(ValueError, match="nothing' is neither a folder nor the id of a model on the Hugging Face hub"):
        analyze_model(str(tmp_path / "nothing"), ["1x"], book, tmp_path / "out")


def test_everything_is_exported() -> None:
    for name in analysis.__all__:
        assert hasattr(analysis, name)
