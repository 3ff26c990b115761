"""Tests set what they depend on: settings in the environment of a test run change nothing."""

from __future__ import annotations

import os

import pytest

from tests.support.environment import forget_settings


def test_settings_of_whoever_runs_the_tests_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "FT_MODELS",
        "OPENAI_API_KEY",
        "HTTPS_PROXY",
    ):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("FT_TEST_VLLM", "kept")
    forget_settings()
    assert not {
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "FT_MODELS",
        "OPENAI_API_KEY",
        "HTTPS_PROXY",
    } & set(os.environ)
    assert os.environ["FT_TEST_VLLM"] == "kept"
