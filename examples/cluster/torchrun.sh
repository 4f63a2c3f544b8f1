#!/usr/bin/env bash
# Several machines with torchrun. Start it on each of them, with the same HEAD and another NODE:
#
#     NODES=2 NODE=0 HEAD=node-0 LACONIC_PLAN="diloco(period=16)" ./torchrun.sh --folder /shared/checkpoints
#
#     NODES    how many machines                  WORKERS  how many workers on each; by default one for each GPU, or CPU
#     NODE     the index of this one, from 0      PORT     a port of machine 0 that the others reach; by default 29400
#     HEAD     name or address of machine 0       RUN      a name for the run, the same on all machines
#     ADDRESS  this machine's address, where its own name does not lead to it on the other machines
#
# gloo uses the interface of this machine's own name; GLOO_SOCKET_IFNAME names another (docs/doctor.md).
set -euo pipefail
: "${NODES:?how many machines there are}" "${NODE:?the index of this machine, from 0}" "${HEAD:?the address of machine 0}"

# Without this, workers on two machines do not come back after a restart (pytorch issue 135712).
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1

options=(--nnodes "$NODES" --nproc-per-node "${WORKERS:-auto}" --max-restarts "${RESTARTS:-3}"
    --rdzv-backend c10d --rdzv-id "${RUN:-laconic}" --rdzv-endpoint "$HEAD:${PORT:-29400}"
    --rdzv-conf "is_host=$((NODE == 0))")
if [ -n "${ADDRESS:-}" ]; then
    options+=(--local-addr "$ADDRESS")
fi
exec torchrun "${options[@]}" --no-python "$(dirname "$0")/worker.sh" "$@"
