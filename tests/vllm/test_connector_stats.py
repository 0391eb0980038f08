"""Rankbook's counts on vLLM's way of statistics: workers, engine core, API server, /metrics.

Real: vLLM's connector classes with their statistics, its sum over workers, what it
sends to an API server, its log and its Prometheus metrics, and what rankbook counts
with. Stand-ins: the connectors were never started, and NIXL moved nothing.
"""

import functools
import importlib.util
import logging
import pickle
import re
import threading
import time
import warnings
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.unit.vllm_integration.books import HandBook, engine

import rankbook_vllm
from rankbook.model import Layout
from rankbook_vllm.config import Settings
from rankbook_vllm.handshake import Pairs
from rankbook_vllm.requests import Requests

pytestmark = pytest.mark.vllm

if importlib.util.find_spec("vllm") is None:
    pytest.skip("needs vLLM: make test-vllm", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns about itself while it loads
    import prometheus_client
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
    from vllm.distributed.kv_transfer.kv_connector.v1 import metrics
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_scheduler import (
        NixlPushConnectorScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
        NixlPushConnectorWorker,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlKVConnectorStats
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    import vllm
    from rankbook_vllm import _vllm, connectors
    from rankbook_vllm._vllm import stats
    from rankbook_vllm._vllm.halves import SchedulerHalf
    from rankbook_vllm.mooncake import MooncakeRequests

LOG = logging.getLogger("vllm.rankbook")
PRODUCER = "prefill-a-0"
LABELS = ["model_name", "engine"]
OUTCOMES = {
    "rankbook_requests_total": ("resolved", "waited", "refused", "corrected", "foreign"),
    "rankbook_handshakes_total": ("shaken", "dropped", "refused"),
}
NIXL_PUSH = {"kv_connector": "NixlPushConnector", "kv_role": "kv_both"}
OURS = {"kv_connector_module_path": "rankbook_vllm.connectors"}
VLLMS = KVConnectorFactory.get_connector_class_by_name("NixlPushConnector")
VLLMS_MULTI = KVConnectorFactory.get_connector_class_by_name("MultiConnector")


# ------------------------------------------------------------------------- stand-ins


def connector(cls, *, scheduler=None, worker=None, children=()):
    """A connector that was not started; its tally as for one that signs in."""
    made = object.__new__(cls)
    made.connector_scheduler, made.connector_worker = scheduler, worker
    made._connectors = list(children)
    return made


def counting(made):
    made._rankbook_tally = _vllm.Tally(made)
    return made


def requests(*known, kind=Requests, **settings):
    book = HandBook(*known)
    return kind(book, Settings(**settings), LOG, time.monotonic, needs_block_ids=False)


def scheduler_of(asked):
    return SimpleNamespace(rankbook=SchedulerHalf(asked, Settings()))


class Worker(NixlPushConnectorWorker):
    """vLLM's, with no more than its statistics."""

    def __init__(self):
        self.xfer_stats = NixlKVConnectorStats()

    def shutdown(self):
        pass  # vLLM 0.28 asks for it when the object goes


def nixl_worker(pairs=None):
    worker = Worker()
    if pairs is not None:
        worker.rankbook = SimpleNamespace(pairs=pairs)
    return worker


def pairs_with(**counts):
    pairs = Pairs(HandBook(), LOG)
    for what, count in counts.items():
        for _ in range(count):
            pairs.count(what)
    return pairs


def transfer(worker, size):
    worker.xfer_stats.record_transfer(
        SimpleNamespace(xferDuration=2000, postDuration=1000, totalBytes=size, descCount=4)
    )


class Engine:
    """What vLLM has between its connectors and whoever reads its log and /metrics."""

    def __init__(self, transfer_config, *, engines=(0,), registry=None):
        self.registry = registry or prometheus_client.CollectorRegistry()
        made = {
            f"_{kind.__name__.lower()}_cls": staticmethod(
                functools.partial(kind, registry=self.registry)
            )
            for kind in (
                prometheus_client.Gauge,
                prometheus_client.Counter,
                prometheus_client.Histogram,
            )
        }
        config = KVTransferConfig(**transfer_config)
        vllm_config = SimpleNamespace(kv_transfer_config=config)
        labels = {index: ["tiny", str(index)] for index in engines}
        self.prom = type("Prom", (metrics.KVConnectorProm,), made)(vllm_config, LABELS, labels)
        self.logging = metrics.KVConnectorLogging(config)

    def step(self, workers=(), core=None, *, index=0):
        """One step, from every process to the next as vLLM sends it."""
        outputs = [
            ModelRunnerOutput(
                req_ids=[],
                req_id_to_index={},
                kv_connector_output=KVConnectorOutput(kv_connector_stats=sent),
            )
            for sent in pickle.loads(pickle.dumps([w.get_kv_connector_stats() for w in workers]))
        ]
        found = None
        if outputs:
            whole = KVOutputAggregator(len(outputs)).aggregate(outputs)
            found = whole.kv_connector_output.kv_connector_stats
        own = core.get_kv_connector_stats() if core is not None else None
        if own is not None and not own.is_empty():  # as the scheduler joins them
            found = found.aggregate(own) if found is not None else own
        if found is None:
            return
        payload = found.to_dict() if hasattr(found, "to_dict") else found.data
        whole = SchedulerStats(kv_connector_stats=payload)
        sent = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(whole))
        self.logging.observe(sent.kv_connector_stats)
        self.prom.observe(sent.kv_connector_stats, index)

    def sample(self, name, index=0, **labels):
        labels |= {"model_name": "tiny", "engine": str(index)}
        return self.registry.get_sample_value(name, labels)

    def counts(self, index=0):
        """Our counters that are not 0."""
        found = {
            f"{name} {outcome}": self.sample(name, index, outcome=outcome)
            for name, outcomes in OUTCOMES.items()
            for outcome in outcomes
        }
        found["late"] = self.sample("rankbook_late_registrations_total", index)
        assert None not in found.values()
        return {what: count for what, count in found.items() if count}

    def text(self, prefix):
        """The lines of /metrics that begin so; without when each was made."""
        lines = prometheus_client.generate_latest(self.registry).decode().splitlines()
        return [line for line in lines if line.startswith(prefix) and "_created{" not in line]

    def logged(self):
        said = []
        self.logging.log(log_fn=lambda text, *args: said.append(text % args))
        return said


def corrected(asked, request_id="r1"):
    """A request that says something else than the topology."""
    params = {"remote_engine_id": PRODUCER, "remote_generation": "g1", "tp_size": 9}
    asked.ask(request_id, params)


@pytest.fixture
def push():
    return Engine(NIXL_PUSH | OURS)


@pytest.fixture
def log(caplog):
    """What the book's side says."""
    LOG.addHandler(caplog.handler)
    caplog.set_level(logging.INFO, LOG.name)
    yield caplog
    LOG.removeHandler(caplog.handler)


def said(log, text):
    """How often; a record may reach the log on two ways."""
    records = {id(record): record for record in log.records}.values()
    return sum(text in record.getMessage() for record in records)


# ------------------------------------------------------------------------ what is shown


def test_every_counter_is_there_at_0_for_every_engine_from_the_start():
    whole = Engine(NIXL_PUSH | OURS, engines=(0, 3))
    for index in (0, 3):
        for name, outcomes in OUTCOMES.items():
            assert [whole.sample(name, index, outcome=one) for one in outcomes] == [0] * len(
                outcomes
            )
        assert whole.sample("rankbook_late_registrations_total", index) == 0


def test_counts_of_the_engine_core_and_of_two_stages_are_summed_and_taken_once(push):
    asked = requests(engine(PRODUCER, layout=Layout(pp_size=2, tp_size=1, num_layers=4)))
    core = counting(connector(connectors.NixlPushConnector, scheduler=scheduler_of(asked)))
    pairs = [pairs_with(shaken=2, late=1), pairs_with(shaken=1, refused=1)]
    stages = [
        counting(connector(connectors.NixlPushConnector, worker=nixl_worker(one))) for one in pairs
    ]
    corrected(asked)
    push.step(stages, core)
    assert push.counts() == {
        "rankbook_requests_total resolved": 1,
        "rankbook_requests_total corrected": 1,
        "rankbook_handshakes_total shaken": 3,
        "rankbook_handshakes_total refused": 1,
        "late": 1,
    }
    before = push.text("rankbook_")
    push.step(stages, core)
    assert push.text("rankbook_") == before
    pairs[1].count("shaken")
    asked.ask("r2", {"remote_engine_id": "nobody"})
    push.step(stages, core)
    assert push.counts()["rankbook_handshakes_total shaken"] == 4
    assert push.counts()["rankbook_requests_total waited"] == 1


def test_what_vllm_shows_of_nixl_is_the_same_with_and_without_ours():
    shown, logged = [], []
    for cls, config in ((VLLMS, NIXL_PUSH), (connectors.NixlPushConnector, NIXL_PUSH | OURS)):
        whole = Engine(config)
        pairs = pairs_with(shaken=1) if config is not NIXL_PUSH else None
        workers = [nixl_worker(pairs), nixl_worker(), nixl_worker()]
        stages = [connector(cls, worker=one) for one in workers]
        if pairs:
            counting(stages[0])
        transfer(workers[0], 4096)
        transfer(workers[1], 1 << 20)
        workers[1].xfer_stats.record_failed_notification()
        whole.step(stages)
        whole.step(stages)  # without news
        transfer(workers[2], 512)
        whole.step(stages)
        shown.append(whole.text("vllm:"))
        logged.append(whole.logged()[0])
    assert shown[0] == shown[1]
    assert any(line.startswith("vllm:nixl_bytes_transferred_sum") for line in shown[0])
    assert logged[1] == f"{logged[0]}, rankbook handshakes shaken=1"


def test_the_log_has_a_line_where_only_rankbook_counted(push):
    core = counting(connector(connectors.NixlPushConnector, scheduler=scheduler_of(requests())))
    core.connector_scheduler.rankbook.requests.ask("r1", {})
    push.step(core=core)
    push.step(core=core)
    assert push.logged() == ["KV Transfer metrics: rankbook requests refused=1"]
    assert push.logged() == []


def test_a_step_without_news_sends_nothing():
    stage = counting(connector(connectors.NixlPushConnector, worker=nixl_worker(pairs_with())))
    core = counting(connector(connectors.NixlPushConnector, scheduler=scheduler_of(requests())))
    assert stage.get_kv_connector_stats() is None
    assert core.get_kv_connector_stats() is None


def test_each_engine_of_an_api_server_has_its_own(push):
    whole = Engine(NIXL_PUSH | OURS, engines=(0, 1))
    stage = counting(
        connector(connectors.NixlPushConnector, worker=nixl_worker(pairs_with(late=2)))
    )
    whole.step([stage], index=1)
    assert (whole.counts(0), whole.counts(1)) == ({}, {"late": 2})


def test_mooncakes_engine_core_is_counted_too():
    whole = Engine({"kv_connector": "MooncakeConnector", "kv_role": "kv_consumer"} | OURS)
    asked = requests(kind=MooncakeRequests)
    core = counting(connector(connectors.MooncakeConnector, scheduler=scheduler_of(asked)))
    asked.ask("r1", {"remote_engine_id": PRODUCER, "transfer_id": "t1"})
    whole.step(core=core)
    assert whole.counts() == {"rankbook_requests_total waited": 1}


# ------------------------------------------------------------------------ MultiConnector


def multi(child, **top):
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [child]},
        **top,
    }


knows_children = pytest.mark.skipif(
    not hasattr(VLLMS_MULTI, "sub_connectors"), reason="vLLM 0.28's does not name its children"
)


@knows_children
def test_a_multi_connector_of_ours_carries_the_counts_of_vllms_children():
    whole = Engine(multi(NIXL_PUSH, **OURS))
    asked = requests()
    workers = [nixl_worker(pairs_with(shaken=2)), nixl_worker(pairs_with(shaken=1))]
    stages = [
        counting(connector(connectors.MultiConnector, children=[connector(VLLMS, worker=worker)]))
        for worker in workers
    ]
    core = counting(
        connector(
            connectors.MultiConnector,
            children=[connector(VLLMS, scheduler=scheduler_of(asked))],
        )
    )
    transfer(workers[1], 4096)
    asked.ask("r1", {})
    whole.step(stages, core)
    whole.step(stages, core)
    assert whole.counts() == {
        "rankbook_requests_total refused": 1,
        "rankbook_handshakes_total shaken": 3,
    }
    assert whole.sample("vllm:nixl_bytes_transferred_sum") == 4096


def test_a_child_of_ours_under_vllms_own_multi_connector_is_shown():
    """vLLM rebuilds a child's statistics by its name, with a class that knows nothing of ours."""
    whole = Engine(multi(NIXL_PUSH | OURS))
    workers = [nixl_worker(pairs_with(shaken=2)), nixl_worker(pairs_with())]
    children = [connector(connectors.NixlPushConnector, worker=worker) for worker in workers]
    stages = [connector(VLLMS_MULTI, children=[counting(child)]) for child in children]
    whole.step(stages)
    transfer(workers[1], 4096)
    whole.step(stages)
    assert whole.counts() == {"rankbook_handshakes_total shaken": 2}
    assert whole.sample("vllm:nixl_bytes_transferred_sum") == 4096
    assert len(whole.logged()) == 1


@knows_children
def test_a_parent_and_a_child_of_ours_have_their_counters_in_common():
    whole = Engine(multi(NIXL_PUSH | OURS, **OURS))
    child = connector(connectors.NixlPushConnector, worker=nixl_worker(pairs_with(shaken=1)))
    parent = counting(connector(connectors.MultiConnector, children=[child]))
    whole.step([parent])
    assert whole.counts() == {"rankbook_handshakes_total shaken": 1}


# ------------------------------------------------------------------ loggers, registries


def test_a_second_logger_of_a_process_takes_the_place_of_the_first():
    shared = prometheus_client.REGISTRY
    try:
        for _ in range(2):
            unregister_vllm_metrics()  # what vLLM's does for its own
            whole = Engine(NIXL_PUSH | OURS, registry=shared)
            assert whole.counts() == {}
            worker = nixl_worker(pairs_with(shaken=1))
            whole.step([counting(connector(connectors.NixlPushConnector, worker=worker))])
            assert whole.counts() == {"rankbook_handshakes_total shaken": 1}
    finally:
        unregister_vllm_metrics()
        for collector in stats._registered.collectors:
            shared.unregister(collector)


@pytest.mark.parametrize("parent", [None, connectors.MultiConnector], ids=["alone", "a child"])
def test_a_registry_that_takes_no_counters_of_ours_still_has_vllms(log, parent):
    registry = prometheus_client.CollectorRegistry()
    taken = prometheus_client.Counter("rankbook_requests", "Somebody else's.", registry=registry)
    whole = Engine(multi(NIXL_PUSH, **OURS) if parent else NIXL_PUSH | OURS, registry=registry)
    assert said(log, "counts stay in the log") == 1
    worker = nixl_worker(pairs_with(shaken=1))
    stage = connector(VLLMS if parent else connectors.NixlPushConnector, worker=worker)
    transfer(worker, 4096)
    whole.step([counting(connector(parent, children=[stage]) if parent else stage)])
    assert whole.sample("vllm:nixl_bytes_transferred_sum") == 4096
    assert taken._value.get() == 0


# -------------------------------------------------------------------- what may go wrong


def test_counts_that_cannot_be_taken_end_no_step_and_are_said_once(push, log):
    broken = SimpleNamespace(counted=lambda: 1 / 0)
    worker = nixl_worker(broken)
    stage = counting(connector(connectors.NixlPushConnector, worker=worker))
    for _ in range(2):
        transfer(worker, 4096)
        push.step([stage])
    assert said(log, "counts stay in the log") == 1
    assert push.sample("vllm:nixl_bytes_transferred_sum") == 8192


@pytest.mark.parametrize(
    "entry",
    [None, 7, [["requests resolved"]], [["requests resolved", "2"]], [[["x"], 1]], [["other", 1]]],
)
def test_an_entry_that_is_not_known_here_is_left_out(push, entry):
    payload = NixlKVConnectorStats().data | {stats.ENTRY: entry, "bytes_transferred": [4096]}
    push.prom.observe(payload)
    push.logging.observe(payload)
    assert push.counts() == {}
    assert push.sample("vllm:nixl_bytes_transferred_sum") == 4096


def test_threads_that_count_at_once_are_all_counted():
    class Slow(Counter):
        """Lets others go on between reading a count and writing it."""

        def __getitem__(self, name):
            found = super().__getitem__(name)
            time.sleep(0)
            return found

    pairs = pairs_with()
    pairs.counts = Slow()
    threads = [
        threading.Thread(target=lambda: [pairs.count("refused") for _ in range(500)])
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert pairs.counted() == {"refused": 2000}


def test_all_that_is_counted_is_shown():
    source = "".join(file.read_text() for file in Path(rankbook_vllm.__path__[0]).rglob("*.py"))
    counted = set(re.findall(r"""(?:counts\[|\.count\()"(\w+)"\]?""", source))
    assert counted == {outcome for outcomes in OUTCOMES.values() for outcome in outcomes} | {"late"}


# ------------------------------------------------------------------------------- seams


def test_the_installed_vllm_has_the_statistics_that_ours_fit():
    assert _vllm.seams.missing_stats_seams() == ()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            lambda patch: patch.delattr(KVConnectorBase_V1, "build_prom_metrics"),
            "has no KVConnectorBase_V1.build_prom_metrics",
        ),
        (
            lambda patch: patch.setattr(
                KVConnectorBase_V1, "get_kv_connector_stats", lambda self, step: None
            ),
            "has KVConnectorBase_V1.get_kv_connector_stats(step)",
        ),
        (
            lambda patch: patch.delattr(metrics.KVConnectorStats, "reduce"),
            "has no KVConnectorStats.reduce",
        ),
        (
            lambda patch: patch.setattr(
                metrics.KVConnectorStats, "split", lambda self: (), raising=False
            ),
            "has KVConnectorStats.split too",
        ),
    ],
    ids=["a hook is gone", "a hook takes more", "a method is gone", "a method is new"],
)
def test_a_vllm_with_other_statistics_keeps_its_own_and_is_named(monkeypatch, log, change, named):
    change(monkeypatch)
    stats._is_possible.cache_clear()
    try:
        found = connectors.subclass(type("NixlPushConnector", (VLLMS,), {}))
    finally:
        stats._is_possible.cache_clear()
    assert not issubclass(found, stats.StatsMixin)
    assert said(log, f"counts stay in the log, /metrics has none: vLLM {vllm.__version__} {named}")


def test_a_connector_that_counts_nothing_is_left_alone():
    for name in ("ExampleConnector", "OffloadingConnector"):
        assert not issubclass(getattr(connectors, name), stats.StatsMixin)


def test_a_connector_that_signs_in_counts_what_its_parts_count():
    class Unstarted(VLLMS):
        """vLLM's, with a scheduler's object that was not started either."""

        def __init__(self, vllm_config, role, kv_cache_config):
            KVConnectorBase_V1.__init__(self, vllm_config, role, kv_cache_config)
            self.connector_scheduler = object.__new__(NixlPushConnectorScheduler)
            self.connector_scheduler.vllm_config = vllm_config
            self.connector_worker = None

    transfer_config = KVTransferConfig(
        **NIXL_PUSH,
        engine_id="decode-a-0",
        kv_connector_extra_config={"rankbook": {"endpoints": "127.0.0.1:1"}},
    )
    config = SimpleNamespace(kv_transfer_config=transfer_config)
    first, second = (
        connectors.subclass(Unstarted)(config, KVConnectorRole.SCHEDULER, None) for _ in range(2)
    )
    try:
        first.connector_scheduler.rankbook.requests.ask("r1", {})
        assert first.get_kv_connector_stats().data[stats.ENTRY] == [["requests refused", 1]]
        assert second.get_kv_connector_stats() is None  # one signs in
    finally:
        for one in (first, second):
            one.connector_scheduler = None  # it has nothing to shut down
            one.shutdown()
