#!/usr/bin/env bash
# What is to be run on a GPU, in parts, each step with a limit of its own so that one that hangs costs little: logs and lines go to OUT.
#
#   bash benchmarks/gpu_runs.sh OUT checks timings accuracy study ...
#
# Seconds on an H200 with 16 cores. Parts that time anything need the machine alone; checks and warm may run beside others.
#   warm      50  compiles what the timings need
#   checks   330  the tests of a GPU, the kernels against their definitions first
#   scoring   30  window scores, selection, gather; ncu after it
#   prefill  110  compress against transformers' prefill at 32K and 128K
#   auto      60  what auto, auto-twice and auto-told cost beside adadropkv
#   decode    25  decode steps and their attention
#   loading   35  a file onto the GPU, to the first token
#   serve    110  dropkv serve under load, in float32 and bfloat16
#   speed    100  bench speed, answers at 131,072 tokens
#   probe     75  the accuracy bench: kernels and functions of one batch, tiles
#   accuracy      plans of docs/results.md; SECONDS_LEFT (540) bounds them, what is missing goes on in the next run; LONG=FOLDER: the long model
#                 RULER_TASKS, NEEDLES_TASKS: some of a plan's
#   study         benchmarks.question_free on the seed for choosing; STUDY_SECONDS (200); STUDY="more options"
set -u
out=$(mkdir -p "${1:?usage: gpu_runs.sh OUT PART...}" && cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1
export PYTHONPATH="${PYTHONPATH:+$PYTHONPATH:}$PWD" PYTHONUNBUFFERED=1
python=${PYTHON:-python3}
model=${MODEL:-smollm2-135m}

step() { # step SECONDS NAME ARGUMENTS...: runs Python, keeps the log, shows its end
    local limit=$1 name=$2 begun=$SECONDS
    shift 2
    timeout -k 5 "$limit" "$python" "$@" > "$out/$name.txt" 2>&1
    local code=$?
    echo "### $name: exit $code, $((SECONDS - begun)) s"
    tail -n "${SHOWN:-25}" "$out/$name.txt" | cut -c1-200
}

left() { # seconds of LIMIT that this script has not used
    echo $((${1:?} - SECONDS))
}

for part in "$@"; do
    case $part in
    warm)
        for name in score_kernel replay_kernel decode_gpu; do
            SHOWN=1 step 100 "warm-$name" "benchmarks/$name.py" &
        done
        wait ;;
    checks)
        for dtype in float32 float16 bfloat16; do # float32 compiles for minutes
            SHOWN=4 step 200 "check-replay-$dtype" tests/dropkv/check_fused_replay.py "$dtype" cuda &
        done
        SHOWN=4 step 100 check-select tests/dropkv/check_window_select.py cuda &
        wait
        step 250 checks -m pytest -q -m gpu -n 6 -k "not memory_runs_out" tests
        SHOWN=4 step 100 check-memory -m pytest -q -m gpu -k memory_runs_out tests ;; # it fills the GPU: alone
    scoring)
        SHOWN=40 step 60 scoring benchmarks/score_kernel.py
        step 40 ncu benchmarks/score_ncu.py ;;
    prefill) step 200 prefill benchmarks/prefill_gpu.py --repeat 1 ;;
    auto)
        step 90 auto benchmarks/prefill_gpu.py --tokens 32768 --observe replay --method adadropkv,auto,auto-twice,auto-told --repeat 1 ;;
    decode) step 90 decode benchmarks/decode_gpu.py ;;
    loading) step 90 loading benchmarks/load_gpu.py --kinds same --threads 2,4 --token --phases ;;
    serve) step 150 serve benchmarks/serve_load.py --device cuda --model "$model" ;;
    speed)
        SHOWN=40 step 200 speed -m dropkv_cli bench speed -o "$out/speed" --shape mistral-7b --lengths 131072 --batch-sizes 1,16,64 \
            --sides answer --observers tail --answer-tokens 128 --repeat 1 ;;
    probe)
        SHOWN=40 step 90 probe benchmarks/accuracy_kernels.py benchmarks/plans/ruler-smollm2.toml
        SHOWN=40 step 60 tiles benchmarks/variants/accuracy_tiles.py ;;
    accuracy)
        for plan in ruler needles; do
            seconds=$(left "${SECONDS_LEFT:-540}")
            [ "$seconds" -gt 20 ] || break
            tasks=${plan^^}_TASKS
            step $((seconds + 30)) "$plan" benchmarks/accuracy_many.py "benchmarks/plans/$plan-smollm2.toml" -o "$out/$plan-smollm2" \
                --model "$model" --deadline "$seconds" ${!tasks:+--tasks "${!tasks}"}
        done
        seconds=$(left "${SECONDS_LEFT:-540}")
        if [ -n "${LONG:-}" ] && [ "$seconds" -gt 20 ]; then
            step $((seconds + 30)) long benchmarks/accuracy_many.py benchmarks/plans/needles-long.toml -o "$out/needles-long" --model "$LONG" \
                --deadline "$seconds"
        fi ;;
    study)
        # shellcheck disable=SC2086  # options are meant to fall apart
        SHOWN=45 step $((${STUDY_SECONDS:-200} + 40)) study -m benchmarks.question_free.spread -o "$out/study" --model "$model" \
            --seconds "${STUDY_SECONDS:-200}" ${STUDY:---groups finalists,streaming --samples 400 --budgets 0.05,0.1,0.25} ;;
    *) echo "no part is called $part" >&2; exit 2 ;;
    esac
done
