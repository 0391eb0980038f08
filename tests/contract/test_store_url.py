"""A store's URL means one store, or says what is wrong with it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rankbook.errors import BadRequest
from rankbook_server.store import MemoryStore, SqliteStore, default_path, open_store
from rankbook_server.store.etcd_url import parse_etcd

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
        ("etcd:10.0.0.5:2379", "etcd:10.0.0.5:2379/rankbook"),
        ("etcd://10.0.0.5:2379/", "etcd:10.0.0.5:2379/rankbook"),
        ("etcd:a:1,b.example:65535,a:1/prod/eu-1", "etcd:a:1,b.example:65535/prod/eu-1"),
        ("etcd:[::1]:2379/book", "etcd:[::1]:2379/book"),
        ("etcd:h:2379/p?ca=/ca.pem&tls=on&cert=/c&key=/k", "etcd:h:2379/p"),
        ("etcd:h:2379?user=me&password_file=/run/secret", "etcd:h:2379/rankbook"),
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
        ("etcd:", "endpoint 1 is not HOST:PORT"),
        ("etcd:10.0.0.5", "endpoint 1 is not HOST:PORT"),
        ("etcd:10.0.0.5:2379,", "endpoint 2 is not HOST:PORT"),
        ("etcd:10.0.0.5:2379,b:0", "port of endpoint 2"),
        ("etcd:10.0.0.5:x", "port of endpoint 1"),
        ("etcd:a_b!:2379", "host of endpoint 1"),
        ("etcd:::1:2379", "IPv6 goes in brackets"),
        ("etcd:[::1%25eth0]:2379", "no IPv6 literal"),
        ("etcd:[nowhere]:2379", "no IPv6 literal"),
        ("etcd:h:2379/a b", "a prefix is made of"),
        ("etcd:h:2379/a//b", "no part of a prefix may be empty"),
        ("etcd:h:2379/a/", "no part of a prefix may be empty"),
        ("etcd:h:2379/" + "a" * 201, "has 201 characters"),
        ("etcd:h:2379/prod/book", "may be book, live or server"),
        ("etcd:h:2379/prod/live/eu", "may be book, live or server"),
        ("etcd:h:2379/prod/server", "may be book, live or server"),
        ("etcd:h:2379?timeout=3", "no option 'timeout'"),
        ("etcd:h:2379?tls=yes", "tls is on or off"),
        ("etcd:h:2379?tls=off&ca=/ca.pem", "contradict"),
        ("etcd:h:2379?cert=/c.pem", "come together"),
        ("etcd:h:2379?ca=", "ca has no value"),
        ("etcd:h:2379?ca=/a&ca=/b", "ca is there twice"),
        ("etcd:h:2379?user=rankbook", "user needs a password"),
        ("etcd:h:2379?password_file=/p", "needs user=NAME"),
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


@pytest.mark.parametrize(
    "url",
    [
        "etcd://root:hunter2@10.0.0.5:2379",
        "etcd://root:hunter2",
        "etcd:h:2379?user=root&password=hunter2",
        "etcd:h:2379?user=root&hunter2",
        "etcd:hunter2/x y",
        "redis://:hunter2@h/0",
    ],
)
def test_a_password_in_a_refused_url_is_not_repeated(url: str) -> None:
    with pytest.raises(BadRequest) as caught:
        open_store(url, FakeClock(), IdSequence())
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in str(caught.value.metadata)


def test_a_password_may_come_by_the_environment_and_is_not_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANKBOOK_ETCD_PASSWORD", "hunter2")
    store = open_store("etcd:h:2379?user=me", FakeClock(), IdSequence())
    assert "hunter2" not in store.description
    address = parse_etcd("h:2379?user=me", {"RANKBOOK_ETCD_PASSWORD": "hunter2"})
    assert address.password == "hunter2"
    assert "hunter2" not in repr(address)


def test_the_files_of_a_store_on_etcd_start_at_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    address = parse_etcd("h:2379?ca=pki/my%20ca.pem&cert=a&key=%2Fk", {})
    assert address.ca == tmp_path / "pki" / "my ca.pem"
    assert address.cert == tmp_path / "a"
    assert address.key == Path("/k")
    assert address.tls
