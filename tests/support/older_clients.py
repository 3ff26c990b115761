"""OpenAI clients of older major versions, each in a folder named after its major version; `make
test-all` installs them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

OLDER = Path(os.environ.get("FT_TEST_CLIENTS", Path(sys.prefix) / "clients"))


def older_client(major: str) -> str:
    """The folder with the client, for PYTHONPATH."""
    folder = OLDER / major
    assert folder.is_dir(), f"{folder} is not there: make test-all installs it"
    return str(folder)
