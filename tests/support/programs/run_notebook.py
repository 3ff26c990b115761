"""Runs a notebook as Jupyter does, and prints what its cells have printed or shown, as JSON. Its
folder is the kernel's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient


def said(output: Any) -> str:
    """The text of an output."""
    return output.get("text") or output.get("data", {}).get("text/plain", "")


if __name__ == "__main__":
    notebook = nbformat.read(Path(sys.argv[1]), as_version=4)
    NotebookClient(notebook, timeout=900, kernel_name="python3").execute()
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    print(json.dumps(["".join(map(said, cell.outputs)) for cell in cells]))
