"""What the process that sends metrics is told by the one that keeps it, and in which environment it runs."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel

from ft_service import logs
from ft_service.host.environment import DATABASE, NETWORK, child_environment
from ft_service.settings import Settings

TURN_SECONDS = 1.0
TRANSMIT_SECONDS = 5


class Orders(BaseModel):
    """Secrets are in it, so it goes by stdin: neither among the arguments nor in the environment."""

    database_url: str
    base_url: str
    api_key: str | None
    """Of W&B; None: nothing is sent there."""
    mlflow_tracking_uri: str | None
    mlflow_token: str | None
    trackio_url: str | None
    trackio_token: str | None
    folder: Path
    """Of this process's own; what is there goes."""
    turn_seconds: float
    """Between two looks at what jobs have reported."""
    transmit_seconds: int
    """For how long points wait for company."""
    log_level: logs.Level
    log_format: logs.Format

    @classmethod
    def of(cls, settings: Settings) -> Orders:
        """For a server that sends somewhere. Raises OSError if FT_DATABASE_URL_FILE cannot be read."""
        key, token, writing = settings.wandb_api_key, settings.mlflow_token, settings.trackio_token
        return cls(
            database_url=settings.resolved_database_url(),
            base_url=settings.wandb_base_url,
            api_key=key.get_secret_value() if key else None,
            mlflow_tracking_uri=settings.mlflow_tracking_uri,
            mlflow_token=token.get_secret_value() if token else None,
            trackio_url=settings.trackio_url,
            trackio_token=writing.get_secret_value() if writing else None,
            folder=sdk_folder(settings),
            turn_seconds=TURN_SECONDS,
            transmit_seconds=TRANSMIT_SECONDS,
            log_level=settings.log_level,
            log_format=settings.log_format,
        )


def sdk_folder(settings: Settings) -> Path:
    """Where W&B's SDK keeps its files: of this host, since FT_HOME may be shared."""
    return settings.home / "wandb" / socket.gethostname()


def environment(inherited: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The environment of the process that sends metrics. W&B's SDK takes nothing from whoever started the server, writes to
    `folder` alone, and reports to nobody how it is used."""
    folders = {f"WANDB_{kind}_DIR": str(folder) for kind in ("CACHE", "CONFIG", "DATA")}
    quiet = {"WANDB_ERROR_REPORTING": "false", "WANDB_SILENT": "true"}
    return child_environment(inherited, *NETWORK, *DATABASE, **folders, **quiet)
