"""Settings from the environment, as commands read them."""

from __future__ import annotations

import pytest

from ft_service.cli.output import load_settings
from ft_service.errors import SpecError

KEYS = ("FT_INFERENCE_API_KEY", "FT_WANDB_API_KEY", "FT_MLFLOW_TOKEN", "FT_TRACKIO_TOKEN")
"""Secrets that are sent in headers: a client that cannot send one says in its error what it is, and tenants see that."""


@pytest.mark.parametrize("name", [*KEYS, "FT_OIDC_CLIENT_SECRET"])
def test_a_secret_ends_before_the_line_break_of_its_file(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    field = name.removeprefix("FT_").lower()
    monkeypatch.setenv(name, "sk-secret\n")
    assert getattr(load_settings(), field).get_secret_value() == "sk-secret"
    monkeypatch.setenv(name, "\n")
    assert getattr(load_settings(), field) is None


@pytest.mark.parametrize("name", KEYS)
@pytest.mark.parametrize("key", ["sk-secret\nsk-other", "sk-secret\u00e9"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, key)
    with pytest.raises(SpecError, match=f"^{name} holds a line break") as error:
        load_settings()
    assert "sk-" not in str(error.value)
