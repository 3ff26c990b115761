"""Whether a job may ask for integrations: refused at the door is better than found missing when the job has ended."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec

from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.spec import Integration

_LEAVE_OUT = "or leave integrations out: the metrics are in the job's events and in its result file too"


NAMES = {"wandb": "Weights & Biases", "mlflow": "MLflow"}
"""Type of an integration → what people call it."""
_SETTING = {"wandb": "FT_WANDB_API_KEY", "mlflow": "FT_MLFLOW_TRACKING_URI"}


def configured(settings: Settings) -> list[str]:
    """Types of integrations that the settings name."""
    given = {"wandb": settings.wandb_api_key, "mlflow": settings.mlflow_tracking_uri}
    return [kind for kind, value in given.items() if value is not None]


def installed(kind: str) -> bool:
    """Whether the package for a type is there. It is not imported."""
    return find_spec(kind) is not None


def refuse_unless_possible(settings: Settings, integrations: Iterable[Integration]) -> None:
    """Raises SpecError with what to set or to install if this server cannot send metrics there."""
    for kind in dict.fromkeys(integration.type for integration in integrations):
        if kind not in configured(settings):
            what = "key for Weights & Biases" if kind == "wandb" else "address of an MLflow server"
            raise _refusal(f"this server has no {what}. Set {_SETTING[kind]} where it runs, {_LEAVE_OUT}.")
        if not installed(kind):
            install = f"Install it (pip install 'ft-service[{kind}]'), {_LEAVE_OUT}."
            raise _refusal(f"the server's package for {NAMES[kind]} is missing. {install}")


def refuse_without_server() -> None:
    """Raises SpecError: what trains without a server has nobody to send metrics."""
    raise _refusal(
        "without a server nobody sends metrics. Submit the job to one (ft submit), or leave integrations out: the metrics are "
        "in metrics.csv of the run directory."
    )


def _refusal(message: str) -> SpecError:
    return SpecError(f"integrations: {message}", param="integrations", code="not_available")
