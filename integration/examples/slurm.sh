#!/usr/bin/env bash
# Trains on Slurm: one torchrun on each node, a process for each GPU. When the job is preempted, or
# its time is over, it saves, goes back into the queue, and goes on from there, with as many nodes
# as it gets then: the global batch stays.
#
#     sbatch --nodes 4 integration/examples/slurm.sh --layout dp=16,tp=2 --model small
#
# What stands after the name of this file goes to `trainwright train`; set a partition and an
# account as your cluster asks for. RUN, PROCESSES and TRAINWRIGHT in the environment say where the
# run is kept, how many processes a node has, and what starts one.

#SBATCH --job-name=trainwright
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --no-kill
#SBATCH --open-mode=append
# To this script alone (B:), two minutes before the end: long enough for a step and a checkpoint.
# A job that is preempted gets SIGTERM instead, as long before its end as GraceTime says.
#SBATCH --signal=B:USR1@120

set -o errexit -o nounset -o pipefail

run=${RUN:-runs/$SLURM_JOB_ID}                 # the same name after each requeue
processes=${PROCESSES:-${SLURM_GPUS_ON_NODE:-1}}
restarts=${SLURM_RESTART_COUNT:-0}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
port=$((20000 + SLURM_JOB_ID % 20000))         # two jobs on a node do not meet

# Nodes meet at the first one. Where a node is lost, torchrun starts the processes of the others
# again, and --elastic lets them go on from the last checkpoint with fewer data ranks.
# The rendezvous carries the number of restarts: nothing of the job before the requeue is left in it.
srun --no-kill --kill-on-bad-exit=0 ${TRAINWRIGHT:-torchrun} \
    --nnodes "1:$SLURM_JOB_NUM_NODES" --nproc-per-node "$processes" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$first:$port" --rdzv-id "$SLURM_JOB_ID-$restarts" \
    --shutdown-timeout 100 \
    -m trainwright.integration train --out "$run" --elastic --save-on-signal "$@" &
training=$!

# Each torchrun gets SIGTERM and passes it on to its processes. These end after the step that they
# are in: all after the same one, even if one of them hears of it later.
leaving=
leave() {
    leaving=yes
    scancel --signal=TERM "$SLURM_JOB_ID"      # the steps of the job, not this script
}
trap leave USR1 TERM

# A trap interrupts wait, which returns more than 128 then: wait again until srun has ended.
while true; do
    code=0
    wait "$training" || code=$?
    kill -0 "$training" 2>/dev/null || break
done

# A run that was saved is not finished. One that failed stays out of the queue: it would fail again.
if [[ -n $leaving && $code -ne 0 ]]; then
    echo "saved in $run; going back into the queue" >&2
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
