"""TLS, users and passwords of a store on etcd, and words without secrets for what goes wrong."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rankbook.errors import Reason, Unavailable
from rankbook_server.store.etcd import EtcdStore

from .etcd_server import EtcdNode, Tls, make_certificates, program_or_give_up, versions
from .opened import build, opened, run
from .store_contract import commit_one, content, put

SECRET = "correct horse"
PREFIX = "prod"
TOKEN_GONE_S = 2.3
"""Tokens live for a second here, and etcd looks for those to forget once a second."""


async def use(store: EtcdStore, mark: str) -> None:
    """Everything that a server does with a store, once."""
    revision = await commit_one(store, put(mark))
    assert mark in await content(store)
    assert await store.last_revision() == revision
    assert (await anext(store.watch(revision - 1))).revision == revision
    await store.touch({mark: 30.0})
    await store.touch({mark: 30.0})
    assert mark in (await anext(store.presence())).live
    assert mark in await store.live()
    await store.drop([mark])


async def refusal(url: str) -> Unavailable:
    store = build(url)
    with pytest.raises(Unavailable) as caught:
        await store.open()
    await store.close()
    assert caught.value.reason is Reason.STORE_UNAVAILABLE
    return caught.value


# TLS.


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl to make certificates")
    return make_certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture(scope="module", params=versions())
def tls_node(request: pytest.FixtureRequest, pki: Tls) -> Iterator[EtcdNode]:
    with EtcdNode(binary=program_or_give_up(request.param), tls=pki) as node:
        yield node


@pytest.fixture(scope="module", params=versions())
def mutual_node(request: pytest.FixtureRequest, pki: Tls) -> Iterator[EtcdNode]:
    both = replace(pki, client_auth=True)
    with EtcdNode(binary=program_or_give_up(request.param), tls=both) as node:
        yield node


def test_a_store_over_tls_trusts_the_authority_that_is_named(tls_node: EtcdNode, pki: Tls) -> None:
    async def body() -> None:
        async with opened(tls_node.url(PREFIX, f"ca={pki.ca}")) as store:
            await use(store, "tls")

    run(body())


def test_a_store_over_tls_shows_its_certificate(mutual_node: EtcdNode, pki: Tls) -> None:
    async def body() -> None:
        query = f"ca={pki.ca}&cert={pki.client_cert}&key={pki.client_key}"
        async with opened(mutual_node.url(PREFIX, query)) as store:
            await use(store, "mutual")
        error = await refusal(mutual_node.url(PREFIX, f"ca={pki.ca}"))
        assert "does not agree with us on TLS" in error.message
        assert "cert=" in error.message

    run(body())


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "may want TLS"),
        ("tls=on", "does not agree with us on TLS"),
        ("ca={other}", "does not agree with us on TLS"),
        ("ca={missing}", "cannot be read (No such file or directory)"),
        ("ca={junk}", "does not agree with us on TLS"),
    ],
)
def test_a_store_that_does_not_get_on_with_tls_says_why(
    tls_node: EtcdNode, pki: Tls, tmp_path: Path, query: str, says: str
) -> None:
    async def body() -> None:
        (tmp_path / "junk.pem").write_text("no certificate")
        names = {
            "other": make_certificates(tmp_path).ca,
            "missing": tmp_path / "missing.pem",
            "junk": tmp_path / "junk.pem",
        }
        error = await refusal(tls_node.url(PREFIX, query.format(**names)))
        assert says in error.message
        assert tls_node.endpoint in error.message or str(tmp_path) in error.message

    run(body())


def test_tls_to_an_etcd_without_it_is_told(etcd: EtcdNode) -> None:
    async def body() -> None:
        error = await refusal(etcd.url(PREFIX, "tls=on"))
        assert "does not agree with us on TLS" in error.message

    run(body())


# Users.


@pytest.fixture(scope="module", params=versions())
def guarded_node(request: pytest.FixtureRequest) -> Iterator[EtcdNode]:
    """Users `book` for prod/ and `other` for elsewhere/; tokens end when unused for a second."""
    flags = ["--auth-token-ttl=1"]
    with EtcdNode(binary=program_or_give_up(request.param), flags=flags) as node:
        node.enable_auth(
            "root secret", {"book": (SECRET, f"{PREFIX}/"), "other": ("other", "elsewhere/")}
        )
        yield node


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text(f"{SECRET}\n")
    return path


def test_a_user_whose_role_ends_at_the_prefix_can_do_everything(
    guarded_node: EtcdNode, password_file: Path
) -> None:
    async def body() -> None:
        query = f"user=book&password_file={password_file}"
        async with opened(guarded_node.url(PREFIX, query)) as store:
            await use(store, "guarded")

    run(body())


def test_a_password_comes_by_the_environment_too(
    guarded_node: EtcdNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def body() -> None:
        async with opened(guarded_node.url(PREFIX, "user=book")) as store:
            await use(store, "environment")

    monkeypatch.setenv("RANKBOOK_ETCD_PASSWORD", SECRET)
    run(body())


def test_a_token_that_ran_out_is_renewed_for_every_kind_of_call(
    guarded_node: EtcdNode, password_file: Path
) -> None:
    async def body() -> None:
        query = f"user=book&password_file={password_file}"
        async with opened(guarded_node.url(PREFIX, query)) as store:
            await store.touch({"lease": 60.0})
            start = await commit_one(store, put("before"))
            calls = {
                "request": lambda: commit_one(store, put("after")),
                "watch": lambda: anext(store.watch(start)),
                "heartbeat": lambda: store.touch({"lease": 60.0, "new": 60.0}),
                "presence": lambda: anext(store.presence()),
            }
            for call in calls.values():
                await asyncio.sleep(TOKEN_GONE_S)
                await call()
            await store.drop(["lease", "new"])

    run(body())


def test_many_calls_with_a_token_that_ran_out_all_pass(
    guarded_node: EtcdNode, password_file: Path
) -> None:
    async def body() -> None:
        query = f"user=book&password_file={password_file}"
        async with opened(guarded_node.url(PREFIX, query)) as store:
            await asyncio.sleep(TOKEN_GONE_S)
            await asyncio.gather(*(commit_one(store, put(f"k{number}")) for number in range(40)))
            await store.touch({f"lease-{number}": 60.0 for number in range(100)})
            await store.drop([f"lease-{number}" for number in range(100)])

    run(body())


def test_a_token_outlives_a_restart_of_etcd(guarded_node: EtcdNode, password_file: Path) -> None:
    async def body() -> None:
        query = f"user=book&password_file={password_file}"
        async with opened(guarded_node.url(PREFIX, query)) as store:
            await commit_one(store, put("a"))
            guarded_node.kill()
            await asyncio.to_thread(guarded_node.start)
            await use(store, "restarted")

    run(body())


def test_a_password_that_changed_is_read_anew(guarded_node: EtcdNode, password_file: Path) -> None:
    def change(password: str) -> None:
        login = {"name": "root", "password": "root secret"}
        token = guarded_node.call("/v3/auth/authenticate", login)["token"]
        new = {"name": "book", "password": password}
        guarded_node.call("/v3/auth/user/changepw", new, token=token)
        password_file.write_text(password)

    async def body() -> None:
        query = f"user=book&password_file={password_file}"
        async with opened(guarded_node.url(PREFIX, query)) as store:
            await use(store, "one")
            change("new one")
            try:
                await use(store, "two")
            finally:
                change(SECRET)

    run(body())


@pytest.mark.parametrize(
    ("prefix", "query", "says"),
    [
        (PREFIX, "", "wants a user"),
        (PREFIX, "user=book&password_file={wrong}", "refuses the user or the password"),
        (PREFIX, "user=nobody&password_file={wrong}", "refuses the user or the password"),
        (PREFIX, "user=book&password_file={missing}", "cannot be read"),
        ("prod-eu", "user=book&password_file={right}", "does not permit it"),
        ("elsewhere", "user=book&password_file={right}", "does not permit it"),
    ],
)
def test_a_user_who_may_not_is_told_what_to_do(
    guarded_node: EtcdNode, password_file: Path, tmp_path: Path, prefix: str, query: str, says: str
) -> None:
    async def body() -> None:
        (tmp_path / "wrong").write_text("hunter2")
        files = {
            "right": password_file,
            "wrong": tmp_path / "wrong",
            "missing": tmp_path / "missing",
        }
        error = await refusal(guarded_node.url(prefix, query.format(**files)))
        assert says in error.message
        shown = f"{error} {error.metadata} {error.__cause__} {error.__context__}"
        assert SECRET not in shown
        assert "hunter2" not in shown

    run(body())


def test_a_user_at_an_etcd_without_users_is_told(etcd: EtcdNode, password_file: Path) -> None:
    async def body() -> None:
        error = await refusal(etcd.url("open", f"user=book&password_file={password_file}"))
        assert "knows no users" in error.message
        assert SECRET not in f"{error} {error.metadata}"

    run(body())
