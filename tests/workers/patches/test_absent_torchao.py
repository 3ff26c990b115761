"""torchao is kept out of a process in a way that Python, transformers and PEFT take for its
absence.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CODE = """
import importlib.util, sys
from workers.patches.absent_torchao import keep_torchao_out
keep_torchao_out()
import transformers, peft
from transformers.utils import is_torchao_available
from peft.import_utils import is_torchao_available as known_to_peft
from peft import LoraConfig, get_peft_model
import torch
get_peft_model(torch.nn.Sequential(torch.nn.Linear(4, 4)), LoraConfig(target_modules=["0"]))
print(is_torchao_available(), known_to_peft(), sys.modules["torchao"])
"""


@pytest.mark.slow
def test_transformers_and_peft_do_without_torchao() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CODE], capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout.strip()) == (0, "False False None"), done.stderr
