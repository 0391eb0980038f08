"""Claims about both wires against a small server that misbehaves on purpose."""

from __future__ import annotations

import asyncio
import queue
import threading
from concurrent import futures

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

import rankbook
from rankbook import RetryPolicy, v1
from rankbook._calls import METHODS
from rankbook._status import CODES


def failure(code: str, reason: str) -> status_pb2.Status:
    status = status_pb2.Status(code=CODES.index(code), message=f"because {reason}")
    status.details.add().Pack(error_details_pb2.ErrorInfo(reason=reason, domain="rankbook"))
    return status


class FakeRegistry:
    """Answers GetStatus; everything else is for the test to say.

    `answer(frame)` is called with each session frame and gives replies, or
    None for silence, or raises `Hangup`.
    """

    class Hangup(Exception):
        pass

    def __init__(self, answer=None, unary=None) -> None:
        self.frames: queue.Queue = queue.Queue()
        self.sessions = 0
        self._answer = answer
        self._unary = unary or {}
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        handlers = {"GetStatus": self._handler("GetStatus", self._status)}
        for name, call in self._unary.items():
            handlers[name] = self._handler(name, call)
        if answer is not None:
            handlers["Session"] = grpc.stream_stream_rpc_method_handler(
                self._session,
                request_deserializer=v1.SessionRequest.FromString,
                response_serializer=v1.SessionResponse.SerializeToString,
            )
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("rankbook.v1.Registry", handlers),)
        )
        port = self._server.add_insecure_port("127.0.0.1:0")
        self._server.start()
        self.address = f"127.0.0.1:{port}"

    @staticmethod
    def _handler(name, call):
        method = METHODS[name]
        streamed = name in ("StreamTopology", "Watch")
        make = (
            grpc.unary_stream_rpc_method_handler
            if streamed
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            call,
            request_deserializer=method.request.FromString,
            response_serializer=method.reply.SerializeToString,
        )

    @staticmethod
    def _status(request, context):
        return v1.GetStatusResponse(version="fake")

    def _session(self, requests, context):
        self.sessions += 1
        for frame in requests:
            self.frames.put(frame)
            try:
                yield from self._answer(frame) or ()
            except self.Hangup:
                context.abort(grpc.StatusCode.UNAVAILABLE, "hung up")

    def stop(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def fake():
    started = []

    def make(*args, **kwargs):
        started.append(FakeRegistry(*args, **kwargs))
        return started[-1]

    yield make
    for one in started:
        one.stop()


QUICK = RetryPolicy(attempts=3, initial_s=0.01, max_s=0.01)


@pytest.fixture(params=["blocking", "asyncio"])
def call(request):
    """Calls one method of a fresh client of either face."""

    def blocking(address, name, *args, **kwargs):
        with rankbook.Client(address, timeout_s=2, retry=QUICK) as client:
            return getattr(client, name)(*args, **kwargs)

    def asynchronous(address, name, *args, **kwargs):
        async def run():
            async with rankbook.AsyncClient(address, timeout_s=2, retry=QUICK) as client:
                return await getattr(client, name)(*args, **kwargs)

        return asyncio.run(run())

    return blocking if request.param == "blocking" else asynchronous


def test_what_answers_but_is_no_registry_is_unreachable(call):
    other = grpc.server(futures.ThreadPoolExecutor(2))
    port = other.add_insecure_port("127.0.0.1:0")
    other.start()
    with pytest.raises(rankbook.Unavailable) as caught:
        call(f"127.0.0.1:{port}", "status")
    other.stop(0).wait()
    assert "UNIMPLEMENTED" in caught.value.message


def hang_up(frame):
    raise FakeRegistry.Hangup


def test_a_write_that_may_have_happened_is_not_sent_again(fake, call):
    server = fake(hang_up)
    with pytest.raises(rankbook.Unavailable):
        call(server.address, "evict_engine", "e")
    assert server.frames.qsize() == 1


def test_a_call_that_changes_nothing_twice_is_sent_until_the_policy_ends(fake, call):
    server = fake(hang_up)
    with pytest.raises(rankbook.Unavailable) as caught:
        call(server.address, "renew_leases", ["l"])
    assert server.frames.qsize() == QUICK.attempts
    assert server.address in caught.value.message


def test_a_passing_trouble_is_waited_out(fake, call):
    replies = iter(
        [
            v1.SessionResponse(status=failure("UNAVAILABLE", "STORE_UNAVAILABLE")),
            v1.SessionResponse(status=failure("RESOURCE_EXHAUSTED", "TOO_MANY_CALLS")),
            v1.SessionResponse(get_status=v1.GetStatusResponse(version="good")),
        ]
    )

    def answer(frame):
        reply = next(replies)
        reply.request_id = frame.request_id
        return [reply]

    server = fake(answer)
    assert call(server.address, "status").version == "good"
    assert server.sessions == 1


def test_a_deadline_that_cuts_a_wait_for_a_revision_says_what_was_waited_for(fake, call):
    said = [v1.SessionResponse(status=failure("UNAVAILABLE", "REVISION_NOT_REACHED"))]

    def answer(frame):
        if not said:
            return None
        said[0].request_id = frame.request_id
        return [said.pop()]

    server = fake(answer)
    with pytest.raises(rankbook.Unavailable) as caught:
        call(server.address, "list_engines", min_revision=9, timeout_s=0.5)
    assert caught.value.reason is rankbook.Reason.REVISION_NOT_REACHED
    assert server.frames.qsize() >= 2


def test_an_eviction_whose_commit_failed_may_have_happened(fake, call):
    def answer(frame):
        status = failure("UNAVAILABLE", "STORE_UNAVAILABLE")
        return [v1.SessionResponse(request_id=frame.request_id, status=status)]

    server = fake(answer)
    with pytest.raises(rankbook.Unavailable):
        call(server.address, "evict_engine", "e")
    assert server.frames.qsize() == 1


def test_a_call_without_an_answer_ends_at_its_deadline_and_is_cancelled(fake, call):
    server = fake(lambda frame: None)
    with pytest.raises(rankbook.DeadlineExceeded) as caught:
        call(server.address, "get_topology", "e", timeout_s=0.2)
    assert caught.value.metadata["call"] == "GetTopology"
    asked = server.frames.get(timeout=2)
    assert asked.get_topology.engine_id == "e"


def test_the_server_is_told_of_a_call_that_was_given_up(fake):
    server = fake(lambda frame: None)
    with rankbook.Client(server.address, retry=QUICK) as client:
        with pytest.raises(rankbook.DeadlineExceeded):
            client.get_topology("e", timeout_s=0.1)
        asked, cancel = (server.frames.get(timeout=2) for _ in range(2))
    assert cancel.cancel.request_id == asked.request_id


def test_nothing_of_grpc_leaks_from_a_server_that_breaks_the_contract(fake, call):
    def answer(frame):
        return [v1.SessionResponse(request_id=frame.request_id)]

    server = fake(answer)
    with pytest.raises(rankbook.Internal):
        call(server.address, "status")


def test_where_no_session_is_carried_calls_go_one_by_one(fake, call, made):
    def topology(request, context):
        for rank in (0, 1):
            yield v1.GetTopologyResponse(
                topologies=[
                    v1.Topology(
                        engine=made.engine(request.engine_id) if rank == 0 else None,
                        workers=[made.worker(request.engine_id, rank, b"")],
                        statuses=made.statuses([rank]),
                    )
                ]
            )

    def list_engines(request, context):
        from grpc_status import rpc_status

        context.abort_with_status(
            rpc_status.to_status(failure("INVALID_ARGUMENT", "LIMIT_EXCEEDED"))
        )

    server = fake(unary={"StreamTopology": topology, "ListEngines": list_engines})
    assert call(server.address, "status").version == "fake"
    assert len(call(server.address, "get_topology", "e").workers) == 2
    with pytest.raises(rankbook.LimitExceeded):
        call(server.address, "list_engines")
    with pytest.raises(rankbook.BadRequest) as caught:
        call(server.address, "revoke_lease", "l")
    assert caught.value.reason is rankbook.Reason.UNKNOWN_CALL


def test_a_stream_that_breaks_is_opened_again_by_the_next_call(fake):
    turns = iter([False, True, True])

    def answer(frame):
        if not next(turns):
            raise FakeRegistry.Hangup
        reply = v1.GetStatusResponse(version="again")
        return [v1.SessionResponse(request_id=frame.request_id, get_status=reply)]

    server = fake(answer)
    with rankbook.Client(server.address, retry=RetryPolicy(attempts=1)) as client:
        with pytest.raises(rankbook.Unavailable):
            client.status()
        assert client.status().version == "again"
        assert client.status().version == "again"
    assert server.sessions == 2


def test_a_break_is_told_to_every_call_that_waits(fake):
    together = threading.Barrier(4)
    waiting = []

    def answer(frame):
        waiting.append(frame)
        if len(waiting) == 4:
            raise FakeRegistry.Hangup

    server = fake(answer)
    failed = []

    def ask(client) -> None:
        together.wait()
        try:
            client.get_topology("e", timeout_s=5)
        except rankbook.Unavailable as error:
            failed.append(error)

    with rankbook.Client(server.address, retry=RetryPolicy(attempts=1)) as client:
        threads = [threading.Thread(target=ask, args=(client,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(4)
    assert len(failed) == 4


def test_a_token_goes_with_every_call(fake):
    seen = queue.Queue()

    def list_engines(request, context):
        seen.put(dict(context.invocation_metadata()).get("authorization"))
        return v1.ListEnginesResponse()

    server = fake(unary={"ListEngines": list_engines})
    with rankbook.Client(server.address, token="secret", retry=QUICK) as client:
        client.list_engines()
    assert seen.get(timeout=2) == "Bearer secret"


def test_a_refused_watch_is_a_typed_error_and_no_loop(fake):
    count = []

    def watch(request, context):
        from grpc_status import rpc_status

        count.append(1)
        context.abort_with_status(
            rpc_status.to_status(failure("PERMISSION_DENIED", "PERMISSION_DENIED"))
        )
        yield v1.WatchResponse()

    server = fake(lambda frame: None, unary={"Watch": watch})
    with rankbook.Client(server.address, retry=QUICK) as client, pytest.raises(rankbook.Denied):
        next(client.watch())
    assert count == [1]
