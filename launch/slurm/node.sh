#!/usr/bin/env bash
# One node of a job's own Ray cluster, started on every node by job.sh through srun, which ends it by SIGTERM.
# Nothing of it stays: Ray's processes and their children are killed by their mark, the temporary folder is removed.

set -uo pipefail
say() { echo "megappo: node $SLURMD_NODENAME: $*"; }

temporary="${MEGAPPO_TMP:-/tmp}/megappo-$SLURM_JOB_ID-$SLURM_NODEID" # short: Ray makes sockets of long names in it
mark="MEGAPPO_NODE=$SLURM_JOB_ID/$SLURMD_NODENAME"

# Every process of this node's Ray has the mark in its environment; other jobs' Ray has not.
# shellcheck disable=SC2317 # called by traps, as what follows
marked() { grep -lszxF "$mark" /proc/[0-9]*/environ | cut -d/ -f3; }

# shellcheck disable=SC2317
clean_up() {
    trap '' TERM INT
    marked | xargs -r kill -TERM 2>/dev/null
    for _ in {1..25}; do
        [ -n "$(marked)" ] || break
        sleep 0.2
    done
    # Twice: what was being forked at the first is there at the second.
    for _ in 1 2; do marked | xargs -r kill -KILL 2>/dev/null; done
    rm -rf "$temporary"
    say "cleaned up"
}
trap clean_up EXIT
trap 'exit 0' TERM INT

[ -e "$MEGAPPO_CONFIG" ] || { say "run.dir: $MEGAPPO_RUN of the head node is not seen here: put it on a shared file system" && exit 1; }
exec >>"$MEGAPPO_RUN/logs/node-$SLURMD_NODENAME.log" 2>&1

if [ -n "$MEGAPPO_SETUP_FILE" ]; then
    # shellcheck disable=SC1090 # the user's
    source "$MEGAPPO_SETUP_FILE" || { say "$MEGAPPO_SETUP_FILE failed with $?" && exit 1; }
fi
ulimit -n "$(ulimit -Hn)"
ulimit -l "$(ulimit -Hl)" # network cards want memory locked

if [ -n "$MEGAPPO_INTERFACE" ]; then
    address=$(ip -4 -o addr show dev "$MEGAPPO_INTERFACE" 2>&1 | awk '{sub("/.*", "", $4); print $4; exit}')
    export NCCL_SOCKET_IFNAME="${NCCL_SOCKET_IFNAME:-=$MEGAPPO_INTERFACE}" # = is for this one, not all that begin so
    export GLOO_SOCKET_IFNAME="${GLOO_SOCKET_IFNAME:-$MEGAPPO_INTERFACE}"
else
    name=$(scontrol show node "$SLURMD_NODENAME" | sed -n 's/.*NodeAddr=\([^ ]*\).*/\1/p')
    address=$(getent ahostsv4 "$name" | awk '{print $1; exit}')
    # Debian gives a host's own name 127.0.1.1, at which other nodes do not reach it.
    if [[ "$address" == 127.* && "$name" != 127.* && "${SLURM_NNODES:-1}" != 1 ]]; then
        loopback=$address
        address=$(hostname -I | tr ' ' '\n' | grep -m 1 -E '^[0-9.]+$')
        [ -n "$address" ] || { say "$name is $loopback, at which other nodes do not reach it: name its network by --interface" && exit 1; }
        say "$name is $loopback, at which other nodes do not reach it: taking $address (another: --interface)"
    fi
fi
[ -n "$address" ] || { say "has no IPv4 address (interface: ${MEGAPPO_INTERFACE:-as Slurm knows the node})" && exit 1; }

resources="\"node_$SLURMD_NODENAME\": 1"
read -ra pools <<<"$(sed -n "$((SLURM_NODEID + 1))p" <<<"$MEGAPPO_NODE_POOLS")"
for pool in "${pools[@]}"; do resources+=", \"pool_$pool\": 1"; done
gpus=0
[ "$MEGAPPO_DEVICE" = cuda ] && gpus=$MEGAPPO_DEVICES_PER_NODE

# Worker ports as the system gives them, so that two jobs on a node do not meet.
options=(--block --disable-usage-stats --node-ip-address "$address" --temp-dir "$temporary"
    --num-cpus $((MEGAPPO_DEVICES_PER_NODE + 2)) --num-gpus "$gpus" --resources "{$resources}"
    --min-worker-port 0 --max-worker-port 0 --dashboard-agent-listen-port 0)
if [ "$SLURM_NODEID" = 0 ]; then
    options+=(--head --port "$MEGAPPO_PORT" --include-dashboard false)
else
    until head=$(cat "$MEGAPPO_HEAD_FILE" 2>/dev/null) && (exec 3<>"/dev/tcp/${head%:*}/${head#*:}") 2>/dev/null; do
        [ $SECONDS -lt "$MEGAPPO_NODE_TIMEOUT" ] || { say "cannot reach the head, ${head:-which did not start}" && exit 1; }
        sleep 0.2
    done
    options+=(--address "$head")
fi

rm -rf "$temporary"
say "$address, pools: ${pools[*]:-none}"
mkdir -m 700 "$temporary" || exit 1
env "$mark" "$MEGAPPO_PYTHON" -m ray.scripts.scripts start "${options[@]}" &
ray=$!
# Others may join once Ray itself says that the head is up; it writes this file then.
if [ "$SLURM_NODEID" = 0 ]; then
    until [ -e "$temporary/ray_current_cluster" ] || ! kill -0 "$ray" 2>/dev/null; do sleep 0.2; done
    echo "$address:$MEGAPPO_PORT" >"$MEGAPPO_HEAD_FILE.partial" && mv "$MEGAPPO_HEAD_FILE.partial" "$MEGAPPO_HEAD_FILE"
fi
wait "$ray" 2>/dev/null
say "Ray ended with $?:"
tail -n 5 "$temporary"/session_latest/logs/{gcs_server,raylet}.{out,err} 2>/dev/null
exit 1
