"""Who is told that a view follows the book, or that it no longer does."""

import queue
import threading
from types import SimpleNamespace

import pytest

import rankbook
from rankbook import v1
from rankbook._cache import WatchFold
from rankbook._wire_sync import Step
from rankbook.errors import Denied, Unavailable

AWAY = Unavailable("the registry is away")


class Script:
    """A watch whose steps the test gives one by one."""

    def __init__(self):
        self.fold = WatchFold()
        self._steps = queue.Queue()

    def give(self, step):
        self._steps.put(step)

    def close(self):
        self._steps.put(None)

    def steps(self, *, patient):
        assert patient
        while (step := self._steps.get()) is not None:
            if isinstance(step, Exception):
                raise step
            yield step


@pytest.fixture
def script():
    return Script()


@pytest.fixture
def view(script):
    wire = SimpleNamespace(new_watch=lambda request, fold: script)
    one = rankbook.TopologyView(SimpleNamespace(namespace="default", _wire=wire))
    yield one
    one.close()


@pytest.fixture
def told(view):
    """What a listener hears, in order."""
    heard = queue.Queue()
    view.on_connection(heard.put)
    return heard


def added(script, made, name="prefill-a-0"):
    """The fold takes an engine in; the step that tells of it."""
    events = script.fold.fold(
        v1.WatchResponse(
            book_id="book",
            book_revision=1,
            synced=True,
            events=[
                v1.WatchEvent(
                    type=v1.EVENT_TYPE_ADDED,
                    engine=made.engine(name, present=1),
                    workers=[made.worker(name, 0, b"agent")],
                    statuses=made.statuses([1]),
                )
            ],
        )
    )
    return Step(events, synced=True)


def test_each_turn_is_told_once_and_nothing_in_between(script, view, told, made):
    view.start()
    script.give(Step(synced=False, error=AWAY))
    script.give(Step(synced=True))
    script.give(Step(synced=True))
    script.give(Step(synced=False, error=AWAY))
    script.give(Step(synced=False, error=AWAY))
    script.give(Step(synced=True))
    assert [told.get(timeout=5) for _ in range(3)] == [True, False, True]
    assert told.empty()


def test_a_listener_that_comes_back_already_sees_what_was_missed(script, view, made):
    seen = queue.Queue()
    view.on_connection(lambda _: seen.put((view.connected, view.get("prefill-a-0") is not None)))
    view.start()
    script.give(added(script, made))
    assert seen.get(timeout=5) == (True, True)


def test_a_listener_that_hears_of_a_break_can_ask_why(script, view):
    seen = queue.Queue()
    view.on_connection(lambda connected: seen.put((connected, view.error)))
    view.start()
    script.give(Step(synced=True))
    script.give(Step(synced=False, error=AWAY))
    assert [seen.get(timeout=5) for _ in range(2)] == [(True, None), (False, AWAY)]


def test_changes_are_told_before_the_turn_that_came_with_them(script, view, made):
    order = queue.Queue()
    view.on_connection(lambda connected: order.put(connected))
    view.subscribe(lambda event: order.put(event.type))
    view.start()
    script.give(added(script, made))
    assert [order.get(timeout=5) for _ in range(2)] == [rankbook.EventType.ADDED, True]


@pytest.mark.parametrize("end", [None, Denied("not permitted")], ids=["closed", "refused"])
def test_the_end_of_the_watch_is_a_turn_too(script, view, told, end):
    view.start()
    script.give(Step(synced=True))
    assert told.get(timeout=5) is True
    script.give(end)
    assert told.get(timeout=5) is False
    assert not view.connected
    assert view.error is end


def test_the_end_of_a_watch_that_was_broken_already_is_none(script, view, told):
    view.start()
    script.give(Step(synced=False, error=AWAY))
    view.close()
    assert told.empty()


def test_a_listener_that_raises_keeps_nobody_from_hearing(script, view):
    def raises(connected):
        raise ValueError("a fault of the listener's")

    heard = queue.Queue()
    view.on_connection(raises)
    view.on_connection(heard.put)
    view.start()
    for synced in (True, False):
        script.give(Step(synced=synced))
    assert [heard.get(timeout=5) for _ in range(2)] == [True, False]


def test_who_ends_listening_hears_no_more_and_may_end_twice(script, view, told):
    heard = queue.Queue()
    end = view.on_connection(heard.put)
    view.start()
    script.give(Step(synced=True))
    assert heard.get(timeout=5) is True
    end()
    end()
    script.give(Step(synced=False))
    assert [told.get(timeout=5) for _ in range(2)] == [True, False]
    assert heard.empty()


def test_listeners_are_called_on_the_views_thread(script, view):
    names = queue.Queue()
    view.on_connection(lambda _: names.put(threading.current_thread().name))
    view.start()
    script.give(Step(synced=True))
    assert names.get(timeout=5) == "rankbook-view"
