"""Whether a job may ask for integrations: refused at the door is better than found missing when the job has ended."""

from __future__ import annotations

from importlib.util import find_spec

from ft_service.errors import SpecError
from ft_service.settings import Settings
from ft_service.spec import JobRequest

WRITER = "tensorboardX"
_LEAVE_OUT = "or leave integrations out: the metrics are in the job's events and in its result file too"


def installed(package: str = "wandb") -> bool:
    """Whether W&B's SDK, or another package, is there. It is not imported."""
    return find_spec(package) is not None


def refuse_unless_possible(request: JobRequest, settings: Settings) -> None:
    """Raises SpecError with what to set or to install if this server cannot do what a job's integrations ask for."""
    if request.integrated("wandb"):
        _refuse_wandb(settings)
    if settings.launcher == "local":  # a cluster's workers have packages of their own
        refuse_without_writer(request)


def _refuse_wandb(settings: Settings) -> None:
    if settings.wandb_api_key is None:
        raise _refusal(f"this server has no key for Weights & Biases. Set FT_WANDB_API_KEY where it runs, {_LEAVE_OUT}.")
    if not installed():
        raise _refusal(
            f"the server's package for Weights & Biases is missing. Install it (pip install 'ft-service[wandb]'), {_LEAVE_OUT}."
        )


def refuse_without_server(request: JobRequest) -> None:
    """Raises SpecError: what trains without a server has nobody to send metrics."""
    if request.integrated("wandb"):
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
