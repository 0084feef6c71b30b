#!/usr/bin/env bash
# All GPU figures in one go, about six minutes on an H200: benchmarks/gpu.sh OUT
# Needs torch with CUDA, the project's dependencies and pytest-xdist; MNIST in $STEELYARD_DATA for `compare` (noise of
# its shape without). `benchmarks/gpu.sh OUT tiny` starts the same scripts on the CPU with the smallest work there is.
# Ends with 1 if one of them failed.
set -u
out=${1:?usage: benchmarks/gpu.sh OUT [tiny]}
mkdir -p "$out"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1
device=cuda
[ "${2:-}" = tiny ] && device=cpu
bench() {
    echo "== python -m benchmarks.simulator $* --device $device" >> "$out/gpu.log"
    timeout 180 python3 -m benchmarks.simulator "$@" --device $device --logs "$out/logs" >> "$out/gpu.log" 2>&1 || echo "FAILED $*" >> "$out/gpu.log"
}
: > "$out/gpu.log"
if [ $device = cpu ]; then
    bench --bench C --against "" --rounds 1 --warmup 0
    bench --bench compare --recipe quickstart --against "" --rounds 1 --warmup 0
else
    nvidia-smi --query-gpu=name,driver_version --format=csv,noheader >> "$out/gpu.log"
    for name in A B; do bench --bench $name --against loop --rounds 2 --precision float32,tf32,bfloat16; done
    for precision in bfloat16 tf32 float32; do bench --bench compare --against loop --rounds 3 --precision $precision; done
    bench --bench compare --against "" --rounds 1 --precision bfloat16 --commands 20
    python3 -m pytest tests/clients/local/test_gpu.py -m gpu -q -n 8 -p no:cacheprovider -o addopts="--import-mode=importlib" > "$out/pytest.log" 2>&1
    tail -1 "$out/pytest.log" >> "$out/gpu.log"
fi
rm -rf "$out/logs"
grep -E "^==|^\{|FAILED|passed|failed" "$out/gpu.log" | cut -c1-900
! grep -qE "FAILED|[0-9] failed" "$out/gpu.log"
