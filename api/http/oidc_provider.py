"""The OpenID Connect provider that people sign in through: the authorization code flow with PKCE,
state and nonce for browsers, device authorization for the command line.

Written to OpenID Connect Core 1.0, Discovery 1.0 and RP-Initiated Logout 1.0, RFC 7636 (PKCE),
RFC 9207 (`iss` beside the code) and RFC 8628 (device authorization). PyJWT checks the ID token's
signature and times. The rest is a few requests by the HTTP client that the service has.
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
from ft_service.errors import AuthError, LimitError, NotFoundError, SpecError, UnavailableError
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
_DEVICE_GRANT = "urn:ietf:params:oauth:grant-type:device_code"
_INTERVAL_SECONDS = 5
"""Between two questions for a device's sign-in, if the provider does not say (RFC 8628, 3.2)."""
_LONGEST_INTERVAL = 60
_LONGEST_DEVICE_SECONDS = 3600
"""Longest time that a device's sign-in may take, whatever the provider says."""


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


@dataclass(frozen=True)
class DeviceSignIn:
    """A sign-in that a program has begun, for a person to confirm in a browser."""

    device_code: str
    """Secret of the program."""
    user_code: str
    """What the person types at `address`."""
    address: str
    complete_address: str | None
    """An address with the code in it, if the provider has one."""
    seconds: int
    """Time that the person has."""
    interval: int
    """Seconds between two questions whether the person has done so."""


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

    async def begin_device(self) -> DeviceSignIn:
        """Begin a sign-in of a program without a browser.

        Raises NotFoundError if the provider has no such sign-ins, AuthError if it refuses this
        service's client, UnavailableError.
        """
        if "device_authorization_endpoint" not in await self._discovered():
            raise NotFoundError(
                f"{self.name} offers no sign-in for the command line: its discovery document has no "
                "device_authorization_endpoint. Sign in on the page and make a key there, or have "
                "its administrator allow this service's client the OAuth 2.0 device authorization "
                "grant.",
                code="no_device_sign_in",
            )
        endpoint = await self._endpoint("device_authorization_endpoint")
        status, told = await self._as_client(endpoint, {"scope": self._settings.oidc_scopes})
        if status != 200:
            raise AuthError(
                f"{self.name} begins no sign-in for the command line: {self._refusal(status, told)}. "
                "Its administrator can allow this service's client the OAuth 2.0 device "
                "authorization grant.",
                code="sign_in_refused",
            )
        return self._begun(told)

    def _begun(self, told: Mapping[str, Any]) -> DeviceSignIn:
        """Return what the provider's answer says. Raises UnavailableError if that is not usable."""
        address = told.get("verification_uri", told.get("verification_url"))  # Google's name
        complete = told.get("verification_uri_complete")
        texts = (told.get("device_code"), told.get("user_code"), address)
        usable = all(isinstance(text, str) and text.isprintable() and text for text in texts)
        if not usable or not str(address).startswith(("https://", "http://")):
            message = f"{self.name} has answered no device_code, user_code and verification_uri."
            raise UnavailableError(message, retry_after=10)
        if not isinstance(complete, str) or not complete.isprintable():
            complete = None
        return DeviceSignIn(
            *map(str, texts),
            complete_address=complete,
            seconds=_whole(told.get("expires_in"), 600, _LONGEST_DEVICE_SECONDS),
            interval=_whole(told.get("interval"), _INTERVAL_SECONDS, _LONGEST_INTERVAL),
        )

    async def device_signed_in(self, device_code: str) -> SignOn | None:
        """Return the person who has confirmed a program's sign-in; None: nobody has yet.

        Raises AuthError if it was refused or is over, LimitError if the program asks too often,
        UnavailableError.
        """
        form = {"grant_type": _DEVICE_GRANT, "device_code": device_code}
        status, tokens = await self._as_client(await self._endpoint("token_endpoint"), form)
        error = tokens.get("error")
        if error == "authorization_pending":
            return None
        if error == "slow_down":
            message = (
                f"{self.name} is asked too often about this sign-in: wait 5 s longer each time."
            )
            raise LimitError(message, code="slow_down", retry_after=2 * _INTERVAL_SECONDS)
        if error in ("expired_token", "access_denied"):
            why = "was not confirmed in time" if error == "expired_token" else "was refused"
            raise AuthError(f"This sign-in {why} at {self.name}.", code="sign_in_refused")
        if status != 200:
            raise self._unconfirmed(status, tokens)
        return (await self._person_of(tokens, None, f"device {device_code}")).person

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
        return await self._person_of(tokens, sign_in.nonce, sign_in.state)

    async def _person_of(
        self, tokens: Mapping[str, Any], nonce: str | None, state: str
    ) -> SignedIn:
        """Return the person whom the provider's tokens are about.

        `nonce`: None: the sign-in had none. `state`: secret of the sign-in. Raises AuthError,
        UnavailableError.
        """
        id_token = tokens.get("id_token")
        if not isinstance(id_token, str):
            raise AuthError(f"{self.name} has sent no ID token.", code="sign_in_refused")
        claims = await self._checked(id_token, nonce)
        if not values_of(claims, self._settings.oidc_groups_claim):
            claims = await self._user_info(claims, tokens.get("access_token"))
        self._refuse_left_out(claims)
        groups = None if self._groups is None else await in_thread(self._groups.current)
        return SignedIn(self._person(claims, state, groups), id_token)

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
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": back,
            "code_verifier": verifier,
        }
        status, tokens = await self._as_client(await self._endpoint("token_endpoint"), form)
        if status != 200:
            raise self._unconfirmed(status, tokens)
        return tokens

    def _unconfirmed(self, status: int, tokens: Mapping[str, Any]) -> AuthError:
        why = self._refusal(status, tokens)
        return AuthError(
            f"{self.name} does not confirm this sign-in: {why}.", code="sign_in_refused"
        )

    def _refusal(self, status: int, told: Mapping[str, Any]) -> str:
        """Log the provider's refusal, and return what it says of the reason."""
        why = f"{told.get('error', status)} {told.get('error_description', '')}"[:200].strip()
        log.warning("%s refuses a sign-in: %s", self._settings.oidc_issuer, why)
        return why

    async def _as_client(self, url: str, form: dict[str, str]) -> tuple[int, dict[str, Any]]:
        """Return status and answer of a request that says which client asks, and proves it."""
        client_id = self._settings.oidc_client_id
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
        return await self._asked("POST", url, data=form, auth=basic)

    async def _checked(self, id_token: str, nonce: str | None) -> dict[str, Any]:
        """Return the claims of an ID token (OpenID Connect Core 1.0, 3.1.3.7).

        `nonce`: None: the request for it had none.

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
        named = str(claims.get("nonce", "")).encode()
        if nonce is not None and not hmac.compare_digest(named, nonce.encode()):
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


def _whole(value: Any, usual: int, most: int) -> int:
    """Return a number of seconds that the provider has named, within bounds."""
    number = value if isinstance(value, int | float) and value > 0 else usual
    return max(1, int(min(number, most)))


def _with_query(url: str, query: Mapping[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"


def _text(digest: bytes) -> str:
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
