"""metrics.jsonl, and the line of progress."""

import errno
import json
import sys

import pytest

from scaleinv.train import logs


def lines(folder):
    return [json.loads(line) for line in (folder / logs.METRICS).read_text().splitlines()]


def write(folder, start, steps):
    metrics = logs.Metrics(folder, start, {}, None)
    for step in steps:
        metrics.write({"step": step, "loss": 1.0 / step, "validation": {"1x": 2.0}})
    metrics.close()


def test_what_is_written_is_read(tmp_path):
    write(tmp_path, 0, [1, 2])
    assert logs.read_metrics(tmp_path) == lines(tmp_path)
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]
    assert lines(tmp_path)[1] == {"step": 2, "loss": 0.5, "validation": {"1x": 2.0}}


def test_lines_past_the_resumed_step_are_dropped(tmp_path):
    write(tmp_path, 0, [1, 2, 3, 4])
    write(tmp_path, 2, [3])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2, 3]
    write(tmp_path, 0, [1])
    assert [line["step"] for line in lines(tmp_path)] == [1]


def test_a_half_written_last_line_is_left_out(tmp_path):
    write(tmp_path, 0, [1, 2])
    path = tmp_path / logs.METRICS
    path.write_text(path.read_text()[:-9])
    assert [line["step"] for line in logs.read_metrics(tmp_path)] == [1]
    write(tmp_path, 1, [2])
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("damage", ['{"step": 1', "[1]", '{"loss": 1}', '{"step": "1"}', "\x00"])
def test_damage_names_the_file_and_says_what_to_do(tmp_path, damage):
    (tmp_path / logs.METRICS).write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n')
    with pytest.raises(ValueError, match=rf"{tmp_path / logs.METRICS} .*; delete the file to continue") as caught:
        logs.Metrics(tmp_path, 2, {}, None)
    assert "\n" not in str(caught.value)


def test_no_metrics_are_no_lines(tmp_path):
    assert logs.read_metrics(tmp_path) == []


@pytest.mark.parametrize("written", [0, 7])
def test_a_full_disk_names_the_file(tmp_path, written):
    """The system writes nothing, or a part of the line."""
    metrics = logs.Metrics(tmp_path, 0, {}, None)

    class Full:
        def write(self, line):
            return written

    metrics.file.close()
    metrics.file = Full()
    with pytest.raises(OSError, match=rf"metrics could not be written: .*{tmp_path / logs.METRICS}") as caught:
        metrics.write({"step": 1, "loss": 1.0})
    assert caught.value.errno == errno.ENOSPC


def test_a_missing_wandb_is_said_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(RuntimeError, match="pip install"):
        logs.Metrics(tmp_path, 0, {}, "project")
    assert list(tmp_path.iterdir()) == []


def test_progress_counts_training_time_alone(monkeypatch):
    now = 100.0
    monkeypatch.setattr(logs.time, "monotonic", lambda: now)
    shown: list[str] = []
    meter = logs.Progress(steps=10, start=0, tokens=50, progress=shown.append, every=2)
    now += 1
    meter.show(1, 3.0, 1.0)
    assert shown == []
    now += 1
    meter.show(2, 2.5, 1.0)
    assert shown == ["step 2/10  loss 2.5000  lr ×1.000  50 tokens/s  ETA 0:08"]
    now += 30
    meter.pause(30)
    now += 2
    meter.show(4, 2.0, 0.5)
    assert shown[1:] == ["step 4/10  loss 2.0000  lr ×0.500  50 tokens/s  ETA 0:06"]
