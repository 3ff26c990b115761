"""`ft login` with a server of its own and a provider that people sign in at, by the command line that
people have.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest

from tests.support.page.provider import CLIENT_ID, SECRET, Provider, providing
from tests.support.rest.process import read, server, started

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::authlib.deprecate.AuthlibDeprecationWarning"
    ),  # how the provider uses Authlib
    pytest.mark.filterwarnings("ignore:get_jwt_config:DeprecationWarning"),
]

SERVE = "from ft_service.cli.root_command import run; run(['serve'])"
GROUPS = """\
platform: {default: admin}
support: {team: submit, default: read}
"""


@dataclass
class Laptop:
    """A person's machine: its FT_HOME, and nothing of the server's."""

    home: Path
    url: str

    def begin(self, *words: str) -> subprocess.Popen[str]:
        """A command that runs."""
        environment = {
            name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ
        }
        return subprocess.Popen(
            [sys.executable, "-m", "ft_service.cli", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment | {"FT_HOME": str(self.home), "HOME": str(self.home)},
        )

    def ft(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command."""
        process = self.begin(*words)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err

    def log_in(self, provider: Provider, subject: str | None, *words: str) -> tuple[int, str, str]:
        """`ft login`, whose code a person types; None: and refuses."""
        process = self.begin("login", self.url, *words)
        assert process.stderr is not None
        told = process.stderr.readline()
        (code,) = re.findall(rf"Open {re.escape(provider.url)}/device .* the code (\S+)\.", told)
        provider.confirm(code, subject)
        out, err = process.communicate(timeout=120)
        return process.returncode, out, told + err


@pytest.fixture
def provider() -> Iterator[Provider]:
    with providing() as provider:
        yield provider


@pytest.fixture
def laptop(tmp_path: Path, provider: Provider) -> Iterator[Laptop]:
    home = tmp_path / "server"
    home.mkdir()
    (home / "groups.yaml").write_text(GROUPS)
    sign_on = {
        "FT_OIDC_ISSUER": provider.url,
        "FT_OIDC_CLIENT_ID": CLIENT_ID,
        "FT_OIDC_CLIENT_SECRET": SECRET,
        "FT_OIDC_GROUPS": str(home / "groups.yaml"),
        "FT_PREVIEW": "off",
    }
    with server(home, SERVE, **sign_on) as running:
        started(home, running)
        yield Laptop(tmp_path / "laptop", read(home / "server.json")["url"])


def test_a_person_signs_in_works_and_signs_out(laptop: Laptop, provider: Provider) -> None:
    provider.person("ada", email="ada@example.com", groups=["support"])
    code, out, err = laptop.log_in(provider, "ada")
    assert code == 0, err
    assert f"ada@example.com is signed in at {laptop.url}/v1 until" in out
    assert "project default, scope read." in out
    kept = laptop.home / "logins"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    (login,) = json.loads(kept.read_text()).values()
    assert login["key"] not in out + err

    assert laptop.ft("jobs", "--json")[:2] == (0, "[]\n"), "without FT_BASE_URL and FT_API_KEY"
    headers = {"authorization": f"Bearer {login['key']}"}
    answer = httpx2.post(f"{laptop.url}/v1/webhook_endpoints", headers=headers, trust_env=False)
    assert "scope read changes nothing" in answer.text

    # Less than nothing: the key stops, without another sign-in on this machine
    provider.person("ada", email="ada@example.com", groups=[])
    elsewhere = Laptop(laptop.home.parent / "other", laptop.url)
    code, _, err = elsewhere.log_in(provider, "ada")
    assert code != 0
    assert "ada@example.com: none of your groups opens a project here" in err
    code, _, err = laptop.ft("jobs")
    assert code != 0
    assert "`ft login` begins another" in err

    provider.person("ada", email="ada@example.com", groups=["platform"])
    assert "scope admin" in laptop.log_in(provider, "ada", "--json")[1].replace('": "', " ")
    key = json.loads(kept.read_text())[f"{laptop.url}/v1"]["key"]
    assert laptop.ft("logout")[1] == f"Signed out of {laptop.url}/v1.\n"
    assert not kept.exists()
    kept.write_text(json.dumps({f"{laptop.url}/v1": login | {"key": key}}))
    code, _, err = laptop.ft("jobs")
    assert "`ft login` begins another" in err, "it has ended at the server too"


def test_what_is_no_sign_in_is_said(laptop: Laptop, provider: Provider) -> None:
    code, _, err = laptop.log_in(provider, None)
    assert (code, "was refused at localhost" in err) == (1, True), err
    provider.person("eve", groups=["platform"], aud="another-client")
    code, _, err = laptop.log_in(provider, "eve")
    assert (code, "Audience" in err) == (1, True), err
    provider.person("eve", groups=["platform"])
    code, _, err = laptop.log_in(provider, "eve", "--project", "elsewhere")
    assert (code, "your groups do not open 'elsewhere', but default" in err) == (1, True), err
    assert not (laptop.home / "logins").exists()


def test_a_provider_without_device_authorization_is_named(
    laptop: Laptop, provider: Provider
) -> None:
    provider.has_devices = False
    code, _, err = laptop.ft("login", laptop.url)
    assert code == 1
    assert "localhost offers no sign-in for the command line" in err
    assert "no device_authorization_endpoint" in err
    code, _, err = laptop.ft("logout")
    assert (code, err) == (1, "ft: Nobody is signed in by `ft login`.\n")
