"""What the tutorials on large bases quote of `ft plan` is what it says, of a base of that shape
without its 16 GB.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.bases import save_base
from tests.support.blocks import ROOT, blocks

LLAMA_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
}
_QUOTED = re.compile(r"(?m)^(ft plan .*)\n```\n\n    (Fits .*)$")


@pytest.mark.slow
def test_the_plans_of_an_8b_are_as_quoted(tmp_path: Path) -> None:
    save_base(tmp_path / "models/meta-llama/Llama-3.1-8B-Instruct", LLAMA_8B)
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    (making,) = [
        block.text
        for block in blocks("docs/tutorial-8b-on-24-gb.md")
        if "my-8b/job.yaml <<" in block.text
    ]
    found = [
        quoted
        for page in ("docs/tutorial-8b-on-24-gb.md", "docs/tutorial-eight-gpus.md")
        for quoted in _QUOTED.findall((ROOT / page).read_text())
    ]
    assert len(found) == 2
    path = f"{ROOT}/.venv/bin:{os.environ['PATH']}"
    environment = os.environ | {
        "PATH": path,
        "FT_HOME": f"{tmp_path}/.ft",
        "FT_MODELS": f"{tmp_path}/models",
        "COLUMNS": "200",
    }
    for command in (making, *(command for command, _ in found)):
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        for quoted, line in found:
            assert quoted != command or line in done.stdout
