#!/usr/bin/env bash
# Watch a small language model learn to add by PPO: about 5 minutes on two cores, no GPU, nothing prepared.
#
#   bash launch/quickstart.sh                 # goes on where an earlier call was stopped
#   bash launch/quickstart.sh --fresh         # forgets the earlier run first
#   bash launch/quickstart.sh ppo.clip=0.1    # any key=value that `megappo train` takes
#
# It makes arithmetic data and a tiny model under runs/quickstart, trains as configs/quickstart.yaml says (an actor on
# four Megatron ranks, critic and reference in a pool of their own, vLLM generating) and writes one HTML page.

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
run=runs/quickstart
config=configs/quickstart.yaml

overrides=()
for argument in "$@"; do
    case "$argument" in
    --fresh) rm -rf "$run" ;;
    run.dir=*) echo "quickstart: the run is always $run; for another folder use: megappo train $config $argument" >&2 && exit 2 ;;
    *=*) overrides+=("$argument") ;;
    *) echo "usage: bash launch/quickstart.sh [--fresh] [key=value ...]" >&2 && exit 2 ;;
    esac
done

# It runs on CPU processes everywhere. Beside a GPU it has an environment of its own, so that the CUDA stack stays.
if [ -z "${MEGAPPO_VENV:-}" ] && command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    export MEGAPPO_VENV="$PWD/runs/.venv-cpu"
fi
export MEGAPPO_STACK=cpu CUDA_VISIBLE_DEVICES=""
# shellcheck source=launch/setup.sh
source launch/setup.sh
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
SECONDS=0

# Before and after, and where to look. Succeeds only if the run has all its steps.
summary() {
    python - "$run" <<'PYTHON'
import sys
from pathlib import Path

from megappo.report.console import duration, validation_scores
from megappo.report.parts import seconds_of
from megappo.report.run_log import read_log
from megappo.strict_yaml import parse

run = Path(sys.argv[1])
log = read_log(run)
config = run / "config.yaml"
if not log or not config.is_file():
    sys.exit(1)
wanted = parse(config.read_text(), [])["run"]["steps"]
if log[-1]["step"] < wanted:
    print(f"quickstart: {log[-1]['step']} of {wanted} steps are done")
    sys.exit(1)
scores = [found for row in log if (found := validation_scores(row["metrics"]))]
for name in scores[-1] if scores else ():
    print(f"validation {name}: {scores[0][name]:.1%} before PPO, {scores[-1][name]:.1%} after {wanted} steps")
print(f"trained for {duration(seconds_of(log))}")
PYTHON
}

if [ ${#overrides[@]} -eq 0 ] && summary 2>/dev/null; then
    megappo report "$run" >/dev/null
    echo "report: $PWD/$run/report.html"
    echo "This run is finished. To train anew: bash launch/quickstart.sh --fresh"
    exit 0
fi

# Made under another name first, so that what was interrupted is not taken for whole.
if [ ! -d "$run/data" ]; then
    echo "quickstart: making the data: sums of two-digit numbers"
    rm -rf "$run/data.part"
    megappo data arithmetic "$run/data.part" --digits 2 --operations + --train 2000 --validation 200 >/dev/null
    mv "$run/data.part" "$run/data"
fi
if [ ! -d "$run/model" ]; then
    echo "quickstart: making the model, warm-started by supervised training (about 20 s)"
    rm -rf "$run/model.part"
    python launch/make_tiny_model.py "$run/model.part" --data "$run/data"
    mv "$run/model.part" "$run/model"
fi

megappo train "$config" "${overrides[@]}" || {
    status=$?
    if [ "$status" -eq 2 ] && [ -d "$run/checkpoints" ]; then
        echo "quickstart: the run is always $run; to begin it anew with these settings: bash launch/quickstart.sh --fresh ${overrides[*]}" >&2
    fi
    exit "$status"
}
megappo report "$run" >/dev/null
echo
summary
echo "report: $PWD/$run/report.html"
echo "all of it took $((SECONDS / 60)) min $((SECONDS % 60)) s after the installation"
