"""Mean reward, by step, of a model that is trained with an environment, on the sample base.

    agent        sums with a second try: deploy/examples/agent.yaml, examples/sums_agent.py
    calculator   tools of an MCP server: calculator.yaml, examples/calculator_mcp.py
    dial         a text game of OpenEnv: dial.yaml, examples/dial_game.py

Each runs with several seeds, from the same model that was shown the task (sums-shown.yaml,
turns-shown.yaml). Everything goes through a real server, as a user's job does. The game is served
by OpenEnv itself with `--openenv PYTHON`, an interpreter that has the package; else by the tests'
own server of its protocol.

    python benchmarks/agents.py [agent] [calculator] [dial] [--seeds 3] [--limit 480] [--no-save]
                                [--training max_steps=60 lr_scheduler_type=linear]
                                [--hyperparameters learning_rate_multiplier=8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import RESULTS, machine, save
from benchmarks.reinforcement import EXAMPLES, ROOT, trained
from examples.calculator_mcp import server as calculator
from examples.dial_game import Dial
from ft_service.agents.hosting import hosting, load_function
from tests.support.attempts import wait_for
from tests.support.environments import game_served, seen, tools_served
from tests.support.ports import free_port
from tests.support.service import Server

SHOWN = {
    "agent": "sums-shown.yaml",
    "calculator": "turns-shown.yaml",
    "dial": "turns-shown.yaml",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", choices=[*SHOWN, []], default=list(SHOWN))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=480.0, help="seconds of a job")
    for part in ("--training", "--hyperparameters"):
        parser.add_argument(
            part, nargs="*", default=[], metavar="NAME=VALUE", help="in place of the example's"
        )
    parser.add_argument("--openenv", type=Path, metavar="PYTHON")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        server = Server(
            Path(folder),
            ROOT / "examples/models",
            described=False,
            OMP_NUM_THREADS="1",
            FT_WEBHOOK_ALLOW_PRIVATE="1",
        )
        server.start()
        try:
            found = run(server.client(), options)
        finally:
            server.stop()
    if not options.no_save:
        path = RESULTS / "agents.json"
        before = json.loads(path.read_text()) if path.is_file() else {}
        kept = {name: before[name] for name in SHOWN if name in before}
        save("agents", {**machine(), **kept, **found})


def run(client: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Task → its jobs, and the seconds in which its model was shown it. One seed of every task
    comes before the next one.
    """
    shown: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for seed in range(options.seeds):
        for task in options.tasks:
            spec = SHOWN[task]
            if spec not in shown:
                shown[spec] = trained(client, spec, seed=1, limit=options.limit)
            example = yaml.safe_load((EXAMPLES / f"{task}.yaml").read_text())
            training = {**example["training"], **values(options.training)}
            method = example["method"]
            method["reinforcement"]["hyperparameters"] |= values(options.hyperparameters)
            with served(client, task, options.openenv) as environment:
                method["reinforcement"]["environment"] |= environment
                given = {"model": shown[spec]["model"], "limit": options.limit, "method": method}
                job = trained(client, f"{task}.yaml", seed=seed, training=training, **given)
            print(task, json.dumps(job), flush=True)
            of_task = {
                "shown_seconds": shown[spec]["seconds"],
                "training": training,
                "hyperparameters": method["reinforcement"]["hyperparameters"],
                "jobs": [],
            }
            found.setdefault(task, of_task)["jobs"].append(job)
    return found


def values(given: list[str]) -> dict[str, Any]:
    """`NAME=VALUE` as YAML has them."""
    return yaml.safe_load("\n".join(given).replace("=", ": ")) or {}


@contextlib.contextmanager
def served(client: Any, task: str, openenv: Path | None) -> Iterator[dict[str, str]]:
    """Give what the environment of a task needs in place of its example's."""
    if task == "agent":
        url = "http://127.0.0.1:9"
        endpoint = client.webhooks.create(
            name="agent", url=url, event_types=["fine_tuning.job.failed"]
        )
        with hosting(load_function(ROOT / "examples/sums_agent.py")) as url:
            yield {"url": url, "webhook_endpoint_id": endpoint.id}
    elif task == "calculator":
        with tools_served(calculator) as url:
            yield {"url": url}
    elif openenv is not None:
        with _by_openenv(openenv) as url:
            yield {"url": url}
    else:
        with game_served(_game) as url:
            yield {"url": url}


@contextlib.contextmanager
def _by_openenv(python: Path) -> Iterator[str]:
    port = free_port()
    command = [python, ROOT / "examples/dial_game.py", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"

    def answers() -> bool:
        with contextlib.suppress(OSError):
            return bool(urllib.request.urlopen(f"{url}/health"))
        return False

    try:
        wait_for(answers)
        yield url
    finally:
        process.terminate()
        process.wait()


def _game() -> Any:
    """The game by the tests' server."""
    dial = Dial()

    def answer(kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            return seen(dial.begin(data["start"], data["goal"]))
        text, reward, done = dial.move(data["message"])
        return seen(text, reward, done=done)

    return answer


if __name__ == "__main__":
    main()
