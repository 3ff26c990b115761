"""The names of transformers' models are those that its own reading of their sources finds, and are
read once.
"""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["torch"] = None
import transformers
from transformers.utils import import_utils
before = import_utils.define_import_structure
assert "transformers.models" not in sys.modules
FIRST
assert import_utils.define_import_structure is before
print(before.cache_info().misses)
read = before(transformers.models.__file__)
print("AutoTokenizer" in read[frozenset()]["auto.tokenization_auto"], all(
    {name: set(own) for name, own in auto_tokenizer._read_before(transformers.models.__file__)[needs].items()} == modules
    for needs, modules in read.items()
))
"""


def printed(first: str) -> list[str]:
    code = CODE.replace("FIRST", first)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_names_of_models_are_read_once_and_all_there() -> None:
    ours = "from ft_service.data.tokens.patches import auto_tokenizer"
    (once, *found), (twice, *_) = (
        printed(ours),
        printed(f"from transformers import AutoTokenizer; {ours}"),
    )
    assert found == ["True", "True"]
    assert int(once) < int(twice), (
        "transformers reads its models' sources once by itself: the patch can go"
    )
