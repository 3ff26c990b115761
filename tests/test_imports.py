"""Directions of imports, seen in fresh interpreters; import-linter checks the same on the
source.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.attempts import HANG_SECONDS

HEAVY = ("torch", "transformers", "peft", "bitsandbytes", "wandb")
SERVICE = (
    "fastapi",
    "starlette",
    "uvicorn",
    "sqlalchemy",
    "alembic",
    "psycopg",
    "ft_service.store",
    "ft_service.control.jobs.reconciler",
)


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("ft_service.control.jobs.reconciler", (*HEAVY, "fastapi", "starlette")),
        ("ft_service.supervisor", HEAVY + SERVICE),
        ("ft_service.client.client", HEAVY + SERVICE),
        ("api.server", HEAVY),
        (
            "workers.train",
            ("torch._inductor.compile_fx", *SERVICE),
        ),  # the compiler takes a second, and most jobs do without
    ],
)
def test_a_fresh_interpreter_loads_nothing_from_the_wrong_side(
    module: str, forbidden: tuple[str, ...]
) -> None:
    code = f"import sys, {module}; print(*(set(sys.modules) & set({forbidden!r})))"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
