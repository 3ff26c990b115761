"""Helm itself, by the library that helm-python-sdk brings: in a process of its own, since it is a
whole Go runtime.

`python -m tests.support.helm` reads `{"chart": path, "cases": {name: values}}` and prints, by name,
`objects` or `error`, and `lint`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/ft-service"


def render(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Case → its `objects`, or the `error` that Helm gives; and what a strict `lint` finds worse
    than advice.
    """
    asked = json.dumps({"chart": str(CHART), "cases": cases})
    command = [sys.executable, "-m", "tests.support.helm"]
    done = subprocess.run(
        command, input=asked, capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def _answer(chart: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    import helm_python

    report = helm_python.lint(chart, dict(values), strict=True, namespace="ft")
    found = [message["error"] for message in report["messages"] if message["severity"] > 1]
    with helm_python.Chart.load(chart) as loaded:
        try:
            loaded.validate_schema(dict(values))
            texts = loaded.render(dict(values), name="ft", namespace="ft")
        except helm_python.HelmError as error:
            return {"error": str(error), "lint": found}
    manifests = [text for path, text in texts.items() if path.endswith(".yaml")]
    return {
        "objects": [item for text in manifests for item in yaml.safe_load_all(text) if item],
        "lint": found,
    }


if __name__ == "__main__":
    given = json.load(sys.stdin)
    print(
        json.dumps(
            {name: _answer(given["chart"], values) for name, values in given["cases"].items()}
        )
    )
