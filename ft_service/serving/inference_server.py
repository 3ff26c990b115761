"""Client for a replica of vLLM or SGLang: OpenAI's API, and loading and unloading of adapters by
name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import httpx2

from ft_service.errors import FtError, SpecError, UnavailableError

_TIMEOUT = httpx2.Timeout(60.0, connect=3.0)
_ANSWER_TIMEOUT = httpx2.Timeout(3600.0, connect=3.0)
"""Of a request for long answers, which waits in the server's queue too."""


class InferenceServerError(FtError):
    """A replica has answered with an error that is not the request's: it does not know the model,
    or has failed.
    """


class InferenceServer:
    """A replica by its base URL, which ends in `/v1`.

    Every method makes one request and raises UnavailableError without an answer, or while the
    server cannot work, SpecError with its message if the request is wrong, and InferenceServerError
    for every other error that it answers.
    """

    def __init__(self, url: str, key: str | None) -> None:
        self.url = url.rstrip("/")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        limits = httpx2.Limits(max_connections=None)
        self._http = httpx2.Client(
            headers=headers, timeout=_TIMEOUT, trust_env=False, limits=limits
        )

    def close(self) -> None:
        self._http.close()

    def models(self) -> set[str]:
        """Names of the models that it serves."""
        answer = self._call("GET", "/models")
        with self._reading("/models"):
            return {str(model["id"]) for model in answer.json()["data"]}

    def longest(self) -> int:
        """Tokens of its context. Raises SpecError if it does not tell."""
        answer = self._call("GET", "/models")
        with self._reading("/models"):
            told = [model.get("max_model_len") for model in answer.json()["data"]]
        lengths = [length for length in told if length is not None]
        if not lengths:
            raise SpecError(
                f"max_tokens: {self.url}/models does not tell its context. Give it.",
                param="max_tokens",
            )
        return max(lengths)

    def load(self, name: str, folder: str) -> None:
        """Load an adapter from a folder that the server sees under the same path."""
        self._call("POST", "/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload(self, name: str) -> None:
        self._call("POST", "/unload_lora_adapter", {"lora_name": name})

    def logprobs(self, name: str, tokens: list[int]) -> list[float]:
        """Log-probabilities in nats of all tokens but the first."""
        body = {
            "model": name,
            "prompt": tokens,
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        }
        answer = self._call("POST", "/completions", body)
        with self._reading("/completions"):
            given = answer.json()["choices"][0]["logprobs"]["token_logprobs"][1 : len(tokens)]
        if len(given) != len(tokens) - 1 or None in given:
            raise FtError(
                f"{self.url} gives no log-probabilities of a prompt (echo and logprobs of "
                "/completions)."
            )
        return [float(value) for value in given]

    def chat_logprobs(
        self, name: str, chat: list[dict[str, Any]], tokens: list[int]
    ) -> list[float] | None:
        """Log-probabilities in nats of all these tokens but the first, with which a conversation's
        text ends as the server renders it. None: it tells none of a conversation, or its chat
        template writes other tokens.

        `prompt_logprobs` is vLLM's: an object for each token, by the tokens' numbers.
        """
        body = {
            "model": name,
            "messages": chat,
            "add_generation_prompt": False,
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        answer = self._call("POST", "/chat/completions", body)
        with self._reading("/chat/completions"):
            told = (answer.json().get("prompt_logprobs") or [])[-len(tokens) :]
            if len(told) < len(tokens) or str(tokens[0]) not in (told[0] or {}):
                return None
            own = [given.get(str(token)) for given, token in zip(told[1:], tokens[1:], strict=True)]
            return None if None in own else [float(given["logprob"]) for given in own if given]

    def complete(self, body: dict[str, Any]) -> list[dict[str, Any]]:
        """The choices of a completion."""
        answer = self._call("POST", "/completions", body, timeout=_ANSWER_TIMEOUT)
        with self._reading("/completions"):
            return answer.json()["choices"]

    @contextlib.contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """Raise InferenceServerError for an answer in another form, such as the page of a proxy."""
        try:
            yield
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise InferenceServerError(
                f"{self.url}{path} answers in another form than OpenAI's: {error!r:.200}."
            ) from error

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: httpx2.Timeout = _TIMEOUT,
    ) -> httpx2.Response:
        try:
            answer = self._http.request(method, f"{self.url}{path}", json=body, timeout=timeout)
        except httpx2.HTTPError as error:
            raise UnavailableError(f"{self.url} does not answer: {error}.") from error
        if not answer.is_success:
            kind = {
                400: SpecError,
                422: SpecError,
                429: UnavailableError,
                503: UnavailableError,
            }.get(answer.status_code, InferenceServerError)
            raise kind(f"{self.url}{path} answers {answer.status_code}: {_words(answer)}")
        return answer


def _words(answer: httpx2.Response) -> str:
    try:
        said = answer.json()
        said = said.get("error", said)
        return str(said.get("message", said))[:300]
    except (ValueError, AttributeError):
        return answer.text[:300]
