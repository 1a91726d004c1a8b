"""Options derived from settings: on the command line and in a file."""

import importlib
import json

import pytest

from scaleinv.cli import main, train
from scaleinv.cli.options import RUN, default_text, given, read_file
from scaleinv.cli.program import parser
from scaleinv.settings import Setting
from scaleinv.train import TrainConfig, preset


def parsed(*words):
    return given(parser().parse_args(["train", *words]), RUN)


def test_only_what_was_given_comes_back():
    assert parsed() == {}
    assert parsed("--steps", "7", "--no-compile") == {"steps": 7, "compile": False}


def test_every_setting_is_an_option_that_reads_back_its_default():
    config = preset("162m")
    for name, setting in RUN.items():
        value = {"preset": "162m"}.get(name) or getattr(config.model if hasattr(config.model, name) else config, name)
        if value is None:
            continue
        flag = "--" + name.replace("_", "-")
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words = [flag if value else "--no-" + flag[2:]] if setting.kind is bool else [flag, text]
        assert parsed(*words) == {name: value}


def test_defaults_in_words():
    assert default_text(RUN["steps"]) == "the preset's"
    assert default_text(RUN["clip"]) == "no clipping"
    assert default_text(RUN["betas"]) == "0.9,0.95"
    assert default_text(RUN["tau"]) == "10"
    assert default_text(RUN["learnable_tau"]) == "off"
    assert default_text(Setting("tokens", int, default=524_288)) == "524,288"


def test_a_file_gives_settings_and_the_command_line_wins(tmp_path):
    (tmp_path / "run.toml").write_text(
        'preset = "162m"\nsteps = 400\nlr-matrices = 0.01\nbetas = [0.8, 0.9]\n'
        'learnable_tau = true\ndata = ["a", "b"]\n'
    )
    assert parsed("--config", "run.toml", "--steps", "5") == {
        "preset": "162m",
        "steps": 5,
        "lr_matrices": 0.01,
        "betas": (0.8, 0.9),
        "learnable_tau": True,
        "data": "a,b",
    }


def test_a_run_can_be_started_again_from_its_config(run, tmp_path):
    again = {**read_file(run / "config.json", RUN), "out": "other"}
    config = preset("162m", **again)
    old = TrainConfig.from_json(json.loads((run / "config.json").read_text())["train"])
    assert {**config.to_json(), "out": old.out} == old.to_json()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("run.toml", "stepz = 3", "run.toml has an unknown key 'stepz': did you mean steps?"),
        ("run.toml", "lr-matrice = 3", "did you mean lr-matrices?"),
        ("run.toml", 'steps = "3"', "run.toml is wrong: steps must be a positive integer, got '3'"),
        ("run.toml", "steps = 3.0", "steps must be a positive integer, got 3.0"),
        ("run.toml", "betas = [0.9]", "betas must be 2 numbers"),
        ("run.toml", "decay = nan", "decay must be a number from 0 to 1, got nan"),
        ("run.toml", "[model]\nlayers = 3", "run.toml has an unknown key 'model'"),
        ("run.toml", "steps = ", "run.toml is not TOML"),
        ("run.json", "{", "run.json is not JSON"),
        ("run.json", '{"train": 3}', "run.json is not a run's config.json"),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(name, content, message, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    assert main(["train", "--config", name]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_file_may_not_change_what_a_resumed_run_is(run, tmp_path, capsys):
    (tmp_path / "run.toml").write_text("steps = 3\nseed = 4\n")
    assert main(["train", "--resume", "run", "--config", "run.toml"]) == 2
    assert "--seed cannot be changed" in capsys.readouterr().err


def test_options_reach_the_run(book, tmp_path):
    words = ["--steps", "1", "--layers", "1", "--lr-matrices", "0.003", "--val-lengths", "1x,2x", "--out", "run"]
    words += ["--batch-tokens", "64", "--train-length", "32", "--val-tokens", "64", "--data", book]
    assert main(["train", *words]) == 0
    written = json.loads((tmp_path / "run" / "config.json").read_text())["train"]
    assert written["model"]["layers"] == 1
    assert written["lr_matrices"] == 0.003
    assert written["val_lengths"] == "1x,2x"


def test_the_run_has_a_folder_of_its_own_name(monkeypatch):
    seen = []

    def run(config, **options):
        seen.append(config.out)
        raise ValueError("enough")

    monkeypatch.setattr("scaleinv.train.run", run, raising=False)
    assert main(["train", "--method", "alibi", "--seed", "4"]) == 2
    assert seen == ["runs/mini-alibi-seed4"]
    assert train.RUN is RUN


def test_a_comparison_takes_the_options_and_the_file_of_a_run(run, tmp_path, monkeypatch):
    seen = []

    def compare(plan, progress):
        seen.append(plan)
        raise ValueError("enough")

    module = importlib.import_module("scaleinv.eval.compare")  # the package holds a function of that name
    monkeypatch.setattr(module, "compare", compare)
    words = ["--methods", "rope,alibi", "--lr-matrices", "0.003", "--sweep", "tau=1,30", "--out", "x", "--no-report"]
    assert main(["compare", *words, "--config", "run/config.json", "--device", "cpu"]) == 2
    (plan,) = seen
    assert (plan.methods, plan.tau, plan.out.name) == (["rope", "alibi"], [1.0, 30.0], "x")
    assert (plan.train["lr_matrices"], plan.train["train_length"], plan.train["steps"]) == (0.003, 32, 2)
    assert not plan.train.keys() & {"method", "seed", "tau", "out"}
