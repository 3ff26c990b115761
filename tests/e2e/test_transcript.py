"""README and docs as a newcomer follows them: their blocks, as written and in order, in a copy of
the project.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.attempts import kill_leftovers, wait_for
from tests.support.blocks import PAGES, ROOT, Block, blocks

SECONDS = 600.0
ELSEWHERE = {
    r"git clone|TORCH_INDEX=|make quickstart$": "set-up needs a network; "
    "tests/ft_service/cli/quickstart has the rest",
    r"lm-eval/bin": "a package index; tests/ft_service/client/test_suite.py has the rest",
    r"^pip install": "a package index; tests/e2e/test_installed_wheel.py has the rest",
    r"\b(kubectl|kind|docker)\b|<ID>": "a cluster; tests/cluster and tests/deploy",
    r"^ft pull |^ft (plan|run|submit) .*my-8b": "16 GB from a hub, and GPUs; "
    "tests/e2e/test_tutorial_plans.py has the plans",
    r"^(vllm|ollama) |llama\.cpp": "somebody else's server",
    r"pg_dump|rsync": "PostgreSQL's and rsync's own",
    r"--rdzv-endpoint": "two hosts; tests/e2e/test_two_hosts.py",
    r"api\.openai\.com|OPENAI_BASE_URL|OPENAI_WEBHOOK_SECRET": "OpenAI's own service, a key with "
    "no end, or a secret",
}
"""What no block here can do (a pattern on its lines) → why, or where it is tested."""


@dataclass
class Newcomer:
    """A terminal in the project's folder; what one block exports the next one knows."""

    folder: Path
    environment: dict[str, str]
    server: subprocess.Popen[bytes] | None = None

    def serve(self, command: str) -> None:
        if self.server is None:
            with (self.folder.parent / "server.log").open("wb") as log:
                self.server = subprocess.Popen(
                    ["bash", "-c", command],
                    cwd=self.folder,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
        wait_for(
            lambda: (self.folder / ".ft/server.json").exists() or self.server_is_gone(), SECONDS
        )
        assert not self.server_is_gone(), (self.folder.parent / "server.log").read_text()

    def server_is_gone(self) -> bool:
        return self.server is not None and self.server.poll() is not None

    def do(self, block: Block) -> str:
        """What a block prints. Fails unless it ends well."""
        state = self.folder.parent / "state"
        text = self._told_apart(block.text)
        code = f"python3 - <<'PROGRAM'\n{text}\nPROGRAM\n" if block.language == "python" else text
        known = f"source {state}\n" if state.exists() else ""
        script = f"set -eu\n{known}{code}\nexport -p > {state}\n"
        ended = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
        )
        assert ended.returncode == 0, (
            f"{block.page}:\n{block.text}\nended with {ended.returncode}:\n{ended.stdout}"
        )
        return ended.stdout

    def _told_apart(self, text: str) -> str:
        """The address and the key in a program are those of this server, whose port no other test
        has.
        """
        home = self.folder / ".ft"
        for pattern, file, name in (
            (r"http://127\.0\.0\.1:8000", "server.json", "url"),
            ("ft-…", "credentials", "api_key"),
        ):
            if re.search(pattern, text):
                value = re.search(rf'"{name}": *"([^"]*)"', (home / file).read_text())
                assert value is not None
                text = re.sub(pattern, value[1], text)
        return text

    def leave(self) -> None:
        if self.server is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.server.pid, signal.SIGTERM)
            self.server.wait(60)


@pytest.fixture
def newcomer(tmp_path: Path) -> Iterator[Newcomer]:
    folder = tmp_path / "ft-service"
    for name in subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    (folder / ".venv").symlink_to(ROOT / ".venv")
    for name in (
        "pyproject.toml",
        "constraints.txt",
    ):  # older than .venv, so that make sets up nothing in it
        os.utime(folder / name, (0, 0))
    spec = folder / "deploy/examples/quickstart.yaml"  # one short job in place of one of a minute
    spec.write_text(
        spec.read_text()
        .replace("max_steps: 150", "max_steps: 4")
        .replace("batch_size: 32", "batch_size: 4")
    )
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("FT_", "OPENAI_", "PYTEST"))
    }
    # PYTHONPATH: the copy's code, also while this checkout is being edited.
    more = {
        "HOME": str(tmp_path),
        "PYTHONPATH": str(folder),
        "FT_PORT": "0",
        "FT_SLOTS": "2",
        "COLUMNS": "80",
        "BROWSER": "true",
    }
    terminal = Newcomer(
        folder, {**kept, **more, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    )
    try:
        yield terminal
    finally:
        terminal.leave()
        kill_leftovers(tmp_path)


def reason_not_to_run(block: Block) -> str | None:
    lines = [*block.commands, block.text]
    return next(
        (
            why
            for pattern, why in ELSEWHERE.items()
            if any(re.search(pattern, line) for line in lines)
        ),
        None,
    )


def runnable(page: str) -> list[Block]:
    """The blocks of a page that run here. One with lines for another place is left out whole."""
    return [block for block in blocks(page) if reason_not_to_run(block) is None]


def test_nothing_is_left_out_without_need() -> None:
    all_lines = "\n".join(
        line for page in PAGES for block in blocks(page) for line in [*block.commands, block.text]
    )
    assert [
        pattern for pattern in ELSEWHERE if not re.search(pattern, all_lines, re.MULTILINE)
    ] == []
    assert len(runnable("README.md")) >= 3
    assert len(runnable("docs/guide.md")) == len(blocks("docs/guide.md"))


@pytest.mark.slow
@pytest.mark.timeout(3600)  # of a busy machine
def test_the_blocks_of_readme_and_docs_do_what_they_say(newcomer: Newcomer) -> None:
    said: dict[str, str] = {}
    for page in (
        "README.md",
        "docs/guide.md",
        *(page for page in PAGES if page not in ("README.md", "docs/guide.md")),
    ):
        for block in runnable(page):
            if block.text.strip() == "make serve":
                newcomer.serve(block.text)
            else:
                said[page] = said.get(page, "") + newcomer.do(block)
    readme = said["README.md"]
    guide = said["docs/guide.md"]
    assert "has succeeded: ft:tiny-llama:local:quickstart:" in readme
    assert "Created fine-tuning job: ftjob-" in readme, "the program's events"
    assert len(re.findall(r"has succeeded: ft:tiny-llama:local:(?:mine|faster):", guide)) == 2
    assert "is intact" in guide
    assert "FutureWarning" not in guide
    assert "Step 6/6: training loss=" in guide, "what rank 0 prints tells of training"
    assert re.search(r"training\.learning_rate\s+0\.001\s+0\.003", guide)
    assert "The merged model is in my-job/merged" in guide
