#!/usr/bin/env bash
# All GPU figures in one go, about six minutes on an H200: benchmarks/gpu.sh OUT
# Needs torch with CUDA, the project's dependencies and pytest-xdist; MNIST in $STEELYARD_DATA for `compare` (noise of
# its shape without).
set -u
out=${1:?usage: benchmarks/gpu.sh OUT}
mkdir -p "$out"
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
bench() {
    echo "== python -m benchmarks.simulator $* --device cuda" >> "$out/gpu.log"
    timeout 180 python3 -m benchmarks.simulator "$@" --device cuda --logs "$out/logs" >> "$out/gpu.log" 2>&1 || echo "FAILED $*" >> "$out/gpu.log"
}
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader > "$out/gpu.log"
for name in A B; do bench --bench $name --against loop --rounds 2 --precision float32,tf32,bfloat16; done
for precision in bfloat16 tf32 float32; do bench --bench compare --against loop --rounds 3 --precision $precision; done
bench --bench compare --against "" --rounds 1 --precision bfloat16 --commands 20
python3 -m pytest tests/clients/local/test_simulation_gpu.py -m gpu -q -n 8 -p no:cacheprovider -o addopts="--import-mode=importlib" > "$out/pytest.log" 2>&1
tail -1 "$out/pytest.log" >> "$out/gpu.log"
rm -rf "$out/logs"
grep -E "^==|^\{|FAILED|passed|failed" "$out/gpu.log" | cut -c1-900
