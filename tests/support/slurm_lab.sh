#!/bin/bash
# A real SLURM with two nodes on this machine, each in a network namespace with its own address and name.
# `slurm_lab.sh up FOLDER` starts it with all its files in FOLDER, `slurm_lab.sh down FOLDER` ends it, and
# `slurm_lab.sh node FOLDER NODE` brings a node back that `node_lab.sh kill FOLDER NODE` has ended.
# Needs root, munge, iproute2 and Debian's slurm-wlm. Commands find it by SLURM_CONF=FOLDER/slurm.conf.
set -e
action=$1 lab=$2 nodes="1 2" here=$(dirname "$(readlink -f "$0")")

up() {
    mkdir -p "$lab"/{state,spool,log} /run/munge /var/log/munge /var/lib/munge
    chown munge:munge /run/munge /var/log/munge /var/lib/munge
    if ! pgrep -x munged > /dev/null; then
        runuser -u munge -- /usr/sbin/munged
        touch "$lab/own_munged"
    fi
    "$here/node_lab.sh" up "$lab"
    for i in $nodes; do mkdir -p "$lab/spool/mwn$i"; done
    configure > "$lab/slurm.conf"
    export SLURM_CONF=$lab/slurm.conf
    slurmctld -f "$SLURM_CONF"
    for i in $nodes; do node "mwn$i"; done
    for _ in $(seq 30); do
        [ "$(sinfo -h -N -p low -o %T | grep -c idle)" = 2 ] && return
        sleep 1
    done
    sinfo -N >&2
    exit 1
}

# Start slurmd on a node, also after `node_lab.sh kill`.
node() {
    "$here/node_lab.sh" run "$lab" "$1" exec slurmd -f "$lab/slurm.conf" -N "$1"
}

configure() {
    cat << CONF
ClusterName=meshwright
SlurmctldHost=$(hostname)(10.99.7.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,batch_sched_delay=0
SlurmdParameters=config_overrides
ReturnToService=2
SlurmdTimeout=5
KillWait=5
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool/%n
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd.%n.log
SlurmctldPidFile=$lab/slurmctld.pid
SlurmdPidFile=$lab/slurmd.%n.pid
$(for i in $nodes; do echo "NodeName=mwn$i NodeAddr=10.99.7.$i CPUs=4 RealMemory=4000 State=UNKNOWN"; done)
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 PreemptMode=REQUEUE GraceTime=60
PartitionName=high Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
CONF
}

down() {
    set +e
    export SLURM_CONF=$lab/slurm.conf
    timeout 10 scancel -u root
    sleep 1
    kill "$(cat "$lab/slurmctld.pid")"
    "$here/node_lab.sh" down "$lab"
    [ -e "$lab/own_munged" ] && kill "$(cat /run/munge/munged.pid)"
    true
}

shift 2
"$action" "$@"
