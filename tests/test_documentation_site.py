"""The pages that are made from the code are current and complete, and the site is refused if a link
leads nowhere.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from docs.site import build, document, generated, llms_txt, schema_text, versions
from ft_service.settings import Settings
from ft_service.spec.request import JobRequest

pytestmark = pytest.mark.docs
ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("path", generated.PAGES)
def test_a_page_that_is_made_from_the_code_is_current(path: str) -> None:
    assert (ROOT / path).read_text() == generated.PAGES[path](), "run: make docs"


def test_every_option_setting_and_operation_has_its_line() -> None:
    options = (ROOT / "docs/options.md").read_text()
    settings = (ROOT / "docs/settings.md").read_text()
    for name, field in JobRequest.model_fields.items():
        assert f"\n| `{name}` |" in options
        for inner in getattr(field.annotation, "model_fields", ()):
            assert (
                f"\n| `{inner}` |" in options.partition(f"\n## `{name}`")[2].partition("\n## ")[0]
            ), f"{name}.{inner}"
    for name, setting in Settings.model_fields.items():
        assert setting.description, name
        assert f"\n| `FT_{name.upper()}` |" in settings
    api = (ROOT / "docs/api.md").read_text()
    for path, operations in document.openapi_document()["paths"].items():
        for method in operations:
            assert f"\n### {method.upper()} {path}\n" in api


def test_a_schema_is_told_in_words() -> None:
    def told(schema: dict[str, object]) -> str:
        return schema_text.values_text(schema, lambda name: f"<{name}>")

    assert told({"type": "integer", "minimum": 1, "maximum": 4096}) == "whole number, 1 to 4,096"
    assert (
        told({"type": "number", "exclusiveMinimum": 0, "maximum": 1})
        == "number, above 0, at most 1"
    )
    assert told({"anyOf": [{"enum": ["a", True]}, {"type": "null"}]}) == "`a` or `true` or none"
    assert (
        told({"type": "array", "items": {"anyOf": [{"$ref": "#/x/A"}, {"type": "string"}]}})
        == "list of (<A> or text)"
    )
    assert schema_text.default_text({"default": 2.5}, required=False) == "`2.5`"
    assert schema_text.default_text({"default": None}, required=False) == "none"


def test_the_navigation_has_every_page() -> None:
    there = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    assert there <= set(llms_txt.pages_of_the_navigation())


def test_the_sites_of_releases_stand_side_by_side(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build_page(out: Path) -> None:
        out.mkdir(parents=True)
        (out / "index.html").write_text(out.name)

    monkeypatch.setattr(versions, "build", build_page)
    archives: list[Path] = []
    for version in ("0.9.0", "0.10.0"):
        versions.assemble(version, tmp_path / "out", archives)
        archives.append(Path(shutil.copy(tmp_path / f"out/site-{version}.tar.gz", tmp_path)))
    pages = {path.parent.name: path.read_text() for path in (tmp_path / "out").glob("*/index.html")}
    assert pages == {"0.9.0": "0.9.0", "0.10.0": "0.10.0", "latest": "0.10.0"}
    listed = json.loads((tmp_path / "out/versions.json").read_text())
    assert [(one["version"], one["aliases"]) for one in listed] == [
        ("0.10.0", ["latest"]),
        ("0.9.0", []),
    ]
    with pytest.raises(ValueError, match=r"other.tar.gz is not named site-VERSION.tar.gz"):
        versions.assemble("1.0.0", tmp_path / "out", [tmp_path / "other.tar.gz"])


def test_links_of_the_site_and_of_llms_txt_lead_to_files_and_the_search_finds_an_option(
    tmp_path: Path,
) -> None:
    build.build(tmp_path / "site")
    pages = list((tmp_path / "site").rglob("index.html"))
    assert len(pages) >= 24
    links = re.compile(r'<(?:a|img|link|script)\b[^>]*?\b(?:href|src)="?([^"#\s>]+)')
    targets = [
        (page, target)
        for page in pages
        for target in links.findall(page.read_text())
        if not re.match(r"\w+:", target)
    ]
    wrong = [
        f"{page.relative_to(tmp_path)}: {target}"
        for page, target in targets
        if not (page.parent / target).exists()
    ]
    assert not wrong, "\n".join(wrong)
    for target in re.findall(r"\]\(([^)]+)\): ", (tmp_path / "site/llms.txt").read_text()):
        assert (tmp_path / "site" / target).is_file()
    index = json.loads((tmp_path / "site/search.json").read_text())
    assert "loraplus_lr_ratio" in json.dumps(index)


@pytest.mark.parametrize("broken", ["[there](not-there.md)", "[there](data.md#no-such-title)"])
def test_a_link_that_leads_nowhere_fails_the_build(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    for path in [*llms_txt.pages_of_the_navigation(), "llms.txt"]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "docs/guide.md").write_text(f"# Guide\n\n{broken}\n")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        build.build(tmp_path / "out")
    assert "docs/guide.md" in failed.value.stdout + failed.value.stderr
    assert not (tmp_path / "out").exists()
