"""Claims about `rankbook._keeper`: what is done next to stay in the book."""

from __future__ import annotations

import copy

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from rankbook import (
    BadRecord,
    Conflict,
    DeadlineExceeded,
    Denied,
    Fenced,
    Incomplete,
    Internal,
    Reason,
    Refused,
    SealMismatch,
    Slot,
    Unavailable,
    v1,
)
from rankbook._change import RegistrationState
from rankbook._keeper import HEARTBEAT_RETRY, Keeper, Seal, StepKind
from rankbook._replies import ClockOffset, RenewReply, Updated
from rankbook.model import Lease, LeaseState, LeaseStatus, Registered, Sealed, Successor
from rankbook.model import Seal as ModelSeal

TTL_S = 9.0


def records(count: int, **also) -> list[v1.WorkerRecord]:
    return [
        v1.WorkerRecord(
            engine_id="e",
            generation="g1",
            slot=v1.Slot(tp_rank=n),
            handshake=v1.Handshake(format="t", payload=b"p"),
            **also,
        )
        for n in range(count)
    ]


def keeper(count: int = 1, **also) -> Keeper:
    return Keeper(records(count), ttl_s=TTL_S, sequence=100, rng=lambda: 0.0, **also)


def lease(name: str = "l1") -> Lease:
    return Lease(name, TTL_S, TTL_S / 3)


def accepted(step, name: str = "l1", epoch: int = 1, revision: int = 1, book: str = "b1"):
    digests = tuple(bytes([n]) for n in range(len(step.records)))
    return Registered(lease(name), epoch, revision, digests, book, "s1")


def renewal(state=LeaseState.ALIVE, *, book: str = "b1", server: str = "s1", **also) -> RenewReply:
    ttl_s = TTL_S if state is LeaseState.ALIVE else 0.0
    return RenewReply(
        (LeaseStatus("l1", state, ttl_s, also.get("replaced_by")),),
        server,
        book,
        1,
        None,
        also.get("clock"),
    )


def settled(count: int = 1) -> Keeper:
    one = keeper(count)
    step = one.next_step(0)
    one.registered_as(step, accepted(step), 0)
    return one


def test_it_signs_in_first_and_then_renews_at_a_third_of_the_ttl():
    one = keeper()
    step = one.next_step(0)
    assert (step.kind, step.sequence, step.epoch, step.lease_id) == (
        StepKind.REGISTER,
        100,
        0,
        "",
    )
    one.registered_as(step, accepted(step, epoch=4), 10.0)
    assert one.state is RegistrationState.REGISTERED
    assert one.next_step(10.0).kind is StepKind.WAIT
    assert one.next_step(10.0).until_s == pytest.approx(10.0 + TTL_S / 3)
    step = one.next_step(10.0 + TTL_S / 3)
    assert (step.kind, step.lease_id, step.ttl_s) == (StepKind.RENEW, "l1", 0.0)


def test_jitter_only_ever_renews_earlier():
    one = Keeper(records(1), ttl_s=TTL_S, sequence=1, rng=lambda: 0.999)
    step = one.next_step(0)
    one.registered_as(step, accepted(step), 0.0)
    assert 0.85 * TTL_S / 3 < one.next_step(0).until_s < TTL_S / 3


def test_a_write_that_is_retried_is_the_same_write():
    one = keeper()
    step = one.next_step(0)
    one.failed(step, DeadlineExceeded("no answer"), 0)
    assert one.next_step(0).kind is StepKind.WAIT
    assert one.next_step(1) == step


def test_an_outage_is_tried_for_ever_at_most_three_fifths_of_a_second_apart():
    one = keeper()
    now, waits = 0.0, []
    for _ in range(200):
        step = one.next_step(now)
        one.failed(step, Unavailable("away"), now)
        until = one.next_step(now).until_s
        waits.append(until - now)
        now = until
    assert waits[0] == pytest.approx(HEARTBEAT_RETRY.initial_s)
    assert max(waits) <= 0.6 + 1e-9
    assert one.state is RegistrationState.PENDING
    assert isinstance(one.error, Unavailable)


@pytest.mark.parametrize("state", [LeaseState.ENDED, LeaseState.UNKNOWN])
def test_a_lost_lease_is_a_new_sign_in_with_a_higher_number(state):
    one = settled()
    one.renewed(renewal(state), 3)
    assert one.state is RegistrationState.SUSPENDED
    step = one.next_step(3)
    assert (step.kind, step.sequence, step.lease_id) == (StepKind.REGISTER, 101, "")
    # The epoch that the book told still fences.
    assert step.epoch == 1
    one.registered_as(step, accepted(step, "l2"), 3)
    assert (one.state, one.lease_id) == (RegistrationState.REGISTERED, "l2")


def test_another_book_is_a_new_sign_in_that_knows_no_epoch():
    one = settled()
    one.renewed(renewal(book="b2"), 3)
    step = one.next_step(3)
    assert (step.kind, step.epoch) == (StepKind.REGISTER, 0)
    assert step.sequence > 100


def test_a_restarted_registry_is_noticed_and_changes_nothing_else():
    one = settled()
    one.renewed(renewal(server="s2"), 3)
    assert (one.boot_id, one.state) == ("s2", RegistrationState.REGISTERED)
    assert one.next_step(3).kind is StepKind.WAIT


def test_a_broken_connection_brings_the_next_renewal_forward():
    one = settled()
    assert one.next_step(0).kind is StepKind.WAIT
    one.hurry()
    assert one.next_step(0).kind is StepKind.RENEW


def test_a_fenced_lease_ends_it_and_names_who_took_over():
    one = settled()
    one.renewed(renewal(LeaseState.FENCED, replaced_by=Successor("e", 7, "g9")), 3)
    assert one.state is RegistrationState.FENCED
    assert one.error.metadata["current_epoch"] == "7"
    assert one.next_step(3).kind is StepKind.END
    one.stop()
    assert one.state is RegistrationState.FENCED


def test_a_fenced_write_ends_it():
    one = keeper()
    one.failed(one.next_step(0), Fenced("newer"), 0)
    assert one.state is RegistrationState.FENCED


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (BadRecord("no"), RegistrationState.STOPPED),
        (Conflict("sizes", reason=Reason.LAYOUT_CONFLICT), RegistrationState.STOPPED),
        (Conflict("held", reason=Reason.SLOT_HELD), RegistrationState.PENDING),
        (Denied("token"), RegistrationState.PENDING),
        (Internal("bug"), RegistrationState.PENDING),
    ],
)
def test_only_what_never_passes_ends_a_first_sign_in(error, state):
    one = keeper()
    one.failed(one.next_step(0), error, 0)
    assert one.state is state
    assert one.error is error


def test_no_refusal_of_a_renewal_ends_it():
    one = settled()
    step = one.next_step(TTL_S)
    for error in (Denied("token"), Internal("bug"), BadRecord("odd"), Refused("odd")):
        one.failed(step, error, TTL_S)
        assert one.state is RegistrationState.SUSPENDED
    one.renewed(renewal(), 2 * TTL_S)
    assert one.state is RegistrationState.REGISTERED
    assert one.error is None


def test_a_stale_number_leaps_and_a_book_that_takes_none_ends_it():
    one = keeper()
    numbers = []
    for now in range(100):
        step = one.next_step(now)
        if step.kind is StepKind.END:
            break
        numbers.append(step.sequence)
        one.failed(step, Refused("stale", reason=Reason.SEQUENCE_STALE), now)
    assert one.state is RegistrationState.STOPPED
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 3


def test_an_update_writes_its_slot_alone():
    one = settled(2)
    changed = records(2)[1]
    changed.handshake.payload = b"new"
    one.update(changed)
    assert not one.settled
    step = one.next_step(0)
    assert (step.kind, step.records, step.sequence) == (StepKind.UPDATE, (changed,), 101)
    one.updated(step, Updated(1, 5, b"digest"), 0)
    assert one.settled
    assert one.registered.record_digests == (bytes([0]), b"digest")


def test_a_newer_update_takes_the_place_of_one_that_was_not_answered():
    one = settled()
    first, second = records(1)[0], records(1)[0]
    first.handshake.payload, second.handshake.payload = b"1", b"2"
    one.update(first)
    step = one.next_step(0)
    one.failed(step, Unavailable("away"), 0)
    one.update(second)
    again = one.next_step(1)
    assert again.records == (second,)
    assert again.sequence > step.sequence


def test_an_answer_to_an_older_wish_does_not_settle_a_newer_one():
    one = settled()
    one.update(records(1)[0])
    step = one.next_step(0)
    one.update(records(1)[0])
    one.updated(step, Updated(1, 5, b"old"), 0)
    assert not one.settled


def test_a_refused_update_is_dropped_and_the_rest_goes_on():
    one = settled()
    one.update(records(1)[0])
    one.failed(one.next_step(0), BadRecord("no"), 0)
    assert isinstance(one.update_error, BadRecord)
    assert (one.state, one.settled) == (RegistrationState.REGISTERED, True)


def test_a_withdrawn_payload_stays_withdrawn_when_the_lease_is_lost():
    one = settled()
    one.withdraw(Slot())
    step = one.next_step(0)
    assert (step.kind, step.withdraw) == (StepKind.UPDATE, True)
    one.updated(step, Updated(1, 2, b""), 0)
    one.renewed(renewal(LeaseState.ENDED), 3)
    step = one.next_step(3)
    assert step.records[0].handshake.payload == b""
    one.registered_as(step, accepted(step, "l2"), 3)
    assert one.next_step(3).withdraw


def test_a_wished_ttl_goes_with_the_next_renewal_once():
    one = settled()
    one.set_ttl(4.0)
    step = one.next_step(0)
    assert (step.kind, step.ttl_s) == (StepKind.RENEW, 4.0)
    one.renewed(renewal(), 0)
    assert one.next_step(TTL_S).ttl_s == 0.0


def seal() -> Seal:
    return Seal("e", "g1", (), v1.CoreRecord(), epoch=3)


def sealed() -> Sealed:
    return Sealed(ModelSeal(1, b"d"), 3, 9, lease("l1"))


def test_a_core_without_records_seals_and_keeps_the_lease_of_its_seal():
    one = keeper(0)
    assert one.next_step(0).kind is StepKind.WAIT
    one.wish_seal(seal())
    step = one.next_step(0)
    assert (step.kind, step.epoch, step.lease_id) == (StepKind.SEAL, 3, "")
    one.sealed_as(step, sealed(), 0)
    assert (one.state, one.seal_settled, one.lease_id) == (RegistrationState.REGISTERED, True, "l1")
    assert one.next_step(TTL_S).kind is StepKind.RENEW


def test_a_lost_lease_is_sealed_again_after_the_records():
    one = settled()
    one.wish_seal(seal())
    step = one.next_step(0)
    one.sealed_as(step, sealed(), 0)
    one.renewed(renewal(LeaseState.ENDED), 3)
    step = one.next_step(3)
    assert step.kind is StepKind.REGISTER
    one.registered_as(step, accepted(step, "l2"), 3)
    again = one.next_step(3)
    assert (again.kind, again.lease_id) == (StepKind.SEAL, "l2")


def test_a_seal_that_may_yet_pass_is_tried_again_and_the_lease_lives_on():
    one = settled()
    one.wish_seal(seal())
    now = 0.0
    for error in (Incomplete("missing"), SealMismatch("differs")):
        step = one.next_step(now)
        assert step.kind is StepKind.SEAL
        one.failed(step, error, now)
        assert one.seal_error is error
        assert one.state is RegistrationState.REGISTERED
        now = one.next_step(now).until_s
    one.sealed_as(one.next_step(now), sealed(), now)
    assert (one.seal_error, one.seal_settled) == (None, True)


def test_a_seal_that_never_passes_is_given_up_until_it_is_wished_anew():
    one = settled()
    one.wish_seal(seal())
    one.failed(one.next_step(0), Refused("contradiction", reason=Reason.ENGINE_INVALID), 0)
    assert one.seal_settled
    assert one.next_step(0).kind is StepKind.WAIT
    one.wish_seal(seal())
    assert one.next_step(0).kind is StepKind.SEAL


def test_the_best_of_the_newest_clock_readings_is_taken():
    one = settled()
    for number in range(20):
        error_s = 0.001 if number == 15 else 0.01 + number
        one.renewed(renewal(clock=ClockOffset(float(number), error_s, float(number))), number)
    assert one.clock.offset_s == 15.0
    for number in range(20, 30):
        one.renewed(renewal(clock=ClockOffset(float(number), 0.5, float(number))), number)
    assert one.clock.offset_s > 20


class Keeping(RuleBasedStateMachine):
    """A keeper against a book that answers, fails, forgets and is replaced at random."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.keeper = Keeper(records(3), ttl_s=TTL_S, sequence=1, rng=lambda: 0.5)
        self.book, self.leases, self.lease = "b1", 0, None
        self.held: dict[int, bytes] = {}
        self.wished = dict.fromkeys(range(3), b"p")
        self.last_sequence = 0

    def _do(self, *, lost: bool) -> None:
        step = self.keeper.next_step(self.now)
        keep = self.keeper
        if step.kind is StepKind.WAIT:
            self.now = max(self.now, min(step.until_s, self.now + TTL_S))
            return
        if step.kind is StepKind.RENEW:
            alive = step.lease_id == self.lease
            if lost:
                keep.failed(step, Unavailable("away"), self.now)
            else:
                state = LeaseState.ALIVE if alive else LeaseState.UNKNOWN
                keep.renewed(renewal(state, book=self.book), self.now)
            return
        assert step.sequence >= self.last_sequence
        self.last_sequence = step.sequence
        if step.kind is StepKind.REGISTER:
            if step.lease_id and step.lease_id != self.lease:
                keep.failed(step, Refused("ended", reason=Reason.LEASE_ENDED), self.now)
                return
            if self.lease is None:
                self.leases += 1
                self.lease = f"l{self.leases}"
        elif step.lease_id not in ("", self.lease) or (
            step.records[0].slot.tp_rank not in self.held
        ):
            error = Refused("not yours", reason=Reason.LEASE_ENDED)
            keep.failed(step, error, self.now)
            return
        for record in step.records:
            payload = b"" if step.withdraw else record.handshake.payload
            self.held[record.slot.tp_rank] = payload
        if lost:
            # Done, but the reply never came.
            keep.failed(step, Unavailable("lost"), self.now)
        elif step.kind is StepKind.REGISTER:
            keep.registered_as(step, accepted(step, self.lease, book=self.book), self.now)
        else:
            keep.updated(step, Updated(1, 1, b"d"), self.now)

    @rule(lost=st.booleans())
    def step(self, lost: bool) -> None:
        self._do(lost=lost)

    @rule(tp_rank=st.integers(0, 2), payload=st.binary(min_size=1, max_size=2))
    def update(self, tp_rank: int, payload: bytes) -> None:
        record = records(3)[tp_rank]
        record.handshake.payload = payload
        self.keeper.update(record)
        self.wished[tp_rank] = payload

    @rule(tp_rank=st.integers(0, 2))
    def withdraw(self, tp_rank: int) -> None:
        self.keeper.withdraw(Slot(tp_rank=tp_rank))
        self.wished[tp_rank] = b""

    @precondition(lambda self: self.lease is not None)
    @rule()
    def expire(self) -> None:
        self.lease, self.held = None, {}

    @rule()
    def lose_the_book(self) -> None:
        self.lease, self.held = None, {}
        self.book = f"{self.book}'"

    @invariant()
    def it_comes_to_rest_with_every_wish_in_the_book(self) -> None:
        was = copy.deepcopy({name: getattr(self, name) for name in _STATE})
        for _ in range(100):
            self._do(lost=False)
            step = self.keeper.next_step(self.now)
            if step.kind is StepKind.WAIT and step.until_s >= self.now + TTL_S / 4:
                # A renewal finds out what was lost meanwhile.
                self.now = step.until_s
        assert self.held == self.wished
        assert self.keeper.settled
        assert self.keeper.state is RegistrationState.REGISTERED
        self.__dict__.update(was)


_STATE = ("now", "keeper", "book", "leases", "lease", "held", "last_sequence")

Keeping.TestCase.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)
test_whatever_is_lost_every_wish_gets_into_the_book = Keeping.TestCase
