import json
import signal
import subprocess
import sys
import threading

import pytest

from scaleinv.eval import workers as module
from scaleinv.eval.compare import todo, work_left
from scaleinv.eval.work import Work
from scaleinv.eval.workers import Workers, work_through


def work(plan) -> Work:
    found = work_left(plan, plan.all_jobs()[0])
    assert found is not None
    return found


def program(monkeypatch, source: str) -> None:
    monkeypatch.setattr(module, "COMMAND", (sys.executable, "-c", source))


def test_work_goes_through_json(plan):
    assert Work.from_json(work(plan).to_json()) == work(plan)


@pytest.mark.slow
def test_records_are_structured_and_nothing_else_is_on_their_channel(plan):
    done = subprocess.run(
        module.COMMAND, input=work(plan).to_json(), capture_output=True, text=True, timeout=120, check=True
    )
    records = [json.loads(line) for line in done.stdout.splitlines()]
    kinds = [record["kind"] for record in records]
    assert {"line", "step", "windows", "evaluated"} <= set(kinds)
    (step,) = (record for record in records if record["kind"] == "step")
    assert step.keys() == {"kind", "step", "steps", "loss", "tokens_per_second"}
    assert (step["step"], step["steps"]) == (2, 2)
    assert [(r["method"], r["length"]) for r in records if r["kind"] == "evaluated"] == [
        ("rope", "1x"), ("rope", "4x"), ("yarn", "1x"), ("yarn", "4x")
    ]  # fmt: skip


def test_finished_models_are_counted_before_any_other_starts(plan, monkeypatch, tmp_path):
    program(monkeypatch, """print('{"kind": "step", "step": 1, "steps": 2, "loss": 3.0}')""")
    job, lines = plan.all_jobs()[0], []
    models = dict.fromkeys(("first", "second", "third"), todo(plan, job, plan.tokens))
    left = {"first": work(plan), "second": None, "third": None}
    work_through(models, left.get, count=1, out=tmp_path, progress=lines.append, done=lambda: None)
    assert str(lines[0]).startswith("2 of 3 models")


@pytest.mark.slow
def test_stray_prints_do_not_break_the_records(plan, monkeypatch):
    source = """
import scaleinv.eval.worker as worker
def do(work, send):
    print("a library says hello")
    send({"kind": "step", "step": 1})
    return 0
worker.do = do
raise SystemExit(worker.main())
"""
    program(monkeypatch, source)
    records = []
    Workers(1).run(work(plan), records.append)
    assert records == [{"kind": "step", "step": 1}]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("print('{\"kind\": \"error\", \"message\": \"no space left\"}'); raise SystemExit(2)", "^no space left$"),
        ("raise ZeroDivisionError('of nothing')", "ZeroDivisionError: of nothing"),
        ("raise SystemExit(7)", "exit code 7"),
    ],
)  # fmt: skip
def test_a_failure_is_told_with_its_message(plan, monkeypatch, source, message):
    program(monkeypatch, source)
    workers = Workers(1)
    with pytest.raises(RuntimeError, match=message):
        workers.run(work(plan), lambda record: None)
    assert not workers.running


def test_a_signal_ends_all(plan, monkeypatch):
    program(monkeypatch, 'import time; print(\'{"kind": "step"}\', flush=True); time.sleep(100)')
    with Workers(1) as workers:
        started = threading.Event()
        errors = []

        def run() -> None:
            try:
                workers.run(work(plan), lambda record: started.set())
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(60)
        signal.raise_signal(signal.SIGTERM)
        thread.join(60)
        assert workers.stopped == signal.SIGTERM
        assert len(errors) == 1
        with pytest.raises(RuntimeError, match="stopped"):
            workers.run(work(plan), lambda record: None)


@pytest.mark.slow
def test_a_worker_ends_when_the_comparison_is_gone(plan):
    source = """
import scaleinv.eval.worker as worker
def do(work, send):
    while True:
        send({"kind": "step"})
worker.do = do
raise SystemExit(worker.main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", source],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    process.stdin.write(work(plan).to_json())
    process.stdin.close()
    assert process.stdout.readline()
    process.stdout.close()
    assert process.wait(60) == 1
