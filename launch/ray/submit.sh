#!/usr/bin/env bash
# Train on a Ray cluster that is already running.
#
#   bash launch/ray/submit.sh ADDRESS CONFIG [key=value ...]
#
#   ADDRESS     the cluster's dashboard, for instance http://head:8265; with token authentication, set RAY_AUTH_TOKEN
#
# Call it in the run's working directory, on a file system that all nodes see at the same path, as they must see the
# model, the data and run.dir: nothing is uploaded. The environment of this call (VIRTUAL_ENV or PATH) is used there.
# Ending this command does not end the run: `ray job stop` does, and the same call goes on from the last checkpoint.

set -euo pipefail
case "${1:-}" in
http://* | https://*) ;;
*) echo "usage: bash launch/ray/submit.sh http://HEAD:8265 CONFIG [key=value ...]" >&2 && exit 2 ;;
esac
[ $# -gt 1 ] || { echo "usage: bash launch/ray/submit.sh $1 CONFIG [key=value ...]" >&2 && exit 2; }
address="$1"
shift

python -m megappo check "$@"
python_there="$(command -v python)"
variables=(PYTHONPATH OMP_NUM_THREADS MEGAPPO_PIN_POOLS)
runtime_env="$(python -c '
import json, os, sys
print(json.dumps({"env_vars": {name: os.environ[name] for name in sys.argv[1:] if name in os.environ}}))
' "${variables[@]}")"
printf -v entry '%q ' "$python_there" -m megappo train "$@"
printf -v folder '%q' "$PWD"
exec "$python_there" -m ray.scripts.scripts job submit --address "$address" --runtime-env-json "$runtime_env" \
    -- bash -c "cd $folder && exec $entry"
