"""Folders of bases as a stranger may send them, judged by server and command line in a process of
little memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.bases import save_base
from tests.support.hostile_bases import save_hostile

ROOT = Path(__file__).parents[4]
SECONDS = 120
"""After which a process hangs: it takes about three."""
DESCRIBED = frozenset(
    {
        "layers",
        "folder-config.json",
        *(f"{kind}-config.json" for kind in ("deep", "deeper", "many-lists")),
        *(f"{kind}-model.safetensors.index.json" for kind in ("deep", "deeper", "many-lists")),
    }
)
"""Folders that the process refuses which describes them (tests/e2e/test_describing.py)."""
HARMLESS = frozenset({"folder-chat_template.jinja", "folder-tokenizer_config.json"})
"""A folder of the name of a file that a base may lack."""


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    models = tmp_path_factory.mktemp("models")
    save_base(models / "good")
    names = save_hostile(models)
    command = [sys.executable, "-m", "tests.support.programs.judge_bases", str(models)]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, cwd=ROOT
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    return {"names": names, **json.loads(ended.stdout)}


def test_each_is_listed_with_its_reason_beside_the_good_one(judged: dict[str, Any]) -> None:
    listed = judged["listed"]
    assert listed["good"] is None
    assert {name for name in judged["names"] if listed[name] is None} - HARMLESS == DESCRIBED


@pytest.mark.parametrize("way", ["created", "planned"])
def test_each_is_refused_where_a_job_names_it(judged: dict[str, Any], way: str) -> None:
    said = judged[way]
    assert said["good"] is None
    taken = {name for name in judged["names"] if said[name] is None}
    assert taken - HARMLESS == DESCRIBED
    for name in (
        "fifo-config.json",
        "zero-tokenizer.json",
        "out-chat_template.jinja",
        "loop-tokenizer_config.json",
    ):
        assert f"The base's {name.partition('-')[2]} in " in said[name]
