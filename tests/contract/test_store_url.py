"""A store's URL means one store, or says what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankbook.errors import BadRequest
from rankbook_server.store import MemoryStore, SqliteStore, default_path, open_store

from .store_contract import FakeClock, IdSequence


def described(url: str) -> str:
    return open_store(url, FakeClock(), IdSequence()).description


def test_memory_is_a_store_in_memory() -> None:
    store = open_store("memory:", FakeClock(), IdSequence())
    assert isinstance(store, MemoryStore)
    assert store.description == "memory:"


@pytest.mark.parametrize(
    ("url", "description"),
    [
        ("sqlite:/var/lib/book.db", "sqlite:/var/lib/book.db"),
        ("sqlite:///var/lib/book.db", "sqlite:/var/lib/book.db"),
        ("sqlite:/var/lib/../book.db", "sqlite:/var/book.db"),
        ("sqlite:/var/my%20books/a%3Fb%25.db", "sqlite:/var/my books/a?b%.db"),
        ("sqlite:/var/a b#c.db", "sqlite:/var/a b#c.db"),
        ("sqlite:/var/a:b.db", "sqlite:/var/a:b.db"),
        ("sqlite:/var/book.db?sync=full", "sqlite:/var/book.db?sync=full"),
        ("sqlite:/var/book.db?sync=normal", "sqlite:/var/book.db"),
    ],
)
def test_a_path_is_taken_as_it_was_meant(url: str, description: str) -> None:
    assert described(url) == description


def test_a_relative_path_starts_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("sqlite:books/a.db", FakeClock(), IdSequence())
    monkeypatch.chdir("/")
    assert store.description == f"sqlite:{tmp_path}/books/a.db"


def test_a_tilde_is_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert described("sqlite:~/a.db") == f"sqlite:{tmp_path}/a.db"


def test_without_a_path_the_book_is_in_the_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert default_path() == tmp_path / "rankbook" / "book.db"
    assert described("sqlite:") == f"sqlite:{tmp_path}/rankbook/book.db"
    assert described("sqlite:?sync=full") == f"sqlite:{tmp_path}/rankbook/book.db?sync=full"


def test_a_store_that_is_built_has_opened_nothing(tmp_path: Path) -> None:
    store = open_store(f"sqlite:{tmp_path}/new/a.db", FakeClock())
    assert isinstance(store, SqliteStore)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "no scheme"),
        ("/var/lib/book.db", "did you mean sqlite:/var/lib/book.db"),
        ("redis:6379", "'redis:...'"),
        ("SQLITE:/a.db", "no store has this scheme"),
        ("memory:here", "takes nothing"),
        ("sqlite::memory:", "write memory:"),
        ("sqlite://db.example.com/book.db", "without a host"),
        ("sqlite://book.db", "without a host"),
        ("sqlite:/a%00b.db", "zero byte"),
        ("sqlite:/a.db?mode=ro", "no option 'mode'"),
        ("sqlite:/a.db?sync=", "not ''"),
        ("sqlite:/a.db?sync=off", "not 'off'"),
        ("etcd:10.0.0.5:2379", "later version"),
    ],
)
def test_a_url_that_means_no_store_is_refused_and_names_those_there_are(
    url: str, says: str
) -> None:
    with pytest.raises(BadRequest) as caught:
        open_store(url, FakeClock(), IdSequence())
    assert says in caught.value.message
    assert "memory:" in caught.value.message
    assert "sqlite:PATH" in caught.value.message
    assert caught.value.metadata["field"] == "store"


@pytest.mark.parametrize("url", ["etcd://root:hunter2@10.0.0.5:2379", "redis://:hunter2@h/0"])
def test_a_password_in_a_refused_url_is_not_repeated(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        open_store(url, FakeClock(), IdSequence())
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(caught.value.metadata)
