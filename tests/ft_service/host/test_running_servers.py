"""Servers that say where they are."""

from __future__ import annotations

import errno

import pytest

from ft_service.host import running_servers
from ft_service.host.running_servers import announced, living_servers


def test_a_server_ends_in_order_though_its_home_has_become_read_only(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with announced(tmp_path, "http://127.0.0.1:1"):
        assert [server.url for server in living_servers(tmp_path)] == ["http://127.0.0.1:1"]
        monkeypatch.setattr(running_servers, "_write", refuse)
    monkeypatch.undo()
    with announced(tmp_path, "http://127.0.0.1:2"):
        pass
    assert living_servers(tmp_path) == []  # the next one that writes takes out what was left


def test_a_server_that_cannot_say_where_it_is_does_not_start(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(running_servers, "_write", refuse)
    with pytest.raises(OSError, match="Read-only"), announced(tmp_path, "http://127.0.0.1:1"):
        pytest.fail("it started")
