"""FT_GRADER_MODELS: the models that graders may ask."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.errors import SpecError
from ft_service.graders.limits import read_models


def test_models_have_the_keys_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "judge").write_text("sk-1\n")
    path = tmp_path / "graders.yaml"
    path.write_text(
        "judge: {base_url: http://10.0.0.5/v1, key_file: keys/judge}\nfree: {base_url: 'https://x/v1', model: a/b}\n"
    )
    models = read_models(path)
    assert (models["judge"].key, models["free"].key, models["free"].model) == ("sk-1", None, "a/b")
    assert "sk-1" not in repr(models)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- judge", "valid dictionary"),
        ("judge: http://x/v1", "judge: "),
        ("judge: {}", "judge.base_url: Field required"),
        ("judge: {base_url: ftp://x}", "judge.base_url"),
        ("judge: {base_url: http://x/v1, key: sk-1}", "Put it into a file of its own"),
        ("judge: {base_url: http://x/v1, key_file: none}", "No such file"),
        ("judge: {base_url: http://x/v1, temperature: 1}", "judge.temperature: Extra inputs"),
        ("judge: [", "expected the node content"),
    ],
)
def test_a_wrong_file_is_refused_when_the_service_starts(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "graders.yaml"
    path.write_text(text)
    with pytest.raises(SpecError, match="FT_GRADER_MODELS = ") as error:
        read_models(path)
    assert said in error.value.message
    assert "sk-1" not in error.value.message
    with pytest.raises(SpecError, match="No such file"):
        read_models(tmp_path / "none.yaml")


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sk-1\nsk-2\n")
    path = tmp_path / "graders.yaml"
    path.write_text("judge: {base_url: http://x/v1, key_file: key}")
    with pytest.raises(SpecError, match=f"{tmp_path / 'key'} holds a line break") as error:
        read_models(path)
    assert "sk-" not in error.value.message
