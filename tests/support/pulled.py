"""Pulls as a server's process leaves them, without that process."""

from __future__ import annotations

from pathlib import Path

from ft_service.control.bases.base_pulls import Pull, PullFolder
from tests.support.bases import save_base
from tests.support.hub import COMMIT


def looked_up(models: Path, pull_id: str, **changes: object) -> Pull:
    """A pull whose small files have arrived: it was found, unless `changes` say otherwise."""
    folder = PullFolder(models)
    pull = folder.find(pull_id)
    staged = folder.path / f"{pull.repository.replace('/', '--')}@{COMMIT[:12]}"
    save_base(staged)
    (staged / "model.safetensors").unlink()
    facts = {"commit": COMMIT, "staged": staged.name, "licence": "apache-2.0", "bytes": 2 * 10**9}
    found = {"state": "found", "trainable": True, **facts, **changes}
    changed = folder.change(pull, [pull.state], **found)
    assert changed is not None
    return changed
