"""The folder of token sets."""

from __future__ import annotations

from pathlib import Path

from ft_service.data.token_folder import entries_of, entry_key, folder_of


def test_the_folder_is_below_ft_home_unless_the_environment_names_or_forbids_one(
    tmp_path: Path,
) -> None:
    assert folder_of({}, tmp_path) == tmp_path / "tokens"
    assert folder_of({"FT_TOKENS": "/a/b"}, tmp_path) == Path("/a/b")
    assert folder_of({"FT_TOKENS": ""}, tmp_path) is None


def test_entries_of_a_file_are_those_whose_key_begins_with_its_digest(tmp_path: Path) -> None:
    for sha256, how in (("12", "b"), ("12", "a"), ("123", "a")):
        (tmp_path / entry_key(sha256, how)).mkdir()
    (tmp_path / "12.lock").touch()
    assert [entry.name for entry in entries_of(tmp_path, "12")] == ["12.a", "12.b"]
