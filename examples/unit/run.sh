#!/bin/sh
# A command as a transient unit that may use its leased devices and no others, by the kernel's word.
# As root; --uid runs it as somebody else.
#
#   examples/unit/run.sh nvidia.com/gpu 1 nvidia-smi
set -eu
if [ $# -lt 3 ]; then
    echo "usage: $0 RESOURCE COUNT COMMAND ..." >&2
    exit 2
fi
resource=$1 count=$2
shift 2
exec heteroctl run --unit -r "$resource" -n "$count" --wait 60 -- "$@"
