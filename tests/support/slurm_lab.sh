#!/bin/bash
# A real SLURM with two nodes on this machine, each in a network namespace with its own address and name.
# `slurm_lab.sh up FOLDER` starts it with all its files in FOLDER, `slurm_lab.sh down FOLDER` ends it.
# Needs root, munge, iproute2 and Debian's slurm-wlm. Commands find it by SLURM_CONF=FOLDER/slurm.conf.
set -e
action=$1 lab=$2 nodes="1 2"

up() {
    mkdir -p "$lab"/{state,spool,log} /run/munge /var/log/munge /var/lib/munge
    chown munge:munge /run/munge /var/log/munge /var/lib/munge
    if ! pgrep -x munged > /dev/null; then
        runuser -u munge -- /usr/sbin/munged
        touch "$lab/own_munged"
    fi
    ip link add mwbr0 type bridge
    ip addr add 10.99.7.254/24 dev mwbr0
    ip link set mwbr0 up
    cp /etc/hosts "$lab/hosts"
    echo 'nameserver 127.0.0.1' > "$lab/resolv.conf"
    for i in $nodes; do
        ip netns add "mwn$i"
        ip link add "mwve$i" type veth peer name eth0 netns "mwn$i"
        ip link set "mwve$i" master mwbr0 up
        ip -n "mwn$i" addr add "10.99.7.$i/24" dev eth0
        ip -n "mwn$i" link set eth0 up
        ip -n "mwn$i" link set lo up
        ip -n "mwn$i" route add default via 10.99.7.254
        echo "10.99.7.$i mwn$i" >> "$lab/hosts"
        mkdir -p "$lab/spool/mwn$i"
    done
    configure > "$lab/slurm.conf"
    export SLURM_CONF=$lab/slurm.conf
    slurmctld -f "$SLURM_CONF"
    for i in $nodes; do
        nsenter --net="/run/netns/mwn$i" unshare --uts --mount sh -c "hostname mwn$i
            mount --bind $lab/resolv.conf /etc/resolv.conf
            mount --bind $lab/hosts /etc/hosts
            exec slurmd -f $SLURM_CONF -N mwn$i"
    done
    for _ in $(seq 30); do
        [ "$(sinfo -h -N -o %T | grep -c idle)" = 2 ] && return
        sleep 1
    done
    sinfo -N >&2
    exit 1
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
SlurmdTimeout=30
KillWait=5
JobRequeue=1
StateSaveLocation=$lab/state
SlurmdSpoolDir=$lab/spool/%n
SlurmctldLogFile=$lab/log/slurmctld.log
SlurmdLogFile=$lab/log/slurmd.%n.log
SlurmctldPidFile=$lab/slurmctld.pid
SlurmdPidFile=$lab/slurmd.%n.pid
$(for i in $nodes; do echo "NodeName=mwn$i NodeAddr=10.99.7.$i CPUs=4 RealMemory=4000 State=UNKNOWN"; done)
PartitionName=low Nodes=ALL Default=YES MaxTime=INFINITE State=UP
CONF
}

down() {
    set +e
    export SLURM_CONF=$lab/slurm.conf
    timeout 10 scancel -u root
    sleep 1
    for i in $nodes; do kill "$(cat "$lab/slurmd.mwn$i.pid")"; done
    kill "$(cat "$lab/slurmctld.pid")"
    sleep 1
    for i in $nodes; do ip netns del "mwn$i"; done
    ip link del mwbr0
    [ -e "$lab/own_munged" ] && kill "$(cat /run/munge/munged.pid)"
    true
}

"$action"
