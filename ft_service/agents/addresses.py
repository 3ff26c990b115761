"""Where an environment is, and what signs the requests to it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

from ft_service.errors import FtError, SpecError, UnavailableError
from ft_service.host.webhook_receiver import Receiver, parse_receiver
from ft_service.spec.environments import Environment

_PACKAGES: Mapping[str, str] = {"mcp": "mcp", "openenv": "websockets"}
"""Type → package that it needs."""
Secrets = Callable[[str], Sequence[str]]
"""Valid secrets of a webhook endpoint by its id. Raises FtError."""


@dataclass(frozen=True)
class Access:
    """What a project's rollouts may ask."""

    project: str
    secrets: Secrets
    allow_private: bool

    async def receiver(self, environment: Environment) -> tuple[Receiver, Sequence[str]]:
        """The server of an environment, and the secrets that sign what is sent there.

        Raises FtError: the address is not allowed any more, or the secret is gone.
        """
        name = environment.webhook_endpoint_id
        secrets = [] if name is None else await asyncio.to_thread(self.secrets, name)
        return parse_receiver(environment.url, allow_private=self.allow_private), secrets


def check_environment(environment: Environment, access: Access) -> None:
    """Raise FtError, naming the field from `environment` on, for an address that is not allowed, a
    webhook endpoint that is not there, or a type whose package is missing here.
    """
    package = _PACKAGES.get(environment.type)
    if package is not None and find_spec(package) is None:
        raise SpecError(
            f"environment.type = {environment.type!r}: this service lacks the package {package}. "
            f"The operator installs ft-service[{environment.type}].",
            param="environment.type",
            code="not_available",
        )
    try:
        parse_receiver(environment.url, allow_private=access.allow_private)
    except FtError as error:
        raise type(error)(
            f"environment.{error.message}", param="environment.url", code=error.code
        ) from None
    if environment.webhook_endpoint_id is None:
        return
    try:
        access.secrets(environment.webhook_endpoint_id)
    except UnavailableError:
        raise
    except FtError as error:
        raise type(error)(
            f"environment.webhook_endpoint_id: {error.message}",
            param="environment.webhook_endpoint_id",
        ) from None
