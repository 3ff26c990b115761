"""Put the site of a release beside those of earlier ones: `python -m docs.site.versions VERSION OUT
[SITE.tar.gz …]`.

The archives are those of earlier releases, by the name site-VERSION.tar.gz. OUT then has a folder
for each version, `latest` with the newest, a start page that leads there, and `versions.json`,
which the pages' choice of versions reads.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from docs.site.build import build

LATEST = "latest"
_ARCHIVE = re.compile(r"site-(\d+\.\d+\.\d+)\.tar\.gz")
_START = f'''<!doctype html>
<meta charset="utf-8"><meta http-equiv="refresh" content="0; url={LATEST}/">
<a href="{LATEST}/">{LATEST}</a>
'''


def assemble(version: str, out: Path, archives: Sequence[Path]) -> None:
    """Build this version's site into `out`, beside those in archives; write its own archive there
    too. Raises ValueError for a file of another name, as `build`, and tarfile.TarError.
    """
    shutil.rmtree(out, ignore_errors=True)
    build(out / version)
    with tarfile.open(out / f"site-{version}.tar.gz", "w:gz") as own:
        own.add(out / version, arcname=".")
    versions = {version}
    for archive in archives:
        match = _ARCHIVE.fullmatch(archive.name)
        if match is None:
            raise ValueError(f"{archive.name} is not named site-VERSION.tar.gz")
        if match[1] != version:
            with tarfile.open(archive) as earlier:
                earlier.extraction_filter = getattr(tarfile, "data_filter", None)  # Python 3.11.4
                earlier.extractall(out / match[1])
            versions.add(match[1])
    newest_first = sorted(
        versions, key=lambda one: [int(part) for part in one.split(".")], reverse=True
    )
    shutil.copytree(out / newest_first[0], out / LATEST)
    (out / "index.html").write_text(_START, encoding="utf-8")
    listed = [
        {"version": one, "title": one, "aliases": [LATEST] if one == newest_first[0] else []}
        for one in newest_first
    ]
    (out / "versions.json").write_text(json.dumps(listed), encoding="utf-8")


if __name__ == "__main__":
    assemble(sys.argv[1], Path(sys.argv[2]), [Path(path) for path in sys.argv[3:]])
