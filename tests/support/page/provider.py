"""A provider that people sign in through: oidc-provider-mock, with PKCE.

A test can spoil its ID tokens.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch
from urllib.parse import parse_qs, urlsplit

import httpx2
import oidc_provider_mock
from joserfc.jwk import RSAKey
from oidc_provider_mock import _app
from werkzeug.serving import make_server
from werkzeug.test import Client

CLIENT_ID = "ft-page"
SECRET = "a secret with : and %"


@dataclass
class Device:
    """A sign-in that a program has begun."""

    code: str
    subject: str | None = None
    """Who has confirmed it; empty: somebody has refused it."""


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
    has_devices: bool = True
    """Whether it offers device authorization (RFC 8628)."""
    devices: dict[str, Device] = field(default_factory=dict)
    """By user code."""

    def person(self, subject: str, **claims: Any) -> None:
        """Set a person's claims, which replace those of the ID token too: `aud`, `exp`, `nonce`,
        ...
        """
        httpx2.put(f"{self.url}/users/{subject}", json=claims, trust_env=False).raise_for_status()

    def confirm(self, user_code: str, subject: str | None) -> None:
        """Let a person type a device's code; None: and refuse."""
        self.devices[user_code].subject = subject or ""

    def _device(self) -> tuple[int, dict[str, Any]]:
        """The answer to a device that begins a sign-in."""
        device = Device(f"device {len(self.devices)}")
        user_code = f"WDJB-{len(self.devices):04}"
        self.devices[user_code] = device
        address = f"{self.url}/device"
        return 200, {
            "device_code": device.code,
            "user_code": user_code,
            "verification_uri": address,
            "verification_uri_complete": f"{address}?user_code={user_code}",
            "expires_in": 600,
            "interval": 1,
        }

    def _device_token(self, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """The answer to a device that asks for its tokens: those of a usual sign-in that is made
        for it.
        """
        found = [each for each in self.devices.values() if each.code == form["device_code"]]
        if not found or found[0].subject is None:
            return 400, {"error": "authorization_pending" if found else "expired_token"}
        [device] = found
        if not device.subject:
            return 400, {"error": "access_denied"}
        device.code = ""
        client = Client(self.app)
        back = "http://localhost:1/back"
        asked = {"response_type": "code", "client_id": CLIENT_ID, "redirect_uri": back}
        led = client.post(
            "/oauth2/authorize",
            base_url=self.url,
            query_string=asked | {"scope": "openid profile email"},
            data={"sub": device.subject},
        )
        code = _fields(urlsplit(led.headers["location"]).query)["code"]
        given = {"grant_type": "authorization_code", "code": code, "redirect_uri": back}
        tokens = client.post(
            "/oauth2/token", base_url=self.url, data=given, auth=(CLIENT_ID, SECRET)
        )
        return tokens.status_code, json.loads(tokens.data)

    def _answer(self, environ: dict[str, Any], path: str) -> tuple[int, dict[str, Any]] | None:
        """What is said of devices; None: the real one answers."""
        if path == "/.well-known/openid-configuration" and self.has_devices:
            told = Client(self.app).get(path, base_url=self.url)
            more = {"device_authorization_endpoint": f"{self.url}/oauth2/device"}
            return 200, json.loads(told.data) | more
        if path not in ("/oauth2/device", "/oauth2/token"):
            return None
        body = environ["wsgi.input"].read(int(environ["CONTENT_LENGTH"]))
        environ["wsgi.input"] = io.BytesIO(body)
        form = _fields(body.decode())
        if path == "/oauth2/device":
            return self._device() if "HTTP_AUTHORIZATION" in environ else (401, {})
        is_device = form.get("grant_type", "").endswith(":device_code")
        return self._device_token(form) if is_device else None

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        query = _fields(environ["QUERY_STRING"])
        if (answer := self._answer(environ, path)) is not None:
            status, told = answer
            start_response(f"{status} _", [("content-type", "application/json")])
            return [json.dumps(told).encode()]
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
