# --- the same for every job: launch/slurm/job.sh -------------------------------------------------------------------
# A Ray cluster of this job alone, `megappo train` on its first node, and an end that leaves nothing behind.
# Exit status: that of `megappo train`; 75 (it stopped for the time limit, with a checkpoint) puts the job in the queue
# again; 1 also if a node does not come.

set -uo pipefail
say() { echo "$(date +%H:%M:%S) megappo job $SLURM_JOB_ID: $*"; }

logs="$MEGAPPO_RUN/logs"
export MEGAPPO_CONFIG="$MEGAPPO_RUN/launch/config-$SLURM_JOB_ID.yaml"
export MEGAPPO_HEAD_FILE="$MEGAPPO_RUN/launch/head-$SLURM_JOB_ID"
driver="" cluster="" stop="" interrupted=""

# shellcheck disable=SC2317 # called by traps
clean_up() {
    trap '' TERM INT USR1
    [ -n "$driver" ] && kill -TERM "$driver" 2>/dev/null
    await "$driver" "the driver" 60
    # Not by a signal to srun, which would kill: nodes need a moment to clean up.
    squeue --noheader --steps --job="$SLURM_JOB_ID" --format="%i %j" | awk '$2 == "megappo-ray" {print $1}' |
        xargs -r -n 1 scancel --signal=TERM
    await "$cluster" "the Ray cluster" 60
    rm -f "$MEGAPPO_HEAD_FILE"
}
# SIGKILL for a process that does not end within so many seconds.
# shellcheck disable=SC2317
await() {
    [ -n "$1" ] || return
    for ((i = 0; i < $3 * 5; i++)); do
        kill -0 "$1" 2>/dev/null || return
        sleep 0.2
    done
    say "$2 did not end within $3 s and is killed"
    kill -KILL "$1" 2>/dev/null
}
trap clean_up EXIT
trap 'say "cancelled"; exit 143' TERM INT
trap 'stop=1; interrupted=1; say "the time limit is near"' USR1

fail() {
    say "error: $*"
    exit 1
}
# The exit status of a process; traps may interrupt it.
wait_for() {
    local status
    while :; do
        wait "$1"
        status=$?
        [ -n "$interrupted" ] || return $status
        interrupted=""
        [ -n "$stop" ] && [ "$1" = "$driver" ] && ask_to_stop
    done
}
# Again and again, since a driver that is still starting does not listen yet; asking twice does no harm.
ask_to_stop() {
    while kill -USR1 "$driver" 2>/dev/null; do sleep 2; done
}

umask 077
mkdir -p "$logs" "$MEGAPPO_RUN/launch"
read_config >"$MEGAPPO_CONFIG" || fail "run.dir: $MEGAPPO_RUN cannot be written on $(hostname)"
rm -f "$MEGAPPO_HEAD_FILE"
umask 022
if [ -n "$MEGAPPO_SETUP_FILE" ]; then
    # shellcheck disable=SC1090 # the user's
    source "$MEGAPPO_SETUP_FILE" || fail "$MEGAPPO_SETUP_FILE failed with $?"
fi
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
say "nodes ${nodes[*]}, start ${SLURM_RESTART_COUNT:-0}, logs in $logs"

# Our own Ray: no address from outside, a port by the job's number, a token that only this job knows.
unset RAY_ADDRESS RAY_NAMESPACE RAY_AUTH_TOKEN_PATH
RAY_AUTH_TOKEN=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token
export MEGAPPO_PORT=$((20000 + SLURM_JOB_ID % 10000))
while (exec 3<>"/dev/tcp/127.0.0.1/$MEGAPPO_PORT") 2>/dev/null; do MEGAPPO_PORT=$((MEGAPPO_PORT + 1)); done

ended="the Ray cluster ended: see the log of the node named above, $logs/node-NAME.log"
SECONDS=0
srun --nodes="${#nodes[@]}" --ntasks="${#nodes[@]}" --ntasks-per-node=1 --whole --overlap --cpu-bind=none \
    --kill-on-bad-exit=1 --unbuffered --job-name=megappo-ray bash "$MEGAPPO_SCRIPTS/node.sh" &
cluster=$!
until RAY_ADDRESS=$(cat "$MEGAPPO_HEAD_FILE" 2>/dev/null); do
    kill -0 "$cluster" 2>/dev/null || fail "$ended"
    [ $SECONDS -lt "$MEGAPPO_NODE_TIMEOUT" ] || fail "the head node ${nodes[0]} started no Ray within" \
        "$MEGAPPO_NODE_TIMEOUT s: see $logs/node-${nodes[0]}.log, or wait longer (--node-timeout)"
    sleep 0.2
done
export RAY_ADDRESS

# The others had to wait for a slow head: at least half of the time is theirs.
left=$((MEGAPPO_NODE_TIMEOUT - SECONDS))
[ "$left" -ge $((MEGAPPO_NODE_TIMEOUT / 2)) ] || left=$((MEGAPPO_NODE_TIMEOUT / 2))
"$MEGAPPO_PYTHON" -m megappo.cluster.readiness "$left" "${nodes[@]}" &
readiness=$!
while kill -0 "$readiness" 2>/dev/null; do
    kill -0 "$cluster" 2>/dev/null || { kill "$readiness" && fail "$ended"; }
    sleep 0.2
done
wait_for "$readiness" || fail "not all nodes were there after $SECONDS s (--node-timeout); each has its" \
    "log in $logs/node-NAME.log, and --sbatch=--exclude=NAME leaves one out"
say "all ${#nodes[@]} nodes are there after $SECONDS s"
[ -z "$stop" ] || fail "the time limit came before training began: raise --time"

# Ignored until Python listens: by default the signal would kill.
(trap '' USR1 && exec "$MEGAPPO_PYTHON" -m megappo train "$MEGAPPO_CONFIG") &
driver=$!
wait_for "$driver"
status=$?
driver=""
case $status in
0) say "finished" ;;
75)
    clean_up
    say "stopped with a checkpoint; back into the queue"
    trap 'exit 0' TERM # Slurm ends what it requeues
    scontrol requeue "$SLURM_JOB_ID" || fail "Slurm does not requeue it: submit the same script again to go on"
    sleep 60
    ;;
*) say "megappo train ended with $status; the same job script goes on from the last checkpoint" ;;
esac
exit $status
