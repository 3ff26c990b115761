"""The environment that tests run in."""

from __future__ import annotations

import os
import pwd

SETTINGS = (
    *("FT_", "OPENAI_", "HF_", "HUGGING", "TRANSFORMERS_", "WANDB_", "MLFLOW_", "TRACKIO_"),
    *(
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "ALL_PROXY",
        "http_proxy",
        "https_proxy",
        "all_proxy",
        "COLUMNS",
        "LINES",
        "NO_COLOR",
    ),
)
"""Beginnings of variables that change what programs do, and that no test has set."""
OF_TESTS = ("FT_TEST_", "FT_GOLDEN", "FT_HOME")
"""Those that are for the tests themselves, or for `make`."""


def has_name() -> bool:
    """Whether this user has one: in a container it may be a number alone, which PostgreSQL and
    Slurm's services refuse.
    """
    try:
        return bool(pwd.getpwuid(os.geteuid()))
    except KeyError:
        return False


def forget_settings() -> None:
    """The environment of a test run may have settings of the service, of hubs and of trackers.
    Tests set those that they depend on."""
    for name in [
        name for name in os.environ if name.startswith(SETTINGS) and not name.startswith(OF_TESTS)
    ]:
        del os.environ[name]
