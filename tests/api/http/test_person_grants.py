"""Projects and scopes by groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from api.http.person_grants import Groups, GroupsFile, grants_of, read_groups, values_of
from ft_service.errors import SpecError

GROUPS: Groups = {
    "ml": {"default": "read", "team": "admin"},
    "ops": {"default": "admin"},
    "*": {"play": "submit"},
}


@pytest.mark.parametrize(
    ("held", "opened"),
    [
        (["ml"], {"default": "read", "team": "admin", "play": "submit"}),
        (["ops", "ml"], {"default": "admin", "team": "admin", "play": "submit"}),
        (["unknown"], {"play": "submit"}),
        (None, {"play": "submit"}),
    ],
)
def test_groups_open_projects_and_the_stronger_scope_counts(
    held: Any, opened: dict[str, str]
) -> None:
    assert grants_of({"groups": held}, "groups", GROUPS) == opened


def test_a_claim_may_name_projects_itself() -> None:
    claims = {
        "roles": [
            "default:read",
            "default:admin",
            "team:submit",
            "admin",
            ":admin",
            "team:root",
            "a:metrics",
            7,
        ]
    }
    assert grants_of(claims, "roles", None) == {"default": "admin", "team": "submit"}
    assert grants_of({"roles": "default:read"}, "roles", None) == {"default": "read"}


def test_a_claim_lies_within_objects_or_has_a_name_with_dots() -> None:
    assert values_of({"realm_access": {"roles": ["a"]}}, "realm_access.roles") == ["a"]
    assert values_of({"https://x.example/groups": ["b"]}, "https://x.example/groups") == ["b"]
    assert values_of({"realm_access": "a"}, "realm_access.roles") == []
    assert values_of({"groups": {"a": 1}}, "groups") == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "must be a mapping of groups"),
        ("[a]", "must be a mapping of groups"),
        ("ml: default", "'ml': must be a group's name"),
        ("ml: {default: root}", "ml: default: 'root' is no scope: use admin, submit or read"),
        ("ml: {default: metrics}", "is no scope"),
        ("ml: {", "while parsing"),
    ],
)
def test_a_mapping_that_is_wrong_is_refused_by_name(tmp_path: Path, text: str, why: str) -> None:
    path = tmp_path / "groups.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="FT_OIDC_GROUPS = ") as caught:
        read_groups(path)
    assert why in str(caught.value)


def test_groups_are_read_again_when_their_file_has_changed(tmp_path: Path) -> None:
    path = tmp_path / "groups.yaml"
    path.write_text("ml: {default: read}\n")
    groups = GroupsFile(path)
    assert groups.current() == {"ml": {"default": "read"}}
    path.write_text("ml: {default: read}\nnew: {team: admin}\n")
    assert groups.current().keys() == {"ml", "new"}
    path.write_text("ml: {default: root, and more}\n")
    assert groups.current().keys() == {"ml", "new"}, "what is wrong takes nobody's access"
    path.unlink()
    assert groups.current().keys() == {"ml", "new"}
