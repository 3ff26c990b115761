"""The notebook with the cells of a course: it is kept without outputs, and runs from its first cell
to its last.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ft_service.installation import SAMPLE_MODELS
from tests.support.describing import put_descriptions

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/notebooks/from-openai.ipynb"
RUN = ROOT / "tests/support/programs/run_notebook.py"


def cells() -> list[dict[str, Any]]:
    return json.loads(NOTEBOOK.read_text())["cells"]


def test_it_is_kept_without_outputs() -> None:
    code = [cell for cell in cells() if cell["cell_type"] == "code"]
    assert len(code) > 10
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
    assert all(cell["metadata"] == {} for cell in cells())


def test_the_cells_of_the_course_name_nothing_of_ours() -> None:
    texts = ["".join(cell["source"]) for cell in cells()]
    begin = next(at for at, text in enumerate(texts) if text.startswith("## The cells of a course"))
    end = next(at for at, text in enumerate(texts) if text.startswith("## The end"))
    course = "\n".join(texts[begin:end])
    assert "OpenAI()" in course
    assert "extra_body" not in course
    assert not re.search(r"base_url|api_key|tiny-llama", course)


@pytest.mark.slow
def test_it_runs_from_the_first_cell_to_the_last(tmp_path: Path) -> None:
    put_descriptions(tmp_path, SAMPLE_MODELS)  # it takes half of the time
    environment = {
        **os.environ,
        "FT_CACHE": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "TMPDIR": str(tmp_path),
        "IPYTHONDIR": str(tmp_path / "ipython"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "jupyter"),
        "PYTHONPATH": str(ROOT),
    }
    try:
        result = subprocess.run(
            [sys.executable, str(RUN), str(NOTEBOOK)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=900,
            cwd=tmp_path,
        )
    finally:  # a cell that fails leaves its server
        for left in tmp_path.glob("ft-service-*/server.json"):
            with suppress(ProcessLookupError):
                os.kill(json.loads(left.read_text())["pid"], signal.SIGTERM)
    assert result.returncode == 0, result.stderr
    said = json.loads(result.stdout.splitlines()[-1])  # the kernel's processes may print, too
    assert any(text.startswith("succeeded") for text in said)
    assert any("The job has succeeded." in text for text in said)
    judged = next(text for text in said if re.search(r"completed \d+ of 12", text))
    base, tuned = (int(count) for count in re.findall(r"completed (\d+) of 12", judged))
    assert base < tuned, judged
    assert any("adapter_model.safetensors" in text for text in said)
    assert not list(tmp_path.glob("ft-service-*")), "what it has stored is removed"
