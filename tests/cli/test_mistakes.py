"""Every mistake is one line and exit code 2, and nothing is written."""

import pytest

from scaleinv.cli import main

HUGE = "9" * 400

MISTAKES = [
    ("", "required: COMMAND"),
    ("trian", "invalid choice: 'trian'"),
    ("train --stepz 3", "unrecognized arguments: --stepz 3"),
    ("train --method alibii", "did you mean alibi"),
    ("train --method ''", "argument --method: must be text that is not empty"),
    ("train --preset big", "argument --preset: must be 'mini' or 'small' or '162m' or '304m', got 'big'"),
    ("train --steps 0", "argument --steps: must be a positive integer, got 0"),
    ("train --steps -3", "argument --steps"),
    ("train --steps 1.5", "argument --steps: must be a positive integer, got '1.5'"),
    (f"train --steps {HUGE}", "argument --steps: must be a positive integer"),
    ("train --batch-tokens 1099511627776", "argument --batch-tokens: must be an integer from 1 to 2,147,483,648"),
    ("train --batch-tokens 100", "batch_tokens must be a multiple of the training length 512, got 100"),
    ("train --micro-tokens -1", "argument --micro-tokens: must be a positive integer"),
    ("train --seed -1", "argument --seed: must be an integer of at least 0"),
    ("train --tau nan", "argument --tau: must be positive and finite, got nan"),
    ("train --tau inf", "argument --tau: must be positive and finite, got inf"),
    ("train --lr-matrices -1", "argument --lr-matrices: must be finite and not negative"),
    ("train --lr-matrices 1e999", "argument --lr-matrices: must be finite and not negative"),
    ("train --betas 0.9", "argument --betas: must be 2 numbers from 0 to 1, 1 excluded"),
    ("train --betas 0.9,x", "argument --betas"),
    ("train --decay 1.5", "argument --decay: must be a number from 0 to 1"),
    ("train --schedule warm", "argument --schedule: must be 'linear' or 'cosine', got 'warm'"),
    ("train --width 30 --heads 4", "width 30 must split into heads=4"),
    ("train --out ''", "argument --out: must be text that is not empty"),
    ("train --data ''", "argument --data: must be text that is not empty"),
    ("train --device cuda", "device cuda is not available: torch finds no CUDA devices"),
    ("train --device gpu", "device must be auto, cpu, cuda or cuda:N, got 'gpu'"),
    ("train --device ''", "argument --device: must be text that is not empty"),
    ("train --config nowhere.toml", "nowhere.toml is not a file"),
    ("train --config /dev/zero", "/dev/zero is not a file"),
    ("train --config ''", "argument --config: must be text that is not empty"),
    ("train --resume ''", "argument --resume: must be text that is not empty"),
    ("train --resume nowhere", "nowhere holds no run"),
    ("train --resume run --seed 3", ": --seed cannot be changed"),
    ("train --resume run --preset mini", ": --preset cannot be changed"),
    ("train --resume run --method alibi --steps 9", ": --method cannot be changed"),
    ("train --resume run --tau 10 --learnable-tau --out x", ": --tau, --learnable-tau, --out cannot be changed"),
    ("evaluate", "required: RUN"),
    ("evaluate ''", "argument RUN: must be text that is not empty"),
    ("evaluate nowhere", "nowhere holds no run"),
    ("evaluate run --lengths 4y", "lengths must read like 4x"),
    ("evaluate run --lengths ''", "lengths must read like 4x"),
    ("evaluate run --lengths=--", "argument --lengths: '--' is not a value"),
    ("evaluate run --methods yarm", "unknown method 'yarm': did you mean yarn"),
    ("evaluate run --methods alibi", "alibi"),
    ("evaluate run --tokens 0", "argument --tokens: must be a positive integer"),
    ("evaluate run --step -1", "argument --step: must be an integer of at least 0"),
    ("evaluate run --step 77", "77"),
    ("evaluate run --out ''", "argument --out: must be text that is not empty"),
    ("evaluate run --device cuda:9", "device cuda:9 is not available"),
    ("compare", "compare needs --out"),
    ("compare --out ''", "argument --out: must be text that is not empty"),
    ("compare --out x --sweep rho=3", "sweep must read like tau="),
    ("compare --out x --sweep tau=nan", "sweep: tau must be one or more numbers above 0, got"),
    ("compare --out x --methods rope,yarm", "unknown method 'yarm'"),
    ("compare --out x --seeds 0", "argument --seeds"),
    ("compare --out x --jobs 0", "argument --jobs"),
    ("compare --out x --tokens -5", "argument --tokens"),
    ("compare --out x --lengths 0x", "lengths must read like 4x"),
    ("compare --out x --device cuda", "device cuda is not available"),
    ("compare --out x --preset big", "argument --preset"),
    ("needle nowhere", "nowhere holds no run"),
    ("needle run --samples 0", "argument --samples: must be a positive integer"),
    ("needle run --depth 2", "argument --depth: must be a number from 0 to 1"),
    ("needle run --methods alibi", "alibi"),
    ("needle run --device cuda", "device cuda is not available"),
    ("generate ''", "argument RUN: must be text that is not empty"),
    ("generate nowhere", "nowhere holds no run"),
    ("generate run --tokens -1", "argument --tokens: must be an integer of at least 0"),
    ("generate run --temperature nan", "argument --temperature: must be finite and not negative"),
    ("generate run --top-p 0", "argument --top-p: must be a number from 0 to 1, 0 excluded"),
    ("generate run --top-k 0", "argument --top-k: must be a positive integer"),
    ("generate run --method yarm", "did you mean yarn"),
    ("generate run --seed -1", "argument --seed"),
    ("generate run --device tpu", "device must be auto, cpu, cuda or cuda:N"),
    ("report nowhere", "nowhere"),
    ("report ''", "argument DIR: must be text that is not empty"),
    ("analyze", "required: what"),
    ("analyze maths", "invalid choice: 'maths'"),
    ("analyze model", "analyze model needs a PATH"),
    ("analyze model ''", "must be text that is not empty"),
    ("analyze theory --out ''", "argument --out: must be text that is not empty"),
    ("analyze model run --lengths x", "lengths must read like 4x"),
    ("prepare --out shards", "required: --text"),
    ("prepare --text nowhere.txt --out shards --tokenizer bytes", "nowhere.txt"),
    ("prepare --text run --out ''", "argument --out: must be text that is not empty"),
    ("prepare --text run --out shards --workers 0", "argument --workers: must be a positive integer"),
    ("prepare --text run --out shards --val-fraction 1", "argument --val-fraction: must be a number from 0 to 1"),
    ("prepare --text run --out shards --tokenizer morse", "morse"),
    ("convert --out x", "required: SOURCE"),
    ("convert '' --out x", "argument SOURCE: must be text that is not empty"),
    ("convert run", "required: --out"),
    ("convert run --out x --tau 0", "argument --tau: must be positive and finite"),
    ("convert run --out x --p 2", "argument --p: must be a number from 0 to 1"),
    ("convert run --out x --stretch ntk", "argument --stretch: invalid choice: 'ntk'"),
    ("adapt", "required: MODEL"),
    ("adapt ''", "argument MODEL: must be text that is not empty"),
    ("adapt run --variants stok", "unknown variant 'stok': did you mean stock"),
    ("adapt run --tokens many", "tokens must read like 50M, 300k or 16384, got 'many'"),
    ("adapt run --lora 0", "argument --lora: must be a positive integer"),
    ("adapt run --lengths 0x", "lengths must read like 4x"),
    ("adapt nowhere/at/all", "'nowhere/at/all' is neither a folder nor the id of a model"),
    ("export nowhere --out x", "nowhere holds no run"),
    ("export run --out ''", "argument --out: must be text that is not empty"),
]


def tree(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("command", "message"), MISTAKES, ids=[command[:60] or "nothing" for command, _ in MISTAKES])
def test_a_mistake_is_one_line_and_writes_nothing(command, message, run, tmp_path, capsys):
    before = tree(tmp_path)
    words = ["" if word == "''" else word for word in command.split()]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("scaleinv: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1, printed.err
    assert tree(tmp_path) == before
