from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
CODE = """
import gc
from ft_service.host.quick_imports import begin_imports, end_imports, quick_imports
with quick_imports():
    print(gc.isenabled())
print(gc.isenabled(), gc.get_freeze_count() > 0)
begin_imports()
with quick_imports():
    pass
print(gc.isenabled())
end_imports()
print(gc.isenabled())
"""


def test_garbage_is_collected_again_once_all_is_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines() == ["False", "True True", "False", "True"]


def test_every_process_that_begins_without_collecting_ends_so() -> None:
    files = [
        path
        for folder in ("api", "ft_service", "workers")
        for path in (ROOT / folder).rglob("*.py")
    ]
    beginning = [
        text
        for path in files
        if "    begin_imports()\n" in (text := path.read_text()) and "def " not in path.name
    ]
    starting = [text for text in beginning if 'if __name__ == "__main__":' in text]
    assert len(starting) >= 8
    assert all('if __name__ == "__main__":\n    end_imports()\n' in text for text in starting)
