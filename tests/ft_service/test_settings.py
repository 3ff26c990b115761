"""Settings from the environment, as commands read them."""

from __future__ import annotations

from pathlib import Path

import pytest

from ft_service.cli.output import load_settings
from ft_service.errors import SpecError
from ft_service.settings import Settings, refuse_misspelt
from ft_service.store.sql import open_store

KEYS = ("FT_INFERENCE_API_KEY", "FT_WANDB_API_KEY", "FT_MLFLOW_TOKEN", "FT_TRACKIO_TOKEN")
"""Secrets that are sent in headers: a client that cannot send one says in its error what it is, and
tenants see that.
"""


@pytest.mark.parametrize("name", [*KEYS, "FT_OIDC_CLIENT_SECRET"])
def test_a_secret_ends_before_the_line_break_of_its_file(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    field = name.removeprefix("FT_").lower()
    monkeypatch.setenv(name, "sk-secret\n")
    assert getattr(load_settings(), field).get_secret_value() == "sk-secret"
    monkeypatch.setenv(name, "\n")
    assert getattr(load_settings(), field) is None


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("key", ["sk-secret\nsk-other", "sk-secret\u00e9"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(
    name: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, key)
    with pytest.raises(SpecError, match=f"^{name} holds a line break") as error:
        load_settings()
    assert "sk-" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("FT_INFERENCE_URL", "http://[", "is no URL"),
        ("FT_INFERENCE_URL", "http://a:port/v1", "is no URL"),
        (
            "FT_INFERENCE_URL",
            "http://a/v1,b/v1",
            "'b/v1' must begin with http:// or https:// and a host",
        ),
        ("FT_OIDC_ISSUER", "https://[", "is no URL"),
    ],
)
def test_what_is_no_address_is_refused_at_the_start(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(SpecError, match=f"^{name}: ") as error:
        load_settings()
    assert said in error.value.message


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), (b"\xff", "utf-8"), (b"\n", "the file is empty")]
)
def test_a_file_without_the_databases_url_is_named(
    content: bytes | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "url").write_bytes(content)
    monkeypatch.setenv("FT_DATABASE_URL_FILE", str(tmp_path / "url"))
    with pytest.raises(SpecError, match=f"^FT_DATABASE_URL_FILE = {tmp_path / 'url'}: ") as error:
        load_settings().resolved_database_url()
    assert said in error.value.message


def test_a_database_at_no_port_is_no_traceback() -> None:
    with pytest.raises(SpecError, match="FT_DATABASE_URL is not a database URL") as error:
        open_store("postgresql://ft:secret@db:port/ft")
    assert "secret" not in error.value.message


def test_no_address_is_not_every_address() -> None:
    """Such as of `ft serve --host "$HOST"` without the variable."""
    with pytest.raises(SpecError, match=r"^--host = '': must have at least 1 character\.$"):
        load_settings(bind="")


def test_a_time_without_an_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters count it in whole seconds."""
    monkeypatch.setenv("FT_STOP_GRACE_SECONDS", "inf")
    with pytest.raises(
        SpecError, match=r"^FT_STOP_GRACE_SECONDS = 'inf': must be a number that is not infinite\.$"
    ):
        load_settings()


def test_texts_for_users_have_names_in_place_of_paths(tmp_path: Path) -> None:
    models = tmp_path / "home" / "bases"
    models.mkdir(parents=True)
    (tmp_path / "link").symlink_to(models)
    settings = Settings(home=tmp_path / "home", models=[tmp_path / "link"])
    told = settings.without_paths(
        f"{tmp_path}/link/org/tiny and {models}/tiny: {tmp_path}/home/ft.db, in {tmp_path}/home "
        f"or {models}."
    )
    assert told == "org/tiny and tiny: ft.db, in FT_HOME or FT_MODELS."
    assert Settings(home=Path("/")).without_paths("a / b") == "a / b"


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("FT_ENGINE_JOB", "FT_ENGINE_JOBS"),
        ("FT_MODEL", "FT_MODELS"),
        ("FT_TOKEN", "FT_TOKENS"),
        ("FT_KEEP_RUN_DAYS", "FT_KEEP_RUNS_DAYS"),
    ],
)
def test_a_setting_that_is_misspelt_is_refused_at_the_start(name: str, meant: str) -> None:
    """It would be ignored."""
    with pytest.raises(SpecError, match=rf"^{name} is no setting: did you mean {meant}\?") as found:
        refuse_misspelt(["PATH", name])
    assert found.value.param == name


def test_names_that_others_use_are_nobodys_mistake() -> None:
    links = ["FT_API_SERVICE_HOST", "FT_API_PORT", "FT_POSTGRES_PORT_5432_TCP"]
    own = [f"FT_{name.upper()}" for name in Settings.model_fields]
    refuse_misspelt([*links, *own, "FT_CACHE", "FT_API_KEY", "FT_BASE_URL", "FT_TEAM", "GIFT_JOBS"])
