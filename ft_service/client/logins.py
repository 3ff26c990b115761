"""Sign-ins of people on the command line (`ft login`): which are kept in FT_HOME, and how one is
made.

`FT_HOME/logins` (mode 0600) has a key for each address, the newest last; a key is sent to its
address alone.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx2
from pydantic import BaseModel, ValidationError

from ft_service.client.connection import (
    LOGINS,
    address_of,
    error_of,
    is_loopback,
    kept_logins,
    not_ours,
    reaching,
)
from ft_service.errors import AuthError, LimitError, UnavailableError
from ft_service.host.running_servers import write_private

_SLOWER_SECONDS = 5.0
"""By which the pause grows when the server is asked too often (RFC 8628, 3.5)."""
_PATH = "/device_sign_ins"
Answer = TypeVar("Answer", bound=BaseModel)


class Code(BaseModel):
    """What a person has to do; as the server answers."""

    device_code: str
    user_code: str
    verification_uri: str
    verification_uri_complete: str | None = None
    expires_in: float
    interval: float


class Login(BaseModel):
    """A sign-in; as the server answers."""

    key: str
    name: str
    project_id: str
    scope: str
    expires_at: float


@dataclass(frozen=True)
class SignIn:
    """A sign-in at one server that goes on."""

    base_url: str
    code: Code

    @classmethod
    def begin(cls, base_url: str) -> SignIn:
        """Ask the server how to sign in. Raises FtError as the server's answer."""
        return cls(base_url, _parsed(Code, *_call(base_url, "POST", _PATH)))

    def wait(
        self,
        project: str | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> Login:
        """Wait until the person has confirmed the code.

        `project`: None: where the person was last. Raises FtError as the server's answer, AuthError
        once the code is too old.
        """
        body = {"device_code": self.code.device_code} | ({"project": project} if project else {})
        until = clock() + self.code.expires_in
        pause = self.code.interval
        while clock() < until:
            sleep(pause)
            try:
                answer, told = _call(self.base_url, "POST", f"{_PATH}/key", body)
            except LimitError:
                pause += _SLOWER_SECONDS
                continue
            except UnavailableError:
                continue  # of the provider or the network: the code may be confirmed meanwhile
            if told.get("status") != "pending":
                return _parsed(Login, answer, told)
        raise AuthError(
            f"The code was not confirmed within {self.code.expires_in / 60:.0f} minutes: `ft login` "
            "begins again."
        )


def keep_login(home: Path, base_url: str, login: Login) -> None:
    """Keep a sign-in in FT_HOME."""
    logins = kept_logins(home)
    logins.pop(base_url, None)
    home.mkdir(parents=True, exist_ok=True)
    _write(home, logins | {base_url: login.model_dump(mode="json")})


def end_login(home: Path, base_url: str) -> bool:
    """Remove a sign-in here, and end it at its server if that answers. Returns whether the server
    did.
    """
    logins = kept_logins(home)
    key = logins.pop(base_url)["key"]
    _write(home, logins)
    try:
        _call(base_url, "DELETE", f"{_PATH}/key", key=key)
    except AuthError:
        return True  # it was over
    except UnavailableError:
        return False
    return True


def _write(home: Path, logins: dict[str, Any]) -> None:
    if logins:
        write_private(home / LOGINS, json.dumps(logins) + "\n")
        return
    with contextlib.suppress(FileNotFoundError):
        (home / LOGINS).unlink()


def _call(
    base_url: str, method: str, path: str, body: Any = None, key: str | None = None
) -> tuple[httpx2.Response, dict[str, Any]]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    timeout = httpx2.Timeout(60.0, connect=5.0)
    client = httpx2.Client(timeout=timeout, trust_env=not is_loopback(base_url), headers=headers)
    with client, reaching(base_url):
        answer = client.request(method, address_of(base_url) + path, json=body)
    if answer.status_code == 429:
        raise LimitError(str(error_of(answer)))
    if not answer.is_success:
        raise error_of(answer)
    if answer.status_code == 204:
        return answer, {}
    try:
        told = answer.json()
    except ValueError:
        raise not_ours(answer) from None
    return answer, told if isinstance(told, dict) else {}


def _parsed(model: type[Answer], answer: httpx2.Response, told: dict[str, Any]) -> Answer:
    try:
        return model.model_validate(told)
    except ValidationError:
        raise not_ours(answer) from None
