"""The picture of an engine, against pictures drawn by hand."""

from __future__ import annotations

import dataclasses
import datetime as dt
from collections.abc import Callable

import pytest

from rankbook.cli.grid import ASCII, UNICODE, Glyphs
from rankbook.cli.picture import draw, next_step
from rankbook.model import (
    Drain,
    ExtraLayer,
    LayerKind,
    Layers,
    Problem,
    Seal,
    Severity,
    Slot,
    State,
    Successor,
    Topology,
)

Make = Callable[..., Topology]


def picture(
    topology: Topology,
    now: dt.datetime,
    *,
    width: int = 100,
    glyphs: Glyphs = ASCII,
    wide: bool = False,
) -> str:
    lines = draw(topology, now=now, width=width, glyphs=glyphs, wide=wide)
    return "\n".join(line.plain for line in lines) + "\n"


def test_one_rank_is_a_picture_without_a_bar(make_topology: Make, now: dt.datetime) -> None:
    expected = """\
prefill-a-0  PRODUCER  READY
group prefill-a  replica prefill-a-0  dp 0  namespace default
epoch 3  generation 01JD0  sealed #1 10s ago
1/1 ranks (pp1xtp1)  32 layers  revision 17 (book 20)  up 3m  changed 12s ago

stage  layers   n   up  tp 0
pp 0   [0,32)  32  1/1     #
"""
    seal = Seal(1, b"", now - dt.timedelta(seconds=10))
    assert expected == picture(make_topology([32], 1, seal=seal), now)


def test_every_kind_of_cell_and_the_way_out_are_shown(
    make_topology: Make, now: dt.datetime
) -> None:
    expected = """\
prefill-a-0  PRODUCER  ● DEGRADED
group prefill-a  replica prefill-a-0  dp 0  namespace default
epoch 3  generation 01JD0  not sealed
6/8 ranks (pp4xtp2)  61 layers  revision 17 (book 20)  up 3m  changed 12s ago

stage  layers    n   up   0                 61   tp 0 1
pp 0   [0,15)   15  2/2  │█████               │     ● ●
pp 1   [15,30)  15  1/2  │     █████          │     ● ✗
pp 2   [30,46)  16  2/2  │          █████     │     ☾ ≠
pp 3   [46,61)  15  1/2  │               █████│     ✗ ●
● here   ✗ missing   ☾ asleep (payload withdrawn)   ≠ layers differ from its stage

missing 2 of 8: pp1 tp1, pp3 tp0
left: every worker that is gone has signed out, or was seen to end
→ takes no new peers until the lost ranks are back (unchanged: READY again; changed: after a new
    seal) or the engine is restarted
▲ LOOPBACK_ADDRESS  pp0 tp0 advertises 127.0.0.1
"""
    topology = make_topology(
        [15, 15, 16, 15],
        2,
        State.DEGRADED,
        gone=(Slot(1, 0, 1), Slot(3, 0, 0)),
        asleep=(Slot(2, 0, 0),),
        odd=(Slot(2, 0, 1),),
        problems=(
            Problem("RANKS_LOST", Severity.WARNING, "said by the line above already"),
            Problem("LOOPBACK_ADDRESS", Severity.WARNING, "pp0 tp0 advertises 127.0.0.1"),
        ),
    )
    assert expected == picture(topology, now, glyphs=UNICODE)


@pytest.mark.parametrize("state", [State.DEGRADED, State.GONE])
@pytest.mark.parametrize(("lapsed", "word"), [(False, "left: "), (True, "lease ran out ")])
def test_how_the_missing_workers_went_is_told(
    make_topology: Make, now: dt.datetime, state: State, lapsed: bool, word: str
) -> None:
    topology = make_topology([31, 30], 1, state, gone=(Slot(1, 0, 0),))
    engine = dataclasses.replace(topology.engine, lapsed=lapsed)
    topology = dataclasses.replace(topology, engine=engine)
    told = [line for line in picture(topology, now).splitlines() if "gone" in line]
    assert any(line.startswith(word) for line in told)


def test_a_stage_without_a_worker_has_no_known_layers(
    make_topology: Make, now: dt.datetime
) -> None:
    expected = """\
stage  layers   n   up   0                 61   tp 0
pp 0   [0,31)  31  1/1  |==========          |     #
pp 1   ?        ?  0/1  |                    |     x
# here   x missing
"""
    topology = make_topology([31, 30], 1, State.FORMING, gone=(Slot(1, 0, 0),))
    assert expected in picture(topology, now)


def test_prefill_context_parallel_ranks_stand_as_groups(
    make_topology: Make, now: dt.datetime
) -> None:
    expected = """\
                         pcp 0  | pcp 1
stage  layers   n   up  tp 0 1 2 | 0 1 2
pp 0   [0,32)  32  5/6     # # # | # x #
"""
    topology = make_topology([32], 3, State.FORMING, pcp_size=2, gone=(Slot(0, 1, 1),))
    assert expected.replace("pcp 0  |", "pcp 0 |") in picture(topology, now)
    assert "missing 1 of 6: pp0 pcp1 tp1\n" in picture(topology, now)


def test_many_ranks_stand_in_eights(make_topology: Make, now: dt.datetime) -> None:
    expected = """\
stage  layers   n     up  tp 0        8        16
pp 0   [0,32)  32  19/20     ######## #x###### ####
"""
    assert expected in picture(make_topology([32], 20, State.FORMING, gone=(Slot(0, 0, 9),)), now)


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_sixteen_stages_of_sixty_four_ranks_fit_the_width(
    make_topology: Make, now: dt.datetime, width: int
) -> None:
    topology = make_topology([4] * 16, 64, State.FORMING, gone=(Slot(3, 0, 17),))
    lines = picture(topology, now, width=width).splitlines()
    assert max(map(len, lines)) <= width
    assert sum(line.count("#") for line in lines if line.startswith("pp ")) == 1023
    assert sum(line.count("x") for line in lines if line.startswith("pp ")) == 1


def test_blocks_of_a_wrapped_grid_are_alike(make_topology: Make, now: dt.datetime) -> None:
    lines = picture(make_topology([32], 64), now, width=80).splitlines()
    cells = [line.count("#") for line in lines if line.startswith("pp 0")]
    assert cells == [32, 32]


def test_a_huge_grid_shows_only_the_stages_with_something_wrong(
    make_topology: Make, now: dt.datetime
) -> None:
    topology = make_topology([1] * 128, 64, State.FORMING, gone=(Slot(100, 0, 3),))
    shown = picture(topology, now, width=120)
    assert "pp 100" in shown
    assert "pp 99" not in shown
    assert "127 more stages are not drawn" in shown


def test_wide_names_the_hosts_of_each_stage(make_topology: Make, now: dt.datetime) -> None:
    shown = picture(make_topology([16, 16], 2, ranks_per_host=3), now, wide=True)
    assert "# #  node-0\n" in shown
    assert "# #  node-0 tp0, node-1 tp1\n" in shown


def test_hosts_that_do_not_fit_beside_the_grid_stand_below_it(
    make_topology: Make, now: dt.datetime
) -> None:
    shown = picture(make_topology([32], 16, hosts="n" * 40), now, wide=True)
    assert f"\nhosts\npp 0  {'n' * 40}-0 tp0-7, {'n' * 40}-1\n    tp8-15\n" in shown


def test_draft_layers_are_counted_apart(make_topology: Make, now: dt.datetime) -> None:
    topology = make_topology([33, 28], 1)
    last = dataclasses.replace(
        topology.workers[1], layers=Layers(33, 61, (), (ExtraLayer(61, LayerKind.DRAFT),))
    )
    topology = dataclasses.replace(topology, workers=(topology.workers[0], last))
    assert "pp 1   [33,61)  28+1  1/1" in picture(topology, now)


def test_an_escape_sequence_in_a_hostname_does_not_reach_the_terminal(
    make_topology: Make, now: dt.datetime
) -> None:
    shown = picture(make_topology([32], 1, hosts="\x1b[31mred"), now, wide=True)
    assert "\x1b" not in shown
    assert "?[31mred-0" in shown


def test_a_dead_engine_has_no_grid_and_names_its_successor(
    make_topology: Make, now: dt.datetime
) -> None:
    topology = make_topology(
        [32],
        1,
        State.GONE,
        gone=(Slot(0, 0, 0),),
        successor=Successor("prefill-a-0", 4, "01JD1"),
    )
    shown = picture(topology, now)
    assert "stage" not in shown
    assert shown.endswith(
        "\n\nleft: every worker that is gone has signed out, or was seen to end"
        "\n-> replaced by prefill-a-0 epoch 4\n"
    )


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (State.COMPLETE, "rankbook seal prefill-a-0"),
        (State.FORMING, "logs of those ranks"),
        (State.DRAINING, "drains by ops (node work)"),
        (State.INVALID, "nobody may use it"),
        (State.GONE, "nothing is known to have taken its place"),
    ],
)
def test_every_state_but_ready_says_what_to_do(
    make_topology: Make, state: State, words: str
) -> None:
    topology = make_topology([32], 1, state, drain=Drain("node work", "ops"))
    assert words in next_step(topology)


def test_ready_needs_no_words(make_topology: Make) -> None:
    assert next_step(make_topology([32], 1)) == ""


def test_a_flood_of_problems_is_counted_not_shown(make_topology: Make, now: dt.datetime) -> None:
    problems = [Problem("ODD", Severity.INFO, f"number {n}") for n in range(20)]
    shown = picture(make_topology([32], 1, problems=problems), now)
    assert "number 11" in shown
    assert "number 12" not in shown
    assert "8 more problems" in shown
