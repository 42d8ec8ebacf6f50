#!/bin/bash
# Two nodes on this machine, mwn1 and mwn2, each a network namespace with its own address and name.
# `node_lab.sh up FOLDER` makes them, `node_lab.sh down FOLDER` ends what runs there and removes them,
# `node_lab.sh run FOLDER NODE COMMAND` runs a shell command on one, `node_lab.sh kill FOLDER NODE` is a power cut.
# Needs root and iproute2.
set -e
action=$1 lab=$2 nodes="mwn1 mwn2"

up() {
    mkdir -p "$lab"
    ip link add mwbr0 type bridge
    ip addr add 10.99.7.254/24 dev mwbr0
    ip link set mwbr0 up
    cp /etc/hosts "$lab/hosts"
    echo 'nameserver 127.0.0.1' > "$lab/resolv.conf"
    for node in $nodes; do
        number=${node#mwn}
        ip netns add "$node"
        ip link add "mwve$number" type veth peer name eth0 netns "$node"
        ip link set "mwve$number" master mwbr0 up
        ip -n "$node" addr add "10.99.7.$number/24" dev eth0
        ip -n "$node" link set eth0 up
        ip -n "$node" link set lo up
        ip -n "$node" route add default via 10.99.7.254
        echo "10.99.7.$number $node" >> "$lab/hosts"
    done
}

run() {
    node=$1
    shift
    exec nsenter --net="/run/netns/$node" unshare --uts --mount sh -c "hostname $node
        mount --bind $lab/resolv.conf /etc/resolv.conf
        mount --bind $lab/hosts /etc/hosts
        $*"
}

kill_node() {
    ip netns pids "$1" | xargs -r kill -9
}

down() {
    set +e
    for node in $nodes; do kill_node "$node"; done
    sleep 0.5
    for node in $nodes; do ip netns del "$node"; done
    ip link del mwbr0
    true
}

shift 2
case $action in
    up | down | run) "$action" "$@" ;;
    kill) kill_node "$@" ;;
esac
