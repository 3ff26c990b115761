"""That transformers reads the sources of its models once, and finds in them what it finds by itself."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import sys
read = []
sys.addaudithook(lambda event, given: event == "open" and str(given[0]).endswith("modeling_llama.py") and read.append(given))
import json
sys.modules["torch"] = None
if sys.argv[1] == "ours":
    from ft_service.data.tokens import tokenize
from transformers import AutoTokenizer, models
names = {name: str(module) for name, module in sorted(models._class_to_module.items())}
print(json.dumps([len(read), names]))
"""


def found_by(who: str) -> tuple[int, dict[str, str]]:
    """How often the sources are read, and the module of each name."""
    ended = subprocess.run([sys.executable, "-c", PROGRAM, who], capture_output=True, text=True, check=True, timeout=300)
    times, names = json.loads(ended.stdout)
    return times, names


def test_the_sources_of_the_models_are_read_once() -> None:
    times, names = found_by("ours")
    stock_times, stock_names = found_by("stock")
    assert (times, stock_times) == (1, 2)
    assert names["LlamaConfig"]
    assert names == stock_names
