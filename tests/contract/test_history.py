"""The history of an embedded store is bounded, whole, and shared by its watches."""

from __future__ import annotations

import asyncio

import pytest

from rankbook_server.core.ops import Commit, Put
from rankbook_server.store.base import Compacted
from rankbook_server.store.history import History

from .store_contract import loop_turn


def commit(revision: int, size: int = 0) -> Commit:
    return Commit(revision, (Put("k", bytes(size)),))


async def revisions(history: History, start: int) -> list[int]:
    history.end()
    return [commit.revision async for commit in history.follow(start)]


def test_the_oldest_commits_go_when_there_are_too_many() -> None:
    history = History(10, max_commits=3)
    assert history.floor == 10
    for revision in range(11, 16):
        history.append(commit(revision))
    assert history.floor == 12
    assert asyncio.run(revisions(history, 12)) == [13, 14, 15]
    with pytest.raises(Compacted):
        asyncio.run(revisions(history, 11))


def test_the_oldest_commits_go_when_they_are_too_large() -> None:
    history = History(0, max_bytes=10_000)
    for revision in range(1, 5):
        history.append(commit(revision, 4_000))
    assert history.floor == 2
    history.append(commit(5, 20_000))
    assert history.floor == 5
    history.append(commit(6, 1))
    assert asyncio.run(revisions(history, 5)) == [6]


def test_a_gap_is_refused() -> None:
    history = History(3)
    for revision in (3, 5):
        with pytest.raises(ValueError, match="does not follow 3"):
            history.append(commit(revision))


def test_a_watch_from_a_revision_yet_to_come_starts_above_it() -> None:
    history = History(0)
    for revision in range(1, 6):
        history.append(commit(revision))
    assert asyncio.run(revisions(history, 3)) == [4, 5]
    assert asyncio.run(revisions(history, 7)) == []


def test_a_watch_that_falls_behind_ends_with_the_revision_it_had_seen() -> None:
    async def body() -> None:
        history = History(0, max_commits=2)
        history.append(commit(1))
        watch = history.follow(0)
        assert (await anext(watch)).revision == 1
        for revision in (2, 3, 4):
            history.append(commit(revision))
        with pytest.raises(Compacted) as caught:
            await anext(watch)
        assert (caught.value.from_revision, caught.value.floor) == (1, 2)

    asyncio.run(body())


def test_many_waiting_watches_are_all_woken_by_each_commit() -> None:
    async def body() -> None:
        history = History(0, max_commits=4)

        async def follow() -> list[int]:
            return [commit.revision async for commit in history.follow(0)]

        following = [asyncio.create_task(follow()) for _ in range(50)]
        for revision in range(1, 11):
            history.append(commit(revision))
            # Each watch takes what there is.
            await loop_turn()
        history.end()
        for task in following:
            assert await task == list(range(1, 11))

    asyncio.run(body())
