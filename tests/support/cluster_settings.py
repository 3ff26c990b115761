"""Settings of a service whose jobs are pods."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from ft_service.settings import Settings


def cluster_settings(folder: Path, **profile: Any) -> Settings:
    path = folder / "pod-profile.yaml"
    path.write_text(
        yaml.safe_dump(
            {"image": "w:1", "slots": 8, "ranks_per_node": 4, **profile}, sort_keys=False
        )
    )
    url = "postgresql+psycopg://ft@db/ft"
    return Settings(home=folder, launcher="kubernetes", pod_profile=path, database_url=url)
