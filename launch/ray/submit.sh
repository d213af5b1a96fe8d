#!/usr/bin/env bash
# Train on a Ray cluster that is already running.
#
#   bash launch/ray/submit.sh ADDRESS CONFIG [key=value ...]
#
#   ADDRESS     the cluster's dashboard, for instance http://head:8265; with token authentication, set RAY_AUTH_TOKEN or
#               RAY_AUTH_TOKEN_PATH
#
# Call it in the run's working directory, on a file system that all nodes see at the same path, as they must see the
# model, the data and run.dir: nothing is uploaded. The environment of this call (VIRTUAL_ENV or PATH) is used there, and
# of its variables those of NCCL, gloo, vLLM and trackers (NCCL_*, WANDB_*, ...; the cluster's dashboard shows them).
# Ending this command does not end the run: `ray job stop` does, and the same call goes on from the last checkpoint.

set -euo pipefail
case "${1:-}" in
http://* | https://*) ;;
*) echo "usage: bash launch/ray/submit.sh http://HEAD:8265 CONFIG [key=value ...]" >&2 && exit 2 ;;
esac
[ $# -gt 1 ] || { echo "usage: bash launch/ray/submit.sh $1 CONFIG [key=value ...]" >&2 && exit 2; }
address="$1"
shift

# Ray takes a token only in this mode, and newer clusters ask for one by default.
if [ -n "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]; then export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"; fi
python -m megappo check "$@"
python - "$address" <<'PYTHON'
import sys

from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

try:
    JobSubmissionClient(sys.argv[1])
except AuthenticationError:
    sys.exit(f"submit: {sys.argv[1]} asks for a token: set RAY_AUTH_TOKEN, or RAY_AUTH_TOKEN_PATH to a file with it")
except ConnectionError as error:
    sys.exit(f"submit: {error} Is this the address of the cluster's dashboard, and can it be reached from here?")
PYTHON
python_there="$(command -v python)"
runtime_env="$(python -m megappo.cluster.job_environment)"
printf -v entry '%q ' "$python_there" -m megappo train "$@"
printf -v folder '%q' "$PWD"
exec "$python_there" -m ray.scripts.scripts job submit --address "$address" --runtime-env-json "$runtime_env" \
    -- bash -c "cd $folder && exec $entry"
