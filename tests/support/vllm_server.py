"""vLLM itself, which wants other versions of some packages than the workers: it has an environment
of its own.

FT_TEST_VLLM=/path/to/its/python          a server is started on the processors or the GPU, as vLLM
was built for FT_TEST_VLLM=http://127.0.0.1:8000/v1     one that serves the sample base in fp32
already, as in `command` below
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.support.bases import SAMPLE
from tests.support.ports import free_port

VLLM = os.environ.get("FT_TEST_VLLM", "")
ABSENT = "vLLM is not here: FT_TEST_VLLM names a Python that has it, or a server"
START_SECONDS = 900


def command(python: str, port: int, model: Path = SAMPLE) -> list[str]:
    """`model`: a folder, by the name of which it is served; the sample base with adapters, another
    without.
    """
    program = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    base = [
        "--model",
        str(model),
        "--served-model-name",
        model.name,
        "--dtype",
        "float32",
        "--max-model-len",
        "512",
    ]
    adapters = ["--enable-lora", "--max-lora-rank", "16"] if model == SAMPLE else []
    return [*program, *base, *adapters, "--enforce-eager"]


@contextmanager
def vllm_serving(folder: Path, model: Path = SAMPLE) -> Iterator[str]:
    """Yield the URL of a server of a model (`command`). `folder`: its home, and its log."""
    if VLLM.startswith("http"):
        yield VLLM
        return
    port = free_port()
    own = {
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    environment = {
        **os.environ,
        **own,
        "HF_HUB_OFFLINE": "1",
        "PYTHONSAFEPATH": "1",
        "HOME": str(folder),
    }
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command(VLLM, port, model), env=environment, stdout=log, stderr=log, cwd=folder
        )
    try:
        url = f"http://127.0.0.1:{port}/v1"
        deadline = time.monotonic() + START_SECONDS
        while not _answers(url):
            assert server.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, "vLLM did not start"
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/models", trust_env=False).is_success
    except httpx2.HTTPError:
        return False
