"""What the service takes from a provider, and how a provider that is slow, large or another one is
refused.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from jwt.algorithms import ECAlgorithm
from pydantic import SecretStr, ValidationError

from api.http import oidc_provider
from api.http.oidc_provider import BrowserSignIn, OidcProvider
from ft_service.errors import AuthError, LimitError, UnavailableError
from ft_service.settings import Settings


class _Served(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]
        answer = self.server.answer  # type: ignore[attr-defined]
        body: Any = answer() if callable(answer) else json.dumps(answer).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *words: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Any]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Served)
    server.asked = 0  # type: ignore[attr-defined]
    server.answer = {}  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def provider_at(server: Any) -> tuple[OidcProvider, str]:
    issuer = f"http://127.0.0.1:{server.server_port}"
    return OidcProvider(
        Settings(home=Path("/nowhere"), oidc_issuer=issuer, oidc_client_id="c")
    ), issuer


def refused(provider: OidcProvider) -> str:
    with pytest.raises(UnavailableError) as caught:
        asyncio.run(provider.authorization_url(BrowserSignIn.begin("/jobs"), "http://here/"))
    return str(caught.value)


def test_the_address_has_what_the_flow_needs_and_the_document_is_kept(server: Any) -> None:
    provider, issuer = provider_at(server)
    server.answer = {"issuer": issuer, "authorization_endpoint": f"{issuer}/authorize?tenant=1"}
    sign_in = BrowserSignIn.begin("/jobs")
    url = ""
    for _ in range(2):
        url = asyncio.run(provider.authorization_url(sign_in, "http://here/back"))
        assert url.startswith(
            f"{issuer}/authorize?tenant=1&response_type=code&client_id=c&redirect_uri=http%3A%2F%2Fhere%2Fback"
        )
        assert (
            f"&state={sign_in.state}&nonce={sign_in.nonce}&code_challenge={sign_in.challenge}"
            in url
        )
    assert server.asked == 1
    assert len({sign_in.state, sign_in.nonce, sign_in.verifier, sign_in.challenge}) == 4
    assert sign_in.verifier not in url


def test_another_issuers_document_is_refused(server: Any) -> None:
    provider, issuer = provider_at(server)
    server.answer = {
        "issuer": "https://evil.example",
        "authorization_endpoint": "https://evil.example/",
    }
    assert (
        refused(provider)
        == f"FT_OIDC_ISSUER = {issuer}: its discovery document is of 'https://evil.example'."
    )
    for address in ("javascript:alert(1)", "https://["):
        server.answer = {"issuer": issuer, "authorization_endpoint": address}
        provider, _ = provider_at(server)
        assert "no usable authorization_endpoint" in refused(provider)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"<html>", "Expecting value"),
        (b"[" * 100_000, ""),
        (b"[]", "not a JSON object"),
        (b" " * (1024**2 + 1), "more than"),
    ],
)
def test_what_is_no_answer_of_a_provider_is_refused(server: Any, body: bytes, why: str) -> None:
    server.answer = lambda: body
    provider, _ = provider_at(server)
    assert why in refused(provider)
    assert why in refused(provider)
    assert server.asked == 1, "it is not asked again at once"


def test_a_slow_provider_holds_nobody_for_long(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oidc_provider, "_SECONDS", 0.2)
    over = threading.Event()
    server.answer = lambda: (over.wait(30) and b"{}") or b"{}"
    provider, _ = provider_at(server)
    assert "does not answer" in refused(provider)
    over.set()
    assert "sign-ins does: ." not in refused(provider)


def test_an_answer_that_took_too_long_or_is_another_browsers_is_refused(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    provider, _issuer = provider_at(server)
    sign_in = BrowserSignIn.begin("/jobs")
    read = BrowserSignIn.of_cookie(sign_in.cookie)
    assert read is not None
    assert (read.state, read.to) == (sign_in.state, "/jobs")
    for answer, why in (
        ({"state": "x"}, "not begun in this browser"),
        ({"state": read.state, "iss": "https://o"}, "another"),
    ):
        with pytest.raises(AuthError, match=why):
            asyncio.run(provider.signed_in(read, answer, "http://here/"))
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now + 601)
    with pytest.raises(AuthError, match="longer than 10 minutes"):
        asyncio.run(provider.signed_in(read, {"state": read.state, "code": "c"}, "http://here/"))
    assert server.asked == 0


@pytest.mark.parametrize(
    "cookie", ["", "..", "1.a.b.c", "x.a.L2pvYnM=", "1.a.%%%", "1.a./w==", "1.a.\ud800"]
)
def test_a_cookie_that_was_not_made_here_is_none(cookie: str) -> None:
    assert BrowserSignIn.of_cookie(cookie) is None


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"oidc_issuer": "http://login.example"}, "use https"),
        ({"oidc_client_id": ""}, "needs FT_OIDC_CLIENT_ID"),
        ({"oidc_client_secret": SecretStr("x"), "oidc_client_secret_file": "/x"}, "unset one"),
        ({"oidc_scopes": "email"}, "openid is missing"),
        ({"page": "off"}, "no page to sign in on"),
        ({"oidc_issuer": "login.example"}, "oidc_issuer"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], why: str) -> None:
    whole = {"home": "/nowhere", "oidc_issuer": "https://login.example", "oidc_client_id": "c"}
    with pytest.raises(ValidationError, match=why):
        Settings(**{**whole, **settings})


class Signer:
    """A provider that signs with one key, which it publishes without an id."""

    def __init__(self, server: Any) -> None:
        self.provider, self.issuer = provider_at(server)
        self.fetched = 0
        self.rotate()
        server.answer = self.answer

    def rotate(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())

    def answer(self) -> bytes:
        """Return one document as discovery and as keys."""
        self.fetched += 1
        public = json.loads(ECAlgorithm.to_jwk(self.key.public_key()))
        named = {"issuer": self.issuer, "jwks_uri": f"{self.issuer}/keys", "keys": [public]}
        return json.dumps(named).encode()

    def token(self) -> str:
        now = int(time.time())
        claims = {"iss": self.issuer, "sub": "s", "aud": "c", "iat": now, "exp": now + 60}
        return jwt.encode({**claims, "nonce": "n"}, self.key, algorithm="ES256")

    def check(self, token: str) -> dict[str, Any]:
        return asyncio.run(self.provider._checked(token, "n"))


def test_keys_that_were_rotated_without_an_id_are_fetched_again_once(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    signer = Signer(server)
    assert signer.check(signer.token())["sub"] == "s"
    fetched = signer.fetched
    signer.rotate()
    forged = signer.token()
    signer.rotate()
    with pytest.raises(AuthError):
        signer.check(forged)
    assert signer.fetched == fetched, "the keys are new: not asked for again within a minute"
    monkeypatch.setattr(oidc_provider, "_NEW_KEY_SECONDS", 0.0)
    assert signer.check(signer.token())["sub"] == "s"
    assert signer.fetched == fetched + 1


def test_a_person_whose_groups_the_provider_left_out_is_told(server: Any) -> None:
    provider, _ = provider_at(server)
    left_out = {"_claim_names": {"groups": "src1"}}
    with pytest.raises(AuthError) as caught:
        provider._refuse_left_out(left_out)
    assert caught.value.code == "sign_in_refused"
    provider._refuse_left_out(left_out | {"groups": ["a"]})
    provider._refuse_left_out({})


@pytest.fixture
def devices(server: Any) -> Iterator[tuple[OidcProvider, list[Any]]]:
    """A provider with device authorization, and what it answers to a POST: status and JSON."""
    provider, issuer = provider_at(server)
    server.answer = {
        "issuer": issuer,
        "token_endpoint": f"{issuer}/token",
        "device_authorization_endpoint": f"{issuer}/device",
    }
    answer: list[Any] = []

    def do_post(handler: Any) -> None:
        status, told = answer
        handler.rfile.read(int(handler.headers["content-length"]))
        handler.send_response(status)
        handler.end_headers()
        handler.wfile.write(json.dumps(told).encode())

    with patch.object(_Served, "do_POST", do_post, create=True):
        yield provider, answer


BEGUN = {"device_code": "d", "user_code": "u", "verification_uri": "https://login.example/device"}


def test_a_devices_sign_in_is_taken_within_bounds(devices: tuple[OidcProvider, list[Any]]) -> None:
    provider, answer = devices
    answer[:] = [200, BEGUN]
    begun = asyncio.run(provider.begin_device())
    assert (begun.seconds, begun.interval, begun.complete_address) == (600, 5, None)
    answer[:] = [200, BEGUN | {"expires_in": 1e9, "interval": "x", "verification_uri_complete": 1}]
    begun = asyncio.run(provider.begin_device())
    assert (begun.seconds, begun.interval, begun.complete_address) == (3600, 5, None)
    google = {name: value for name, value in BEGUN.items() if name != "verification_uri"}
    answer[:] = [200, google | {"verification_url": "https://google.example/device"}]
    assert asyncio.run(provider.begin_device()).address == "https://google.example/device"
    for wrong in (
        {"user_code": "\x1b[2J"},
        {"verification_uri": "javascript:x"},
        {"device_code": 1},
    ):
        answer[:] = [200, BEGUN | wrong]
        with pytest.raises(UnavailableError, match="no device_code, user_code and"):
            asyncio.run(provider.begin_device())
    answer[:] = [400, {"error": "unauthorized_client"}]
    with pytest.raises(AuthError, match=r"unauthorized_client\. Its administrator can allow"):
        asyncio.run(provider.begin_device())


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        ("expired_token", AuthError, "was not confirmed in time"),
        ("access_denied", AuthError, "was refused"),
        ("slow_down", LimitError, "asked too often"),
        ("invalid_grant", AuthError, "does not confirm this sign-in: invalid_grant"),
    ],
)
def test_a_devices_sign_in_that_failed_is_told(
    devices: tuple[OidcProvider, list[Any]], error: str, kind: type[Exception], why: str
) -> None:
    provider, answer = devices
    answer[:] = [400, {"error": "authorization_pending"}]
    assert asyncio.run(provider.device_signed_in("d")) is None
    answer[:] = [400, {"error": error}]
    with pytest.raises(kind, match=why):
        asyncio.run(provider.device_signed_in("d"))
