"""Rollouts that are open: an agent calls the model with a key that works for one of them alone, and
what was sampled is recorded, token for token.

Any thread may use them. A rollout is closed when its agent has answered, or its time is over; then
its key opens nothing, and answers that come later are not recorded.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import secrets
import threading
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from ft_service.errors import (
    AuthError,
    FtError,
    LimitError,
    NotFoundError,
    SpecError,
    UnavailableError,
)
from ft_service.ids import new_id
from ft_service.reinforcement.trajectories import RecordedCall
from ft_service.serving.preview import PreviewModel
from ft_service.serving.preview_process import Deliver

T = TypeVar("T")

KEY_PREFIX = "ftr-"
CALLS_AT_ONCE = 8
"""Calls of one rollout at once."""
MOST_REFUSED = 100
"""Refused calls of a rollout, after which it is ended: a client that does nothing but repeat them
would keep the service from others.
"""
MOST_SEEN = 4
"""Earlier conversations whose tokens a prompt may begin with."""
BUSY_SECONDS = 0.5
"""Pause before a call is asked again that the sampler had no place for."""
TURNS_USED = "rollout_turns_used"
TOKENS_USED = "rollout_tokens_used"
CLIENT_GONE = "rollout_client_gone"
WRONG_KEY = "rollout_wrong_key"


@dataclass(frozen=True, kw_only=True)
class RolloutBudget:
    """What a rollout may use."""

    turns: int
    tokens: int
    """Sampled tokens of all calls together."""
    longest_answer: int
    """Sampled tokens of one call at most."""
    window: int
    """Tokens of one call with its prompt at most: what a row that is trained on may have."""
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RolloutModel:
    """The weights that answer, and how answers are drawn."""

    model: PreviewModel
    adapter: str
    """A PEFT folder."""
    temperature: float
    seed: int


@dataclass(eq=False)
class CallUnderWay:
    """A call whose answer is not there yet."""

    order: dict[str, Any]
    """For the preview's process (workers/serving/requests.py, ChatRequest or TextRequest)."""
    messages: Sequence[Any] | None
    """As the agent has sent them; None: it has sent a text."""
    tokens: int
    """Reserved of the budget."""
    has_begun: bool = False
    """Whether the preview has delivered a part of the answer."""

    def told(self, deliver: Deliver) -> Deliver:
        """`deliver`, which also notes that the answer has begun."""

        def begun(part: Any) -> None:
            self.has_begun = True
            deliver(part)

        return begun


@dataclass(frozen=True)
class AnsweredCall:
    """A call with its answer."""

    recorded: RecordedCall
    message: Mapping[str, Any]
    """The answer, as in OpenAI's chat completions."""
    finish_reason: str
    text: str
    reasoning: str
    calls: Sequence[Mapping[str, Any]]
    """Calls of tools: name and arguments."""


class OpenRollout:
    """One rollout."""

    def __init__(
        self,
        project_id: str,
        model: RolloutModel,
        budget: RolloutBudget,
        prompt_seed: int = 0,
    ) -> None:
        """`prompt_seed`: from 0 to 2**31 - 1, the same for all rollouts of a prompt."""
        self.id = new_id("rollout_")
        self.key = KEY_PREFIX + secrets.token_urlsafe(32)
        """Opens this rollout alone, while it is open."""
        self.project_id = project_id
        self.model = model
        self.budget = budget
        self.prompt_seed = prompt_seed
        self.ends_at = math.inf
        """When its time is over; it begins with `start`."""
        self.was_called = False
        self.answered: list[AnsweredCall] = []
        """In the order in which they ended."""
        self.messages: Sequence[Any] = ()
        """The conversation of the last answered call, without its answer; a text is one message."""
        self.ending: Sequence[Any] = ()
        """What an environment has said to the last answer."""
        self.refused: Counter[str] = Counter()
        """Code → refused calls."""
        self.sampling: dict[str, Any] = {}
        """Parameters of sampling that the agent has asked for, and that the job decides."""
        self.unserved: FtError | None = None
        """Why the newest call waits for the sampler; None: none does."""
        self._guard = threading.Lock()
        self._under_way: list[CallUnderWay] = []
        self._closed = False

    def start(self) -> None:
        """Begin the rollout's time."""
        self.ends_at = time.monotonic() + self.budget.seconds

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_flooded(self) -> bool:
        """Whether so many calls were refused that the rollout is to be ended."""
        return self.refused.total() >= MOST_REFUSED

    @property
    def seconds_left(self) -> float:
        return self.ends_at - time.monotonic()

    def begin(
        self, order: Mapping[str, Any], messages: Sequence[Any] | None, sampling: Mapping[str, Any]
    ) -> CallUnderWay:
        """Begin a call, if the budget has room for it.

        `order`: of the conversation or text (`messages` = None) for the preview's process; how the
        answer is drawn is the job's. `sampling`: parameters of it that the agent has given.
        Raises SpecError for a budget that is used up, LimitError for too many calls at once,
        NotFoundError for a rollout that is over.
        """
        budget = self.budget
        with self._guard:
            self.was_called = True
            if self._closed or self.is_flooded:
                raise is_over(self.id)
            if len(self._under_way) >= CALLS_AT_ONCE:
                raise LimitError(
                    f"{CALLS_AT_ONCE} calls of this rollout are under way. Wait for an answer.",
                    code="too_many_at_once",
                    retry_after=1.0,
                )
            turn = len(self.answered) + len(self._under_way)
            if turn >= budget.turns:
                raise _used_up(f"max_turns = {budget.turns}", TURNS_USED, "calls")
            used = sum(len(own.recorded.tokens) for own in self.answered)
            left = budget.tokens - used - sum(own.tokens for own in self._under_way)
            if left < 1:
                raise _used_up(f"max_tokens = {budget.tokens}", TOKENS_USED, "tokens")
            tokens = min(left, budget.longest_answer, order["max_tokens"] or left)
            self.sampling |= sampling
            call = CallUnderWay(
                {
                    **order,
                    "adapter": self.model.adapter,
                    "n": 1,
                    "max_tokens": tokens,
                    "temperature": self.model.temperature,
                    "top_p": 1.0,
                    "seed": zlib.crc32(f"{self.model.seed}/{turn}".encode()),
                    "logprobs_at": self.model.temperature,
                    "recorded": True,
                    "window": budget.window,
                    "seen": self._seen(),
                },
                messages,
                tokens,
            )
            self._under_way.append(call)
            return call

    def _seen(self) -> list[list[int]]:
        recorded = [own.recorded for own in self.answered[-MOST_SEEN:]]
        return [[*own.prompt, *own.tokens] for own in recorded]

    def end(self, call: CallUnderWay, parts: Iterable[Mapping[str, Any]]) -> AnsweredCall:
        """Record the answer to a call. `parts`: all that the preview has delivered."""
        answered = _answered(parts)
        with self._guard:
            self._under_way.remove(call)
            self.unserved = None
            if not self._closed:
                self.answered.append(answered)
                self.messages = (
                    [{"role": "user", "content": answered.recorded.prompt_text}]
                    if call.messages is None
                    else call.messages
                )
                self.ending = ()
        return answered

    def drop(self, call: CallUnderWay) -> None:
        """Forget a call without an answer: it was refused, or its client has gone."""
        with self._guard:
            if call in self._under_way:
                self._under_way.remove(call)
                self._note_unserved(call)

    def refuse(self, code: str) -> None:
        """Count a call that was refused, or whose client has gone before its answer."""
        with self._guard:
            self.refused[code] += 1

    def close(self) -> None:
        """Record nothing any more."""
        with self._guard:
            self._closed = True
            for call in self._under_way:
                self._note_unserved(call)

    def _note_unserved(self, call: CallUnderWay) -> None:
        """No agent is late that waits for the sampler: a rollout whose deadline ends before the
        sampler has begun to answer a call is unserved.
        """
        if self.seconds_left <= 0 and not call.has_begun:
            self.unserved = UnavailableError(
                "The sampler did not begin to answer a call before its rollout's deadline."
            )


@dataclass
class OpenRollouts:
    """The rollouts that are open in this process."""

    base_url: str
    """Address of this server as agents reach it, without /v1; empty: none can, since this process
    has no API, or moves no jobs.
    """
    _by_key: dict[bytes, OpenRollout] = field(default_factory=dict[bytes, OpenRollout])
    """SHA-256 of the key → rollout."""
    _guard: threading.Lock = field(default_factory=threading.Lock)

    def open(self, rollout: OpenRollout) -> None:
        """Let a rollout be called with its key."""
        with self._guard:
            self._by_key[_digest(rollout.key)] = rollout

    def close(self, rollout: OpenRollout) -> None:
        """End a rollout: its key opens nothing any more."""
        rollout.close()
        with self._guard:
            self._by_key.pop(_digest(rollout.key), None)

    def find(self, rollout_id: str, key: str) -> OpenRollout:
        """Return the rollout that a key opens.

        Raises AuthError for a key that opens none, NotFoundError for that of another one.
        """
        rollout = self._by_key.get(_digest(key))
        if rollout is None:
            raise AuthError(
                "This key opens no rollout: it works until its rollout has ended, or its "
                "deadline is over."
            )
        if rollout.id != rollout_id:
            rollout.refuse(WRONG_KEY)
            raise is_over(rollout_id)
        return rollout

    def url_of(self, rollout: OpenRollout) -> str:
        """`base_url` for an OpenAI client."""
        return f"{self.base_url}/v1/rollouts/{rollout.id}"


async def when_served(rollout: OpenRollout, ask: Callable[[], Awaitable[T]]) -> T:
    """What `ask` gives. While the sampler has no place for it, wait until the rollout is over.

    Raises FtError, NotFoundError if it is over.
    """
    while not rollout.is_closed:
        try:
            async with asyncio.timeout(max(0.0, rollout.seconds_left)):
                return await ask()
        except UnavailableError as error:
            rollout.unserved = error
            await asyncio.sleep(BUSY_SECONDS)
        except TimeoutError:
            break
        except FtError:
            rollout.unserved = None
            raise
    raise is_over(rollout.id)


def is_over(rollout_id: str) -> NotFoundError:
    """The error for a rollout that a key does not open."""
    return NotFoundError(
        f"There is no open rollout {rollout_id[:80]!r} for this key.",
        param="rollout_id",
        code="rollout_not_found",
    )


def _used_up(limit: str, code: str, what: str) -> SpecError:
    return SpecError(
        f"The rollout's {what} are used up ({limit} of its environment). End it with a reward.",
        code=code,
    )


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="replace")).digest()


def _answered(parts: Iterable[Mapping[str, Any]]) -> AnsweredCall:
    prompt: Sequence[int] = ()
    text = ""
    reasoning = ""
    end: Mapping[str, Any] = {}
    for part in parts:
        match part["kind"]:
            case "begun":
                prompt = part["prompt"]
            case "text":
                text += part["text"]
                reasoning += part.get("reasoning", "")
            case "end":
                end = part
            case _:
                pass
    called = [
        {"id": new_id("call_"), "type": "function", "function": dict(call)} for call in end["calls"]
    ]
    message = {
        "role": "assistant",
        "content": text,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": called} if called else {}),
    }
    recorded = RecordedCall(
        prompt,
        end["tokens"],
        end["logprobs"],
        end["truncated"],
        end.get("prompt_text", ""),
        end.get("drawn_text", ""),
    )
    return AnsweredCall(recorded, message, end["reason"], text, reasoning, end["calls"])
