#!/usr/bin/env bash
# A rented host with GPUs and a root shell: RunPod, Lambda, Vast.ai and the like. Copy the repository there, then run in its folder
#   bash deploy/examples/gpu-hosts/rented-host.sh BASE [SPEC]       such as Qwen/Qwen3-8B
# STATE is the disk that outlives the host (RunPod: /workspace): the same command on the next one continues the training.
set -euo pipefail

base=${1:?usage: rented-host.sh ORG/NAME [SPEC]}
spec=${2:-deploy/examples/cuda-8b-nf4.yaml}
state=${STATE:-/workspace}
export FT_HOME="$state/ft" FT_MODELS="$state/models"

[ -x "$state/venv/bin/ft" ] || {
    python3 -m venv "$state/venv"
    "$state/venv/bin/pip" install -c constraints.txt '.[workers]'
}
"$state/venv/bin/ft" pull "$base"
"$state/venv/bin/ft" run "$spec" --model "$base" --run-dir "$state/run"
echo "The adapter is in $state/run/adapter."
