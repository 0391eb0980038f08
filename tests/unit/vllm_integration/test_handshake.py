"""Handshakes are answered from the book: who may pair, with what, and until when."""

import dataclasses
import logging

import pytest
from tests.unit.vllm_integration.books import HandBook, consumer, engine

from rankbook.errors import (
    Incompatible,
    Incomplete,
    Reason,
    TransferError,
)
from rankbook.model import Layout, Role, Slot, State
from rankbook_vllm.handshake import Call, Pairs, check_pair, check_peers, payloads_of

PRODUCER = "prefill-a-0"
OWN = "decode-a-0"
LEASE_S = 30.0
GRID = Layout(pp_size=2, tp_size=2, num_layers=4)
STAGES = Layout(pp_size=2, tp_size=1, num_layers=4)
ONE = Layout(pp_size=1, tp_size=1, num_layers=4)


# ------------------------------------------------------------------------ payloads


def test_every_stage_gives_the_payload_of_every_rank_that_is_asked():
    assert payloads_of(engine(layout=GRID), [0, 1]) == {
        (pp, tp): b"agent pp%d tp%d" % (pp, tp) for pp in (0, 1) for tp in (0, 1)
    }


def test_only_the_ranks_that_are_asked_are_given():
    assert set(payloads_of(engine(layout=GRID), [1])) == {(0, 1), (1, 1)}


def test_ranks_of_dcp_over_pcp_are_found_by_both_numbers():
    layout = Layout(pp_size=1, tp_size=2, num_layers=4, pcp_size=2, dcp_size=4)
    whole = engine(layout=layout)
    slots = [Slot(0, pcp, tp) for pcp in (0, 1) for tp in (0, 1)]
    workers = tuple(
        dataclasses.replace(
            whole.workers[0],
            slot=slot,
            handshake=dataclasses.replace(
                whole.workers[0].handshake, payload=b"%d%d" % (slot.pcp_rank, slot.tp_rank)
            ),
        )
        for slot in slots
    )
    found = payloads_of(dataclasses.replace(whole, workers=workers), range(4))
    assert found == {(0, 0): b"00", (0, 1): b"01", (0, 2): b"10", (0, 3): b"11"}


def without_payload(topology, **changes):
    """The engine with its last worker's handshake changed; None where nothing is given."""
    *others, last = topology.workers
    handshake = dataclasses.replace(last.handshake, **changes) if changes else None
    changed = dataclasses.replace(last, handshake=handshake)
    return dataclasses.replace(topology, workers=(*others, changed))


@pytest.mark.parametrize(
    "peer",
    [
        engine(layout=STAGES, without=(1,)),
        without_payload(engine(layout=STAGES)),
        without_payload(engine(layout=STAGES), payload=b""),
    ],
    ids=["no worker", "no handshake", "withdrawn"],
)
def test_a_stage_that_is_not_there_is_never_left_out(peer):
    with pytest.raises(Incomplete) as caught:
        payloads_of(peer, [0])
    assert caught.value.metadata["missing"] == "pp1 tp0"


def test_another_connectors_payload_is_not_given_to_nixl():
    with pytest.raises(Incompatible) as caught:
        payloads_of(without_payload(engine(), format="vllm.mooncake"), [0])
    assert caught.value.metadata == {"producer": "vllm.mooncake", "consumer": "vllm.nixl"}


# --------------------------------------------------------------------- who may pair


def test_a_producer_of_two_stages_pushes_to_a_consumer_of_one():
    check_peers(engine(layout=STAGES), consumer())


def test_every_broken_rule_is_named_with_both_values():
    with pytest.raises(Incompatible) as caught:
        check_peers(
            engine(connector="NixlConnector", layout=STAGES),
            consumer(connector="NixlConnector", compat_hash="0ther"),
        )
    reasons = caught.value.metadata["reasons"].split(", ")
    assert {"PULL_PP_PRODUCER_UNSUPPORTED", "COMPAT_HASH_MISMATCH"} <= set(reasons)
    assert caught.value.metadata["producer"] == PRODUCER
    assert caught.value.metadata["consumer"] == OWN


def test_factors_that_differ_are_named_with_both_values():
    peer = engine(connector="NixlConnector", compat_hash="0ther")
    with pytest.raises(Incompatible, match="'NixlConnector' and 'NixlPushConnector'"):
        check_peers(peer, consumer())


@pytest.mark.parametrize(
    ("own_role", "peer_role", "notif_only", "we_consume"),
    [
        (Role.CONSUMER, Role.PRODUCER, True, True),
        (Role.CONSUMER, Role.BOTH, False, True),
        (Role.BOTH, Role.PRODUCER, False, True),
        (Role.BOTH, Role.BOTH, True, True),
        (Role.PRODUCER, Role.CONSUMER, False, False),
        (Role.PRODUCER, Role.BOTH, False, False),
        (Role.BOTH, Role.CONSUMER, False, False),
        (Role.BOTH, Role.BOTH, False, False),
    ],
)
def test_in_push_it_is_known_who_writes(own_role, peer_role, notif_only, we_consume):
    """Two stages may push, and may not be pushed to."""
    # The stages are the producer's: what is allowed tells the direction.
    layouts = (ONE, STAGES) if we_consume else (STAGES, ONE)
    own = engine(OWN, role=own_role, layout=layouts[0])
    peer = engine(role=peer_role, layout=layouts[1])
    pp_size = layouts[1].pp_size
    check_pair(own, peer, Call(PRODUCER, 1, pp_size=pp_size, notif_only=notif_only))
    # And the other way round they may not.
    own, peer = (
        engine(OWN, role=own_role, layout=layouts[1]),
        engine(role=peer_role, layout=layouts[0]),
    )
    with pytest.raises(Incompatible):
        check_pair(own, peer, Call(PRODUCER, 1, pp_size=layouts[0].pp_size, notif_only=notif_only))


def test_in_pull_of_two_that_do_both_who_calls_reads():
    def both(name, **more):
        return engine(name, role=Role.BOTH, connector="NixlConnector", **more)

    with pytest.raises(Incompatible) as caught:
        check_pair(both(OWN), both(PRODUCER, layout=STAGES), Call(PRODUCER, 1, pp_size=2))
    assert "PULL_PP_PRODUCER_UNSUPPORTED" in caught.value.metadata["reasons"]
    assert caught.value.metadata["producer"] == PRODUCER
    check_pair(both(OWN), both(PRODUCER), Call(PRODUCER, 1))


@pytest.mark.parametrize(
    ("changes", "name"),
    [({"tp_size": 4}, "tp_size"), ({"dcp_size": 2}, "dcp_size"), ({"pp_size": 1}, "pp_size")],
)
def test_a_call_of_other_sizes_than_sealed_is_refused(changes, name):
    call = dataclasses.replace(Call(PRODUCER, 2, pp_size=2, notif_only=True), **changes)
    own = consumer(layout=Layout(1, 2, 4))
    with pytest.raises(TransferError) as caught:
        check_pair(own, engine(layout=GRID), call)
    assert caught.value.reason is Reason.ENGINE_INFO_CHANGED
    assert set(caught.value.metadata) == {name}


# ---------------------------------------------------------------------------- pairs


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def book():
    return HandBook(engine(), consumer())


@pytest.fixture
def pairs(book, clock):
    return Pairs(book, logging.getLogger("rankbook"), lease_s=LEASE_S, clock=clock)


def paired(book, pairs, **changes):
    peer = engine(**changes)
    book.put(peer)
    pairs.made(peer)
    assert not pairs.is_over(PRODUCER)
    return peer


OVER = {
    "another start": {"generation": "g2", "epoch": 2},
    "gone": {"state": State.GONE},
    "asleep": {"state": State.DEGRADED, "asleep": (Slot(),)},
    "other memory": {"payload": b"moved"},
}
NOT_OVER = {
    "half": {"state": State.DEGRADED, "layout": STAGES, "without": (1,)},
    "draining": {"state": State.DRAINING},
    "not sealed yet, with other memory": {"state": State.COMPLETE, "payload": b"moved"},
    "a new label": {"labels": {"zone": "b"}, "revision": 99},
}


@pytest.mark.parametrize("changes", OVER.values(), ids=OVER)
def test_a_pairing_is_over_when_the_peer_is_another(book, pairs, changes):
    paired(book, pairs)
    book.put(engine(**changes))
    assert pairs.is_over(PRODUCER)
    assert set(pairs.over()) == {PRODUCER}


@pytest.mark.parametrize("changes", NOT_OVER.values(), ids=NOT_OVER)
def test_a_pairing_outlasts_what_leaves_the_memory_where_it_is(book, pairs, changes):
    paired(book, pairs, **({"layout": changes["layout"]} if "layout" in changes else {}))
    book.put(engine(**changes))
    assert not pairs.is_over(PRODUCER)
    assert pairs.over() == {}


def test_a_book_that_was_lost_is_no_proof_that_a_peer_ended(book, pairs):
    paired(book, pairs)
    book.forget(PRODUCER)
    assert not pairs.is_over(PRODUCER)
    book.put(engine())
    assert not pairs.is_over(PRODUCER)
    book.forget(PRODUCER)
    book.put(engine(generation="g2", epoch=1))
    assert pairs.is_over(PRODUCER)


@pytest.mark.parametrize("changes", [{"state": State.GONE}, OVER["asleep"]], ids=["gone", "asleep"])
def test_a_peer_that_returns_unchanged_before_it_was_dropped_is_paired_still(book, pairs, changes):
    paired(book, pairs)
    book.put(engine(**changes))
    book.put(engine())
    assert not pairs.is_over(PRODUCER)


def test_nobody_is_over_whom_nobody_shook_hands_with(book, pairs):
    for changes in OVER.values():
        book.put(engine(**changes))
    book.forget(PRODUCER)
    assert pairs.over() == {}


def test_a_peer_that_changed_during_the_handshake_is_over_at_once(book, pairs):
    old = engine()
    book.put(engine(generation="g2", epoch=2))
    pairs.made(old)
    assert pairs.is_over(PRODUCER)


def test_an_old_word_that_arrives_late_ends_no_new_pairing(book, pairs):
    old = engine(state=State.GONE)
    paired(book, pairs, generation="g2", epoch=2)
    book.tell(PRODUCER, old)
    assert not pairs.is_over(PRODUCER)


def test_a_request_of_a_newer_start_ends_the_pairing_before_the_book_shows_it(book, pairs):
    paired(book, pairs)
    pairs.bind(PRODUCER, "g2")
    assert pairs.is_over(PRODUCER)
    # The copy is behind: that it still has the old start says nothing.
    book.put(engine(labels={"zone": "b"}))
    assert pairs.is_over(PRODUCER)


def test_a_request_of_a_newer_start_during_the_handshake_ends_it_too(book, pairs):
    pairs.bind(PRODUCER, "g2")
    pairs.made(engine())
    assert pairs.is_over(PRODUCER)


def test_a_request_of_the_paired_start_changes_nothing(book, pairs):
    paired(book, pairs)
    pairs.bind(PRODUCER, "g1")
    pairs.bind(PRODUCER, "")
    assert not pairs.is_over(PRODUCER)
    assert pairs.bound(PRODUCER) == "g1"


def test_any_start_will_do_until_a_request_names_one(pairs):
    assert pairs.bound(PRODUCER) == ""


def test_what_was_dropped_is_shaken_anew(book, pairs):
    paired(book, pairs)
    newer = engine(generation="g2", epoch=2)
    book.put(newer)
    pairs.dropped(PRODUCER)
    assert pairs.over() == {}
    pairs.bind(PRODUCER, "g2")
    pairs.made(newer)
    assert not pairs.is_over(PRODUCER)
    assert (pairs.counts["shaken"], pairs.counts["dropped"]) == (2, 1)


def test_from_workers_that_ended_nothing_comes_any_more(book, pairs, clock):
    paired(book, pairs)
    book.put(engine(state=State.GONE))
    clock.now_s += 5
    assert pairs.over()[PRODUCER] <= clock.now_s - 5


@pytest.mark.parametrize(
    "changes",
    [
        {"state": State.GONE, "lapsed": True},
        OVER["another start"],
        OVER["asleep"],
        OVER["other memory"],
        {"state": State.GONE, "generation": "g2", "epoch": 2},
    ],
    ids=["lapsed", "another start", "asleep", "other memory", "another start that died"],
)
def test_from_workers_that_may_run_still_something_may_come_for_as_long_as_a_lease(
    book, pairs, clock, changes
):
    paired(book, pairs)
    over_s = clock.now_s
    book.put(engine(**changes))
    clock.now_s += 5
    # Further news of the same end does not put it off.
    book.put(engine(**changes, labels={"zone": "b"}))
    assert pairs.over()[PRODUCER] == over_s + LEASE_S


def test_one_that_lapsed_and_is_known_to_have_ended_later_is_dead_from_then_on(book, pairs, clock):
    paired(book, pairs)
    book.put(engine(state=State.GONE, lapsed=True))
    book.put(engine(state=State.GONE))
    assert pairs.over()[PRODUCER] == clock.now_s


def test_workers_that_ended_stay_so_when_another_start_takes_their_place(book, pairs, clock):
    paired(book, pairs)
    ended_s = clock.now_s
    book.put(engine(state=State.GONE))
    clock.now_s += 5
    book.put(engine(generation="g2", epoch=2))
    assert pairs.over()[PRODUCER] == ended_s


def test_the_end_of_one_pairing_is_not_that_of_the_next(book, pairs, clock):
    paired(book, pairs)
    book.put(engine(state=State.GONE))
    clock.now_s += 5
    book.put(engine(generation="g3", epoch=3))
    pairs.made(engine(generation="g2", epoch=2))
    assert pairs.over()[PRODUCER] == clock.now_s + LEASE_S


@pytest.mark.parametrize("state", list(State), ids=str)
def test_a_peer_that_was_dialled_is_over_as_soon_as_the_book_knows_it(book, pairs, state):
    pairs.dialled("prefill-b-0")
    assert not pairs.is_over("prefill-b-0")
    book.put(engine("prefill-b-0", state=state))
    assert pairs.is_over("prefill-b-0")
    pairs.dropped("prefill-b-0")
    assert pairs.over() == {}


def test_a_peer_that_the_book_learned_while_it_was_dialled_is_over_at_once(pairs):
    pairs.dialled(PRODUCER)
    assert pairs.is_over(PRODUCER)


def test_a_request_that_names_a_start_ends_what_was_dialled(pairs):
    pairs.dialled("prefill-b-0")
    pairs.bind("prefill-b-0", "g1")
    assert pairs.is_over("prefill-b-0")


def test_the_bound_start_follows_the_book_once_it_has_shown_it(book, pairs):
    pairs.bind(PRODUCER, "g1")
    book.put(engine(generation="g2", epoch=2, state=State.FORMING))
    assert pairs.bound(PRODUCER) == "g2"


def test_a_bound_start_that_the_book_has_not_shown_yet_stays(book, pairs):
    """This copy is late: what it shows next may be the start before."""
    pairs.bind(PRODUCER, "g3")
    book.put(engine(generation="g2", epoch=2))
    assert pairs.bound(PRODUCER) == "g3"
    for generation in ("g3", "g4"):
        book.put(engine(generation=generation, epoch=3))
        assert pairs.bound(PRODUCER) == generation


@pytest.mark.parametrize(
    ("known", "bound", "kept"),
    [
        ({}, "g1", "g1"),
        ({"state": State.DEGRADED}, "g1", "g1"),
        ({"state": State.GONE}, "g1", ""),
        ({}, "g0", ""),
        (None, "g1", ""),
    ],
    ids=["there", "half", "gone", "another start", "unknown"],
)
def test_after_a_refusal_a_start_is_kept_only_where_the_book_has_it(
    book, pairs, known, bound, kept
):
    if known is None:
        book.forget(PRODUCER)
    else:
        book.put(engine(**known))
    pairs.bind(PRODUCER, bound)
    pairs.refused(PRODUCER)
    assert pairs.bound(PRODUCER) == kept
    assert pairs.counted() == {"refused": 1}


def test_of_engines_that_the_book_never_showed_the_first_are_forgotten(book, pairs):
    pairs.bind(PRODUCER, "g1")
    for number in range(1030):
        pairs.bind(f"nobody-{number}", "g1")
    assert pairs.bound(PRODUCER) == "g1"
    assert [bool(pairs.bound(f"nobody-{number}")) for number in (0, 5, 6, 1029)] == [
        False,
        False,
        True,
        True,
    ]


@pytest.mark.parametrize("state", [State.DEGRADED, State.INVALID], ids=str)
def test_an_engine_that_lacks_a_part_for_a_lease_is_lost_for_who_waits(book, pairs, clock, state):
    paired(book, pairs)
    began_s = clock.now_s
    book.put(engine(state=state))
    clock.now_s += LEASE_S - 0.1
    book.put(engine(state=state, labels={"zone": "b"}))  # no further reprieve
    assert pairs.lost() == {}
    clock.now_s += 0.1
    assert pairs.lost() == {PRODUCER: began_s + LEASE_S}
    assert pairs.over() == {}  # a transfer under way may end
    book.current = False
    assert pairs.lost() == {}  # what is known is old
    book.current = True
    book.put(engine())
    assert pairs.lost() == {}


@pytest.mark.parametrize(
    "changes",
    [
        {"state": State.DRAINING},
        {"state": State.GONE},
        {"state": State.DEGRADED, "generation": "g2", "epoch": 2},
    ],
    ids=["draining", "gone", "another start"],
)
def test_an_engine_is_lost_by_nothing_but_a_missing_part(book, pairs, clock, changes):
    paired(book, pairs)
    book.put(engine(**changes))
    clock.now_s += 2 * LEASE_S
    assert pairs.lost() == {}


def test_many_engines_that_come_and_go_leave_nothing(book, pairs):
    def held():
        return sum(len(value) for value in vars(pairs).values() if isinstance(value, dict))

    before = held()
    for number in range(50):
        name = f"prefill-{number}"
        pairs.dialled(name)
        for generation in ("g1", "g2"):
            peer = engine(name, generation=generation)
            book.put(peer)
            pairs.bind(name, generation)
            pairs.made(peer)
            book.put(engine(name, generation=generation, state=State.DEGRADED))
        book.put(engine(name, generation="g2", state=State.GONE))
        for gone in pairs.over():
            pairs.dropped(gone)
        book.forget(name)
    assert held() - before <= len(pairs.counts)
