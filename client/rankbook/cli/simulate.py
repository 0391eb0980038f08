"""`rankbook simulate`: made-up engines, published by real clients."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Sequence
from typing import Any

import click

import rankbook
from rankbook import AsyncClient
from rankbook.cli.durations import Seconds
from rankbook.cli.invocation import Invocation, global_options, pass_invocation
from rankbook.cli.plan import LayerCounts
from rankbook.cli.synthetic import Shape, make_records
from rankbook.errors import DeadlineExceeded, Fenced, RankbookError, Unavailable
from rankbook.model import (
    Address,
    CoreRecord,
    LeaseState,
    Process,
    Role,
    SealedSlot,
    WorkerRecord,
)

__all__ = ["simulate"]

_RETRY_S = 0.5


@click.command()
@click.option("--pp", type=click.IntRange(1, 1024), default=1, show_default=True, help="Stages.")
@click.option("--tp", type=click.IntRange(1, 1024), default=1, show_default=True, help="TP ranks.")
@click.option(
    "--layers",
    type=click.IntRange(1, 65_536),
    default=32,
    show_default=True,
    help="Layers of the model, split as vLLM does.",
)
@click.option("--partition", type=LayerCounts(), metavar="N,N,...", help="Another split of them.")
@click.option(
    "--engines",
    "count",
    type=click.IntRange(1, 1000),
    default=1,
    show_default=True,
    help="How many engines: GROUP-0, GROUP-1, ...",
)
@click.option(
    "--first", type=click.IntRange(min=0), default=0, help="Number of the first one.  [default 0]"
)
@click.option("--group", default="sim", show_default=True, help="Their group.")
@click.option(
    "--role",
    type=click.Choice(["producer", "consumer", "both"], case_sensitive=False),
    default="producer",
    show_default=True,
    help="What they do with KV.",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=Seconds(above_zero=True),
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="Time to live of every worker's lease.",
)
@click.option(
    "--payload-bytes",
    type=click.IntRange(0, 512 * 1024),
    default=1024,
    show_default=True,
    help="Size of a worker's made-up handshake payload.",
)
@click.option("--no-seal", is_flag=True, help="Leave them COMPLETE.")
@click.option(
    "--kill-after",
    type=Seconds(above_zero=True),
    metavar="DURATION",
    help="Then a worker of the first engine falls silent: out after its TTL.",
)
@click.option(
    "--restart-after",
    type=Seconds(above_zero=True),
    metavar="DURATION",
    help="Then the first engine starts anew: a new generation.",
)
@click.option(
    "--duration",
    "duration_s",
    type=Seconds(above_zero=True),
    metavar="DURATION",
    help="End by itself after so long.",
)
@global_options()
@pass_invocation
def simulate(invocation: Invocation, /, **asked: Any) -> None:
    """Publishes made-up engines until interrupted; then takes them all out.

    Every worker has a lease of its own and is renewed; every engine is sealed
    by a core of its own. SIGINT and SIGTERM end it cleanly, exit 0.

    \b
    RPC: BeginGeneration, RegisterWorkers, SealEngine, RenewLeases, RevokeLease
    Example:
      rankbook simulate --pp 4 --tp 8 --layers 61 --engines 8
      rankbook simulate --pp 2 --tp 2 --kill-after 10s --restart-after 40s
    """
    shape = Shape(
        pp_size=asked["pp"],
        tp_size=asked["tp"],
        num_layers=asked["layers"],
        layers=asked["partition"] or (),
        role=Role(asked["role"].upper()),
        group=asked["group"],
        payload_bytes=asked["payload_bytes"],
    )
    fleet = _Fleet(invocation, shape, asked)
    asyncio.run(fleet.run())


class _Fleet:
    """The engines of one run, and the switches."""

    def __init__(self, invocation: Invocation, shape: Shape, asked: dict[str, Any]) -> None:
        self._invocation = invocation
        self._asked = asked
        self._engines = [
            _Engine(
                self,
                invocation.async_client(),
                shape,
                number,
                asked["ttl_s"],
                seal=not asked["no_seal"],
            )
            for number in range(asked["first"], asked["first"] + asked["count"])
        ]
        self._stop = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        main = asyncio.ensure_future(self._work())
        stop = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({main, stop}, return_when=asyncio.FIRST_COMPLETED)
            if main.done():
                main.result()
        finally:
            for task in (main, stop):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, RankbookError):
                    await task
            await asyncio.gather(*(engine.leave() for engine in self._engines))

    async def _work(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self._engines))
        jobs = [asyncio.ensure_future(engine.keep()) for engine in self._engines]
        jobs.append(asyncio.ensure_future(self._switch("kill_after", self._engines[0].kill)))
        jobs.append(asyncio.ensure_future(self._switch("restart_after", self._engines[0].start)))
        try:
            if self._asked["duration_s"]:
                await asyncio.wait(
                    jobs,
                    timeout=self._asked["duration_s"],
                    return_when=asyncio.FIRST_EXCEPTION,
                )
                for job in jobs:
                    if job.done():
                        job.result()
            else:
                await asyncio.gather(*jobs)
                await asyncio.Event().wait()
        finally:
            for job in jobs:
                job.cancel()
            await asyncio.gather(*jobs, return_exceptions=True)

    async def _switch(self, name: str, act: Any) -> None:
        if self._asked[name]:
            await asyncio.sleep(self._asked[name])
            await act()

    def say(self, event: str, engine: str, words: str, **values: object) -> None:
        """Tells what happened: a line of JSON, or of text."""
        out = self._invocation.out
        if out.as_json:
            out.json_line({"event": event, "engine_id": engine, **values})
        else:
            out.lines([f"{engine}  {event}  {words}".rstrip()])


class _Engine:
    """One made-up engine: workers, each under a lease of its own, and a core."""

    def __init__(
        self,
        fleet: _Fleet,
        client: AsyncClient,
        shape: Shape,
        number: int,
        ttl_s: float,
        *,
        seal: bool,
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._shape = shape
        self._ttl_s = ttl_s
        self._with_seal = seal
        self.engine_id = f"{shape.group}-{number}"
        self._epoch = 0
        self._records: list[WorkerRecord] = []
        self._leases: dict[int, str] = {}
        self._sequences: dict[int, int] = {}
        self._digests: dict[int, bytes] = {}
        self._core = Process(boot_id="core")
        self._core_lease = ""
        self._seals = 0
        self._fenced = False

    async def start(self) -> None:
        """Starts, or starts anew: a new generation retires the old one."""
        generation = rankbook.new_id()
        count = self._shape.pp_size * self._shape.tp_size
        self._records = make_records(
            self._shape,
            engine_id=self.engine_id,
            generation=generation,
            boot_ids=[rankbook.new_id() for _ in range(count)],
        )
        # Nothing of the start before is renewed from here on.
        self._leases, self._digests, self._core_lease, self._seals = {}, {}, "", 0
        self._sequences = dict.fromkeys(range(count), 0)
        self._epoch = await self._client.begin_generation(self.engine_id, generation)
        await asyncio.gather(*(self._sign_in(rank) for rank in range(count)))
        self._core = Process(boot_id=rankbook.new_id(), hostname=self._records[0].process.hostname)
        revision = 0
        if self._with_seal:
            revision = await self._seal()
        self._fenced = False
        self._fleet.say(
            "sealed" if self._with_seal else "complete",
            self.engine_id,
            f"{count} ranks  epoch {self._epoch}",
            generation=generation,
            epoch=self._epoch,
            revision=revision,
        )

    async def _sign_in(self, rank: int) -> None:
        self._sequences[rank] += 1
        record = self._records[rank]
        registered = await self._client.register_workers(
            [record],
            sequence=self._sequences[rank],
            lease_key=f"{record.process.boot_id}.{self._sequences[rank]}",
            ttl_s=self._ttl_s,
            epoch=self._epoch,
        )
        self._leases[rank] = registered.lease.lease_id
        self._digests[rank] = registered.record_digests[0]

    async def _seal(self) -> int:
        self._seals += 1
        slots = [
            SealedSlot(record.slot, record.process.boot_id, self._digests[rank])
            for rank, record in enumerate(self._records)
        ]
        address = self._records[0].addresses[0]
        sealed = await self._client.seal_engine(
            self.engine_id,
            self._records[0].generation,
            slots,
            CoreRecord(
                process=self._core,
                addresses=(Address("http", address.host, 8000, "serving"),),
                connector="SimulatedConnector",
            ),
            sequence=self._seals,
            epoch=self._epoch,
            lease_key=f"{self._core.boot_id}.{self._seals}",
            ttl_s=self._ttl_s,
        )
        self._core_lease = sealed.lease.lease_id
        return sealed.revision

    async def kill(self) -> None:
        """The last worker falls silent, as a lost node does."""
        rank = len(self._records) - 1
        if self._leases.pop(rank, None) is not None:
            slot = self._records[rank].slot
            self._fleet.say(
                "killed",
                self.engine_id,
                f"pp{slot.pp_rank} tp{slot.tp_rank}: gone when its lease of {self._ttl_s:g} s ends",
                pp_rank=slot.pp_rank,
                tp_rank=slot.tp_rank,
            )

    async def keep(self) -> None:
        """Renews for ever; what was lost is put back."""
        while True:
            await asyncio.sleep(self._ttl_s / 3)
            if self._fenced:
                continue
            try:
                await self._renew()
            except (Unavailable, DeadlineExceeded):
                await asyncio.sleep(min(_RETRY_S, self._ttl_s / 6))
            except Fenced as fenced:
                self._fenced = True
                self._fleet.say("fenced", self.engine_id, fenced.message)

    async def _renew(self) -> None:
        ranks = dict(self._leases)
        core_lease = self._core_lease
        lease_ids = [*ranks.values(), *([core_lease] if core_lease else [])]
        if not lease_ids:
            return
        reply = await self._client.renew_leases(lease_ids)
        dead = {s.lease_id for s in reply.statuses if s.state is not LeaseState.ALIVE}
        fenced = [s for s in reply.statuses if s.state is LeaseState.FENCED]
        if fenced and fenced[0].lease_id in (*self._leases.values(), self._core_lease):
            raise Fenced(
                "a newer start took over, or it was evicted",
                metadata={"engine_id": self.engine_id},
            )
        for rank, lease_id in ranks.items():
            if lease_id in dead and self._leases.get(rank) == lease_id:
                await self._sign_in(rank)
        if core_lease and core_lease in dead and core_lease == self._core_lease:
            await self._seal()

    async def leave(self) -> None:
        """Takes everything out; a registry that is away is left to the TTL."""
        leases: Sequence[str] = [*self._leases.values(), self._core_lease]
        with contextlib.suppress(RankbookError):
            await asyncio.gather(
                *(self._client.revoke_lease(one, timeout_s=2.0) for one in leases if one),
                return_exceptions=True,
            )
        await self._client.close()
