#!/usr/bin/env bash
# One machine with any number of GPUs, or none: check, then train on a Ray that ends with the run.
#
#   bash launch/local.sh CONFIG [key=value ...]
#
# Without a GPU the run is on CPU processes (run.device=cpu). Interrupted (Ctrl-C, SIGTERM), it resumes by the same
# call; SIGUSR1 to the printed process number makes a checkpoint after the current step and ends it with status 75.

set -euo pipefail
[ $# -gt 0 ] || { echo "usage: bash launch/local.sh CONFIG [key=value ...]" >&2 && exit 2; }
here="$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=launch/setup.sh
source "$here/setup.sh"

unset RAY_ADDRESS # a cluster that is already there is not meant; for one: launch/ray/submit.sh
overrides=()
gpus=$( (nvidia-smi -L 2>/dev/null || true) | grep -c '^GPU' || true)
if [ "$gpus" -eq 0 ]; then
    overrides+=(run.device=cpu)
    export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fi
echo "local: $gpus GPUs, process $$" >&2
exec python -m megappo train "$@" "${overrides[@]}"
