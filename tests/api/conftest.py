"""A real server on a free port of this host, driven by the real `openai` client."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI

from ft_service.bases.catalogue import Catalogue
from ft_service.cli.root_command import run
from ft_service.control.checks import file_views
from ft_service.data.examiner import Examiner
from ft_service.settings import Settings
from ft_service.store.records import NewKey
from ft_service.store.sql import Store, migrate, open_store
from tests.support.bases import save_base
from tests.support.describing import at_once
from tests.support.rest.process import end_forker
from tests.support.rest.service import TRAINING, Service, serving_app


@pytest.fixture(scope="session", autouse=True)
def _no_forker_is_left() -> Iterator[None]:
    yield
    end_forker()


@pytest.fixture(scope="session")
def examiner() -> Iterator[Examiner]:
    """The process that reads data files, for tests that ask for samples and statistics often and
    are about something else.
    """
    with Examiner() as examiner:
        yield examiner


@pytest.fixture
def examined_by_one_process(examiner: Examiner, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of a process for each request, which takes a second to start."""
    one_at_a_time = threading.Lock()

    @contextmanager
    def examining(tokens: Path | None = None) -> Iterator[Examiner]:
        with one_at_a_time:
            yield examiner

    monkeypatch.setattr(file_views, "examining", examining)


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings besides the usual ones; a test changes them before it asks for `service`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return {}


@pytest.fixture
def settings(tmp_path: Path, configure: dict[str, Any]) -> Settings:
    save_base(tmp_path / "models" / "tiny")
    save_base(tmp_path / "models" / "meta-llama" / "Llama-3.2-1B")
    aliases = tmp_path / "aliases.yaml"
    aliases.write_text("gpt-4o-mini-2024-07-18: tiny\n")
    return Settings(
        home=tmp_path, models=[tmp_path / "models"], model_aliases=aliases, slots=4, **configure
    )


@pytest.fixture(scope="session")
def new_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database of this version's schema, to copy: a copy is quicker than the migrations."""
    path = tmp_path_factory.mktemp("database") / "ft.db"
    migrate(f"sqlite:///{path}")
    return path


@pytest.fixture
def store(settings: Settings, new_database: Path) -> Iterator[Store]:
    shutil.copy(new_database, settings.home / "ft.db")
    store = open_store(settings.resolved_database_url())
    yield store
    store.close()


@pytest.fixture(scope="session")
def server(new_database: Path) -> Iterator[tuple[str, FastAPI]]:
    """The address of one server for all tests; what stands behind it is each test's own."""
    with serving_app(Settings(home=new_database.parent), new_database) as served:
        yield served


@pytest.fixture(scope="session")
def connections() -> Iterator[httpx2.Client]:
    with httpx2.Client(verify=False, trust_env=False, timeout=240.0) as client:
        yield client


@pytest.fixture
def service(
    server: tuple[str, FastAPI], settings: Settings, store: Store, connections: httpx2.Client
) -> Iterator[Service]:
    store.projects.ensure_project("default", "local")
    _, key = store.keys.create_key(NewKey(project_id="default", name="test", scope="admin"))
    url, app = server
    before = app.state.services
    app.state.services = replace(
        before,
        settings=settings,
        store=store,
        catalogue=Catalogue.from_settings(settings, at_once()),
    )
    yield Service(url, settings, store, key, app, connections)
    # What a test has put in its place, such as meters, is not the next one's.
    app.state.services = before


@pytest.fixture
def client(service: Service) -> openai.OpenAI:
    return service.client()


@pytest.fixture
def training_file(client: openai.OpenAI) -> str:
    return client.files.create(file=("train.jsonl", TRAINING), purpose="fine-tune").id


@pytest.fixture
def ft(
    service: Service, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """The command line against the server: what it printed."""
    monkeypatch.setenv("FT_BASE_URL", f"{service.url}/v1")
    monkeypatch.setenv("FT_API_KEY", service.key)

    def call(*words: str, code: int = 0) -> str:
        capsys.readouterr()
        ended = run(list(words))
        printed = capsys.readouterr()
        assert ended == code, printed
        return printed.out + printed.err

    return call
