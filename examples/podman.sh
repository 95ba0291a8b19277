#!/bin/sh
# A container with leased devices, which its end gives back:
#
#   examples/podman.sh nvidia.com/gpu 2 --rm IMAGE nvidia-smi
#   examples/podman.sh amd.com/gpu 1 --detach --name=train IMAGE python3 train.py
#
# RESOURCE, COUNT, then whatever `podman run` takes.  The lease is podman's until the container is made, so that
# pulling the image may take its time and a failure gives the devices back; from then on it is the container's.
set -eu
resource=$1 count=$2
shift 2
# as another user than root in a container of your own, add --userns=keep-id
exec heteroctl run --resource "$resource" --count "$count" -- \
    sh -c 'exec podman run --device "heteroagent.org/lease=$HETERO_LEASE_ID" "$@"' podman "$@"
