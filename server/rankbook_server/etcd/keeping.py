"""Keeping leases alive: all of them over one stream, many at a time."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection
from typing import Any

import grpc.aio

from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.client import EtcdClient, Member
from rankbook_server.etcd.failures import EtcdError, What, no_answer, stream_ended

__all__ = ["LeaseKeeper"]

_PATH = "/etcdserverpb.Lease/LeaseKeepAlive"


class _Batch:
    """Leases that someone waits for."""

    def __init__(self, leases: Collection[int]) -> None:
        self.missing = set(leases)
        self.ttls: dict[int, int] = {}
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def answer(self, lease: int, ttl_s: int) -> None:
        self.ttls[lease] = ttl_s
        self.missing.discard(lease)
        if not self.missing and not self.done.done():
            self.done.set_result(None)

    def fail(self, error: EtcdError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Stream:
    """One open stream at one member."""

    def __init__(self, client: EtcdClient, member: Member, call: Any) -> None:
        self._client = client
        self.member = member
        self._call = call
        self._waiting: dict[int, deque[_Batch]] = {}
        self._writing = asyncio.Lock()
        self._answers = 0
        self._reader = asyncio.ensure_future(self._read())
        self._writers: set[asyncio.Task[None]] = set()
        self.ended = False

    async def renew(self, leases: Collection[int]) -> dict[int, int]:
        batch = _Batch(leases)
        # It goes on where the caller gives up: to cancel a write would cancel the
        # stream for all.
        writer = asyncio.ensure_future(self._write(leases, batch))
        self._writers.add(writer)
        writer.add_done_callback(self._writers.discard)
        try:
            while not batch.done.done():
                seen = self._answers
                await asyncio.wait((batch.done,), timeout=self._client.timeout_s)
                if not batch.done.done() and self._answers == seen:
                    raise no_answer(self.member.endpoint, self._client.timeout_s)
            batch.done.result()
            return batch.ttls
        finally:
            batch.done.cancel()

    async def _write(self, leases: Collection[int], batch: _Batch) -> None:
        async with self._writing:
            for lease in leases:
                if self.ended:
                    break
                self._waiting.setdefault(lease, deque()).append(batch)
                try:
                    await self._call.write(pb.LeaseKeepAliveRequest(id=lease))
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError, asyncio.CancelledError):
                    # The reader says why, to all who wait.
                    await asyncio.wait((self._reader,), timeout=self._client.timeout_s)
                    break
            else:
                return
        batch.fail(stream_ended(self.member.endpoint))

    async def _read(self) -> None:
        error = stream_ended(self.member.endpoint)
        try:
            while True:
                answer = await self._call.read()
                if answer is grpc.aio.EOF:
                    break
                self._answers += 1
                # One answer a request, in their order: who asked first is first.
                waiting = self._waiting.get(answer.id)
                if waiting:
                    waiting.popleft().answer(answer.id, answer.ttl)
                    if not waiting:
                        del self._waiting[answer.id]
        except grpc.aio.AioRpcError as lost:
            error = self._client.lost(self.member, lost)
        finally:
            self.ended = True
            for batches in self._waiting.values():
                for batch in batches:
                    batch.fail(error)
            self._waiting.clear()

    async def close(self) -> None:
        self.ended = True
        self._reader.cancel()
        self._call.cancel()
        await asyncio.wait((self._reader, *self._writers))


class LeaseKeeper:
    """Keeps leases alive. For one event loop."""

    def __init__(self, client: EtcdClient) -> None:
        """Opens a stream at the first call."""
        self._client = client
        self._stream: _Stream | None = None
        self._opening = asyncio.Lock()

    async def renew(self, leases: Collection[int]) -> dict[int, int]:
        """Lets leases live for their whole time from now.

        Returns:
            Seconds each lives, zero where there is no such lease.

        Raises:
            EtcdError: Some may have been renewed.
        """
        if not leases:
            return {}

        async def attempt(member: Member) -> dict[int, int]:
            while True:
                stream = await self._open(member)
                try:
                    return await stream.renew(leases)
                except EtcdError as error:
                    if stream is self._stream:
                        self._stream = None
                    await stream.close()
                    if stream.member is member:
                        if error.what is What.ENDED:
                            # A request is told why.
                            await self._client.pulse(member)
                        raise
                    # It was open since before that member's turn, which comes now.

        return await self._client.somewhere(attempt, twice=True)

    async def close(self) -> None:
        """Ends the stream."""
        if self._stream is not None:
            await self._stream.close()
            self._stream = None

    async def _open(self, member: Member) -> _Stream:
        async with self._opening:
            if self._stream is None or self._stream.ended:
                metadata = await self._client.metadata()
                await member.connect()
                call = member.stream(_PATH, pb.LeaseKeepAliveResponse)(metadata=metadata)
                self._stream = _Stream(self._client, member, call)
            return self._stream
