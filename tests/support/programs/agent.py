"""The agent of a host whose attempts follow a script: `agent.py URL HOME HOST SLOTS SCRIPT`, until it is killed.

SCRIPT `real`: attempts are real.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from ft_service.launcher import agent as module
from ft_service.launcher.agent import Agent, Equipment
from ft_service.storage.locations import Places
from ft_service.store.fleet.hosts import HostRow
from ft_service.store.sql import open_store
from tests.support.attempts import scripted

LEASE_SECONDS = 5.0
"""How long jobs wait for a host that is gone."""

if __name__ == "__main__":
    url, home, name, slots, script = sys.argv[1:]
    module.BEAT_SECONDS = 0.5
    module.TURN_SECONDS = 0.05
    equipment = Equipment(
        scratch=Path(home) / f"scratch-{name}",
        grace_seconds=20.0,
        lease_seconds=LEASE_SECONDS,
        worker_command=() if script == "real" else scripted(script),
    )
    host = HostRow(host=name, slots=int(slots), address="127.0.0.1", kind="cpu", gpus=0, memory=None)
    Agent(open_store(url), Places(Path(home)), host, equipment).run(threading.Event())
