"""The wheel without the repository, in an environment whose top-level packages `api` and `workers`
belong to somebody else.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ft_service.version import this_version
from tests.support.attempts import kill_leftovers, wait_for
from tests.support.wheels import WheelEnvironment, build_wheel

HEAVY = re.compile(
    r"(torch|transformers|peft|safetensors|numpy|bitsandbytes|fastapi|uvicorn|openai)\b",
    re.IGNORECASE,
)
SECONDS = 120.0
SHORT = (
    "training.max_steps=2",
    "training.batch_size=4",
    "training.warmup_ratio=0",
    "checkpoint.save_steps=2",
)


@pytest.fixture
def installed(tmp_path: Path) -> Iterator[WheelEnvironment]:
    made = WheelEnvironment(tmp_path / "environment", build_wheel(tmp_path))
    for name in ("api", "workers"):
        (made.packages / name).mkdir()
        (made.packages / name / "__init__.py").write_text(
            f"raise ImportError('the foreign package {name}')\n"
        )
    yield made
    kill_leftovers(tmp_path)


@pytest.mark.slow
def test_the_wheel_alone_plans_serves_and_trains_beside_foreign_packages(
    installed: WheelEnvironment,
) -> None:
    installed.share(hidden=lambda name: HEAVY.match(name) is not None)
    assert installed.output("ft", "--version") == f"ft-service {this_version()}\n"
    copied = installed.output("ft", "quickstart", "--copy", "mine")
    assert "quickstart.yaml" in copied
    assert "150 steps over 1,200 samples" in installed.output(
        "ft", "plan", "mine/quickstart.yaml", "--hardware", "H100"
    )
    assert (
        "The quickstart needs openai, fastapi, uvicorn, torch"
        in installed.run("ft", "quickstart").stderr
    )
    assert installed.run("python", "-c", "import torch").returncode

    installed.share(hidden=lambda name: False)
    for name in ("api", "workers"):
        assert (
            f"the foreign package {name}" in installed.run("python", "-c", f"import {name}").stderr
        )
    whose = installed.output("python", "-P", "-c", "import ft_service; print(ft_service.__file__)")
    assert Path(whose.strip()).is_relative_to(installed.packages)

    home = installed.folder / "home"
    settings = {"FT_HOME": str(home), "FT_SLOTS": "2", "OMP_NUM_THREADS": "1"}
    with (installed.folder / "server.log").open("wb") as log:
        command = [str(installed.folder / "bin/ft"), "serve", "--port", "0"]
        server = subprocess.Popen(
            command,
            cwd=installed.folder,
            env=installed.environment(**settings),
            stdout=log,
            stderr=log,
        )
    try:
        wait_for(lambda: (home / "server.json").exists() or server.poll() is not None, SECONDS)
        assert server.poll() is None, (installed.folder / "server.log").read_text()
        assert "tiny-llama" in installed.output("ft", "models", **settings)
        changes = [word for change in SHORT for word in ("--set", change)]
        watched = installed.output(
            "ft", "submit", "--watch", "mine/quickstart.yaml", *changes, **settings
        )
        assert "has succeeded: ft:tiny-llama:local:quickstart:" in watched
        installed.output("ft", "download", "last", "--out", "adapter", **settings)
        assert (installed.folder / "adapter/adapter_model.safetensors").is_file()
        assert "ft-service" in installed.output("python", "-c", PAGE, home, **settings)
    finally:
        server.send_signal(signal.SIGTERM)
        assert server.wait(SECONDS) == 0


PAGE = """
import json, pathlib, sys, urllib.request
url = json.loads((pathlib.Path(sys.argv[1]) / "server.json").read_text())["url"]
for path in ("/sign-in", "/page/static/page.css", "/docs"):
    print(urllib.request.urlopen(url + path).read().decode()[:20_000])
"""
"""Prints the page's first view, its style and the API's: they are made of files in the wheel."""
