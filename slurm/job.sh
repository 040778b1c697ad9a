# The job scripts source this file. `megarl_job CONFIG key=value …` checks the config on the first node, then runs one launcher per node.
# `megarl_step COMMAND …` only runs the launchers.
#
# Slurm copies the job script elsewhere. So all paths are relative to the folder where sbatch was called: the checkout, on a shared file
# system.
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:?submit this script with sbatch}"
if [ ! -x .venv/bin/megarl ]; then
    echo "slurm: $PWD/.venv/bin/megarl is not there: call sbatch in the checkout, after make setup (CPUs) or make setup-gpu (docs/cluster.md)" >&2
    exit 2
fi

megarl_job() {
    # Typos and impossible sizes end the job here with exit status 2, and a run that does not fit into its GPUs with 1, before a launcher
    # starts. The log has the plan only then.
    local plan status=0
    plan=$(.venv/bin/megarl train "$@" --dry-run) || status=$?
    if [ $status -ne 0 ]; then
        [ -z "$plan" ] || echo "$plan"
        exit $status
    fi
    for command in ${MEGARL_COMMANDS:-train}; do
        megarl_step "$command" "$@"
    done
}

# On scancel or preemption, Slurm itself sends SIGTERM to the launchers. They save a checkpoint and end. Engines that joined a run give back
# their requests.
# Near the time limit, Slurm sends SIGUSR1 to this script alone (#SBATCH --signal). The script sends SIGTERM to the launchers, and puts the
# job back into the queue. The job then continues from that checkpoint. The script calls scancel for that, because an srun that gets SIGTERM
# itself kills its tasks at once.
# --cpu-bind=none: some clusters would bind the launcher, and all that it starts, to one core. It needs a core for each rank.
# --wait: when a node is lost, the other launchers end. The job must last until Slurm notices (SlurmdTimeout, 300 s) and requeues it.
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
