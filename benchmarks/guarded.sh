#!/usr/bin/env bash
# The stage `last` of benchmarks.guarded on one machine with a GPU: benchmarks/guarded.sh OUT SECONDS [PROCESSES]
# Digits on single cores, the other data on the GPU, the most wanted first; what there is after SECONDS is kept in
# OUT/last.jsonl. $STEELYARD_DATA holds mnist, unipen62 and cifar10_jpeg (all of it, or every n-th image).
# A further call with the same OUT goes on.
set -u
out=${1:?usage: benchmarks/guarded.sh OUT SECONDS [PROCESSES]} seconds=${2:?seconds} processes=${3:-14}
mkdir -p "$out/jobs"
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.."
export PYTHONPATH="$PWD/src:$PWD:${PYTHONPATH:-}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
if [ ! -e "$STEELYARD_DATA/cifar10/cifar10.npz" ] && [ -e "$STEELYARD_DATA/cifar10_jpeg/train.npz" ]; then
    mkdir -p "$STEELYARD_DATA/cifar10"
    python3 -c "from pathlib import Path; from benchmarks.published.__main__ import pack; pack(Path('$STEELYARD_DATA/cifar10/cifar10.npz'), 1)" || true
fi
all="decoy+inflation,backdoor+inflation,class-flip+inflation,ipm+inflation,scaled-reversal+inflation"
all="$all,backdoor-boosted+inflation,alie+inflation,min-max+inflation,distributed-backdoor+inflation"
all="$all,neurotoxin+inflation,slow-drift+inflation,sign-flip+inflation,min-sum+inflation,mimic+inflation"
all="$all,semantic-boosted+inflation,semantic-backdoor+inflation,bias-push+inflation,free-rider+inflation"
all="$all,free-riders+inflation,label-flip+inflation,gaussian+inflation,late-inflation,inflation"
few="decoy+inflation,backdoor+inflation,ipm+inflation,scaled-reversal+inflation"
rules="EQ clip(EQ) clip(capped(RD;max_shares=1.5)) median(EQ) fltrust(EQ) guarded"
begun=$(date +%s)
job() { printf '%s\n' "$*"; } # NAME OPTIONS
adaptive() { # ATTACK RULE: a process for each kind of data
    for part in 0 1; do job "$1-$part-${2%%(*} --only digits --shares 0.2 --attacks $1+inflation --part $part/2 --alone --device cpu --seeds 2 --rules $2"; done
}
jobs() {
    local part rule data
    for part in 0 1; do job "gpu-mnist-$part --only mnist --shares 0.2 --attacks $all --part $part/2 --device auto --memory 6 --seeds 2"; done
    for data in unipen62 cifar10; do job "gpu-$data --only $data --shares 0.2 --attacks $few,class-flip+inflation --device auto --memory 6 --seeds 2"; done
    for part in 0 1 2 3; do job "digits-$part --only digits --shares 0.2 --attacks $all --part $part/4 --device cpu"; done
    for rule in "guarded" "median(EQ)" "clip(capped(RD;max_shares=1.5))" "fltrust(EQ)"; do adaptive adaptive "$rule"; done
    for rule in "guarded" "median(EQ)"; do adaptive adaptive-insider "$rule"; done
    for part in 0 1; do job "shares-$part --only digits --shares 0.1,0.3 --attacks $few --part $part/2 --alone --device cpu"; done
    for part in 0 1; do job "gpu-decoys-$part --only mnist --shares 0.2 --attacks adaptive-decoys+inflation --part $part/2 --alone --device auto --memory 6 --seeds 1 --rules guarded"; done
    job "rows20 --only digits --shares 0.2 --rows 20 --attacks $few --device cpu"
    job "clients4 --only digits --shares 0.25 --clients 4 --attacks $few --device cpu"
    job "clients8 --only digits --shares 0.125 --clients 8 --attacks $few --device cpu"
    job "wrong --only digits --shares 0.2 --held wrong --attacks $few --device cpu"
    job "lacking --only digits --shares 0.2 --held lacking --attacks $few --device cpu"
    adaptive adaptive-sleeper guarded
}
one() { # what one process does with a line
    local name=$1 left
    shift
    left=$((seconds - $(date +%s) + begun - 5))
    [ "$left" -gt 15 ] || exit 0
    local options=() rest=()
    case " $* " in *" --rules "*) ;; *) rest=(--rules "$rules") ;; esac
    local rows=(--rows 60)
    case " $* " in *" --rows "*) rows=() ;; esac
    timeout "$left" python3 -m benchmarks.guarded "$out/jobs/$name" --stage last --whole --seconds "$left" "${rows[@]}" "$@" "${rest[@]}" > "$out/jobs/$name.log" 2>&1
    echo "$name ended with $?"
}
export -f one
export out seconds begun rules
jobs | xargs -P "$processes" -I{} bash -c 'one $1' _ {}
cat "$out"/jobs/*/*.jsonl > "$out/last.jsonl"
wc -l "$out/last.jsonl"
