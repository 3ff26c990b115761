"""A provider that people sign in through: oidc-provider-mock, with PKCE.

A test can spoil its ID tokens.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs

import httpx2
import oidc_provider_mock
from joserfc.jwk import RSAKey
from oidc_provider_mock import _app
from werkzeug.serving import make_server

CLIENT_ID = "ft-page"
SECRET = "a secret with : and %"


@dataclass
class Provider:
    """The provider, around the real one: it refuses what a provider that asks for PKCE refuses, and
    keeps what it was asked.
    """

    app: Any
    url: str = ""
    challenges: list[str] = field(default_factory=list)
    """PKCE challenges of the sign-ins that were begun."""
    exchanged: list[dict[str, str]] = field(default_factory=list)
    """Forms that codes were exchanged with."""
    led_to: list[str] = field(default_factory=list)
    """Addresses that browsers were sent back to."""
    ended: list[dict[str, str]] = field(default_factory=list)
    """Queries of logouts."""

    def person(self, subject: str, **claims: Any) -> None:
        """Set a person's claims, which replace those of the ID token too: `aud`, `exp`, `nonce`,
        ...
        """
        httpx2.put(f"{self.url}/users/{subject}", json=claims, trust_env=False).raise_for_status()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        query = _fields(environ["QUERY_STRING"])
        if path == "/oauth2/authorize" and query.get("code_challenge_method") != "S256":
            start_response("400 Bad Request", [])
            return [b"no PKCE"]
        if path == "/oauth2/authorize":
            self.challenges.append(query["code_challenge"])
        if path == "/oauth2/end_session":
            self.ended.append(query)
        if path == "/oauth2/token":
            body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
            form = _fields(body.decode())
            self.exchanged.append(form | {"authorization": environ.get("HTTP_AUTHORIZATION", "")})
            digest = hashlib.sha256(form.get("code_verifier", "").encode()).digest()
            if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() not in self.challenges:
                start_response("400 Bad Request", [])
                return [b'{"error": "invalid_grant"}']
            environ = environ | {"wsgi.input": io.BytesIO(body)}

        def note(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            for number, (name, value) in enumerate(headers):
                if name.lower() == "location" and "state=" not in value and "state" in query:
                    # Which it forgets when it says no.
                    headers[number] = (
                        name,
                        f"{value}&state={query['state']}",
                    )
            self.led_to += [value for name, value in headers if name.lower() == "location"]
            return start_response(status, headers, *more)

        return self.app(environ, note)


@contextmanager
def providing() -> Iterator[Provider]:
    """A provider on a free port of this host, by the name localhost, so that the page is another
    site to browsers.
    """
    with patch.dict(os.environ, {"AUTHLIB_INSECURE_TRANSPORT": "1"}):
        provider = Provider(oidc_provider_mock.app())
        server = make_server("localhost", 0, provider, threaded=True)
        provider.url = f"http://localhost:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield provider
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


@contextmanager
def foreign_key() -> Iterator[None]:
    """ID tokens that are signed with a key which the provider does not publish."""
    grant = _app.OpenIDCode
    usual = grant.get_jwt_config
    key = RSAKey.generate_key(2048).as_dict(private=True)

    def config(self: Any, *words: Any, **named: Any) -> dict[str, Any]:
        return {**usual(self, *words, **named), "key": key}

    with patch.object(grant, "get_jwt_config", config):
        yield


def _fields(query: str) -> dict[str, str]:
    return {name: values[0] for name, values in parse_qs(query).items()}
