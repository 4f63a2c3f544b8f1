#!/usr/bin/env bash
# Replicas that come and go, with torchft: `pip install "laconic-train[torchft]"` on each machine. On the first one, start
#
#     torchft_lighthouse --min_replicas 1 --join_timeout_ms 10000 --bind "[::]:29510"
#
# and on all of them, as often as there are replicas:
#
#     HEAD=node-0 LACONIC_PLAN="diloco(period=16)" ./torchft.sh --steps 400
set -euo pipefail
: "${HEAD:?the address of the machine with the lighthouse}"
export TORCHFT_LIGHTHOUSE="${TORCHFT_LIGHTHOUSE:-http://$HEAD:29510}"
laconic doctor  # of this machine alone: replicas need not be there at the same time
exec python "$(dirname "$0")/torchft_train.py" "$@"
