"""Parts of the page, rendered from answers of the API."""

from __future__ import annotations

import re

from fastapi import Request

from api.page.rendering import rendered, static_files


def test_samples_are_drawn_by_role_and_their_text_is_text() -> None:
    tokens = [
        {"id": 1, "text": "<b>", "role": "template"},
        {"id": 2, "text": "Hi", "role": "words"},
        {"id": 3, "text": "<script>", "role": "learned"},
        {"id": 4, "text": "far", "role": "cut"},
    ]
    sample = {
        "line": 3,
        "tokens": tokens,
        "learned": 1,
        "total": 4,
        "cut_at": 3,
        "error": None,
        "answer": "",
    }
    fault = {
        "line": 4,
        "tokens": [],
        "learned": 0,
        "total": 0,
        "cut_at": None,
        "error": "no <i>",
        "answer": "",
    }
    found = {"data": [sample, fault], "has_more": True, "word": "line", "format": "chat lines"}
    request = Request(
        {
            "type": "http",
            "method": "GET",
            "path": "/",
            "query_string": b"",
            "headers": [],
            "server": ("h", 1),
        }
    )
    body = rendered(
        request, "samples.html", found=found, after=0, more="/more?after=", lengths=None
    ).body
    for role, text in (
        ("template", "&lt;b&gt;"),
        ("words", "Hi"),
        ("learned", "&lt;script&gt;"),
        ("cut", "far"),
    ):
        assert f'class="t-{role}"' in body
        assert text in body
    assert "no &lt;i&gt;" in body
    assert 'hx-get="/more?after=4"' in body


def test_a_file_in_numbers_names_the_lines_to_look_at() -> None:
    request = Request(
        {
            "type": "http",
            "method": "GET",
            "path": "/",
            "query_string": b"",
            "headers": [],
            "server": ("h", 1),
        }
    )
    spread = {"least": 3, "mean": 5.0, "median": 5, "p90": 8, "p99": 9, "most": 9}
    none = {"count": 0, "first": []}
    cut = {"count": 3, "first": [2, 7]}
    file = {
        "word": "line",
        "samples": 40,
        "tokens": 200,
        "targets": 50,
        "lengths": spread,
        "cut": cut,
    }
    file |= dict.fromkeys(("dropped", "alike", "duplicates", "near_empty", "skipped"), none)
    bars = [{"begin": 3, "end": 9, "samples": 40, "share": 1.0}]
    body = rendered(
        request, "statistics.html", found={"training": file, "warnings": ["<b>"]}, bars=bars
    ).body
    assert "25.0 %" in body
    assert "3<small> line 2, 7 …" in body
    assert "Duplicates" not in body
    assert "&lt;b&gt;" in body
    refused = rendered(request, "statistics.html", found={"fault": "a.jsonl, line 3: <i>"}).body
    assert "line 3: &lt;i&gt;" in refused


def test_no_text_is_dimmed_by_opacity() -> None:
    """What is faint already would be too faint to read (WCAG asks for a contrast of 4.5); axe does
    not see it.
    """
    css = static_files()["page.css"][0].decode()
    dimmed = re.findall(r"([^{};]+){[^{}]*opacity: 0?\.\d", css)
    assert [rule.strip() for rule in dimmed] == ["button:disabled", "50%"]
