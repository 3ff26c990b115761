"""The packages that `make gpu-report` needs besides PyTorch, transformers and PEFT, its tests
included, for a machine that has those and no index.

    python benchmarks/gpu_report/packages.py FOLDER [--python 3.12] [--cuda 130]

FOLDER then holds them in the versions of `constraints.txt`, some 60 MB, with bitsandbytes cut down
to its libraries for processors and for one version of CUDA (`torch.version.cuda` without the dot).
Take it along, and set PYTHONPATH to it there.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

NAMES = (
    *(
        "annotated-types",
        "bitsandbytes",
        "google-re2",
        "nvidia-cudnn-frontend",
        "pillow",
        "protobuf",
        "pydantic",
        "pydantic_core",
    ),
    "typing-inspection",
)
TESTING = ("iniconfig", "pluggy", "Pygments", "pytest", "pytest-timeout")
"""What runs tests/gpu."""
COMPARED = ("torchao",)
"""For comparison alone: no job uses it."""
LIGER = "liger-kernel==0.8.5"
"""The same, and of no extra of the project."""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_24_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
ROOT = Path(__file__).parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="its version there")
    parser.add_argument("--cuda", default="130", help="PyTorch's there")
    options = parser.parse_args()
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-compile",
        "--only-binary=:all:",
        "--upgrade",
    ]
    command += [
        "--target",
        str(options.folder),
        "--python-version",
        options.python,
        "--implementation",
        "cp",
    ]
    command += [flag for platform in PLATFORMS for flag in ("--platform", platform)]
    subprocess.run([*command, *pinned((ROOT / "constraints.txt").read_text()), LIGER], check=True)
    trim(options.folder / "bitsandbytes", options.cuda)
    for library in (options.folder / "torchao").glob("*.so"):  # of other kernels: 13 MB
        library.unlink()


def pinned(constraints: str) -> list[str]:
    """NAMES, TESTING and COMPARED with the versions that are tested."""
    lines = {
        line.partition("==")[0].lower().replace("_", "-"): line
        for line in constraints.splitlines()
        if "==" in line
    }
    return [lines[name.lower().replace("_", "-")] for name in (*NAMES, *TESTING, *COMPARED)]


def trim(package: Path, cuda: str) -> None:
    """Remove bitsandbytes' libraries for other devices.

    Raises SystemExit if there is none for this version of CUDA.
    """
    kept = {"libbitsandbytes_cpu.so", f"libbitsandbytes_cuda{cuda}.so"}
    libraries = list(package.glob("libbitsandbytes_*.so"))
    if not kept <= {library.name for library in libraries}:
        there = ", ".join(sorted(library.name for library in libraries))
        raise SystemExit(f"bitsandbytes has no library for CUDA {cuda}; there are: {there}")
    for library in libraries:
        if library.name not in kept:
            library.unlink()


if __name__ == "__main__":
    main()
