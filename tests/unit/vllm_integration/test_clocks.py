"""A peer's clock is known by way of the registry's, within the error that is said."""

import datetime as dt
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from rankbook.errors import Unavailable
from rankbook.model import ClockPair
from rankbook_vllm.clocks import DRIFT, REFRESH_S, PeerClocks, clock_pair, offset_between

BORN = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)


@dataclass(frozen=True)
class World:
    """Clocks over one true time, in seconds: each has its own start and speed."""

    start_s: float
    speed: float

    def reads(self, true_s: float) -> float:
        return self.start_s + self.speed * true_s


def registry_at(true_s: float) -> dt.datetime:
    return BORN + dt.timedelta(seconds=true_s)


speeds = st.floats(1 - DRIFT / 2, 1 + DRIFT / 2)
starts = st.floats(-1e6, 1e6)
delays = st.floats(0.0, 0.5)


@given(starts, speeds, starts, speeds, st.floats(0, 3600), st.floats(0, 3600), delays, delays)
def test_the_true_offset_is_within_the_error(
    our_start, our_speed, their_start, their_speed, between_s, later_s, out_s, back_s
):
    """Pairs taken at different moments, over unequal ways there and back, by clocks
    that run 50 ppm off each."""
    ours, theirs = World(our_start, our_speed), World(their_start, their_speed)

    def pair(clock: World, at_s: float) -> ClockPair:
        sent, got = clock.reads(at_s), clock.reads(at_s + out_s + back_s)
        error_s = (got - sent) / 2
        return ClockPair(sent + error_s, registry_at(at_s + out_s), error_s)

    theirs_at, ours_at = 100.0, 100.0 + between_s
    now = ours_at + 2.0 + later_s
    found = offset_between(pair(ours, ours_at), pair(theirs, theirs_at), ours.reads(now))
    assert found is not None
    true_offset = theirs.reads(now) - ours.reads(now)
    # A datetime has microseconds.
    assert abs(found.offset_s - true_offset) <= found.error_s + 4e-6


def test_the_error_grows_with_the_age_of_the_measurements():
    pair = ClockPair(0.0, BORN, 0.001)
    fresh = offset_between(pair, pair, 0.0)
    old = offset_between(pair, pair, 3600.0)
    assert fresh.error_s == 0.002
    assert old.error_s > 0.3


class Registry:
    """Answers with the true time, after the given delays."""

    def __init__(self, clock, delays):
        self.clock = clock
        self.delays = list(delays)

    def status(self, *, timeout_s=None):
        delay = self.delays.pop(0)
        if delay is None:
            raise Unavailable("away")
        self.clock.now += delay / 2
        told = registry_at(self.clock.now)
        self.clock.now += delay / 2
        return type("Status", (), {"server_time": told})()


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now + 5000.0


def test_the_quickest_answer_of_three_is_taken():
    clock = Clock()
    pair = clock_pair(Registry(clock, [0.4, 0.02, 0.2]), clock)
    assert abs(pair.error_s - 0.01) < 1e-9
    assert abs((pair.registry_time - BORN).total_seconds() + 5000.0 - pair.local_s) < 1e-5


def wait_until_asked(clocks):
    """The measuring thread is short; it is joined rather than slept for."""
    import threading

    for thread in threading.enumerate():
        if thread.name == "rankbook-clock":
            thread.join(10)


def test_a_peer_is_unknown_until_the_registry_answered_and_asked_for_again():
    clock = Clock()
    registry = Registry(clock, [None, 0.01, 0.01, 0.01])
    clocks = PeerClocks(registry, clock)
    theirs = ClockPair(1.0, BORN, 0.0)
    clocks.refresh()
    wait_until_asked(clocks)
    assert registry.delays == [0.01] * 3  # it was away
    clocks.refresh()
    wait_until_asked(clocks)
    found = clocks.offset_to(theirs)
    assert abs(found.offset_s - (1.0 - 5000.0)) < 0.01
    assert clocks.offset_to(None) is None


def test_a_fresh_measurement_is_kept_and_an_old_one_made_anew():
    clock = Clock()
    registry = Registry(clock, [0.01] * 6)
    clocks = PeerClocks(registry, clock)
    clocks.refresh()
    wait_until_asked(clocks)
    clocks.refresh()
    wait_until_asked(clocks)
    assert len(registry.delays) == 3
    clock.now += REFRESH_S + 1
    clocks.refresh()
    wait_until_asked(clocks)
    assert registry.delays == []
