"""Build the documentation's site: `python -m docs.site.build [OUT]`; OUT is build/site unless
given.

The pages keep their places in the repository, so that their links work there and here. The build
copies the pages of the navigation, and the files that they link to, to a folder of its own, and
lets Zensical make the site of that.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docs.site.llms_txt import CONFIG, ROOT, pages_of_the_navigation

STYLE = "site.css"
_LINK = re.compile(r"\]\(([^)#\s]+)")


def build(out: Path) -> None:
    """Build into `out`, which is replaced.

    Raises subprocess.CalledProcessError if a link or an anchor leads nowhere.
    """
    with tempfile.TemporaryDirectory() as folder:
        stage = Path(folder)
        pages = pages_of_the_navigation()
        for path in dict.fromkeys(
            [*pages, *(linked for page in pages for linked in _linked_files(page))]
        ):
            (stage / "pages" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, stage / "pages" / path)
        shutil.copy(ROOT / "llms.txt", stage / "pages/llms.txt")
        shutil.copy(Path(__file__).with_name(STYLE), stage / "pages" / STYLE)
        shutil.copy(CONFIG, stage / CONFIG.name)
        subprocess.run(
            [sys.executable, "-m", "zensical", "build", "--strict"],
            cwd=stage,
            check=True,
            capture_output=True,
            text=True,
        )
        for page in pages:  # as llms.txt links to them
            (stage / "site" / page).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / page, stage / "site" / page)
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(stage / "site", out)


def _linked_files(page: str) -> list[str]:
    """Files of the repository that a page links to or shows; paths from the project's folder."""
    targets = [
        target
        for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8"))
        if "://" not in target
    ]
    found = [((ROOT / page).parent / target).resolve() for target in targets]
    return [str(path.relative_to(ROOT)) for path in found if path.is_file()]


def main(arguments: list[str]) -> int:
    out = Path(arguments[0]) if arguments else ROOT / "build/site"
    try:
        build(out)
    except subprocess.CalledProcessError as error:
        print(error.stdout, error.stderr, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
