"""A GPU from Modal, in the folder of this repository:

    modal run deploy/examples/gpu-hosts/modal_job.py --spec deploy/examples/cuda-8b-nf4.yaml --base
    Qwen/Qwen3-8B modal volume get ft-state run/adapter my-adapter

Base and run directory are kept in the volume `ft-state`: called again, it continues from the last
checkpoint.
"""

from __future__ import annotations

import os
import subprocess

import modal

STATE = "/state"
app = modal.App("ft-service")
volume = modal.Volume.from_name("ft-state", create_if_missing=True)
image = (
    modal.Image.debian_slim(python_version="3.12")
    .apt_install("gcc", "libc6-dev")
    .add_local_dir(".", "/src", copy=True, ignore=[".git", ".venv", ".ft", "build", "dist"])
    .run_commands("cd /src && python -m pip install -c constraints.txt '.[workers]'")
)


@app.function(image=image, gpu="L4", volumes={STATE: volume}, timeout=24 * 3600, retries=0)
def train(spec: str, base: str, run: str) -> int:
    """Train a SPEC of the repository on a base of the hub.

    Returns the exit code of `ft run`: 75 means run it again.
    """
    environment = {**os.environ, "FT_MODELS": f"{STATE}/models", "FT_CACHE": "/tmp/cache"}
    try:
        subprocess.run(["ft", "pull", base], env=environment, cwd="/src", check=True)
        command = ["ft", "run", spec, "--model", base, "--run-dir", f"{STATE}/{run}"]
        return subprocess.run(command, env=environment, cwd="/src", check=False).returncode
    finally:
        volume.commit()


@app.local_entrypoint()
def main(
    spec: str = "deploy/examples/cuda-8b-nf4.yaml", base: str = "Qwen/Qwen3-8B", run: str = "run"
) -> None:
    raise SystemExit(train.remote(spec, base, run))
