"""One publisher: it signs in, renews, and does what chance says, until told to be quiet.

A publisher is a worker of an engine, or several workers of one process. The
first publisher of an engine is its rank 0 and its core: it makes the tokens of
new starts, seals, drains and evicts.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import rankbook
from rankbook.model import LeaseState, State

from .calls import Calls, can_be_sealed
from .cast import PublisherPlan
from .journal import Journal
from .stage import QUIET, REPORT, RUN, STOP

__all__ = ["Publisher", "Surroundings"]

_TURN_S = 0.1
_RETRY_S = 0.25


@dataclass(slots=True)
class Surroundings:
    """What a process looks up for its publishers, several times a second."""

    phase: str = RUN
    quiet: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the phase is no longer `run`."""
    generations: dict[str, str] = field(default_factory=dict)
    set_generation: Callable[[str, str], None] = lambda engine_id, token: None


@dataclass(slots=True)
class _Holder:
    """One life of a worker in one start of its engine."""

    boot_id: str
    generation: str
    sequence: int = 0
    epoch: int = 0
    lease_key: str = ""
    lease_id: str = ""
    content: int = 0
    """Sequence whose content was published last; zero for none."""
    is_in: bool = False
    """What it last wrote was acknowledged, and its lease lived when it last heard."""
    is_fenced: bool = False
    renews: bool = True
    core_sequence: int = 0
    core_lease_id: str = ""
    keys: int = 0

    def next(self) -> int:
        self.sequence += 1
        return self.sequence


class Publisher:
    """Runs until the phase is `stop`. For one event loop."""

    def __init__(
        self,
        plan: PublisherPlan,
        life: int,
        clients: list[rankbook.AsyncClient],
        journal: Journal,
        around: Surroundings,
        rng: random.Random,
    ) -> None:
        """Publishes nothing yet.

        Args:
            plan: What it holds.
            life: How often its process was started before.
            clients: What it calls with.
            journal: Where it notes everything.
            around: The phase and the tokens.
            rng: Chance.
        """
        self._plan = plan
        self._life = life
        self._journal = journal
        self._around = around
        self._rng = rng
        self._calls = Calls(plan, clients, journal, rng)
        self._boots = 0
        self._holder: _Holder | None = None
        self._past: list[_Holder] = []
        self._draining = False
        self._evicts: str = ""
        self._reported = False

    # -------------------------------------------------------------- its lives

    async def run(self) -> None:
        """Lives one start after the other."""
        await asyncio.sleep(self._rng.uniform(0, 1.0))
        while self._around.phase != STOP:
            generation = self._generation()
            if not generation or self._is_dead(generation):
                if self._plan.leads and self._around.phase in (RUN, QUIET):
                    await self._start_anew()
                else:
                    self._report(None)
                    await asyncio.sleep(_TURN_S)
                continue
            self._holder = holder = self._new_holder(generation)
            renewing = asyncio.create_task(self._renew(holder))
            try:
                await self._live(holder)
            finally:
                renewing.cancel()
                await asyncio.gather(renewing, return_exceptions=True)
                self._past = [*self._past[-3:], holder]

    def _generation(self) -> str:
        return self._around.generations.get(self._plan.engine.engine_id, "")

    def _is_dead(self, generation: str) -> bool:
        return any(p.is_fenced and p.generation == generation for p in self._past)

    def _new_holder(self, generation: str) -> _Holder:
        self._boots += 1
        boot_id = f"p{self._plan.number}.{self._life}.{self._boots}"
        return _Holder(boot_id, generation, lease_key=boot_id)

    async def _start_anew(self) -> None:
        """Makes the token of a start, as rank 0 does."""
        self._boots += 1
        engine_id = self._plan.engine.engine_id
        token = f"{engine_id}.s{self._life}.{self._boots}"
        if self._rng.random() < 0.7:
            while self._around.phase in (RUN, QUIET):
                if isinstance(await self._calls.begin(token), int):
                    break
                await asyncio.sleep(_RETRY_S)
        self._around.set_generation(engine_id, token)
        self._around.generations[engine_id] = token
        self._draining = False

    async def _live(self, holder: _Holder) -> None:
        next_act_s = asyncio.get_running_loop().time() + self._rng.uniform(0.5, 3.0)
        next_look_s = 0.0
        while self._around.phase != STOP:
            if holder.is_fenced or self._generation() != holder.generation:
                return
            if not holder.renews:
                # Its process is over; the next life has another boot_id.
                return
            if self._around.phase == REPORT:
                self._report(holder)
                await asyncio.sleep(_TURN_S)
                continue
            if not holder.is_in:
                if not await self._sign_in(holder):
                    await asyncio.sleep(_RETRY_S * self._rng.uniform(0.5, 1.5))
                continue
            now_s = asyncio.get_running_loop().time()
            if self._around.phase == RUN and now_s >= next_act_s:
                await self._act(holder)
                next_act_s = asyncio.get_running_loop().time() + self._rng.expovariate(1 / 2.5)
            elif self._plan.leads and now_s >= next_look_s:
                await self._keep_sealed(holder)
                next_look_s = asyncio.get_running_loop().time() + 0.5
            await asyncio.sleep(_TURN_S)

    def _report(self, holder: _Holder | None) -> None:
        """Says what it holds at the end."""
        if self._around.phase != REPORT or self._reported:
            return
        self._reported = True
        facts: dict[str, object] = {"pub": self._plan.number, "holds": False}
        if holder is not None:
            facts |= {
                "holds": holder.is_in,
                "engine": self._plan.engine.engine_id,
                "gen": holder.generation,
                "boot": holder.boot_id,
                "slots": list(self._plan.slots),
                "content": holder.content,
                "lease": holder.lease_id,
            }
        self._journal.note("final", **facts)

    # --------------------------------------------------------------- renewing

    async def _renew(self, holder: _Holder) -> None:
        pause_s = self._plan.ttl_s / 3
        while True:
            await asyncio.sleep(pause_s)
            leases = [lease for lease in (holder.lease_id, holder.core_lease_id) if lease]
            if not leases or not holder.renews:
                continue
            reply = await self._calls.renew(leases)
            if isinstance(reply, rankbook.RankbookError):
                pause_s = 0.1
                continue
            pause_s = self._plan.ttl_s / 3
            for status in reply.statuses:
                self._heard(holder, status.lease_id, status.state)

    def _heard(self, holder: _Holder, lease_id: str, state: LeaseState) -> None:
        if state is LeaseState.ALIVE:
            return
        if state is LeaseState.FENCED and lease_id == holder.lease_id:
            holder.is_fenced = True
        elif lease_id == holder.lease_id:
            holder.lease_id, holder.is_in = "", False
        elif lease_id == holder.core_lease_id:
            holder.core_lease_id = ""

    # ---------------------------------------------------------------- writing

    async def _sign_in(self, holder: _Holder, why: str = "") -> bool:
        """Publishes everything anew; whether it is in the book now."""
        sequence = holder.next()
        reply = await self._register(holder, sequence, why=why)
        if self._failed(holder, reply):
            return False
        holder.content = sequence
        return True

    async def _register(
        self, holder: _Holder, sequence: int, *, content: int = 0, why: str = ""
    ) -> rankbook.Registered | rankbook.RankbookError:
        reply = await self._calls.register(
            self._plan.slots,
            boot_id=holder.boot_id,
            generation=holder.generation,
            sequence=sequence,
            epoch=holder.epoch,
            lease_key=holder.lease_key,
            ttl_s=self._plan.ttl_s,
            content=content,
            why=why,
        )
        if isinstance(reply, rankbook.Registered):
            holder.epoch = reply.epoch
            holder.lease_id = reply.lease.lease_id
            holder.is_in = True
        return reply

    def _failed(self, holder: _Holder, reply: object) -> bool:
        """Whether a write was refused or got no answer; what follows from it."""
        if not isinstance(reply, rankbook.RankbookError):
            return False
        if isinstance(reply, rankbook.Fenced):
            holder.is_fenced = True
        else:
            # It may have happened or not: the next sign-in makes it sure.
            holder.is_in = False
        return True

    async def _keep_sealed(self, holder: _Holder) -> None:
        """What the engine's core does: it looks, and seals what is whole."""
        seen = await self._calls.look()
        if seen is None:
            return
        quiet = self._around.phase == QUIET
        if seen.engine.state is State.DRAINING and quiet:
            await self._calls.drain(undo=True)
            self._draining = False
        has_core = bool(holder.core_lease_id)
        if not can_be_sealed(seen, holder.generation) or (
            has_core and seen.engine.state is State.DRAINING
        ):
            return
        holder.core_sequence += 1
        reply = await self._calls.seal(
            seen,
            boot_id=f"core.{holder.boot_id}",
            generation=holder.generation,
            sequence=holder.core_sequence,
            epoch=holder.epoch,
            lease_key=f"core.{holder.boot_id}",
        )
        if isinstance(reply, rankbook.Sealed):
            holder.core_lease_id = reply.lease.lease_id
        elif isinstance(reply, rankbook.Fenced):
            holder.is_fenced = True

    # ---------------------------------------------------------------- actions

    async def _act(self, holder: _Holder) -> None:
        actions: list[tuple[int, Callable[[_Holder], Awaitable[None]]]] = [
            (30, self._change),
            (8, self._repeat),
            (6, self._write_old),
            (6, self._sleep),
            (5, self._move),
            (8, self._leave),
            (4, self._revoke),
            (6, self._crash),
            (4, self._pause),
            (6, self._rival),
            (5, self._write_from_the_past),
        ]
        if self._plan.leads:
            actions += [(14, self._restart), (10, self._drain), (4, self._evict)]
        weights = [weight for weight, _ in actions]
        ((_, action),) = self._rng.choices(actions, weights)
        await action(holder)

    async def _change(self, holder: _Holder) -> None:
        """New content, by either call."""
        # One number for one holder: several slots change together.
        if len(self._plan.slots) > 1 or self._rng.random() < 0.5:
            await self._sign_in(holder, "change")
            return
        sequence = holder.next()
        reply = await self._calls.update(
            self._plan.slots[0],
            boot_id=holder.boot_id,
            generation=holder.generation,
            sequence=sequence,
            epoch=holder.epoch,
        )
        if not self._failed(holder, reply):
            holder.content = sequence

    async def _repeat(self, holder: _Holder) -> None:
        """The same write twice, as after a lost reply; perhaps at another server."""
        if not await self._sign_in(holder, "first"):
            return
        reply = await self._register(holder, holder.sequence, why="repeat")
        self._failed(holder, reply)

    async def _write_old(self, holder: _Holder) -> None:
        """A write that comes after a later one of the same holder."""
        if not await self._sign_in(holder, "newer"):
            return
        if holder.sequence > 1:
            await self._register_aside(holder, self._rng.randint(1, holder.sequence - 1), "old")

    async def _register_aside(self, holder: _Holder, sequence: int, why: str) -> None:
        """A write that must be refused; what it is answered changes nothing here."""
        await self._calls.register(
            self._plan.slots,
            boot_id=holder.boot_id,
            generation=holder.generation,
            sequence=sequence,
            epoch=holder.epoch,
            lease_key=holder.lease_key,
            ttl_s=self._plan.ttl_s,
            why=why,
        )

    async def _sleep(self, holder: _Holder) -> None:
        """vLLM's sleep mode: the payload goes and comes back."""
        if len(self._plan.slots) > 1:
            return
        reply = await self._calls.update(
            self._plan.slots[0],
            boot_id=holder.boot_id,
            generation=holder.generation,
            sequence=holder.next(),
            epoch=holder.epoch,
            asleep=True,
        )
        if not self._failed(holder, reply):
            await self._wait(0.3, 2.0)
        await self._sign_in(holder, "awake")

    async def _move(self, holder: _Holder) -> None:
        """The same content under another lease."""
        if not holder.content:
            return
        holder.keys += 1
        before = holder.lease_id
        holder.lease_key = f"{holder.boot_id}.k{holder.keys}"
        reply = await self._register(holder, holder.next(), content=holder.content, why="move")
        if not self._failed(holder, reply) and self._rng.random() < 0.5 and before:
            await self._calls.revoke(before)

    async def _leave(self, holder: _Holder) -> None:
        """Signs out, may repeat an earlier write, and comes back."""
        sequence = holder.next()
        for _ in range(5):
            reply = await self._calls.deregister(
                boot_id=holder.boot_id,
                generation=holder.generation,
                sequence=sequence,
                epoch=holder.epoch,
            )
            if isinstance(reply, int):
                break
            if isinstance(reply, rankbook.Fenced):
                holder.is_fenced = True
                return
            await asyncio.sleep(_RETRY_S)
        holder.is_in = False
        if self._rng.random() < 0.5:
            await self._register_aside(holder, self._rng.randint(1, sequence), "late")
        await self._wait(0.2, 2.0)
        if self._rng.random() < 0.5:
            holder.renews = False

    async def _revoke(self, holder: _Holder) -> None:
        """Gives the lease up; the records go with it."""
        lease_id, holder.is_in = holder.lease_id, False
        holder.lease_id = ""
        await self._calls.revoke(lease_id)
        await self._wait(0.1, 1.5)

    async def _crash(self, holder: _Holder) -> None:
        """Ends without a word, as a lost node does, and comes back as another process."""
        holder.renews = False
        self._journal.note("crash", pub=self._plan.number, boot=holder.boot_id)
        await self._wait(0.1, 2.0 * self._plan.ttl_s)

    async def _pause(self, holder: _Holder) -> None:
        """Does not renew for a while, and goes on as if nothing had been."""
        lease_id, holder.lease_id = holder.lease_id, ""
        await self._wait(0.3 * self._plan.ttl_s, 1.6 * self._plan.ttl_s)
        holder.lease_id = holder.lease_id or lease_id

    async def _rival(self, holder: _Holder) -> None:
        """Claims a slot that somebody else may hold."""
        engine = self._plan.engine
        slots = [(pp, tp) for pp in range(engine.pp_size) for tp in range(engine.tp_size)]
        self._boots += 1
        boot_id = f"r{self._plan.number}.{self._life}.{self._boots}"
        reply = await self._calls.register(
            [self._rng.choice(slots)],
            boot_id=boot_id,
            generation=holder.generation,
            sequence=1,
            epoch=holder.epoch,
            lease_key=boot_id,
            ttl_s=2.0,
            why="rival",
        )
        if isinstance(reply, rankbook.Registered) and self._rng.random() < 0.7:
            await self._calls.deregister(
                boot_id=boot_id, generation=holder.generation, sequence=2, epoch=reply.epoch
            )

    async def _write_from_the_past(self, holder: _Holder) -> None:
        """A worker of an earlier start that does not know that it is over."""
        past = [p for p in self._past if p.generation != holder.generation and p.epoch]
        if past:
            old = self._rng.choice(past)
            await self._register_aside(old, old.next(), "past")

    async def _restart(self, holder: _Holder) -> None:
        """The engine starts anew under the same name."""
        if self._rng.random() < 0.3:
            await self._calls.deregister(
                boot_id=holder.boot_id,
                generation=holder.generation,
                sequence=holder.next(),
                epoch=holder.epoch,
            )
        await self._start_anew()

    async def _drain(self, holder: _Holder) -> None:
        self._draining = not self._draining
        await self._calls.drain(undo=not self._draining)

    async def _evict(self, holder: _Holder) -> None:
        await self._calls.evict(holder.epoch if self._rng.random() < 0.5 else 0)

    async def _wait(self, least_s: float, most_s: float) -> None:
        """Waits, unless the publishers are to be quiet."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._rng.uniform(least_s, most_s)):
                await self._around.quiet.wait()
