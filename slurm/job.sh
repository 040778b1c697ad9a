# Sourced by the job scripts. `megarl_job CONFIG key=value …` checks the config on the first node, then runs one launcher per node;
# `megarl_step COMMAND …` only does the latter.
#
# The job script is copied by Slurm, so everything is relative to where sbatch was called: the checkout, on a shared file system.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
if [ ! -x .venv/bin/megarl ]; then
    echo "slurm: $PWD/.venv/bin/megarl is not there: call sbatch in the checkout, after make setup (CPUs) or make setup-gpu (docs/cluster.md)" >&2
    exit 2
fi

megarl_job() {
    # Typos and impossible sizes end the job here, with exit status 2, before any node is used.
    .venv/bin/megarl train "$@" --dry-run > /dev/null
    for command in ${MEGARL_COMMANDS:-train}; do
        megarl_step "$command" "$@"
    done
}

# SIGTERM (scancel, preemption) comes to the launchers from Slurm itself: they save a checkpoint and end (engines that have joined a run give
# back their requests). SIGUSR1 (#SBATCH --signal:
# the time limit is near) comes to this script alone. It asks the launchers for the same, and puts the job back into the queue, from
# where it goes on from that checkpoint. By scancel: an srun that gets SIGTERM kills its tasks outright.
# --cpu-bind=none: the launcher has a core for each rank; some clusters would bind it, and all that it starts, to a single one.
# --wait: when a node is lost the others end, and the job must still be there when Slurm notices (SlurmdTimeout, 300 s) and requeues it.
megarl_step() {
    local status=0 again=
    srun ${SLURM_HET_SIZE:+--het-group=0-$((SLURM_HET_SIZE - 1))} --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=0 --wait=600 \
        .venv/bin/megarl "$@" &
    local step=$!
    trap : TERM
    trap 'again=yes; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
    while kill -0 $step 2>/dev/null; do
        status=0
        wait $step || status=$?
    done
    trap - TERM USR1
    if [ -n "$again" ]; then
        scontrol requeue "$SLURM_JOB_ID"
        exit 0
    fi
    if [ $status -ne 0 ]; then
        exit $status
    fi
}
