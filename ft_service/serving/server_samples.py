"""Answers to requests for samples by the operator's inference servers (FT_INFERENCE_URL), in the
parts that a preview delivers.

Each version of weights is an adapter with a name of its own, so that no server answers with an
earlier one. It is copied to FT_ADAPTERS and loaded by the server that is asked for it first. The
folder's time is that of its last use: a version that was not used for a while is unloaded and
removed, also after a restart, and comes back when it is asked for.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ft_service.errors import FtError, NotFoundError, SpecError, UnavailableError
from ft_service.host.loops import every
from ft_service.serving.handoff import inference_servers, put_adapter
from ft_service.serving.inference_server import InferenceServer
from ft_service.serving.preview import PreviewModel
from ft_service.serving.preview_process import Deliver, as_part
from ft_service.settings import Settings
from ft_service.spec import GREEDY

log = logging.getLogger(__name__)

PREFIX = "ft-sampler-"
"""Beginning of a version's name, which no tuned model's has."""
UNUSED_SECONDS = 120.0
"""Time after which a version that is not sampled from is unloaded."""
AWAY_SECONDS = 2.0
"""Time for which a server that did not answer is not asked."""
AT_ONCE = 128
"""Limit of requests under way at all servers together."""
TOKEN = "token_id:"
"""How vLLM writes a token if it is asked for numbers (return_tokens_as_token_ids)."""

_PLACES = 8
"""Tokens by which it is found out at which temperature a server tells log-probabilities."""
_Likeliest = Sequence[tuple[int, float]]
"""Tokens with their log-probabilities in nats, the likeliest first."""
Choices = Sequence[Mapping[str, Any]]
"""What /completions answers."""


class ServerSampler:
    """Requests for samples at all servers: those of FT_INFERENCE_URL, or others that are given,
    which answer for bases alone.

    Any thread may submit; `run` belongs to a thread of its own.
    """

    def __init__(self, settings: Settings, others: Sequence[InferenceServer] | None = None) -> None:
        self._servers = inference_servers(settings) if others is None else others
        self._adapters = settings.adapters if others is None else None
        self._pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="samples")
        self._guard = threading.Lock()
        self._busy, self._used = Counter[InferenceServer](), Counter[str]()
        """Requests under way at each server, and of each model."""
        self._away: dict[InferenceServer, float] = {}
        self._loading = threading.Lock()
        self._loaded: set[tuple[InferenceServer, str]] = set()
        self._tells_drawn: set[InferenceServer] = set()
        """Servers whose log-probabilities are known to be those at the temperature that is drawn
        at.
        """

    def submit(
        self,
        model: PreviewModel,
        order: dict[str, Any],
        deliver: Deliver,
        *,
        project_id: str = "",
        on_processor: bool = False,
    ) -> None:
        """As `Preview.submit`. Raises UnavailableError while no server answers, NotFoundError for
        weights that are gone.
        """
        name = model.name if order["adapter"] is None else version_of(Path(order["adapter"]))
        with self._guard:
            now = time.monotonic()
            there = [server for server in self._servers if self._away.get(server, 0.0) <= now]
            if not there:
                urls = ", ".join(server.url for server in self._servers)
                raise UnavailableError(f"No inference server answers ({urls}).")
            server = min(there, key=lambda each: self._busy[each])
            self._busy[server] += 1
            self._used[name] += 1
        self._pool.submit(self._answer, server, name, order, deliver)

    def cancel(self, ticket: object) -> None:
        """Do nothing: the server goes on with a request, and its answer is delivered to nobody."""

    def run(self, stop: threading.Event) -> None:
        """Unload what is not used until `stop` is set."""
        every(
            UNUSED_SECONDS / 10,
            self.unload_unused,
            stop,
            "unloading weights that are not sampled from",
        )
        self._pool.shutdown(cancel_futures=True)
        for server in self._servers:
            server.close()

    def unload_unused(self) -> None:
        """Unload and remove the versions that no request uses, and none has used for
        UNUSED_SECONDS.
        """
        for folder in self._adapters.glob(f"{PREFIX}*") if self._adapters is not None else ():
            with self._loading:
                if (
                    not self._used[folder.name]
                    and folder.stat().st_mtime <= time.time() - UNUSED_SECONDS
                ):
                    for server in self._servers:
                        self._unload(server, folder.name)
                    shutil.rmtree(folder, ignore_errors=True)

    def _unload(self, server: InferenceServer, name: str) -> None:
        self._loaded.discard((server, name))
        try:
            if name in server.models():
                server.unload(name)
        except FtError as error:
            log.warning("%s was not unloaded: %s", name, error.message)

    def _answer(
        self, server: InferenceServer, name: str, order: dict[str, Any], deliver: Deliver
    ) -> None:
        try:
            self._require_logprobs_at(server, order)
            for part in parts_of(order, self._completed(server, name, order)):
                deliver(part)
        except UnavailableError as error:
            with self._guard:
                self._away[server] = time.monotonic() + AWAY_SECONDS
            deliver(as_part(error))
        except FtError as error:
            deliver(as_part(error))
        except Exception:
            log.exception("a request for samples has failed")
            deliver(as_part(FtError("The request has failed; the service's log says how.")))
        finally:
            with self._guard:
                self._used[name] -= 1
                self._busy[server] -= 1

    def _completed(
        self, server: InferenceServer, name: str, order: Mapping[str, Any]
    ) -> list[Choices]:
        """The server's answers to the requests of an order."""
        wanted = order["max_tokens"] or server.longest() - len(order["prompt"])
        if wanted < 1:
            raise SpecError(
                "prompt: it fills the inference server's context. Shorten it.", param="prompt"
            )
        bodies = bodies_of(order, name, wanted)
        if order["adapter"] is None:
            return [server.complete(body) for body in bodies]
        self._load(server, name, Path(order["adapter"]))
        try:
            return [server.complete(body) for body in bodies]
        except FtError:
            if name in server.models():
                raise
        with self._loading:  # it has restarted without the adapter
            self._loaded.discard((server, name))
        self._load(server, name, Path(order["adapter"]))
        return [server.complete(body) for body in bodies]

    def _require_logprobs_at(self, server: InferenceServer, order: Mapping[str, Any]) -> None:
        """Raise SpecError unless the server tells log-probabilities at the temperature that the
        order asks for. It is asked once, by a model that it has besides: the mode is the
        server's.
        """
        at = order.get("logprobs_at", 1.0)
        if at == 1 or (server in self._tells_drawn and not order["scored"]):
            return
        asked = f"temperature = {at:g}: {server.url} tells log-probabilities"
        if order["scored"]:
            said = f"{asked} of given tokens at temperature 1 only, and beta needs them at {at:g}."
            raise SpecError(f"{said} Set temperature to 1, or beta to 0.", param="temperature")
        few = max(1, min(_PLACES, (order["max_tokens"] or _PLACES + 1) - 1))
        base = min(name for name in server.models() if not name.startswith(PREFIX))
        one = {
            **order,
            "n": 1,
            "top_logprobs": 2,
            "ends": False,
            "stop_texts": [],
            "stop_tokens": [],
        }
        [drawn, *_] = server.complete(bodies_of(one, base, few)[0])
        tokens = [_number(token) for token in drawn["logprobs"]["tokens"]]
        known = {
            **one,
            "prompt": [*order["prompt"], *tokens],
            "scored": len(tokens),
            "top_prompt_logprobs": 2,
        }
        [scored, *_] = server.complete(bodies_of(known, base, 1)[0])
        raw = _scores(known, scored.get("prompt_logprobs") or (), len(order["prompt"]))["top"]
        if not is_told_at(
            at, [_likeliest(own, 2) for own in drawn["logprobs"]["top_logprobs"]], raw
        ):
            said = f"{asked} at temperature 1, and training needs those at which answers are drawn."
            way = "Start vLLM with --logprobs-mode processed_logprobs, or set temperature to 1."
            raise SpecError(f"{said} {way}", param="temperature")
        self._tells_drawn.add(server)

    def _load(self, server: InferenceServer, name: str, source: Path) -> None:
        assert self._adapters is not None  # without it a sampler of weights is refused
        folder = self._adapters / name
        with self._loading:
            if (server, name) not in self._loaded:
                put_adapter(source, folder)
                if name not in server.models():
                    server.load(name, str(folder))
                self._loaded.add((server, name))
            os.utime(folder)


def version_of(folder: Path) -> str:
    """The name of the weights that are in a folder now: others in their place have another one.

    Raises NotFoundError.
    """
    try:
        state = folder.stat()
    except FileNotFoundError:
        raise NotFoundError(
            "The weights were deleted.", param="model_path", code="weights_not_found"
        ) from None
    return (
        PREFIX
        + hashlib.sha256(f"{folder} {state.st_ino} {state.st_mtime_ns}".encode()).hexdigest()[:24]
    )


def is_told_at(
    temperature: float, told: Sequence[_Likeliest], at_one: Sequence[_Likeliest]
) -> bool:
    """Whether the log-probabilities of places' two likeliest tokens are rather those at a
    temperature than those at 1, which are given too. Their distance says it: it is that of the
    logits, divided by the temperature. Pure.
    """
    ours, raw = (
        sum(first[1] - second[1] for first, second in of_places) for of_places in (told, at_one)
    )
    return abs(ours - raw / temperature) <= abs(ours - raw)


def bodies_of(order: Mapping[str, Any], name: str, max_tokens: int) -> list[dict[str, Any]]:
    """The bodies of /completions for an order (SampleRequest.order): of its answers, then of the
    prompt's log-probabilities, which vLLM would compute for each of several answers. Pure. Every
    option is given: a server takes those that are left out from the base's
    generation_config.json.
    """
    if order.get("images"):
        raise SpecError(
            "prompt: images are shown to the preview alone, and FT_INFERENCE_URL has the samples "
            "drawn by inference servers. Leave them out.",
            param="prompt",
        )
    greedy = order["temperature"] < GREEDY
    body = {
        "model": name,
        "prompt": order["prompt"],
        "n": 1 if greedy else order["n"],  # vLLM refuses more
        "max_tokens": max_tokens,
        "temperature": order["temperature"],
        "top_p": order["top_p"],
        "top_k": order["top_k"] or -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "seed": order["seed"],
        "stop": order["stop_texts"],
        "stop_token_ids": order["stop_tokens"],
        "ignore_eos": not order["ends"],
        "skip_special_tokens": False,  # texts to stop at, and calls of tools, may contain them
        "logprobs": order["top_logprobs"],
        "return_tokens_as_token_ids": True,
    }
    if not order["scored"]:
        return [body]
    scored = {"prompt_logprobs": order["top_prompt_logprobs"]}
    return (
        [{**body, **scored}]
        if body["n"] == 1
        else [body, {**body, **scored, "n": 1, "max_tokens": 1}]
    )


def parts_of(order: Mapping[str, Any], answers: Sequence[Choices]) -> Iterator[dict[str, Any]]:
    """The parts of an answer, as the preview delivers them.

    `answers`: to `bodies_of`. Pure. Raises FtError for choices without tokens.
    """
    choices = answers[0]
    if order["temperature"] < GREEDY:
        choices = [choices[0]] * order["n"]
    if order["scored"]:
        first = len(order["prompt"]) - order["scored"]
        yield {
            "kind": "scores",
            "place": first,
            **_scores(order, answers[-1][0].get("prompt_logprobs") or (), first),
        }
    for index, choice in enumerate(choices):
        told = choice["logprobs"]
        top = [_likeliest(own, order["top_logprobs"]) for own in told["top_logprobs"]]
        tokens = [_number(token) for token in told["tokens"]]
        yield {
            "kind": "tokens",
            "index": index,
            "tokens": tokens,
            "logprobs": told["token_logprobs"],
            "top": top,
        }
        yield {
            "kind": "end",
            "index": index,
            "reason": choice["finish_reason"],
            "text": choice["text"],
        }
    yield {"kind": "done"}


def _scores(
    order: Mapping[str, Any], told: Sequence[Mapping[str, Mapping[str, float]] | None], first: int
) -> dict[str, Any]:
    places = list(zip(order["prompt"], told, strict=False))[first:]
    if len(places) != order["scored"] or any(own is None for _, own in places):
        raise FtError(
            "The inference server gives no log-probabilities of a prompt (prompt_logprobs of "
            "/completions)."
        )
    known = [
        (token, {int(other): each["logprob"] for other, each in (own or {}).items()})
        for token, own in places
    ]
    top = [_sorted(own)[: order["top_prompt_logprobs"]] for _, own in known]
    return {"logprobs": [own[token] for token, own in known], "top": top}


def _likeliest(told: Mapping[str, float], most: int) -> list[tuple[int, float]]:
    """vLLM adds the token that was drawn, where it is none of the likeliest."""
    return _sorted({_number(token): logprob for token, logprob in told.items()})[:most]


def _sorted(logprobs: Mapping[int, float]) -> list[tuple[int, float]]:
    return sorted(logprobs.items(), key=lambda pair: -pair[1])


def _number(token: str) -> int:
    if not token.startswith(TOKEN):
        raise FtError(
            "The inference server gives no tokens (return_tokens_as_token_ids of /completions), "
            "as vLLM does."
        )
    return int(token.removeprefix(TOKEN))
