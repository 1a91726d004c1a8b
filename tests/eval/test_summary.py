import json
import math

import pytest

from scaleinv.eval.summary import (
    Summary,
    loss,
    parse_accuracy,
    parse_summary,
    read_summary,
    read_summary_if_any,
    read_sweep,
    write_summary,
    write_sweep,
)

FOUND = {"accuracy": 0.5, "low": 0.4, "high": 0.6, "samples": 100}


def test_what_is_written_is_read_again(tmp_path):
    path = tmp_path / "summary.json"
    assert read_summary_if_any(path) == Summary()
    losses = {"rope": {"1x": loss(1.5, 0.1, 3), "64x": loss(2.5, None, 3)}}
    summary = Summary(losses, {"rope": {"1x": parse_accuracy(FOUND, "here")}}, {"train_length": 512})
    write_summary(path, summary)
    assert read_summary(path) == summary
    at = {"1x": {"mean": 1.5, "stderr": 0.1, "seeds": 3}, "64x": {"mean": 2.5, "stderr": None, "seeds": 3}}
    assert json.loads(path.read_text()) == {
        "loss": {"rope": at},
        "needle": {"rope": {"1x": FOUND}},
        "settings": {"train_length": 512},
    }


def test_a_diverged_run_is_null_in_the_file(tmp_path):
    path = tmp_path / "summary.json"
    write_summary(path, Summary({"rope": {"1x": loss(math.inf, None, 1)}}))
    assert json.loads(path.read_text())["loss"]["rope"]["1x"]["mean"] is None
    assert math.isnan(read_summary(path).loss["rope"]["1x"].value)


def test_losses_and_needles_do_not_touch_each_other():
    before = parse_summary(
        {
            "loss": {"rope": {"1x": {"mean": 1.0}}, "alibi": {"1x": {"mean": 2.0}}},
            "needle": {"rope": {"1x": FOUND}},
            "settings": {"train_length": 512, "steps": 3, "needle": {"task": 1}},
        },
        "before",
    )
    after = before.with_loss(
        {"yarn": {"1x": loss(3.0, None, 1)}}, {"train_length": 512, "steps": 4}, asked=["yarn", "rope"]
    )
    assert list(after.loss) == ["yarn", "alibi"]  # rope is asked for again and not there yet
    assert after.needle == before.needle
    assert after.settings == {"train_length": 512, "steps": 4, "needle": {"task": 1}}
    found = {"alibi": {"1x": parse_accuracy(FOUND, "here")}}
    after = before.with_needle(found, {"task": 2}, 512)
    assert after.loss == before.loss
    assert list(after.needle) == ["rope", "alibi"]
    assert after.settings == {"train_length": 512, "steps": 3, "needle": {"task": 2}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[]", "must be a JSON object, got \\[\\]"),
        ("{", "is not JSON.*delete a damaged file"),
        ('{"loss": 3}', "loss must be a JSON object, got 3"),
        ('{"loss": {"rope": {"1x": 3}}}', "loss.rope.1x must be a JSON object, got 3"),
        ('{"loss": {"rope": {"1x": {"mean": true}}}}', "loss.rope.1x: mean must be a number, got True"),
        ('{"loss": {"rope": {"1x": {"mean": 1, "seeds": 0.5}}}}', "seeds must be a positive whole number, got 0.5"),
        ('{"needle": {"rope": {"1x": {"accuracy": null}}}}', "accuracy must be between 0 and 1, got nan"),
        ('{"loss": {"rope": {"far": {"mean": 1}}}}', "lengths must read like 4x"),
        ('{"settings": {"train_length": -1}}', "settings.train_length must be a positive number of tokens"),
    ],
)
def test_damage_names_the_file_and_the_place(tmp_path, content, message):
    path = tmp_path / "summary.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=rf"summary\.json.*{message}"):
        read_summary(path)


def test_a_sweep_is_ordered_by_tau(tmp_path):
    path = tmp_path / "sweep.json"
    write_sweep(path, {tau: {"1x": loss(float(tau), None, 1)} for tau in ("100", "0.01", "3")})
    assert list(read_sweep(path, 512)) == ["0.01", "3", "100"]
    path.write_text('{"tau": {"big": {}}}')
    with pytest.raises(ValueError, match=r"sweep\.json: tau must be a positive number of tokens, got 'big'"):
        read_sweep(path, 512)
