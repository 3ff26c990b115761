"""The processes that the quickstart starts: its server and its evaluations. Each of them ends with the quickstart, however that ends."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx2
from evaluate import Score

from ft_service.connection import find_connection

READY_SECONDS = 60.0
STOP_SECONDS = 20.0
POLL_SECONDS = 0.1
EVALUATE = Path(__file__).with_name("evaluate.py")
BOUND = "import runpy, sys; from ft_service.lifetime import die_with_parent; die_with_parent(); runpy.run_path(sys.argv.pop(1), run_name='__main__')"
"""Python code that runs the script in its first argument, and dies with the process that started it."""
