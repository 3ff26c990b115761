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
OF_THE_SERVICE = (
    ("ft_service.supervisor", HEAVY + SERVICE),
    ("ft_service.client.client", HEAVY + SERVICE),
    ("ft_service.control.jobs.reconciler", (*HEAVY, "fastapi", "starlette")),
    ("api.server", HEAVY),
)
"""Imported one after the other, each with what may not be there by then: ever less."""
OF_THE_WORKERS = (("workers.train", ("torch._inductor.compile_fx", *SERVICE)),)
"""The compiler takes a second, and most jobs do without."""


@pytest.mark.parametrize(
    "modules",
    [
        pytest.param(OF_THE_SERVICE, id="service"),
        pytest.param(OF_THE_WORKERS, id="workers"),
    ],
)
def test_a_fresh_interpreter_loads_nothing_from_the_wrong_side(
    modules: tuple[tuple[str, tuple[str, ...]], ...],
) -> None:
    code = "import importlib, sys\n" + "".join(
        f"importlib.import_module({module!r})\n"
        f"print(*({module!r} + ' loads ' + one for one in {forbidden!r} if one in sys.modules))\n"
        for module, forbidden in modules
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
