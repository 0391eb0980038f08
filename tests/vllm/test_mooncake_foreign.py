"""Mooncake's consumer at peers without rankbook: what their bootstrap servers may change.

See `mooncake_desk` for what is real in these tests.
"""

import importlib.util
import warnings

import pytest

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    from tests.vllm.mooncake_desk import (
        SOON_S,
        book,
        later_stages,
        make_bootstrap,
        make_consumer,
        stages,
        topology,
    )


def test_a_producer_without_rankbook_is_looked_up_once_at_its_bootstrap_server(
    make_consumer, make_bootstrap, stages
):
    consumer, bootstrap = make_consumer(), make_bootstrap()
    bootstrap.name(foreign=stages.addresses)
    for request_id in ("r1", "r2"):
        consumer.pull(request_id, "", bootstrap.address, engine_id="foreign")
        stages.answer(stages.asked())
        assert consumer.wait(request_id)
        bootstrap.answer = b""


@pytest.mark.parametrize("before", [True, False], ids=["known", "not known yet"])
def test_what_a_bootstrap_server_says_of_an_engine_of_the_book_is_not_believed(
    book, make_consumer, make_bootstrap, stages, later_stages, before
):
    consumer, bootstrap = make_consumer(), make_bootstrap()
    book.tell(topology(stages.addresses))
    if before:
        consumer.pull("r1")
        stages.answer(stages.asked())
        assert consumer.wait("r1")
    bootstrap.name(foreign=later_stages.addresses, prefill_a_0=later_stages.addresses)
    consumer.pull("r2", "", bootstrap.address, engine_id="foreign")
    later_stages.answer(later_stages.asked())
    assert consumer.wait("r2")
    for request_id, generation in (("r3", "g1"), ("r4", "")):
        consumer.pull(request_id, generation, bootstrap.address)
        stages.answer(stages.asked())
        assert consumer.wait(request_id)
    assert later_stages.quiet()


def test_an_engine_that_came_into_the_book_while_a_server_was_asked_is_asked_by_the_book(
    book, make_consumer, make_bootstrap, stages, later_stages
):
    consumer, bootstrap = make_consumer(), make_bootstrap()
    bootstrap.name(prefill_a_0=later_stages.addresses)
    bootstrap.go_on.clear()
    consumer.pull("r1", "", bootstrap.address)
    assert bootstrap.asked.wait(SOON_S)
    book.tell(topology(stages.addresses))
    bootstrap.go_on.set()
    stages.answer(stages.asked())
    assert consumer.wait("r1")
    assert later_stages.quiet()


def test_what_a_bootstrap_server_says_is_for_the_requests_that_name_it(
    make_consumer, make_bootstrap, stages, later_stages
):
    consumer, honest, other = make_consumer(), make_bootstrap(), make_bootstrap()
    honest.name(foreign=stages.addresses)
    other.name(foreign=later_stages.addresses)
    consumer.pull("r1", "", other.address, engine_id="foreign")
    later_stages.answer(later_stages.asked())
    assert consumer.wait("r1")
    consumer.pull("r2", "", honest.address, engine_id="foreign")
    stages.answer(stages.asked())
    assert consumer.wait("r2")


def test_a_pull_bound_to_a_start_is_never_asked_at_a_bootstrap_server(
    book, make_consumer, make_bootstrap, stages, later_stages
):
    consumer, bootstrap = make_consumer(), make_bootstrap()
    bootstrap.name(prefill_a_0=later_stages.addresses)
    consumer.pull("r1", "g1", bootstrap.address)
    assert book.asked.wait(SOON_S)
    book.tell(topology(stages.addresses))
    stages.answer(stages.asked())
    assert consumer.wait("r1")
    assert not bootstrap.asked.is_set()


@pytest.mark.parametrize(
    "answer",
    [
        b"{}",
        b"[",
        b"[]",
        b'{"0": {"engine_id": ["foreign"], "worker_addr": {"0": {"0": "tcp://10.0.0.5:1"}}}}',
        b'{"0": {"engine_id": "foreign", "worker_addr": {}}}',
        b'{"0": {"engine_id": "foreign", "worker_addr": {"0": {}}}}',
        b'{"0": {"engine_id": "foreign", "worker_addr": {"1": {"0": "tcp://10.0.0.5:1"}}}}',
        b'{"0": {"engine_id": "foreign", "worker_addr": {"0": {"0": 5}}}}',
    ],
)
def test_a_pull_is_handed_back_whatever_a_bootstrap_server_answers(
    make_consumer, make_bootstrap, answer
):
    consumer, bootstrap = make_consumer(), make_bootstrap()
    bootstrap.answer = answer
    consumer.pull("r1", "", bootstrap.address, engine_id="foreign")
    assert not consumer.wait("r1")
    assert consumer.errors == {7, 8}
    half = consumer.worker.rankbook
    assert (half.asking, half.pulls, half.tasks) == ({}, {}, set())


@pytest.mark.parametrize("server", [5, ["http://10.0.0.5:8998"], "nonsense", "http://["])
def test_a_pull_that_names_no_server_is_handed_back(make_consumer, server):
    consumer = make_consumer()
    for request_id in ("r1", "r2"):
        consumer.pull(request_id, "", server, engine_id="foreign")
        assert not consumer.wait(request_id)
