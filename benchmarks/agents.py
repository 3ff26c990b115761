"""Mean reward of an agent that is trained: sums with a second try, on the sample base.

Runs deploy/examples/agent.yaml with several seeds, each from the same model that was shown some
sums (sums-shown.yaml), and examples/sums_agent.py as the agent.

    python benchmarks/agents.py [--seeds 3] [--limit 300] [--no-save]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import yaml

if __name__ == "__main__":  # the repository's root, for benchmarks started by path
    sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.machine import machine, save
from benchmarks.reinforcement import EXAMPLES, ROOT, trained
from ft_service.agents.hosting import hosting, load_function
from tests.support.service import Server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of a job")
    parser.add_argument("--no-save", action="store_true")
    options = parser.parse_args()
    method = yaml.safe_load((EXAMPLES / "agent.yaml").read_text())["method"]
    function = load_function(ROOT / "examples/sums_agent.py")
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
            client = server.client()
            endpoint = client.webhooks.create(
                name="agent", url="http://127.0.0.1:9", event_types=["fine_tuning.job.failed"]
            )
            shown = trained(client, "sums-shown.yaml", seed=1, limit=options.limit)
            with hosting(function) as url:
                environment = method["reinforcement"]["environment"]
                environment |= {"url": url, "webhook_endpoint_id": endpoint.id}
                given = {"model": shown["model"], "limit": options.limit, "method": method}
                jobs = [
                    trained(client, "agent.yaml", seed=seed, **given)
                    for seed in range(options.seeds)
                ]
        finally:
            server.stop()
    for job in jobs:
        print({name: job[name] for name in ("first", "last", "seconds")})
    if not options.no_save:
        save("agents", {**machine(), "shown_seconds": shown["seconds"], "jobs": jobs})


if __name__ == "__main__":
    main()
