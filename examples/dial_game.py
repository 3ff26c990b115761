"""A small text game for OpenEnv: turn a dial to a hidden goal by saying `up` or `down`, in three
moves.

    pip install openenv        in an environment of its own: it wants another version of mcp
    python examples/dial_game.py [--port 8902]

Jobs play it with deploy/examples/dial.yaml. A line of their data has the keys `start` and `goal`.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

MOVES = 3
STEPS = {"up": 1, "down": -1}


@dataclass
class Dial:
    """The rules, which need no package."""

    at: int = 0
    goal: int = 0
    moves: int = 0

    def begin(self, start: int, goal: int) -> str:
        self.at, self.goal, self.moves = start, goal, 0
        return self._seen()

    def move(self, said: str) -> tuple[str, float, bool]:
        """What is seen then, the reward, and whether the game is over."""
        self.at += STEPS.get(said.strip(), 0)
        self.moves += 1
        won = self.at == self.goal
        return self._seen(), float(won), won or self.moves == MOVES

    def _seen(self) -> str:
        if self.at == self.goal:
            return f"{self.at} is right"
        return f"{self.at} is {'low' if self.at < self.goal else 'high'}"


def app() -> Any:
    """The game as OpenEnv's server serves it."""
    from openenv.core.env_server import create_app  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.interfaces import Environment  # pyright: ignore[reportMissingImports]
    from openenv.core.env_server.types import Action, Observation, State  # pyright: ignore[reportMissingImports]

    class Said(Action):
        message: str

    class Seen(Observation):
        text: str

    class DialEnvironment(Environment[Said, Seen, State]):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def __init__(self) -> None:
            super().__init__()
            self.dial = Dial()

        def reset(self, seed: int | None = None, start: int = 0, goal: int = 0, **_: Any) -> Seen:
            return Seen(text=self.dial.begin(start, goal))

        def step(self, action: Said, timeout_s: float | None = None, **_: Any) -> Seen:
            text, reward, done = self.dial.move(action.message)
            return Seen(text=text, reward=reward, done=done)

        @property
        def state(self) -> State:
            return State(step_count=self.dial.moves)

    return create_app(DialEnvironment, Said, Seen, env_name="dial", max_concurrent_envs=64)


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8902)
    uvicorn.run(app(), port=parser.parse_args().port, log_level="warning")


if __name__ == "__main__":
    main()
