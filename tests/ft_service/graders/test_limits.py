"""The operator's limits: the models that graders may ask, and the paths that python graders must
not see.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ft_service.errors import SpecError
from ft_service.graders.limits import GraderLimits, private_paths, read_models
from ft_service.installation import SAMPLE_MODELS
from ft_service.settings import Settings


def test_models_have_the_keys_of_their_files(tmp_path: Path) -> None:
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "judge").write_text("sk-1\n")
    path = tmp_path / "graders.yaml"
    path.write_text(
        "judge: {base_url: http://10.0.0.5/v1, key_file: keys/judge}\nfree: {base_url: "
        "'https://x/v1', model: a/b}\n"
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
def test_a_wrong_file_is_refused_when_the_service_starts(
    text: str, said: str, tmp_path: Path
) -> None:
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


def test_every_path_of_the_settings_is_private(tmp_path: Path) -> None:
    """A new setting that is a path is among them by itself."""
    is_path = [
        name for name, field in Settings.model_fields.items() if "Path" in str(field.annotation)
    ]
    given: dict[str, Any] = {
        name: tmp_path / name for name in is_path if name != "database_url_file"
    }
    given["models"] = [given["models"]]
    home = tmp_path / "home"
    home.mkdir()
    (home / "files").symlink_to("/somewhere")
    settings = Settings(
        **given, database_url=f"sqlite:///{tmp_path}/own.db", trackio_url=f"file://{tmp_path}/runs"
    )
    found = private_paths(
        settings, {"FT_CACHE": "/c", "KUBECONFIG": "/k:/k2", "HOME": "/h", "PATH": "/usr/lib"}
    )
    expected = {f"FT_{name.upper()}": tmp_path / name for name in given}
    expected |= {
        "FT_DATABASE_URL": tmp_path / "own.db",
        "FT_TRACKIO_URL": tmp_path / "runs",
        "FT_HOME (files)": home / "files",
    }
    expected |= {"FT_CACHE": Path("/c"), "HOME": Path("/h")}
    assert found == expected | {"KUBECONFIG": Path("/k"), "KUBECONFIG (k2)": Path("/k2")}


def test_without_settings_all_is_in_the_home_and_the_sample_base_is_nobodys(tmp_path: Path) -> None:
    """An installed package has the sample base in the folder of packages, which python graders
    see.
    """
    found = private_paths(Settings(home=tmp_path, models=[SAMPLE_MODELS]), {})
    assert found == {"FT_HOME": tmp_path, "FT_DATABASE_URL": tmp_path / "ft.db"}


def test_keys_of_models_that_grade_are_private(tmp_path: Path) -> None:
    (tmp_path / "judge.key").write_text("sk-judge")
    models = tmp_path / "graders.yaml"
    models.write_text(
        "judge: {base_url: 'http://127.0.0.1/v1', key_file: judge.key}\nopen: {base_url: "
        "'http://127.0.0.1/v1'}\n"
    )
    private = GraderLimits.from_settings(Settings(home=tmp_path, grader_models=models)).private
    assert private["key_file of judge"] == tmp_path / "judge.key"
    assert private["FT_GRADER_MODELS"] == models
    assert "key_file of open" not in private
