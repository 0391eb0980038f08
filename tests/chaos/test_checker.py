"""Every rule of the checker fires on a history that breaks it, and on no good one."""

from __future__ import annotations

import inspect
import sys

import pytest

from .checker.verdict import RULES, figures
from .scene import Scene, good_scene

A, B = (0, 0), (0, 1)
_ROW = [0, 0, "a", "g1", 2, False, True]
BOTH = [(A, "a", 2), (B, "b", 1)]


def test_a_good_history_breaks_no_rule() -> None:
    scene = good_scene()
    assert scene.broken() == set()
    assert figures(scene.history())["writes acknowledged"] == 3


def test_leaving_revoking_evicting_and_restarting_excuse_an_absence() -> None:
    scene = Scene()
    scene.register("b", 1, 1.0, rev=1, slots=[B])
    scene.deregister("b", 2, 1.1)
    scene.show(1.2, scene.content(2, []))
    scene.register("b", 3, 1.3, rev=3, slots=[B])
    scene.call("revoke", 1.5, {"lease": "lease-b"}, {})
    scene.show(1.6, scene.content(4, []))
    scene.register("b", 4, 1.7, rev=5, slots=[B], lease="lease-b2")
    scene.call("evict", 1.8, {"engine": "engine-0", "epoch": 1}, None)
    scene.show(1.9, scene.content(6, []))
    scene.register("c", 1, 2.0, rev=7, slots=[A], gen="g2", epoch=2)
    rows = [(A, "c", 1)]
    scene.show(2.1, scene.content(7, rows, gen="g2", epoch=2, state="FORMING", seal=0))
    # Nobody was asked at the end.
    assert scene.broken() == {"servers end alike"}


def test_a_lease_that_ran_out_excuses_an_absence() -> None:
    scene = Scene()
    scene.register("a", 1, 0.0, rev=1)
    scene.renew("lease-a", 1.0)
    scene.show(3.1, scene.content(2, []))
    scene.renew("lease-a", 3.2, state="ENDED")
    assert not {"acknowledged and lost", "leases live"} & scene.broken()


# ------------------------------------------------------------ what is shown


@pytest.mark.parametrize(
    ("rule", "facts"),
    [
        ("mixed generations", {"workers": [_ROW, [0, 1, "b", "g0", 1, False, True]]}),
        ("mixed generations", {"workers": [[0, 0, "a", "g1", 2, False, False]], "present": 1}),
        ("one holder a slot", {"workers": [_ROW, _ROW]}),
        ("whole answers", {"present": 1}),
        ("states", {"state": "GONE"}),
        ("states", {"declared": 4}),
        ("states", {"seal_is_of_this": False}),
        ("states", {"core": ""}),
    ],
)
def test_a_content_that_cannot_be_is_found(rule: str, facts: dict[str, object]) -> None:
    scene = good_scene()
    scene.show(0.9, {**scene.content(3, BOTH), **facts}, digest="other")
    assert rule in scene.broken()


def test_two_answers_at_one_revision_are_found() -> None:
    scene = good_scene()
    scene.show(0.9, scene.content(2, BOTH, drain=True), digest="other")
    assert scene.broken() == {"same revision, same answer"}


def test_content_that_nobody_sent_is_found() -> None:
    scene = good_scene()
    scene.show(0.9, scene.content(4, [(A, "a", 3), (B, "b", 1)]))
    assert "nothing is made up" in scene.broken()
    late = good_scene()
    late.show(0.9, late.content(4, [(A, "a", 3), (B, "b", 1)]))
    late.register("a", 3, 0.95, rev=4)
    assert "nothing is made up" in late.broken()


def test_an_epoch_that_goes_back_is_found() -> None:
    scene = good_scene()
    scene.show(1.0, scene.content(4, [], gen="g2", epoch=2))
    scene.show(1.1, scene.content(5, BOTH, gen="g1", epoch=1))
    assert "fencing" in scene.broken()


def test_one_epoch_of_two_starts_is_found() -> None:
    scene = good_scene()
    scene.show(1.0, scene.content(4, [], gen="g2", epoch=1))
    assert "fencing" in scene.broken()


def test_a_seal_that_goes_back_is_found() -> None:
    scene = good_scene()
    scene.show(1.0, scene.content(4, BOTH, seal=0))
    assert "states" in scene.broken()


def test_a_holders_content_that_goes_back_is_found() -> None:
    scene = good_scene()
    scene.show(1.0, scene.content(4, [(A, "a", 1), (B, "b", 1)]))
    assert "writes are ordered" in scene.broken()


# ------------------------------------------------------------------- writes


def test_a_write_of_an_older_start_is_found() -> None:
    scene = good_scene()
    scene.register("c", 1, 1.0, rev=4, gen="g2", epoch=2)
    scene.register("a", 3, 1.1, rev=5)
    assert "fencing" in scene.broken()


def test_a_write_that_overlaps_the_newer_start_is_no_breach() -> None:
    scene = Scene()
    scene.register("a", 1, 1.0, rev=1)
    scene.register("c", 1, 1.1, rev=3, gen="g2", epoch=2, took=0.5)
    scene.register("a", 2, 1.2, rev=2)
    assert "fencing" not in scene.broken()


def test_a_write_of_an_evicted_start_is_found() -> None:
    scene = good_scene()
    scene.call("evict", 1.0, {"engine": "engine-0", "epoch": 1}, {"rev": 4})
    scene.register("a", 3, 1.1, rev=5)
    assert "fencing" in scene.broken()


@pytest.mark.parametrize(
    ("generation", "epoch"), [("g1", 2), ("g2", 1), ("g2", 0)], ids=["two", "twice", "back"]
)
def test_an_epoch_that_is_not_the_starts_own_and_new_is_found(generation: str, epoch: int) -> None:
    scene = good_scene()
    scene.call("begin", 1.0, {"engine": "engine-0", "gen": generation}, {"epoch": epoch})
    assert "fencing" in scene.broken()


def test_a_lower_sequence_that_was_taken_is_found() -> None:
    scene = good_scene()
    scene.register("a", 1, 1.0, rev=4)
    assert "writes are ordered" in scene.broken()


def test_a_lower_sequence_that_was_refused_is_as_it_should_be() -> None:
    scene = good_scene()
    scene.register("a", 1, 1.0, refused="SEQUENCE_STALE")
    assert scene.broken() == set()


def test_a_repeat_with_another_reply_is_found() -> None:
    scene = good_scene()
    scene.register("a", 2, 1.0, rev=4)
    assert "writes are ordered" in scene.broken()


def test_a_later_write_with_an_earlier_revision_is_found() -> None:
    scene = good_scene()
    scene.register("a", 3, 1.0, rev=2)
    assert "writes are ordered" in scene.broken()


def test_a_late_duplicate_that_brings_a_record_back_is_found() -> None:
    scene = good_scene()
    scene.deregister("a", 3, 1.0)
    scene.register("a", 3, 1.1, rev=5)
    assert "writes are ordered" in scene.broken()


def test_a_slot_that_is_given_away_under_a_living_lease_is_found() -> None:
    scene = good_scene()
    scene.register("c", 1, 1.0, rev=4)
    assert "one holder a slot" in scene.broken()


def test_a_slot_whose_holder_has_ended_may_be_taken() -> None:
    scene = Scene()
    scene.register("a", 1, 0.0, rev=1)
    scene.register("c", 1, 2.1, rev=2)
    assert "one holder a slot" not in scene.broken()


# ------------------------------------------------------------------- leases


@pytest.mark.parametrize("state", ["ENDED", "UNKNOWN"])
def test_a_lease_that_ends_before_its_time_is_found(state: str) -> None:
    scene = good_scene()
    scene.renew("lease-a", 3.9, state=state)
    assert scene.broken() == {"leases live"}


def test_a_lease_that_was_given_up_may_end() -> None:
    scene = good_scene()
    scene.call("revoke", 2.5, {"lease": "lease-a"}, None)
    scene.renew("lease-a", 3.0, state="ENDED")
    assert scene.broken() == set()


def test_a_fence_without_a_cause_is_found() -> None:
    scene = good_scene()
    scene.renew("lease-a", 3.0, state="FENCED")
    assert scene.broken() == {"fencing"}


def test_a_record_that_goes_while_its_lease_lives_is_found() -> None:
    scene = good_scene()
    scene.show(1.0, scene.content(4, [(B, "b", 1)]))
    assert "acknowledged and lost" in scene.broken()


def test_another_holder_that_is_shown_while_a_lease_lives_is_found() -> None:
    scene = good_scene()
    scene.register("c", 1, 0.9, lost=True)
    scene.show(1.0, scene.content(4, [(A, "c", 1), (B, "b", 1)]))
    assert "one holder a slot" in scene.broken()


def test_an_acknowledged_change_that_is_not_shown_is_found() -> None:
    scene = good_scene()
    scene.register("a", 3, 0.9, rev=4)
    scene.show(1.0, scene.content(4, BOTH))
    assert "acknowledged and lost" in scene.broken()


def test_a_withdrawn_payload_that_is_shown_is_found() -> None:
    scene = good_scene()
    facts = {"engine": "engine-0", "gen": "g1", "boot": "a", "slots": [[0, 0]], "seq": 3}
    scene.call("update", 0.9, {**facts, "content": 2, "asleep": True}, {"rev": 4, "epoch": 1})
    scene.show(1.0, scene.content(5, BOTH))
    assert "acknowledged and lost" in scene.broken()


# ------------------------------------------------------------------ readers


def test_a_watch_that_goes_back_is_found() -> None:
    scene = good_scene()
    scene.message("w0.0", 0.7, 2)
    assert scene.broken() == {"reads never go back"}


def test_a_message_of_a_beginning_is_no_going_back() -> None:
    scene = good_scene()
    scene.message("w0.0", 0.7, 0, synced=False)
    assert scene.broken() == set()


def test_an_engine_that_goes_back_is_found() -> None:
    scene = good_scene()
    scene.message("w0.0", 0.7, 3, ("engine-0", "added", 2, "d2"), synced=False)
    scene.message("w0.0", 0.8, 3, ("engine-0", "modified", 3, "d3"))
    assert scene.broken() == {"reads never go back"}


def test_an_answer_that_is_older_than_asked_for_is_found() -> None:
    scene = good_scene()
    scene.reader("w1.0", "query")
    scene.note("answer", 0.7, reader="w1.0", min=3, rev=2, book="b", engines=[])
    assert scene.broken() == {"reads never go back"}


def test_a_view_that_goes_back_is_found() -> None:
    scene = good_scene()
    scene.reader("w1.0", "view")
    scene.note("view", 0.7, reader="w1.0", rev=3)
    scene.note("view", 0.8, reader="w1.0", rev=2)
    scene.note("end", 2.9, reader="w1.0", synced=True, engines={"engine-0": [3, "d3"]})
    assert scene.broken() == {"reads never go back"}


def test_a_change_that_a_synced_watch_lacks_is_found() -> None:
    scene = good_scene()
    scene.reader("w1.0")
    scene.message("w1.0", 0.4, 2, ("engine-0", "added", 2, "d2"))
    scene.message("w1.0", 0.7, 3)
    scene.message("w1.0", 0.8, 3, ("engine-0", "modified", 3, "d3"))
    scene.note("end", 2.9, reader="w1.0", synced=True, engines={"engine-0": [3, "d3"]})
    assert scene.broken() == {"missed changes"}


def test_a_deletion_that_a_synced_watch_missed_is_found() -> None:
    scene = Scene()
    scene.reader("w0.0")
    scene.reader("w1.0")
    scene.register("a", 1, 0.0, rev=1)
    scene.message("w0.0", 0.1, 1, ("engine-0", "added", 1, "d1"))
    scene.message("w1.0", 0.1, 1, ("engine-0", "added", 1, "d1"))
    scene.show(0.1, scene.content(1, [(A, "a", 1)], state="FORMING", seal=0))
    scene.deregister("a", 2, 0.2)
    scene.message("w0.0", 0.3, 2, ("engine-0", "removed", 2, ""))
    scene.message("w1.0", 0.3, 2)
    assert "missed deletions" in scene.broken()


def test_an_end_that_is_newer_than_its_messages_resume_point_is_no_missed_change() -> None:
    scene = Scene()
    for reader in ("w0.0", "w1.0"):
        scene.reader(reader)
    scene.register("a", 1, 0.0, rev=1)
    for reader in ("w0.0", "w1.0"):
        scene.message(reader, 0.1, 1, ("engine-0", "added", 1, "d1"))
    scene.show(0.1, scene.content(1, [(A, "a", 1)], state="FORMING", seal=0))
    scene.message("w0.0", 0.2, 2, ("engine-0", "modified", 2, "d2"))
    scene.deregister("a", 2, 0.2)
    scene.message("w0.0", 0.3, 3, ("engine-0", "removed", 3, ""))
    scene.message("w1.0", 0.3, 2, ("engine-0", "removed", 3, ""))
    assert "missed changes" not in scene.broken()


def test_a_part_of_what_a_watch_never_had_is_found() -> None:
    scene = good_scene()
    scene.note("baseless", 0.7, reader="w0.0", engine="engine-1", rev=3, gen="g", known="")
    assert scene.broken() == {"missed changes"}


def test_a_reader_that_ends_with_something_else_is_found() -> None:
    scene = good_scene()
    scene.reader("w1.0", "client")
    scene.note("end", 2.9, reader="w1.0", synced=True, engines={"engine-0": [2, "d2"]})
    assert scene.broken() == {"everybody converges"}


def test_a_reader_that_has_what_is_gone_is_found() -> None:
    scene = good_scene()
    scene.reader("w1.0", "client")
    engines = {"engine-0": [3, "d3"], "engine-9": [1, "d1"]}
    scene.note("end", 2.9, reader="w1.0", synced=True, engines=engines)
    assert scene.broken() == {"everybody converges"}


def test_a_reader_that_converges_late_or_says_nothing_is_found() -> None:
    late = good_scene()
    late.message("w0.0", 11.5, 3, ("engine-0", "modified", 3, "d3"))
    assert late.broken() == {"everybody converges"}
    silent = good_scene()
    silent.reader("w1.0", "view")
    assert silent.broken() == {"everybody converges"}


def test_only_the_last_life_of_a_reader_has_to_converge() -> None:
    scene = good_scene()
    scene.reader("w1.0", "view")
    scene.reader("w1.1", "view")
    scene.note("end", 2.9, reader="w1.1", synced=True, engines={"engine-0": [3, "d3"]})
    assert scene.broken() == set()


# ------------------------------------------------------------------ the end


def test_servers_that_end_differently_are_found() -> None:
    scene = good_scene()
    scene.note("truth", 3.0, server="server-2", digest="d2", **scene.content(2, BOTH))
    assert "servers end alike" in scene.broken()


def test_a_server_that_does_not_answer_is_found() -> None:
    scene = good_scene()
    scene.note("no truth", 3.0, server="server-2", reason="STORE_UNAVAILABLE")
    assert scene.broken() == {"servers end alike"}


def test_a_holder_that_is_not_in_the_book_is_found() -> None:
    scene = good_scene()
    (final,) = [line for line in scene.lines if line["kind"] == "final" and line["pub"] == 1]
    final["content"] = 2
    assert scene.broken() == {"acknowledged and lost"}


def test_a_dead_holder_in_the_book_is_found() -> None:
    scene = good_scene()
    (final,) = [line for line in scene.lines if line["kind"] == "final" and line["pub"] == 1]
    final["holds"] = False
    assert scene.broken() == {"publishers come back", "the dead are out"}


def test_an_engine_that_does_not_come_back_is_found() -> None:
    scene = good_scene()
    for line in scene.lines:
        if line["kind"] == "truth":
            line["state"] = "COMPLETE"
    assert "engines come back" in scene.broken()


@pytest.mark.parametrize("kind", ["ended by itself", "did not stop", "failed"])
def test_a_process_that_fails_is_found(kind: str) -> None:
    scene = good_scene()
    scene.note(kind, 2.0, node="server-0", code=1)
    assert scene.broken() == {"no process fails"}


def test_a_fault_of_ours_is_found() -> None:
    scene = good_scene()
    scene.register("a", 3, 0.9, refused="INTERNAL")
    assert scene.broken() == {"no process fails"}


def test_every_rule_has_a_test_that_names_it() -> None:
    text = inspect.getsource(sys.modules[__name__])
    assert [rule for rule in RULES if f'"{rule}"' not in text] == []
