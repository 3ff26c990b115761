"""Checks at a job's creation that this server can serve the job's integrations."""

from __future__ import annotations

from importlib.util import find_spec

from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.spec import JobRequest

WRITER = "tensorboardX"
_LEAVE_OUT = (
    "or leave integrations out: the metrics are in the job's events and in its result file too"
)


NAMES = {"wandb": "Weights & Biases", "mlflow": "MLflow", "trackio": "trackio"}
"""Type of an integration that the server sends to → its display name."""
SETTING = {
    "wandb": "FT_WANDB_API_KEY",
    "mlflow": "FT_MLFLOW_TRACKING_URI",
    "trackio": "FT_TRACKIO_URL",
}
_WANTED = {
    "wandb": "key for Weights & Biases",
    "mlflow": "address of an MLflow server",
    "trackio": "address of a trackio server, nor a folder for it",
}


def configured(settings: Settings) -> list[str]:
    """Types of integrations that the settings configure."""
    given = {
        "wandb": settings.wandb_api_key,
        "mlflow": settings.mlflow_tracking_uri,
        "trackio": settings.trackio_url,
    }
    return [kind for kind, value in given.items() if value is not None]


def installed(package: str) -> bool:
    """Whether a package is installed; a tracker's has the name of its type. It is not imported."""
    return find_spec(package) is not None


def refuse_unless_possible(request: JobRequest, settings: Settings) -> None:
    """Raise SpecError with what to set or install if this server cannot serve a job's
    integrations.
    """
    for kind in NAMES:
        if request.integrated(kind):
            _refuse_unless_sent(kind, settings)
    if settings.launcher == "local":  # a cluster's workers have packages of their own
        refuse_without_writer(request)


def _refuse_unless_sent(kind: str, settings: Settings) -> None:
    if kind not in configured(settings):
        raise _refusal(
            f"this server has no {_WANTED[kind]}. Set {SETTING[kind]} where it runs, {_LEAVE_OUT}."
        )
    if not installed(kind):
        install = f"Install it (pip install 'ft-service[{kind}]'), {_LEAVE_OUT}."
        raise _refusal(f"the server's package for {NAMES[kind]} is missing. {install}")


def refuse_without_server(request: JobRequest) -> None:
    """Raise SpecError for integrations and limits that need a server, and as
    `refuse_without_writer`.
    """
    if request.max_cost is not None:
        raise SpecError(
            f"max_cost = {request.max_cost:g}: costs are counted by a server only. Submit the job "
            "to one (ft submit), or limit the time (max_seconds).",
            param="max_cost",
        )
    if any(request.integrated(kind) for kind in NAMES):
        raise _refusal(
            "metrics are sent by a server only. Submit the job to one (ft submit), or leave "
            "integrations out: the metrics "
            "are in metrics.csv of the run directory."
        )
    refuse_without_writer(request)


def refuse_without_writer(request: JobRequest) -> None:
    """Raise SpecError for TensorBoard event files if the package that writes them is missing."""
    if request.integrated("tensorboard") and not installed(WRITER):
        raise _refusal(
            f"type tensorboard needs the package {WRITER}, which is missing. Install it (pip "
            f"install {WRITER}), {_LEAVE_OUT}."
        )


def _refusal(message: str) -> SpecError:
    return SpecError(f"integrations: {message}", param="integrations", code="not_available")
