"""The web application. It holds no state of its own; any number of processes may serve it."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from api import openapi
from api.http.azure_paths import AzurePaths
from api.http.dependencies import Services
from api.http.middleware import RequestContext
from api.page.inner_api import ApiError
from api.page.rendering import SignInNeeded, refusal, to_sign_in
from api.routes import (
    artefacts,
    chats,
    device_sign_ins,
    engines,
    evals,
    files,
    fine_tuning,
    graders,
    health,
    inference,
    job_metrics,
    keys,
    models,
    organization,
    pulls,
    responses,
    rollouts,
    uploads,
    webhooks,
)
from api.routes.page import (
    compare_page,
    data_page,
    engines_page,
    jobs_page,
    models_page,
    new_job_page,
    organization_page,
    pulls_page,
    sign_in_page,
    sign_on_page,
)
from api.routes.tinker import run_routes, sampling_routes, session_routes, training_routes
from api.routes.tuning import plans, sweeps
from api.wire import error_views
from ft_service.agents.open_rollouts import OpenRollouts
from ft_service.bases.catalogue import Catalogue
from ft_service.bases.describing import Descriptions
from ft_service.control.bases.describe_bases import service_descriptions
from ft_service.control.places.price_list import price_list
from ft_service.control.tinker.tinker_models import read_options
from ft_service.errors import SpecError
from ft_service.meters import Meters
from ft_service.serving.preview import Preview
from ft_service.settings import Settings
from ft_service.store.sql import Store
from ft_service.traces import Traces
from ft_service.version import this_version

_DESCRIPTION = """
Fine-tuning in OpenAI's wire format: `openai.OpenAI(base_url="…/v1", api_key="…")` works unchanged. Options that OpenAI has no
field for are at the top level of the create body (`extra_body` of the client); answers have extra fields next to OpenAI's.
Everything that OpenAI's API does not have says so, and has the mark `x-beyond-openai`.
"""


_REST = (
    *(fine_tuning, job_metrics, plans, sweeps, engines),
    *(files, uploads, artefacts, graders, evals, models, pulls, webhooks, organization),
)
_SERVICE = (inference, chats, responses, rollouts, keys, device_sign_ins, health)
_TINKER = (training_routes, sampling_routes, run_routes, session_routes)
_PAGE = (
    sign_in_page,
    sign_on_page,
    new_job_page,
    compare_page,
    engines_page,
    data_page,
    models_page,
    pulls_page,
    organization_page,
    jobs_page,
)
"""Modules in the order in which their routes are tried: `/jobs/{job_id}/{verb}` of jobs_page
matches what others handle, and so does the last route of session_routes.
"""


def create_app(
    settings: Settings,
    store: Store,
    meters: Meters | None = None,
    preview: Preview | None = None,
    descriptions: Descriptions | None = None,
    traces: Traces | None = None,
    rollouts: OpenRollouts | None = None,
) -> FastAPI:
    """Return the application over a store whose schema is up to date.

    `meters` None: new ones. `preview`: answers chat completions; None: nothing here does.
    `descriptions` None: those in the cache. `traces` None: nothing is traced.
    `rollouts`: those whose agents call the model here; None: there are none.

    Raises SpecError if FT_MODEL_ALIASES, FT_GRADER_MODELS, FT_TINKER_OPTIONS, or a file for single
    sign-on, is wrong.
    """
    meters = meters or Meters()
    app = FastAPIOffline(
        title="ft-service",
        version=this_version(),
        description=_DESCRIPTION,
        docs_url=None,  # openapi.py has one that runs no scripts of other origins
        redoc_url=None,
        redirect_slashes=False,
    )
    catalogue = Catalogue.from_settings(
        settings, descriptions or service_descriptions(settings, makes=False)
    )
    opened = rollouts or OpenRollouts("")
    app.state.services = services = Services(settings, store, catalogue, meters, preview, opened)
    services.grader_limits  # read now  # noqa: B018
    services.provider  # too  # noqa: B018
    price_list(settings)
    read_options(settings.tinker_options)
    for module in (*_REST, *_SERVICE, *_TINKER, *(_PAGE if settings.page == "on" else ())):
        # Not by include_router: FastAPI searches an included router again at every request.
        app.router.routes.extend(module.router.routes)
    if settings.page == "on":
        app.add_exception_handler(SignInNeeded, to_sign_in)
        app.add_exception_handler(ApiError, refusal)
    if settings.mcp == "on":
        _install_mcp(app)
    error_views.install_handlers(app)
    app.add_middleware(AzurePaths)
    app.add_middleware(RequestContext, meters=meters, traces=traces)
    openapi.complete_document(app)
    openapi.add_page(app)
    return app


def _install_mcp(app: FastAPI) -> None:
    """Raise SpecError if the package is missing."""
    try:
        from api.mcp import server
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("mcp"):
            raise
        raise SpecError(
            "FT_MCP = on needs the package mcp, which is missing: pip install 'ft-service[mcp]'.",
            param="FT_MCP",
            code="missing_package",
        ) from None
    server.install(app)
