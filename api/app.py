"""The web application: everything HTTP, nothing else. It holds no state of its own; any number of processes may serve it."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi_offline import FastAPIOffline

from api import openapi
from api.http.dependencies import Services
from api.http.middleware import RequestContext
from api.page.inner_api import ApiError
from api.page.rendering import SignInNeeded, refusal, to_sign_in
from api.routes import (
    artefacts,
    files,
    fine_tuning,
    graders,
    health,
    inference,
    keys,
    metrics,
    models,
    organization,
    permissions,
    uploads,
    webhooks,
)
from api.routes.page import chat, compare, data, entry, exports, jobs, new_job, projects, usage
from api.routes.page import models as page_models
from api.routes.page import sweeps as page_sweeps
from api.routes.tuning import plans, sweeps
from api.wire import errors
from ft_service import __version__
from ft_service.bases.catalogue import Catalogue
from ft_service.control.base_facts import is_tunable
from ft_service.meters import Meters
from ft_service.serving.preview import Preview
from ft_service.settings import Settings
from ft_service.store.sql import Store

_DESCRIPTION = """
Fine-tuning in OpenAI's wire format: `openai.OpenAI(base_url="…/v1", api_key="…")` works unchanged. Options that OpenAI has no
field for ride at the top level of the create body (`extra_body` of the client); answers carry extra fields beside OpenAI's.
What OpenAI's API does not have says so, and carries the mark `x-beyond-openai`.
"""


_REST = (
    fine_tuning,
    metrics,
    plans,
    sweeps,
    files,
    uploads,
    permissions,
    artefacts,
    graders,
    models,
    webhooks,
    organization,
    inference,
    keys,
    health,
)
_PAGE = (entry, new_job, compare, data, page_models, chat, usage, projects, page_sweeps, exports, jobs)


def create_app(settings: Settings, store: Store, meters: Meters | None = None, preview: Preview | None = None) -> FastAPI:
    """The application over a store whose schema is up to date. `meters` None: new ones, for this application alone.
    `preview`: what answers chat completions; None: nothing here does.

    Raises SpecError if FT_MODEL_ALIASES is wrong.
    """
    meters = meters or Meters()
    app = FastAPIOffline(
        title="ft-service",
        version=__version__,
        description=_DESCRIPTION,
        docs_url=None,  # openapi.py has one that runs nothing of others
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.services = Services(settings, store, Catalogue.from_settings(settings, is_tunable), meters, preview)
    for routes in _REST:
        # As they are: a router that FastAPI includes is looked through anew at every request.
        app.router.routes.extend(routes.router.routes)
    if settings.page == "on":
        for routes in _PAGE:
            app.router.routes.extend(routes.router.routes)
        app.add_exception_handler(SignInNeeded, to_sign_in)
        app.add_exception_handler(ApiError, refusal)
    errors.install_handlers(app)
    app.add_middleware(RequestContext, meters=meters)
    openapi.complete_document(app)
    openapi.add_page(app)
    return app
