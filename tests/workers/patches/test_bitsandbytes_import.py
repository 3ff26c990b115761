"""bitsandbytes still needs the stand-ins that it is imported with, and no others."""

from __future__ import annotations

import subprocess
import sys

import pytest

WITH = "import workers, torch"
WITHOUT = """
import torch
asked = []
torch.cuda.get_device_capability = lambda device=None: asked.append("capability") or (0, 0)
torch.cuda.is_available, torch.cuda.device_count = (lambda: True), (lambda: 1)
stock = torch.compile
torch.compile = lambda *args, **options: asked.append("compile") or stock(*args, **options)
try:
    import bitsandbytes
except Exception as error:  # there is no GPU
    asked.append(type(error).__name__)
"""


def printed(code: str, what: str) -> str:
    code = f"{code}\nimport sys\nprint({what})"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    return done.stdout.strip()


def test_the_compiler_is_not_loaded_and_torch_is_as_it_was() -> None:
    functions = "torch.compile.__module__, torch.cuda.get_device_capability.__module__"
    found = printed(
        WITH, f"'torch._inductor' in sys.modules, torch.cuda.is_initialized(), {functions}"
    )
    assert found == "False False torch torch.cuda"


@pytest.mark.slow
def test_bitsandbytes_compiles_at_its_import() -> None:
    """As soon as it no longer does, half of the patch can go."""
    assert "compile" in printed(WITHOUT, "*asked").split()
