#!/usr/bin/env bash
# One worker under torchrun: checks the set-up together with all other workers, then trains.
#
#     torchrun ... --no-python worker.sh --folder /shared/checkpoints
#
# Each attempt is checked: machines that come back one by one then always wait for each other in the same place.
set -euo pipefail
laconic doctor
exec python "$(dirname "$0")/train.py" "$@"
