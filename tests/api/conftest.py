"""A real server on a free port of this host, driven by the real `openai` client."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
import uvicorn

from api.app import create_app
from ft_service.settings import Settings
from ft_service.store.sql import SqlStore, migrate, open_store

LINE = json.dumps({"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}) + "\n"
TRAINING = LINE.encode() * 3


@dataclass
class Service:
    """A running server and what stands behind it."""

    url: str
    settings: Settings
    store: SqlStore
    key: str

    def client(self, key: str | None = None, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key or self.key, **{"max_retries": 0, **options})

    def http(self, method: str, path: str, *, key: str | None = None, **options: Any) -> httpx2.Response:
        """A request that the openai client would not send."""
        headers = {"authorization": f"Bearer {key or self.key}", **options.pop("headers", {})}
        return httpx2.request(method, f"{self.url}{path}", headers=headers, **options)


def make_model(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (folder / name).write_text("{}")


@pytest.fixture
def configure(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Settings beside the usual ones; a test changes them before it asks for `service`."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return {}


@pytest.fixture
def settings(tmp_path: Path, configure: dict[str, Any]) -> Settings:
    make_model(tmp_path / "models" / "tiny")
    make_model(tmp_path / "models" / "meta-llama" / "Llama-3.2-1B")
    aliases = tmp_path / "aliases.yaml"
    aliases.write_text("gpt-4o-mini-2024-07-18: tiny\n")
    return Settings(home=tmp_path, models=[tmp_path / "models"], model_aliases=aliases, slots=4, **configure)


@pytest.fixture
def store(settings: Settings) -> Iterator[SqlStore]:
    migrate(settings.resolved_database_url())
    store = open_store(settings.resolved_database_url())
    yield store
    store.close()


@pytest.fixture
def service(settings: Settings, store: SqlStore) -> Iterator[Service]:
    store.ensure_project("default", "local")
    _, key = store.create_key(project_id="default", name="test", scope="admin")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        server = uvicorn.Server(uvicorn.Config(create_app(settings, store), log_level="critical"))
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            wait_until(lambda: server.started)
            yield Service(f"http://127.0.0.1:{listener.getsockname()[1]}", settings, store, key)
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def client(service: Service) -> Iterator[openai.OpenAI]:
    with service.client() as client:
        yield client


@pytest.fixture
def training_file(client: openai.OpenAI) -> str:
    return client.files.create(file=("train.jsonl", TRAINING), purpose="fine-tune").id


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)
