#!/usr/bin/env bash
# All GPU figures in one go, about three minutes on an H200: benchmarks/gpu.sh OUT
# Needs torch with CUDA and pydantic; MNIST in $STEELYARD_DATA for `compare` (noise of its shape without).
set -u
out=${1:?usage: benchmarks/gpu.sh OUT}
mkdir -p "$out"
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
bench() {
    echo "== python -m benchmarks.simulator $* --device cuda" >> "$out/gpu.log"
    timeout 110 python3 -m benchmarks.simulator "$@" --device cuda --logs "$out/logs" >> "$out/gpu.log" 2>&1 || echo "FAILED $*" >> "$out/gpu.log"
}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader > "$out/gpu.log"
for precision in tf32 bfloat16 float32; do bench --bench A --against loop --rounds 2 --precision $precision; done
for precision in tf32 bfloat16; do bench --bench compare --against loop --rounds 3 --precision $precision; done
for precision in tf32 bfloat16 float32; do bench --bench B --against loop --rounds 1 --precision $precision; done
timeout 100 python3 -m pytest tests/clients/test_local_gpu.py -m gpu -q -p no:cacheprovider -o addopts="" > "$out/pytest.log" 2>&1
tail -1 "$out/pytest.log" >> "$out/gpu.log"
rm -rf "$out/logs"
grep -E "^==|^\{|FAILED|passed|failed" "$out/gpu.log" | cut -c1-600
