#!/usr/bin/env bash
# Real SLURM and real MPI on this one machine, without systemd: installs Debian's packages, starts a cluster of one node,
# runs the examples on it and stops it again. Needs root, on Debian or Ubuntu. One line a check; returns how many failed.
set -uo pipefail
cd "$(dirname "$0")/.."
root=$PWD
export PATH="$root/.venv/bin:$PATH:/usr/sbin" OMP_NUM_THREADS=1
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1
work=$(mktemp -d)
failed=0
recipe=(digits --max-steps 90 --log-every 3 --strategy "Gradients(Mean(TopK(0.01), ErrorFeedback()))")

main() {
    [ "$(id -u)" = 0 ] || die "needs root, to install and start daemons"
    command -v thinwire > /dev/null || die "thinwire is not there: make setup"
    trap stop EXIT
    install slurm-wlm munge openmpi-bin mpich
    start_munge
    start_slurm
    cd "$work"
    ln -s "$root/.venv" .venv
    check "srun, four tasks" by_srun
    check "mpirun of Open MPI, four processes" by_mpirun openmpi open-mpi.sh
    check "mpirun of MPICH, four processes" by_mpirun mpich mpich.sh
    check "srun, an elastic run that loses a task" elastic
    check "a job is signalled, requeues and ends as if undisturbed" requeued
    check "a batch script without srun starts its own workers" by_itself
    check "a sweep as a job array" swept
    exit "$failed"
}

# ---- the checks: each leaves what it prints in a file, which is shown where it fails ----

by_srun() {
    srun --ntasks=4 thinwire train "${recipe[@]}" --name srun && finished srun
}

by_mpirun() { # NAME OF THE MPI, EXAMPLE
    MPIRUN=mpirun.$1 "$root/examples/mpi/$2" "${recipe[@]}" --name "$1" && same "$1"
}

elastic() { # a task is killed; the others go on, and the run ends with a summary
    local launcher
    srun --ntasks=4 --no-kill --kill-on-bad-exit=0 thinwire train "${recipe[@]}" --elastic --name elastic --resume &
    launcher=$!
    wait_for 120 test -s runs/elastic/metrics.jsonl || return 1
    grep -lzx "SLURM_PROCID=2" /proc/[0-9]*/environ 2> /dev/null | cut -d/ -f3 | xargs kill -KILL
    wait "$launcher" # its exit code is that of the task that was killed
    finished elastic && tail -1 runs/elastic/metrics.jsonl | grep -q '"workers": 3' || { tail -1 runs/elastic/metrics.jsonl; return 1; }
}

requeued() {
    local job
    job=$(sbatch --parsable --partition=all "$root/examples/slurm/one-node.sbatch" "${recipe[@]}" --name requeued) || return 1
    wait_for 300 test -s runs/requeued/metrics.jsonl || { cat "thinwire-$job.log"; return 1; }
    scancel --signal=USR1 "$job"
    wait_for 300 job_ended "$job"
    cat "thinwire-$job.log"
    scontrol show job "$job" | grep -q 'JobState=COMPLETED.*' || { scontrol show job "$job"; return 1; }
    scontrol show job "$job" | grep -q 'Restarts=1 ' || { scontrol show job "$job"; return 1; }
    grep -q "stopped by SIGUSR1, saved in runs/requeued/checkpoints/step-" "thinwire-$job.log" && same requeued
}

by_itself() {
    printf '#!/bin/bash\nthinwire train %s --workers 2 --max-steps 4 --name own\n' digits > own.sbatch
    sbatch --wait --ntasks=4 --output=own.log own.sbatch || { cat own.log; return 1; }
    grep -q '"workers": 2' runs/own/summary.json
}

swept() {
    cat > grid.toml << 'TOML'
recipe = "digits"
output = "sweep"
[fixed]
workers = 2
max_steps = 12
[grid]
seed = [1, 2]
TOML
    thinwire sweep grid.toml --slurm partition=all,time=10 || return 1
    grep -qE '^[^-]+_[01]$' <(squeue --noheader --array --format=%i) || { echo "no job array in the queue"; return 1; }
    wait_for 300 sweep_ended || { thinwire sweep grid.toml --status; return 1; }
    [ "$(ls sweep/*/summary.json | wc -l)" = 2 ]
}

sweep_ended() {
    [ -z "$(squeue --noheader)" ]
}

# ---- what checks are made of ----

finished() { # RUN
    test -s "runs/$1/summary.json" || { echo "runs/$1/summary.json is missing"; return 1; }
}

same() { # RUN: whether it learned to the last bit what the one under srun did
    finished "$1" && python3 - "$1" << 'PYTHON'
import json, sys
one, other = (json.load(open(f"runs/{name}/summary.json"))["final"] for name in ("srun", sys.argv[1]))
if one != other:
    sys.exit(f"results differ: {one} under srun, {other} here")
PYTHON
}

job_ended() { # JOB
    scontrol show job "$1" | grep -qE 'JobState=(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)'
}

wait_for() { # SECONDS COMMAND...
    local deadline=$((SECONDS + $1))
    shift
    until "$@"; do
        [ $SECONDS -lt $deadline ] || { echo "waited too long for: $*"; return 1; }
        sleep 0.2
    done
}

check() { # NAME COMMAND...
    local name=$1 began=$SECONDS
    shift
    if "$@" > "$work/check.log" 2>&1; then
        echo "ok      $name ($((SECONDS - began)) s)"
    else
        echo "FAILED  $name"
        sed 's/^/        /' "$work/check.log"
        failed=$((failed + 1))
    fi
}

die() {
    echo "try_cluster: $*" >&2
    exit 1
}

# ---- the cluster ----

install() { # PACKAGES...
    local attempt
    dpkg -s "$@" > /dev/null 2>&1 && return
    export DEBIAN_FRONTEND=noninteractive
    for attempt in 1 2 3; do
        apt-get update -qq > "$work/apt.log" 2>&1 &&
            apt-get install -y -qq --no-install-recommends "$@" >> "$work/apt.log" 2>&1 && return
        sleep $((10 * attempt))
    done
    tail -5 "$work/apt.log" >&2
    die "cannot install $*"
}

start_munge() {
    (umask 077 && head -c 1024 /dev/urandom > "$work/munge.key")
    munged --force --key-file="$work/munge.key" --socket="$work/munge.socket" --pid-file="$work/munged.pid" \
        --log-file="$work/munged.log" --seed-file="$work/munge.seed" || die "munged does not start: $(tail -1 "$work/munged.log")"
}

start_slurm() {
    local host
    host=$(hostname -s)
    mkdir "$work/state" "$work/spool"
    # A requeued job waits until its credential has expired; the node says it has more cores than there may be.
    cat > "$work/slurm.conf" << CONF
ClusterName=try
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthInfo=socket=$work/munge.socket,cred_expire=5
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
StateSaveLocation=$work/state
SlurmdSpoolDir=$work/spool
SlurmctldPidFile=$work/slurmctld.pid
SlurmdPidFile=$work/slurmd.pid
SlurmctldLogFile=$work/slurmctld.log
SlurmdLogFile=$work/slurmd.log
NodeName=$host NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
    export SLURM_CONF="$work/slurm.conf"
    { slurmctld && slurmd; } > "$work/start.log" 2>&1 || die "SLURM does not start: $(tail -1 "$work/start.log")"
    wait_for 30 node_is_idle > /dev/null || die "SLURM's node does not come up: $(tail -1 "$work/slurmd.log")"
}

node_is_idle() {
    [ "$(sinfo --noheader --format=%t 2> /dev/null)" = idle ]
}

free_port() {
    python3 -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

stop() {
    local daemon
    scancel --user=root --quiet 2> /dev/null
    for daemon in slurmd slurmctld munged; do
        [ -s "$work/$daemon.pid" ] && kill "$(cat "$work/$daemon.pid")" && wait_for 10 gone "$(cat "$work/$daemon.pid")"
    done 2> /dev/null
    [ "$failed" = 0 ] && rm -rf "$work" || echo "left for a look: $work"
}

gone() { # PROCESS: not there, or a zombie where nobody collects it
    ! kill -0 "$1" 2> /dev/null || grep -q '^State:.*Z' "/proc/$1/status"
}

main
