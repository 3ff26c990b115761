from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from ft_service.client.client import Client
from ft_service.client.connection import Connection, find_address, find_connection
from ft_service.errors import (
    AuthError,
    ConflictError,
    DataError,
    ForbiddenError,
    FtError,
    NotFoundError,
    SpecError,
    UnavailableError,
)
from ft_service.host.running_servers import announced
from tests.support.rest.stub_server import BASE_URL, KEY, error

LOCAL = "http://127.0.0.1:8000"


OURS = {"FT_BASE_URL": "http://box:9/v1", "FT_API_KEY": "ft-env"}


CLOUD = {"OPENAI_BASE_URL": "http://other/v1", "OPENAI_API_KEY": "sk-cloud"}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """Of a server that lives."""
    (tmp_path / "credentials").write_text('{"api_key": "ft-local"}')
    with announced(tmp_path, LOCAL):
        yield tmp_path


def test_arguments_come_before_ours_before_openais_before_the_file(home: Path) -> None:
    assert find_connection(
        {**OURS, **CLOUD}, home, base_url="http://arg/v1", api_key="k"
    ) == Connection("http://arg/v1", "k")
    assert find_connection({**OURS, **CLOUD}, home) == Connection("http://box:9/v1", "ft-env")
    assert find_connection(CLOUD, home) == Connection("http://other/v1", "sk-cloud")
    assert find_connection({}, home) == Connection("http://127.0.0.1:8000/v1", "ft-local")


def test_the_key_of_openais_cloud_is_not_sent_to_the_local_server(home: Path) -> None:
    assert find_connection({"OPENAI_API_KEY": "sk-cloud"}, home).api_key == "ft-local"


def test_the_local_key_is_not_sent_to_another_server(home: Path) -> None:
    with pytest.raises(AuthError, match="no API key for http://box:9/v1: set FT_API_KEY"):
        find_connection({"FT_BASE_URL": "http://box:9/v1"}, home)


def test_the_local_servers_address_given_by_hand_finds_its_key(home: Path) -> None:
    assert find_connection({"FT_BASE_URL": "http://127.0.0.1:8000/v1/"}, home).api_key == "ft-local"


def test_a_login_is_used_at_its_server_alone(home: Path, tmp_path: Path) -> None:
    keys = {"https://a.example/v1": "ft-login-a", "http://box:9/v1": "ft-login-box"}
    (tmp_path / "logins").write_text(json.dumps({url: {"key": key} for url, key in keys.items()}))
    assert find_connection({"FT_BASE_URL": "http://box:9"}, home).api_key == "ft-login-box"
    assert find_connection(OURS, home).api_key == "ft-env", "a key that is given goes first"
    cloud = {"FT_BASE_URL": "https://a.example", "OPENAI_API_KEY": "sk-cloud"}
    assert find_connection(cloud, home).api_key == "ft-login-a"
    assert find_connection({}, home).api_key == "ft-local", "a server that runs here"
    (tmp_path / "server.json").unlink()
    assert find_connection({}, home) == Connection("http://box:9/v1", "ft-login-box"), "the newest"
    assert find_address({}, home, None) == "http://box:9/v1"
    (tmp_path / "logins").write_text('{"a": 1}')
    with pytest.raises(SpecError, match="is not a file of logins: remove it"):
        find_connection({}, home)


def test_our_key_alone_goes_to_the_local_server(home: Path) -> None:
    assert find_connection({"FT_API_KEY": "ft-user"}, home) == Connection(f"{LOCAL}/v1", "ft-user")


def test_an_address_without_a_path_means_version_1(tmp_path: Path) -> None:
    assert (
        find_connection({**OURS, "FT_BASE_URL": "http://box:9"}, tmp_path).base_url
        == "http://box:9/v1"
    )


def test_without_any_server_the_message_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(FtError, match="ft serve"):
        find_connection({}, tmp_path)


@pytest.mark.parametrize("address", ["box:9", "ftp://box", "http://", "http://box:port"])
def test_what_is_no_address_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(SpecError, match="base_url = ") as caught:
        find_connection({**OURS, "FT_BASE_URL": address}, tmp_path)
    assert caught.value.param == "base_url"


@pytest.mark.parametrize("key", ["ft-…", "ft-1\n", "ft- 1"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(tmp_path: Path, key: str) -> None:
    with pytest.raises(AuthError, match="FT_API_KEY") as caught:
        find_connection({**OURS, "FT_API_KEY": key}, tmp_path)
    assert key not in caught.value.message


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"api_key": 1}'])
def test_a_broken_credentials_file_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "credentials").write_text(text)
    with pytest.raises(SpecError, match="credentials is not a credentials file"):
        find_connection({}, tmp_path)


def test_a_server_that_was_killed_is_not_found(home: Path) -> None:
    entry = json.loads((home / "server.json").read_text())
    entry["process"]["pid"] = 2**22 + 1
    (home / "server.json").write_text(json.dumps(entry))
    with pytest.raises(FtError, match="No server is running"):
        find_connection({}, home)


def test_a_server_whose_key_is_kept_elsewhere_needs_one(tmp_path: Path) -> None:
    with announced(tmp_path, "http://127.0.0.1:9"):
        with pytest.raises(AuthError, match=r"no API key for http://127\.0\.0\.1:9/v1"):
            find_connection({}, tmp_path)
        assert find_connection({"FT_API_KEY": "k"}, tmp_path) == Connection(
            "http://127.0.0.1:9/v1", "k"
        )


def test_the_key_is_not_in_the_repr() -> None:
    assert "secret" not in repr(Connection("http://box/v1", "secret"))


def client_answering(answer: httpx2.Response) -> Client:
    return Client(Connection(BASE_URL, KEY), transport=httpx2.MockTransport(lambda request: answer))


@pytest.mark.parametrize(
    ("status", "code", "kind"),
    [
        (400, "unknown_parameter", SpecError),
        (400, "invalid_file_format", DataError),
        (401, "invalid_api_key", AuthError),
        (403, "insufficient_permissions", ForbiddenError),
        (404, "model_not_found", NotFoundError),
        (409, "conflict", ConflictError),
        (413, "file_too_large", SpecError),
        (503, "unavailable", UnavailableError),
        (500, "internal_error", FtError),
    ],
)
def test_an_error_of_the_servers_is_the_same_error_here(
    status: int, code: str, kind: type[FtError]
) -> None:
    answer = error(status, "lora.r = 0: too small.", code=code, param="lora.r")
    with client_answering(answer) as client, pytest.raises(FtError) as caught:
        client.job("ftjob-1")
    assert type(caught.value) is kind
    assert (caught.value.message, caught.value.code, caught.value.param) == (
        "lora.r = 0: too small.",
        code,
        "lora.r",
    )


@pytest.mark.parametrize("status", [200, 404, 502])
def test_an_answer_of_something_else_names_the_address_and_what_to_check(status: int) -> None:
    with (
        client_answering(httpx2.Response(status, text="<html>")) as client,
        pytest.raises(FtError) as caught,
    ):
        client.models()
    assert f"http://service.test/v1/models answered {status}" in caught.value.message
    assert "FT_BASE_URL" in caught.value.message


def test_nobody_listening_says_how_to_start_a_server() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{unused.getsockname()[1]}/v1"
        with (
            Client(Connection(address, KEY)) as client,
            pytest.raises(UnavailableError, match="ft serve") as caught,
        ):
            client.models()
    assert address in caught.value.message
