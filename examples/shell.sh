#!/bin/sh
# A lease by hand: allocate, take its environment, use it, and give it back whatever happens.
#
#   examples/shell.sh nvidia.com/gpu 2 python3 train.py
#
# For one command, `heteroctl run -r nvidia.com/gpu -n 2 -- python3 train.py` does the same; this is for
# scripts that do several things with the devices, or something with the lease.
set -eu
if [ $# -lt 3 ]; then
    echo "usage: $0 RESOURCE COUNT COMMAND ..." >&2
    exit 2
fi
resource=$1 count=$2
shift 2

# In use at once, and bound to this shell: should it be killed, the agent takes the devices back.
lease=$(heteroctl --json allocate -r "$resource" -n "$count" --confirm --pid $$ |
    python3 -c 'import json, sys; print(json.load(sys.stdin)["lease"])')

trap 'heteroctl release "$lease" >/dev/null' EXIT
trap 'exit 129' HUP
trap 'exit 130' INT
trap 'exit 143' TERM

# Sets and exports the lease's variables, and unsets those that would choose other devices.
variables=$(heteroctl manifest "$lease")
eval "$variables"

echo "leased: $HETERO_DEVICES" >&2
"$@"
