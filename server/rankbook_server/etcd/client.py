"""A client of etcd's v3 wire on asyncio: members, users, deadlines.

One channel a member. Requests go to one member until it fails; then the next
one is asked, where that is safe: always, if nothing was done for certain; else
only for requests that may be done twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

import grpc
import grpc.aio

from rankbook_server.etcd import etcd_pb2 as pb
from rankbook_server.etcd.failures import EtcdError, What, closed, explain, no_connection

__all__ = ["CONNECT_TIMEOUT_S", "TIMEOUT_S", "EtcdClient", "Login", "Member"]

TIMEOUT_S = 2.0
"""Default deadline of a request. An election takes one second to two."""

CONNECT_TIMEOUT_S = 2.0
"""Longest wait for a member to take a connection, and gRPC's own bound of it."""

_PAUSE_S = 0.1
# Between two rounds over the members while none is ready.

_OPTIONS: tuple[tuple[str, Any], ...] = (
    # A page of a snapshot is as large as its values.
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # gRPC's minimum backoff is also its connect timeout; 100 ms failed on a
    # loaded machine, 2 s did not.
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # etcd drops a client that pings more often than every 5 s. A watch and a
    # lease stream notice a silent member sooner, by requests (see `pulse`), and
    # what these send is lost for at most the timeout here.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 2_500),
    ("grpc.http2.ping_timeout_ms", 2_500),
    ("grpc.http2.max_pings_without_data", 0),
    # A shared subchannel that waits out its backoff would hold up the next attempt.
    ("grpc.use_local_subchannel_pool", 1),
    # etcd is inside the cluster; a web proxy from the environment is not on the way.
    ("grpc.enable_http_proxy", 0),
    ("grpc.primary_user_agent", "rankbookd"),
)

_LEADER = ("hasleader", "true")
# With it a member without a leader says so at once; without it, never.


class Message(Protocol):
    """What every generated message can do."""

    def SerializeToString(self) -> bytes:  # noqa: N802
        """Encodes it."""

    @classmethod
    def FromString(cls, s: bytes) -> Self:  # noqa: N802
        """Decodes one."""


Reply = TypeVar("Reply", bound=Message)
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Login:
    """Who we are to etcd."""

    user: str
    """The user's name."""
    password: Callable[[], str]
    """Reads the password, anew for each log-in; may raise `Unavailable`."""


class Member:
    """One endpoint and the channel to it."""

    def __init__(
        self, index: int, endpoint: str, credentials: grpc.ChannelCredentials | None
    ) -> None:
        self.index = index
        self.endpoint = endpoint
        """HOST:PORT."""
        target = f"dns:///{endpoint}"
        self.channel: grpc.aio.Channel = (
            grpc.aio.insecure_channel(target, options=_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        )
        self._calls: dict[str, Any] = {}

    def unary(self, path: str, reply: type[Message]) -> Any:
        """The method of a path, such as `/etcdserverpb.KV/Txn`."""
        call = self._calls.get(path)
        if call is None:
            call = self._calls[path] = self.channel.unary_unary(
                path, request_serializer=_serialize, response_deserializer=reply.FromString
            )
        return call

    def stream(self, path: str, reply: type[Message]) -> Any:
        """The method of a path that streams both ways."""
        return self.channel.stream_stream(
            path, request_serializer=_serialize, response_deserializer=reply.FromString
        )

    async def connect(self) -> None:
        """Waits while it connects.

        So a request that finds nobody at the other end was never sent, for
        certain, and may go to another member.

        Raises:
            EtcdError: The address neither takes nor refuses a connection.
        """
        busy = (grpc.ChannelConnectivity.IDLE, grpc.ChannelConnectivity.CONNECTING)
        state = self.channel.get_state(try_to_connect=True)
        if state not in busy:
            return
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                while state in busy:
                    await self.channel.wait_for_state_change(state)
                    state = self.channel.get_state(try_to_connect=True)
        except TimeoutError:
            raise no_connection(self.endpoint, CONNECT_TIMEOUT_S) from None


class EtcdClient:
    """A connection to an etcd cluster. For one event loop; not thread-safe.

    Every method raises `EtcdError` where it fails.
    """

    def __init__(
        self,
        endpoints: Sequence[str],
        *,
        clock: Callable[[], float],
        credentials: grpc.ChannelCredentials | None = None,
        login: Login | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Connects at the first request. To be made on the loop that uses it.

        Args:
            endpoints: HOST:PORT of each member, an IPv6 literal in brackets.
            clock: Seconds on a clock that never goes back.
            credentials: Of the channels; None for no TLS.
            login: The user, where etcd has some.
            timeout_s: Deadline of a request at one member.
        """
        self.timeout_s = timeout_s
        self.members = [
            Member(index, endpoint, credentials) for index, endpoint in enumerate(endpoints)
        ]
        self._clock = clock
        self._at = 0
        self._login = login
        self._token = ""
        self._login_lock = asyncio.Lock()
        self._closed = False

    # Keys.

    async def range(self, request: pb.RangeRequest) -> pb.RangeResponse:
        """Reads."""
        return await self.call("/etcdserverpb.KV/Range", request, pb.RangeResponse, twice=True)

    async def txn(self, request: pb.TxnRequest, *, twice: bool = False) -> pb.TxnResponse:
        """Reads and writes at one revision.

        Args:
            request: What.
            twice: It does no harm if it is done twice.
        """
        return await self.call("/etcdserverpb.KV/Txn", request, pb.TxnResponse, twice=twice)

    async def compact(self, revision: int) -> None:
        """Forgets history up to a revision; keys stay."""
        request = pb.CompactRequest(revision=revision, physical=True)
        await self.call("/etcdserverpb.KV/Compact", request, pb.CompactResponse)

    # Leases.

    async def grant(self, lease: int, ttl_s: int) -> bool:
        """Makes a lease; False where there was one of this number."""
        request = pb.LeaseGrantRequest(id=lease, ttl=ttl_s)
        try:
            await self.call(
                "/etcdserverpb.Lease/LeaseGrant", request, pb.LeaseGrantResponse, twice=True
            )
        except EtcdError as error:
            if error.what is What.LEASE_EXISTS:
                return False
            raise
        return True

    async def revoke(self, lease: int) -> None:
        """Ends a lease and deletes its keys; no effect where there is none."""
        request = pb.LeaseRevokeRequest(id=lease)
        try:
            await self.call(
                "/etcdserverpb.Lease/LeaseRevoke", request, pb.LeaseRevokeResponse, twice=True
            )
        except EtcdError as error:
            if error.what is not What.LEASE_MISSING:
                raise

    async def time_to_live(self, lease: int) -> int:
        """Seconds a lease has left, rounded down; -1 where there is none."""
        request = pb.LeaseTimeToLiveRequest(id=lease)
        path = "/etcdserverpb.Lease/LeaseTimeToLive"
        return (await self.call(path, request, pb.LeaseTimeToLiveResponse, twice=True)).ttl

    # The cluster.

    async def status(self) -> pb.StatusResponse:
        """How the member that is asked is."""
        path = "/etcdserverpb.Maintenance/Status"
        return await self.call(path, pb.StatusRequest(), pb.StatusResponse, twice=True)

    async def alarms(self) -> Sequence[pb.AlarmMember]:
        """What is wrong with the cluster."""
        path = "/etcdserverpb.Maintenance/Alarm"
        request = pb.AlarmRequest(action=pb.AlarmRequest.GET)
        return (await self.call(path, request, pb.AlarmResponse, twice=True)).alarms

    async def close(self) -> None:
        """Ends everything that runs."""
        self._closed = True
        for member in self.members:
            await member.channel.close()

    # For this room.

    @property
    def member(self) -> Member:
        """The member whose turn it is."""
        return self.members[self._at]

    def rotate(self, failed: Member) -> None:
        """Turns to the next member, unless that was done since this one failed."""
        if failed.index == self._at:
            self._at = (self._at + 1) % len(self.members)

    async def call(
        self, path: str, request: Message, reply: type[Reply], *, twice: bool = False
    ) -> Reply:
        """Makes a request, at another member where one fails.

        Args:
            path: Of the method.
            request: What to send.
            reply: What comes back.
            twice: It does no harm if it is done twice.
        """

        async def attempt(member: Member) -> Reply:
            metadata = await self.metadata()
            return await self._once(member, path, request, reply, metadata)

        return await self.somewhere(attempt, twice=twice)

    async def somewhere(
        self,
        attempt: Callable[[Member], Awaitable[Result]],
        *,
        twice: bool,
        unauthenticated: bool = False,
    ) -> Result:
        """Makes attempts at one member after the other, until one passes.

        Each member is tried once, however long that takes; in the time of one
        deadline more rounds follow.
        """
        ends = self._clock() + self.timeout_s
        logged_in = unauthenticated
        failed = 0
        while True:
            member, token = self.member, self._token
            if self._closed:
                raise closed(member.endpoint)
            try:
                return await attempt(member)
            except grpc.aio.UsageError:
                raise closed(member.endpoint) from None
            except asyncio.CancelledError:
                instead = self.cancelled(member)
                if instead is None:
                    raise
                raise instead from None
            except EtcdError as error:
                if error.what is What.TOKEN and self._login and not logged_in:
                    logged_in = True
                    await self._authenticate(token)
                    continue
                if not error.elsewhere:
                    raise
                self.rotate(member)
                failed += 1
                if error.unknown and not twice:
                    raise
                if failed < len(self.members):
                    continue
                # Certificates do not mend themselves.
                if error.what is What.TLS or self._clock() + _PAUSE_S >= ends:
                    raise
                if failed % len(self.members) == 0:
                    await asyncio.sleep(_PAUSE_S)

    async def pulse(self, member: Member, key: bytes = b"\0") -> None:
        """Asks one member for a sign of life, from its own memory.

        Args:
            member: Which.
            key: One that may be read, or etcd logs that it may not.

        Raises:
            EtcdError: There was none. A refusal is a sign.
        """
        request = pb.RangeRequest(key=key, serializable=True, count_only=True)
        try:
            await self._once(
                member, "/etcdserverpb.KV/Range", request, pb.RangeResponse, await self.metadata()
            )
        except grpc.aio.UsageError:
            raise closed(member.endpoint) from None
        except EtcdError as error:
            if error.elsewhere:
                self.rotate(member)
                raise

    async def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with every request; logs in first where that was not done."""
        if self._login is None:
            return (_LEADER,)
        if not self._token:
            await self._authenticate("")
        return (_LEADER, ("token", self._token))

    @property
    def token(self) -> str:
        """The token that `metadata` would send."""
        return self._token

    async def renew_token(self, used: str) -> bool:
        """Logs in anew, unless that was done since a token was used.

        Returns:
            Whether there is a user to log in.
        """
        if self._login is None:
            return False
        await self._authenticate(used)
        return True

    def lost(self, member: Member, error: grpc.aio.AioRpcError) -> EtcdError:
        """Says what the end of a stream means."""
        return explain(
            error.code(), error.details() or "", member.endpoint, timeout_s=self.timeout_s
        )

    def cancelled(self, member: Member) -> EtcdError | None:
        """After a CancelledError: what to raise instead, where the task was not cancelled.

        A call on a channel that is closed ends like a task that is cancelled.
        """
        task = asyncio.current_task()
        if self._closed and task is not None and not task.cancelling():
            return closed(member.endpoint)
        return None

    async def _authenticate(self, used: str) -> None:
        login = self._login
        assert login is not None
        async with self._login_lock:
            if self._token != used:
                return
            request = pb.AuthenticateRequest(name=login.user, password=login.password())

            async def attempt(member: Member) -> pb.AuthenticateResponse:
                return await self._once(
                    member,
                    "/etcdserverpb.Auth/Authenticate",
                    request,
                    pb.AuthenticateResponse,
                    (_LEADER,),
                )

            answer = await self.somewhere(attempt, twice=True, unauthenticated=True)
            self._token = answer.token

    async def _once(
        self,
        member: Member,
        path: str,
        request: Message,
        reply: type[Reply],
        metadata: Iterable[tuple[str, str]],
    ) -> Reply:
        try:
            await member.connect()
            answer: Reply = await member.unary(path, reply)(
                request, timeout=self.timeout_s, metadata=tuple(metadata)
            )
        except grpc.aio.AioRpcError as error:
            raise self.lost(member, error) from None
        return answer


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()
