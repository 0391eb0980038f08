"""`rankbook plan` and `rankbook compare`: who reads what, and who may pair."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
from google.protobuf.message import Message
from rich.text import Text

from rankbook import convert, v1
from rankbook.cli.invocation import (
    Invocation,
    Reported,
    engine_argument,
    global_options,
    pass_invocation,
)
from rankbook.cli.output import Column, Table, error_json
from rankbook.cli.words import slots_text
from rankbook.errors import Incompatible
from rankbook.model import Slot

__all__ = ["LayerCounts", "compare", "compare_table", "consumers_table", "plan", "producers_table"]


class LayerCounts(click.ParamType[tuple[int, ...]]):
    """A click parameter that takes layer counts with commas: 30,10."""

    name = "layers"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        try:
            counts = tuple(int(part) for part in str(value).split(","))
        except ValueError:
            self.fail(f"{value!r} is no list of layer counts such as 30,10", param, ctx)
        if min(counts) < 0:
            self.fail(f"{value!r} has a negative count", param, ctx)
        return counts


def _rank(rank: dict[str, Any]) -> str:
    return f"pp{rank['pp_rank']} tp{rank['tp_rank']}"


def _ranks(ranks: Iterable[dict[str, Any]]) -> str:
    return slots_text(Slot(rank["pp_rank"], 0, rank["tp_rank"]) for rank in ranks)


def _heads(read: dict[str, Any]) -> str:
    """The heads; none for a draft layer, whose heads the plan does not know."""
    if read["start_head"] == read["end_head"]:
        return ""
    return f"[{read['start_head']},{read['end_head']})"


def consumers_table(plan: dict[str, Any]) -> Table:
    """What each consumer rank does: a line for each producer rank it reads from."""
    table = Table(
        [
            Column("CONSUMER"),
            Column("READS FROM"),
            Column("LAYERS"),
            Column("HEADS"),
            Column("CONTACTS"),
            Column("WAITS FOR", right=True),
        ]
    )
    for consumer in plan["consumers"]:
        contacts, count = _ranks(consumer["contact"]), str(consumer["expected_completions"])
        for read in consumer["read"]:
            table.add(
                _rank(consumer),
                _rank(read),
                f"[{read['start_layer']},{read['end_layer']})",
                _heads(read),
                contacts,
                count,
            )
        if not consumer["read"]:
            table.add(_rank(consumer), "nobody", "", "", contacts, count)
    return table


def producers_table(plan: dict[str, Any]) -> Table:
    """How many consumer ranks each producer rank waits for; equal ones on one line."""
    table = Table([Column("PRODUCERS"), Column("WAIT FOR", right=True)])
    counts: dict[int, list[dict[str, Any]]] = {}
    for producer in plan["producers"]:
        counts.setdefault(producer["consumer_count"], []).append(producer)
    for count, producers in counts.items():
        table.add(_ranks(producers), str(count))
    return table


@click.command()
@click.option("--from", "producer", required=True, metavar="ENGINE", help="The producer.")
@click.option("--to", "consumer", metavar="ENGINE", help="A consumer that is in the book.")
@click.option("--tp-size", type=click.IntRange(min=1), help="A consumer by its sizes: TP ranks.")
@click.option("--pp-size", type=click.IntRange(min=1), help="Its stages.  [default 1]")
@click.option(
    "--layers",
    type=LayerCounts(),
    metavar="N,N,...",
    help="Layers of each of its stages.  [default: vLLM's split]",
)
@click.option("--dcp-size", type=click.IntRange(min=1), help="Its DCP ranks.  [default 1]")
@click.option(
    "--mode",
    type=click.Choice(["push", "pull"]),
    help="Who starts a transfer.  [default: what the producer states, else pull]",
)
@global_options()
@pass_invocation
def plan(
    invocation: Invocation,
    producer: str,
    consumer: str | None,
    tp_size: int | None,
    pp_size: int | None,
    layers: tuple[int, ...] | None,
    dcp_size: int | None,
    mode: str | None,
) -> None:
    """Plans a transfer: per consumer rank whom to contact, what to read, what to wait for.

    Layers and heads are global indices, the end exclusive. Exits 5 with the
    reason where no plan exists.

    \b
    RPC: PlanTransfer
    Example:
      rankbook plan --from prefill-a-0 --to decode-0
      rankbook plan --from prefill-a-0 --tp-size 2 --pp-size 2 --layers 31,30
    """
    sizes = (tp_size, pp_size, layers, dcp_size)
    if consumer is not None and any(size is not None for size in sizes):
        raise click.UsageError("--to names an engine in the book; sizes do not go with it")
    if consumer is None and tp_size is None:
        raise click.UsageError("a plan needs --to ENGINE, or --tp-size N for a consumer by sizes")
    layout = None
    if consumer is None:
        layout = v1.ConsumerLayout(
            tp_size=tp_size or 1,
            pp_size=pp_size or (len(layers) if layers else 1),
            layers=layers or (),
            dcp_size=dcp_size or 1,
        )
    with invocation.client() as client:
        reply = client.plan_transfer(
            producer,
            consumer_engine_id=consumer,
            consumer_layout=layout,
            mode=mode.upper() if mode else None,
        )
    shown = convert.to_json(reply.plan)
    out = invocation.out
    if out.as_json:
        out.json(
            {
                **shown,
                "mode": reply.mode,
                "producer_engine_id": producer,
                "consumer_engine_id": consumer,
                "producer_revision": reply.producer_revision,
                "consumer_revision": reply.consumer_revision,
            }
        )
        return
    out.table(consumers_table(shown))
    out.lines([""])
    out.table(producers_table(shown))
    target = consumer or "a consumer of these sizes"
    out.note(f"mode {reply.mode}: {producer} (revision {reply.producer_revision}) to {target}")


def compare_table(comparison: dict[str, Any]) -> Table:
    """Every broken rule and every differing factor."""
    table = Table(
        [Column("RULE"), Column("PRODUCER"), Column("CONSUMER"), Column("WHAT TO DO", prose=True)]
    )
    for reason in comparison["reasons"]:
        table.add(
            Text(reason["reason"], style="red"),
            reason["producer"],
            reason["consumer"],
            reason["message"],
        )
    for factor in comparison["factors"]:
        table.add(f"factor {factor['name']}", factor["producer"], factor["consumer"], "")
    return table


@click.command()
@engine_argument("producer", "PRODUCER")
@engine_argument("consumer", "CONSUMER")
@global_options()
@pass_invocation
def compare(invocation: Invocation, producer: str, consumer: str) -> None:
    """Tells whether two engines may pair, and if not, every reason.

    Exits 5 when they may not.

    \b
    RPC: ComparePeers
    Example:
      rankbook compare prefill-a-0 decode-0
    """
    with invocation.client() as client:
        reply = client.compare_peers(producer, consumer)
    shown = convert.to_json(reply) if isinstance(reply, Message) else reply.as_dict()
    out = invocation.out
    error = None
    if not shown["compatible"]:
        reasons = [reason["reason"] for reason in shown["reasons"]]
        error = Incompatible(
            f"{producer} and {consumer} may not pair: {', '.join(reasons)}",
            metadata={
                "producer_engine_id": producer,
                "consumer_engine_id": consumer,
                "reasons": ",".join(reasons),
            },
        )
    if out.as_json:
        out.json({**shown, "error": error_json(error)} if error else shown)
    else:
        verdict = Text("compatible", style="bold green")
        if error:
            verdict = Text("not compatible", style="bold red")
        out.lines([Text.assemble(f"{producer} -> {consumer}: ", verdict)])
        if shown["reasons"] or shown["factors"]:
            out.table(compare_table(shown))
    if error is not None:
        raise Reported(error)
