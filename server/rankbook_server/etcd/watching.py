"""Watches of etcd: one stream each, which comes as whole revisions and never hangs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc.aio

from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.client import EtcdClient, Member
from rankbook_server.etcd.failures import EtcdError, What, explain_cancel, no_answer, stream_ended

__all__ = ["Change", "EtcdWatch", "Revisions"]

_PATH = "/etcdserverpb.Watch/Watch"

_IDLE_S = 2.0
# After so long without a word the member is asked for a sign of life: with the
# request's own deadline a silent member is noticed within 4 s.


@dataclass(frozen=True, slots=True)
class Change:
    """Everything that one revision did to a range."""

    revision: int
    """The revision."""
    events: tuple[pb.Event, ...]
    """What happened, in order; at least one."""


class Revisions:
    """Puts the events of a watch together, a whole revision at a time.

    etcd builds a response out of whole revisions: one for each transaction
    where the watch has caught up, and up to 1,000 of them, cut between two
    revisions, where it has not (`eventBatch.add` in its mvcc/watcher_group.go,
    of 3.4 and 3.5). So only fragments of one response can share a revision.

    A member that was far behind and got the leader's state as a whole begins
    its watches anew where they were created, so what was seen can come again;
    it is left out.
    """

    def __init__(self, seen: int) -> None:
        """Starts after a revision: that one and those before it are left out."""
        self._seen = seen
        self._events: list[pb.Event] = []

    def add(self, response: pb.WatchResponse) -> list[Change]:
        """Takes a response; returns the revisions that are whole now, rising."""
        whole: list[Change] = []
        for event in response.events:
            if self._events and event.kv.mod_revision != self._events[0].kv.mod_revision:
                self._finish(whole)
            if event.kv.mod_revision > self._seen:
                self._events.append(event)
        if not response.fragment:
            self._finish(whole)
        return whole

    def _finish(self, whole: list[Change]) -> None:
        if self._events:
            self._seen = self._events[0].kv.mod_revision
            whole.append(Change(self._seen, tuple(self._events)))
            self._events.clear()


class EtcdWatch:
    """A watch of a range of keys. It does not resume: who reads it starts another."""

    def __init__(self, client: EtcdClient, key: bytes, range_end: bytes, seen: int) -> None:
        """Starts nothing yet.

        Args:
            client: Where.
            key: The first key.
            range_end: The first key past the range.
            seen: Changes above this revision are told of; above zero.
        """
        self._client = client
        self._key = key
        # A delete at the very revision that history was compacted to is lost in
        # 3.4 and 3.5, and a watch from it is served all the same. To ask from
        # one revision earlier gets the refusal that is due.
        self._create = pb.WatchCreate(
            key=key, range_end=range_end, start_revision=seen, fragment=True
        )
        self._revisions = Revisions(seen)
        self._stream: Any = None
        self._member: Member | None = None
        self._reading: asyncio.Task[pb.WatchResponse] | None = None

    async def start(self) -> None:
        """Starts it, at the first member that takes it.

        Raises:
            EtcdError: With COMPACTED, history is forgotten.
        """
        await self._client.somewhere(self._start_at, twice=True)

    async def read(self, stop: asyncio.Future[None]) -> list[Change] | None:
        """Waits for changes.

        Args:
            stop: Ends the wait.

        Returns:
            Whole revisions, at least one; None once `stop` is done.

        Raises:
            EtcdError: The stream ended, or etcd is silent.
        """
        while True:
            response = await self._next(stop)
            if response is None:
                return None
            if response.canceled:
                raise self._ended(response)
            changes = self._revisions.add(response)
            if changes:
                return changes

    def cancel(self) -> None:
        """Ends it; to be called always, at the end."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._stream is not None:
            self._stream.cancel()
            self._stream = None

    async def _start_at(self, member: Member) -> None:
        self.cancel()
        self._member = member
        metadata = await self._client.metadata()
        await member.connect()
        self._stream = member.stream(_PATH, pb.WatchResponse)(metadata=metadata)
        try:
            async with asyncio.timeout(self._client.timeout_s):
                # Where it has ended already, the read says how.
                with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await self._stream.write(pb.WatchRequest(create=self._create))
                response = await self._read()
                while not response.created:
                    response = await self._read()
        except TimeoutError:
            raise no_answer(member.endpoint, self._client.timeout_s) from None
        except EtcdError as error:
            if error.what is What.ENDED:
                # A request is told why.
                await self._client.pulse(member, self._key)
            raise
        if response.canceled:
            raise self._ended(response)

    async def _read(self) -> pb.WatchResponse:
        assert self._member is not None
        try:
            response = await self._stream.read()
        except grpc.aio.AioRpcError as error:
            raise self._client.lost(self._member, error) from None
        except asyncio.CancelledError:
            instead = self._client.cancelled(self._member)
            if instead is None:
                raise
            raise instead from None
        if response is grpc.aio.EOF:
            raise stream_ended(self._member.endpoint)
        word: pb.WatchResponse = response
        return word

    async def _next(self, stop: asyncio.Future[None]) -> pb.WatchResponse | None:
        """The next word of the stream, which must come or etcd must give a sign of life."""
        assert self._member is not None
        if self._reading is None:
            self._reading = asyncio.ensure_future(self._read())
            self._reading.add_done_callback(_heard)
        reading = self._reading
        pulse: asyncio.Task[None] | None = None
        try:
            while not reading.done() and not stop.done():
                waits: Iterable[asyncio.Future[Any]] = (
                    (reading, stop) if pulse is None else (reading, stop, pulse)
                )
                await asyncio.wait(
                    waits,
                    timeout=_IDLE_S if pulse is None else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                if pulse is None:
                    if not reading.done() and not stop.done():
                        pulse = asyncio.ensure_future(self._client.pulse(self._member, self._key))
                elif pulse.done():
                    done, pulse = pulse, None
                    done.result()
        finally:
            if pulse is not None:
                pulse.cancel()
                with contextlib.suppress(EtcdError, asyncio.CancelledError):
                    await pulse
        if not reading.done():
            return None
        self._reading = None
        try:
            return reading.result()
        except EtcdError:
            self._client.rotate(self._member)
            raise

    def _ended(self, response: pb.WatchResponse) -> EtcdError:
        assert self._member is not None
        error = explain_cancel(
            response.cancel_reason, response.compact_revision, self._member.endpoint
        )
        if error.what is What.DENIED and self._client.token:
            # 3.4 and 3.5 say so of a token that ran out, too.
            return EtcdError(
                What.TOKEN,
                error.message,
                endpoint=self._member.endpoint,
                said=response.cancel_reason,
            )
        return error


def _heard(reading: asyncio.Task[pb.WatchResponse]) -> None:
    """Takes note of how a read ended: after `cancel` nobody asks."""
    if not reading.cancelled():
        reading.exception()
