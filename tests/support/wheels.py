"""The project as a wheel, and that wheel in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SECONDS = 300.0


def build_wheel(folder: Path) -> Path:
    """Build the wheel into a folder; its path."""
    command = [
        sys.executable,
        "-m",
        "hatchling",
        "build",
        "--target",
        "wheel",
        "--directory",
        str(folder),
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    return wheel


class WheelEnvironment:
    """A virtual environment with the wheel.

    It shares other distributions with this one, and does not see the repository.
    """

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder
        venv.create(folder)
        self.packages = Path(
            self.output(
                "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"
            ).strip()
        )
        install = [
            "-m",
            "pip",
            "--python",
            str(folder / "bin/python"),
            "install",
            "--no-deps",
            "--no-index",
            "--quiet",
        ]
        subprocess.run([sys.executable, *install, str(wheel)], check=True, timeout=300)

    def share(self, hidden: Callable[[str], bool]) -> None:
        """Make the packages of this environment importable in that one, but for those whose file
        names are `hidden`.
        """
        links = self.folder / f"shared-{len(list(self.folder.glob('shared-*')))}"
        links.mkdir()
        for folder in (
            Path(path) for path in sys.path if path.endswith(("site-packages", "dist-packages"))
        ):
            for path in folder.iterdir():
                link = links / path.name
                if (
                    path.suffix != ".pth"
                    and path.name != "__pycache__"
                    and not hidden(path.name)
                    and not link.exists()
                ):
                    link.symlink_to(path)
        (self.packages / "shared.pth").write_text(f"{links}\n")

    def environment(self, **settings: str) -> dict[str, str]:
        """Return the environment variables of its processes: none of ours."""
        kept = ("LANG", "TMPDIR", "FT_TEST_RUN", "OMP_NUM_THREADS")
        inherited = {name: os.environ[name] for name in kept if name in os.environ}
        path = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        return {
            **inherited,
            "PATH": path,
            "HOME": str(self.folder),
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "120",
            **settings,
        }

    def run(self, *words: str | Path, **settings: str) -> subprocess.CompletedProcess[str]:
        """Run one of its programs to its end, in its folder."""
        command = [str(self.folder / "bin" / words[0]), *map(str, words[1:])]
        return subprocess.run(
            command,
            cwd=self.folder,
            env=self.environment(**settings),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )

    def output(self, *words: str | Path, **settings: str) -> str:
        """Run one of its programs, which has to succeed; what it prints."""
        ended = self.run(*words, **settings)
        assert ended.returncode == 0, (
            f"{words} ended with {ended.returncode}:\n{ended.stdout}\n{ended.stderr}"
        )
        return ended.stdout
