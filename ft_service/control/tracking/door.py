"""Whether a job may ask for integrations: refused at the door is better than found missing when the job has ended."""

from __future__ import annotations

from importlib.util import find_spec

from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.spec import JobRequest

WRITER = "tensorboardX"
_LEAVE_OUT = "or leave integrations out: the metrics are in the job's events and in its result file too"


NAMES = {"wandb": "Weights & Biases", "mlflow": "MLflow", "trackio": "trackio"}
"""Type of an integration that the server sends to → what people call it."""
_SETTING = {"wandb": "FT_WANDB_API_KEY", "mlflow": "FT_MLFLOW_TRACKING_URI", "trackio": "FT_TRACKIO_URL"}
_WANTED = {
    "wandb": "key for Weights & Biases",
    "mlflow": "address of an MLflow server",
    "trackio": "address of a trackio server, nor a folder for it",
}


def configured(settings: Settings) -> list[str]:
    """Types of integrations that the settings name."""
    given = {"wandb": settings.wandb_api_key, "mlflow": settings.mlflow_tracking_uri, "trackio": settings.trackio_url}
    return [kind for kind, value in given.items() if value is not None]


def installed(package: str) -> bool:
    """Whether a package is there: those of trackers are called as the type is. It is not imported."""
    return find_spec(package) is not None


def refuse_unless_possible(request: JobRequest, settings: Settings) -> None:
    """Raises SpecError with what to set or to install if this server cannot do what a job's integrations ask for."""
    for kind in NAMES:
        if request.integrated(kind):
            _refuse_unless_sent(kind, settings)
    if settings.launcher == "local":  # a cluster's workers have packages of their own
        refuse_without_writer(request)


def _refuse_unless_sent(kind: str, settings: Settings) -> None:
    if kind not in configured(settings):
        raise _refusal(f"this server has no {_WANTED[kind]}. Set {_SETTING[kind]} where it runs, {_LEAVE_OUT}.")
    if not installed(kind):
        install = f"Install it (pip install 'ft-service[{kind}]'), {_LEAVE_OUT}."
        raise _refusal(f"the server's package for {NAMES[kind]} is missing. {install}")


def refuse_without_server(request: JobRequest) -> None:
    """Raises SpecError: what trains without a server has nobody to send metrics."""
    if any(request.integrated(kind) for kind in NAMES):
        raise _refusal(
            "without a server nobody sends metrics. Submit the job to one (ft submit), or leave integrations out: the metrics "
            "are in metrics.csv of the run directory."
        )
    refuse_without_writer(request)


def refuse_without_writer(request: JobRequest) -> None:
    """Raises SpecError for event files for TensorBoard that nothing here can write."""
    if request.integrated("tensorboard") and not installed(WRITER):
        raise _refusal(
            f"type tensorboard needs the package {WRITER}, which is missing. Install it (pip install {WRITER}), {_LEAVE_OUT}."
        )


def _refusal(message: str) -> SpecError:
    return SpecError(f"integrations: {message}", param="integrations", code="not_available")
