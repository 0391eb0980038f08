"""Mooncake's workers with the book: who is asked, and when a pull is over.

See `mooncake_desk` for what is real in these tests.
"""

import dataclasses
import importlib.util
import threading
import warnings
from types import SimpleNamespace

import pytest

from rankbook.model import Handshake, State
from rankbook_vllm.config import Settings
from rankbook_vllm.mooncake import FORMAT, Listener

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from tests.vllm.mooncake_desk import (
        OWN,
        SOON_S,
        book,
        later_stages,
        make_consumer,
        stages,
        topology,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector as vllms

    from rankbook_vllm._vllm import mooncake


def test_every_stage_that_the_sealed_topology_names_is_asked(book, make_consumer, stages):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    questions = stages.asked()
    assert [list(blocks) for _, _, blocks in questions] == [["r1"], ["r1"]]
    stages.answer(questions)
    assert consumer.wait("r1")


def test_a_pull_waits_for_a_producer_that_is_not_sealed_and_asks_no_part_of_it(
    book, make_consumer, stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses[:1], state=State.FORMING))
    consumer.pull("r1", generation="")
    assert book.asked.wait(SOON_S)
    book.tell(topology(stages.addresses, state=State.COMPLETE))
    assert stages.quiet()
    book.tell(topology(stages.addresses))
    stages.answer(stages.asked())
    assert consumer.wait("r1")


def test_pulls_of_a_producer_that_died_fail_at_once_and_leave_nothing(book, make_consumer, stages):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.asked()
    book.tell(topology(state=State.GONE))
    assert not consumer.wait("r1")
    assert consumer.errors == {7, 8}
    half = consumer.worker.rankbook
    assert (half.known, half.pulls, half.tasks) == ({}, {}, set())
    assert consumer.worker._remote_agents == {}
    assert consumer.worker._tp_size == {OWN: 1}


def test_a_death_that_was_told_before_the_question_was_asked_ends_it_too(
    book, make_consumer, stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.answer(stages.asked())
    assert consumer.wait("r1")
    judge = book.judge
    book.judge = lambda *args: (judge(*args), book.tell(topology(state=State.GONE)))[0]
    consumer.pull("r2")
    assert not consumer.wait("r2")
    assert consumer.worker.rankbook.pulls == {}


def test_a_producer_that_lapsed_may_still_write_so_its_pull_is_left_alone(
    book, make_consumer, stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    questions = stages.asked()
    book.tell(topology(state=State.GONE, lapsed=True))
    consumer.pull("r2")
    assert not consumer.wait("r2")
    consumer.errors.clear()
    stages.answer(questions)
    assert consumer.wait("r1")


def test_a_restarted_producer_is_asked_where_it_listens_now(
    book, make_consumer, stages, later_stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.answer(stages.asked())
    assert consumer.wait("r1")
    book.tell(topology(state=State.GONE))
    book.tell(topology(later_stages.addresses, generation="g2"))
    consumer.pull("r2", generation="g2")
    later_stages.answer(later_stages.asked())
    assert consumer.wait("r2")
    assert stages.quiet()


def test_a_producer_that_published_other_addresses_is_asked_there(
    book, make_consumer, stages, later_stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.answer(stages.asked())
    assert consumer.wait("r1")
    book.tell(topology(later_stages.addresses))
    consumer.pull("r2")
    later_stages.answer(later_stages.asked())
    assert consumer.wait("r2")


def test_a_start_that_was_replaced_alive_may_still_finish_what_it_was_asked(
    book, make_consumer, stages, later_stages
):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    questions = stages.asked()
    book.tell(topology(later_stages.addresses, generation="g2"))
    consumer.pull("r2", generation="g2")
    later_stages.answer(later_stages.asked())
    assert consumer.wait("r2")
    stages.answer(questions)
    assert consumer.wait("r1")


def test_a_pull_of_an_older_start_fails_and_nobody_is_asked(book, make_consumer, stages):
    consumer = make_consumer()
    book.tell(topology(stages.addresses, generation="g2"))
    consumer.pull("r1", generation="g1")
    assert not consumer.wait("r1")
    assert stages.quiet()


def test_a_producer_that_may_not_pair_is_refused_before_it_is_asked(book, make_consumer, stages):
    consumer = make_consumer()
    whole = topology(stages.addresses)
    other = tuple(
        dataclasses.replace(worker, model=dataclasses.replace(worker.model, head_size=64))
        for worker in whole.workers
    )
    book.tell(dataclasses.replace(whole, workers=other))
    consumer.pull("r1")
    assert not consumer.wait("r1")
    assert stages.quiet()


def test_what_the_engine_core_refused_is_handed_back_with_its_blocks(make_consumer):
    consumer = make_consumer()
    metadata = vllms.MooncakeConnectorMetadata()
    metadata.rankbook = SimpleNamespace(failed={"r1": ([3, 4],)})
    consumer.worker.start_load_kv(metadata)
    assert not consumer.wait("r1")
    assert consumer.errors == {3, 4}


def test_shutdown_does_not_wait_for_an_answer_that_never_comes(book, make_consumer, stages):
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("r1")
    stages.asked()
    asleep = threading.Thread(target=consumer.worker.shutdown, daemon=True)
    asleep.start()
    asleep.join(SOON_S)
    assert not asleep.is_alive()
    assert not consumer.worker._mooncake_receiver_t.is_alive()


def test_vllms_own_shutdown_follows_where_questions_cannot_be_ended_in_time(
    make_consumer, monkeypatch
):
    consumer, go_on, ended = make_consumer(), threading.Event(), []
    consumer.worker.receiver_loop.call_soon_threadsafe(go_on.wait, SOON_S)
    with monkeypatch.context() as patch:
        patch.setattr(mooncake, "_SHUTDOWN_S", 0.05)
        patch.setattr(vllms.MooncakeConnectorWorker, "shutdown", lambda self: ended.append(self))
        consumer.worker.shutdown()
    go_on.set()
    assert ended == [consumer.worker]


def test_no_bootstrap_server_is_launched_where_the_side_channel_is_off():
    def transfer(**options):
        return SimpleNamespace(
            kv_connector="MooncakeConnector", kv_connector_extra_config={}, **options
        )

    original = vllms.should_launch_bootstrap_server
    with mooncake.without_bootstrap(transfer(), Settings(side_channel=False)):
        assert vllms.should_launch_bootstrap_server(None) is False
    assert vllms.should_launch_bootstrap_server is original
    for settings in (Settings(), Settings(side_channel=False, handshake="vllm")):
        with mooncake.without_bootstrap(transfer(), settings):
            assert vllms.should_launch_bootstrap_server is original


@pytest.mark.parametrize(
    "handshake",
    [
        Handshake(FORMAT, 1, b"[" * 200_000),
        Listener("ipc:///tmp/rankbook-nobody", "tcp").encode(),
        Listener("tcp://10.0.0.5:0", "tcp").encode(),
    ],
    ids=["deep", "ipc", "port 0"],
)
def test_a_pull_of_a_producer_whose_payload_is_none_is_handed_back(
    book, make_consumer, stages, handshake
):
    consumer, whole = make_consumer(), topology(stages.addresses)
    workers = tuple(
        dataclasses.replace(worker, handshake=handshake) for worker in whole.workers[1:]
    )
    book.tell(dataclasses.replace(whole, workers=(whole.workers[0], *workers)))
    consumer.pull("r1")
    assert not consumer.wait("r1")
    assert consumer.errors == {7, 8}
    assert stages.quiet()


def test_a_pull_is_handed_back_whatever_is_raised_on_its_way(
    book, make_consumer, stages, monkeypatch
):
    def fail(*_):
        raise ZeroDivisionError("on its way")

    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    ways = (
        (book, "judge"),
        (book, "when"),
        (mooncake, "check_pair"),
        (vllms.MooncakeConnectorWorker, "receive_kv"),
        (vllms.MooncakeConnectorWorker, "receive_kv_from_single_worker"),
    )
    for owner, name in ways:
        consumer.worker.rankbook.known.clear()
        consumer.errors.clear()
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            consumer.pull(name)
            assert not consumer.wait(name), name
        assert consumer.errors == {7, 8}, name
    assert stages.quiet()
    consumer.errors.clear()
    consumer.pull("r1")
    stages.answer(stages.asked())
    assert consumer.wait("r1")


def test_a_pull_whose_name_cannot_be_sent_is_handed_back(book, make_consumer, stages):
    """vLLM puts the names into a message where nothing catches what goes wrong."""
    consumer = make_consumer()
    book.tell(topology(stages.addresses))
    consumer.pull("\ud800")
    assert not consumer.wait("\ud800")
    assert consumer.errors == {7, 8}
