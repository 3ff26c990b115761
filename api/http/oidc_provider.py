"""The OpenID Connect provider that people sign in through: the authorization code flow with PKCE,
state and nonce.

Written to OpenID Connect Core 1.0, Discovery 1.0 and RP-Initiated Logout 1.0, RFC 7636 (PKCE) and
RFC 9207 (`iss` beside the code). PyJWT checks the ID token's signature and times. The rest is a few
requests by the HTTP client that the service has.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import hmac
import json
import logging
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import httpx2

from api.http.person_grants import Groups, GroupsFile, grants_of, values_of
from api.http.threads import in_thread
from ft_service.errors import AuthError, SpecError, UnavailableError
from ft_service.settings import Settings
from ft_service.store.tenants.people import STATE_SECONDS, SignOn

log = logging.getLogger(__name__)

ALGORITHMS = (
    "RS256",
    "RS384",
    "RS512",
    "PS256",
    "PS384",
    "PS512",
    "ES256",
    "ES384",
    "ES512",
    "EdDSA",
)
"""Signatures of ID tokens: those that need a key which only the provider has."""
_MOST_BYTES = 1024**2
"""Limit of an answer of the provider."""
_SECONDS = 10.0
"""Time limit of a request to it."""
_KEPT_SECONDS = 3600.0
"""Time after which the discovery document and the keys are fetched again."""
_NEW_KEY_SECONDS = 60.0
"""Shortest time between two fetches of the keys because of one that is not among them, or of a
signature that is not theirs.
"""
_FAILED_SECONDS = 5.0
"""Time for which a document that could not be fetched is not asked for again: who waits for it is
told so at once.
"""
_LEEWAY_SECONDS = 60.0
"""Difference between the provider's clock and this host's that is tolerated."""
_NAME_CHARACTERS = 100


@dataclass(frozen=True)
class BrowserSignIn:
    """A sign-in that a browser has begun.

    All its secrets are derived from the one in the browser's cookie, so nothing is stored for
    sign-ins that are never finished, and a state is worth nothing in another browser.
    """

    cookie: str
    began: float
    """Seconds since the epoch."""
    to: str
    """The path that it leads to."""

    @classmethod
    def begin(cls, to: str) -> BrowserSignIn:
        cookie = f"{int(time.time())}.{secrets.token_urlsafe(32)}.{base64.urlsafe_b64encode(to.encode()).decode()}"
        return cls(cookie, time.time(), to)

    @classmethod
    def of_cookie(cls, cookie: str) -> BrowserSignIn | None:
        """Return the sign-in of a browser's cookie; None if that is not one that `begin` has
        made.
        """
        try:
            began, _, to = cookie.split(".")
            return cls(
                cookie, float(began), base64.b64decode(to.encode(), b"-_", validate=True).decode()
            )
        except ValueError:
            return None

    @property
    def state(self) -> str:
        return self._derived("state")

    @property
    def nonce(self) -> str:
        return self._derived("nonce")

    @property
    def verifier(self) -> str:
        return self._derived("verifier")

    @property
    def challenge(self) -> str:
        """S256 of the verifier (RFC 7636, 4.2)."""
        return _text(hashlib.sha256(self.verifier.encode()).digest())

    def _derived(self, name: str) -> str:
        return _text(hashlib.sha256(f"ft-service sign-in {name} {self.cookie}".encode()).digest())


@dataclass(frozen=True)
class SignedIn:
    """A person whom the provider has signed in, and the token that says so."""

    person: SignOn
    id_token: str


class OidcProvider:
    """The provider by the settings."""

    def __init__(self, settings: Settings) -> None:
        """Raises SpecError if FT_OIDC_GROUPS or FT_OIDC_CLIENT_SECRET_FILE is wrong, or the extra
        `oidc` is not installed.
        """
        try:
            import jwt  # noqa: F401  # only services with single sign-on have it
        except ImportError:
            message = (
                "FT_OIDC_ISSUER needs a package that is not installed: pip install "
                "'ft-service[oidc]'."
            )
            raise SpecError(message, param="FT_OIDC_ISSUER", code="missing_package") from None
        self._settings = settings
        self._secret = _client_secret(settings)
        self._groups = GroupsFile(settings.oidc_groups) if settings.oidc_groups else None
        self._documents: dict[str, tuple[float, dict[str, Any]]] = {}
        self._failures: dict[str, tuple[float, str]] = {}
        self._fetching = asyncio.Lock()

    @property
    def name(self) -> str:
        """Its host, for people."""
        return urlsplit(self._settings.oidc_issuer).hostname or self._settings.oidc_issuer

    async def authorization_url(self, sign_in: BrowserSignIn, back: str) -> str:
        """Return the address that a browser is sent to.

        `back`: the redirect URI. Raises UnavailableError.
        """
        query = {
            "response_type": "code",
            "client_id": self._settings.oidc_client_id,
            "redirect_uri": back,
            "scope": self._settings.oidc_scopes,
            "state": sign_in.state,
            "nonce": sign_in.nonce,
            "code_challenge": sign_in.challenge,
            "code_challenge_method": "S256",
        }
        return _with_query(await self._endpoint("authorization_endpoint"), query)

    async def logout_url(self, id_token: str | None, back: str) -> str | None:
        """Return the address at which the provider ends its own session and leads back; None if it
        has none or does not answer.
        """
        try:
            ends = (await self._discovered()).get("end_session_endpoint")
        except UnavailableError as error:
            log.warning("signed out here only: %s", error)
            return None
        query = {"client_id": self._settings.oidc_client_id, "post_logout_redirect_uri": back}
        if id_token:
            query["id_token_hint"] = id_token
        return _with_query(ends, query) if isinstance(ends, str) else None

    async def signed_in(
        self, sign_in: BrowserSignIn, answer: Mapping[str, str], back: str
    ) -> SignedIn:
        """Return the person whom the provider's answer is about; the grants may be empty.

        `answer`: parameters of the request that the browser was sent back with. Raises AuthError if
        the answer cannot be trusted, UnavailableError if the provider does not answer.
        """
        if not hmac.compare_digest(answer.get("state", "").encode(), sign_in.state.encode()):
            raise AuthError("This sign-in was not begun in this browser.", code="sign_in_unknown")
        if time.time() - sign_in.began > STATE_SECONDS:
            raise AuthError(
                f"This sign-in took longer than {STATE_SECONDS / 60:.0f} minutes.",
                code="sign_in_unknown",
            )
        if answer.get("iss", self._settings.oidc_issuer) != self._settings.oidc_issuer:
            raise AuthError("This answer is another provider's.", code="sign_in_refused")
        if "code" not in answer:
            why = " ".join(
                answer.get(name, "")[:200] for name in ("error", "error_description")
            ).strip()
            raise AuthError(
                f"{self.name} did not sign you in: {why or 'it gave no reason'}.",
                code="sign_in_refused",
            )
        tokens = await self._exchange(answer["code"], sign_in.verifier, back)
        id_token = tokens.get("id_token")
        if not isinstance(id_token, str):
            raise AuthError(f"{self.name} has sent no ID token.", code="sign_in_refused")
        claims = await self._checked(id_token, sign_in.nonce)
        if not values_of(claims, self._settings.oidc_groups_claim):
            claims = await self._user_info(claims, tokens.get("access_token"))
        self._refuse_left_out(claims)
        groups = None if self._groups is None else await in_thread(self._groups.current)
        return SignedIn(self._person(claims, sign_in.state, groups), id_token)

    def _refuse_left_out(self, claims: Mapping[str, Any]) -> None:
        """Raise AuthError for a person of so many groups that the provider only says where they
        can be asked for (OpenID Connect Core 1.0, 5.6.2: distributed claims).
        """
        claim = self._settings.oidc_groups_claim
        elsewhere = claims.get("_claim_names")
        if values_of(claims, claim) or not isinstance(elsewhere, Mapping) or claim not in elsewhere:
            return
        raise AuthError(
            f"{self.name} has left out your groups, since there are too many for a token (Entra "
            "ID: more than 200). Its administrator can have it send only groups that are assigned "
            "to this application.",
            code="sign_in_refused",
        )

    def _person(self, claims: Mapping[str, Any], state: str, groups: Groups | None) -> SignOn:
        named = [claims.get(name) for name in ("email", "preferred_username", "name", "sub")]
        name = next(text for text in named if isinstance(text, str) and text)[:_NAME_CHARACTERS]
        grants = grants_of(claims, self._settings.oidc_groups_claim, groups)
        return SignOn(
            identity=f"{claims['iss']} {claims['sub']}", name=name, grants=grants, state=state
        )

    async def _exchange(self, code: str, verifier: str, back: str) -> dict[str, Any]:
        """Return the tokens for a code. Raises AuthError if the provider refuses it."""
        client_id = self._settings.oidc_client_id
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": back,
            "code_verifier": verifier,
        }
        known = (await self._discovered()).get(
            "token_endpoint_auth_methods_supported", ["client_secret_basic"]
        )
        basic = None
        if self._secret is not None and "client_secret_basic" in known:
            basic = (quote(client_id, safe=""), quote(self._secret, safe=""))  # RFC 6749, 2.3.1
        else:
            form |= {"client_id": client_id} | (
                {} if self._secret is None else {"client_secret": self._secret}
            )
        status, tokens = await self._asked(
            "POST", await self._endpoint("token_endpoint"), data=form, auth=basic
        )
        if status != 200:
            why = f"{tokens.get('error', status)} {tokens.get('error_description', '')}"[
                :200
            ].strip()
            log.warning("%s refuses a code: %s", self._settings.oidc_issuer, why)
            raise AuthError(
                f"{self.name} does not confirm this sign-in: {why}.", code="sign_in_refused"
            )
        return tokens

    async def _checked(self, id_token: str, nonce: str) -> dict[str, Any]:
        """Return the claims of an ID token (OpenID Connect Core 1.0, 3.1.3.7).

        Raises AuthError if one of them is wrong.
        """
        import jwt

        try:
            header = jwt.get_unverified_header(id_token)
            try:
                claims = await self._decoded(id_token, header, _KEPT_SECONDS)
            except jwt.InvalidSignatureError:  # keys without an id may be new ones
                claims = await self._decoded(id_token, header, _NEW_KEY_SECONDS)
        except jwt.PyJWTError as error:
            log.warning("an ID token of %s is refused: %s", self._settings.oidc_issuer, error)
            message = f"The ID token of {self.name} is not valid here: {str(error)[:200]}."
            raise AuthError(message, code="sign_in_refused") from None
        audiences = claims["aud"] if isinstance(claims["aud"], list) else [claims["aud"]]
        party = claims.get("azp", self._settings.oidc_client_id if len(audiences) == 1 else None)
        if party != self._settings.oidc_client_id:
            raise AuthError(
                f"The ID token of {self.name} was made for another client, or does not say for "
                "which of several (azp).",
                code="sign_in_refused",
            )
        if not hmac.compare_digest(str(claims.get("nonce", "")).encode(), nonce.encode()):
            raise AuthError(
                f"The ID token of {self.name} belongs to another sign-in.", code="sign_in_refused"
            )
        return claims

    async def _decoded(
        self, id_token: str, header: Mapping[str, Any], oldest: float
    ) -> dict[str, Any]:
        """Return the claims of a token whose signature, times and names are right.

        `oldest`: as `_key`'s. Raises AuthError, PyJWTError.
        """
        import jwt

        key = await self._key(header, oldest)
        return jwt.decode(
            id_token,
            jwt.PyJWK(key, algorithm=header["alg"]),
            algorithms=[header["alg"]],
            audience=self._settings.oidc_client_id,
            issuer=self._settings.oidc_issuer,
            leeway=_LEEWAY_SECONDS,
            options={"require": ["iss", "sub", "aud", "exp", "iat"]},
        )

    async def _key(self, header: Mapping[str, Any], oldest: float) -> dict[str, Any]:
        """Return the public key that a token's header names, of keys that were fetched within
        `oldest` seconds. Raises AuthError if there is none.
        """
        if header.get("alg") not in ALGORITHMS:
            alg = str(header.get("alg"))[:20]
            message = (
                f"The ID token of {self.name} is signed by {alg!r}, not by one of "
                f"{', '.join(ALGORITHMS)}."
            )
            raise AuthError(message, code="sign_in_refused")
        for age in (oldest, _NEW_KEY_SECONDS):  # a key that is not known may be new
            document = await self._document(await self._endpoint("jwks_uri"), age)
            for key in document.get("keys", []):
                if isinstance(key, dict) and _fits(key, header):
                    return key
        raise AuthError(
            f"The ID token of {self.name} is signed by a key that it does not publish.",
            code="sign_in_refused",
        )

    async def _user_info(self, claims: dict[str, Any], access_token: Any) -> dict[str, Any]:
        """Return the claims with those that the provider tells only by its user info."""
        endpoint = (await self._discovered()).get("userinfo_endpoint")
        if not isinstance(endpoint, str) or not isinstance(access_token, str):
            return claims
        status, told = await self._asked(
            "GET", endpoint, headers={"authorization": f"Bearer {access_token}"}
        )
        if status != 200 or told.get("sub") != claims["sub"]:
            return claims
        return {**told, **claims}

    async def _endpoint(self, name: str) -> str:
        address = (await self._discovered()).get(name)
        scheme = urlsplit(self._settings.oidc_issuer).scheme
        with contextlib.suppress(ValueError):  # no address, such as "https://["
            if isinstance(address, str) and urlsplit(address).scheme in ("https", scheme):
                return address
        raise UnavailableError(
            f"The discovery document of {self._settings.oidc_issuer} has no usable {name}."
        )

    async def _discovered(self) -> dict[str, Any]:
        """Return the discovery document. Raises UnavailableError."""
        issuer = self._settings.oidc_issuer
        found = await self._document(
            f"{issuer.rstrip('/')}/.well-known/openid-configuration", _KEPT_SECONDS
        )
        if found.get("issuer") != issuer:
            raise UnavailableError(
                f"FT_OIDC_ISSUER = {issuer}: its discovery document is of "
                f"{str(found.get('issuer'))[:200]!r}."
            )
        return found

    async def _document(self, url: str, oldest: float) -> dict[str, Any]:
        """Return a document that was fetched within `oldest` seconds."""
        async with self._fetching:
            fetched, document = self._documents.get(url, (None, {}))
            if fetched is not None and time.monotonic() - fetched < oldest:
                return document
            failed, why = self._failures.get(url, (None, ""))
            if failed is not None and time.monotonic() - failed < _FAILED_SECONDS:
                raise UnavailableError(why, retry_after=10)
            try:
                status, document = await self._asked("GET", url)
                if status != 200:
                    raise UnavailableError(
                        f"{self.name} answers {status} for {url}.", retry_after=10
                    )
            except UnavailableError as error:
                self._failures[url] = time.monotonic(), str(error)
                raise
            self._documents[url] = time.monotonic(), document
            return document

    async def _asked(self, method: str, url: str, **request: Any) -> tuple[int, dict[str, Any]]:
        """Return status and JSON object of an answer.

        Raises UnavailableError if it is late, too large or no such object.
        """
        try:
            async with (
                asyncio.timeout(_SECONDS),
                httpx2.AsyncClient(timeout=_SECONDS, follow_redirects=False) as client,
            ):
                accept = {"accept": "application/json", **request.pop("headers", {})}
                async with client.stream(method, url, headers=accept, **request) as answer:
                    body = b""
                    async for chunk in answer.aiter_bytes():
                        body += chunk
                        if len(body) > _MOST_BYTES:
                            raise ValueError(f"more than {_MOST_BYTES} bytes")
            value = json.loads(body)
            if not isinstance(value, dict):
                raise ValueError("not a JSON object")
            return answer.status_code, value
        except (httpx2.HTTPError, TimeoutError, ValueError, RecursionError) as error:
            why = str(error) or type(error).__name__
            log.warning("%s %s: %s", method, url, why)
            message = f"{self.name} does not answer as a provider of sign-ins does: {why}."
            raise UnavailableError(message, retry_after=10) from None


def _client_secret(settings: Settings) -> str | None:
    if settings.oidc_client_secret is not None:
        return settings.oidc_client_secret.get_secret_value()
    path = settings.oidc_client_secret_file
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(
            f"FT_OIDC_CLIENT_SECRET_FILE = {path}: {error}", param="FT_OIDC_CLIENT_SECRET_FILE"
        ) from None


def _fits(key: Mapping[str, Any], header: Mapping[str, Any]) -> bool:
    """Return whether a published key is the one that a token names; a token of a provider with one
    key may name none.
    """
    named = "kid" not in header or key.get("kid") == header["kid"]
    return (
        named and key.get("use", "sig") == "sig" and key.get("alg", header["alg"]) == header["alg"]
    )


def _with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"


def _text(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
