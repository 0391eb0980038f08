"""The faults of a run, and when: a schedule that follows from the seed alone.

Two lanes run side by side, so that faults meet. Each fault holds the nodes it
is about: no other fault touches them meanwhile. Whatever a fault does, it takes
back itself; `Faults.run` returns with everything as it was.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from .deployment import Deployment
from .etcd_faults import compact, fill, free, move_leader
from .journal import Journal
from .nodes import Node, PythonNode

__all__ = ["ALL", "Faults", "Mix"]

_JUMPS_S = (-86_400.0, -7200.0, -60.0, -3.0, 3.0, 60.0, 7200.0, 86_400.0)
_LONGEST_TTL_S = 4.0


@dataclass(frozen=True, slots=True)
class Mix:
    """How often each kind of fault comes, as weights."""

    name: str
    weights: dict[str, int]
    etcd_flags: tuple[str, ...] = ()


_WEIGHTS = {
    "kill a server": 8,
    "kill a client": 6,
    "kill etcd": 6,
    "freeze a server": 7,
    "freeze a client": 5,
    "freeze etcd": 5,
    "cut a client": 6,
    "cut a server": 7,
    "cut etcd": 5,
    "isolate": 6,
    "reset": 5,
    "slow the store": 6,
    "slow a client": 3,
    "jump a clock": 7,
    "compact": 8,
    "move the leader": 4,
    "all servers": 2,
    "all etcd": 2,
}

ALL = (
    Mix("everything", _WEIGHTS),
    Mix(
        "the store",
        {
            **_WEIGHTS,
            "fill the quota": 14,
            "compact": 24,
            "slow the store": 14,
            "kill etcd": 10,
            "cut a client": 2,
            "freeze a client": 2,
        },
        ("--quota-backend-bytes", str(48 << 20)),
    ),
    Mix(
        "the network",
        {
            **_WEIGHTS,
            "cut a client": 14,
            "cut a server": 16,
            "cut etcd": 12,
            "isolate": 16,
            "reset": 12,
            "slow a client": 8,
        },
    ),
)
"""The mixes of CI."""


class Faults:
    """Makes faults until time is up. For one event loop."""

    def __init__(self, deployment: Deployment, mix: Mix, seed: int, journal: Journal) -> None:
        """Does nothing yet."""
        self._on = deployment
        self._mix = mix
        self._seed = seed
        self._journal = journal
        self._busy: set[str] = set()
        self._kinds: dict[str, Callable[[random.Random], Awaitable[None]]] = {
            "kill a server": lambda rng: self._kill(rng, deployment.servers),
            "kill a client": lambda rng: self._kill(rng, self._clients()),
            "kill etcd": lambda rng: self._kill(rng, deployment.members),
            "freeze a server": lambda rng: self._freeze(rng, deployment.servers),
            "freeze a client": lambda rng: self._freeze(rng, self._clients()),
            "freeze etcd": lambda rng: self._freeze(rng, deployment.members),
            "cut a client": lambda rng: self._cut(rng, self._clients(), deployment.servers),
            "cut a server": lambda rng: self._cut(rng, deployment.servers, deployment.members),
            "cut etcd": lambda rng: self._cut(rng, deployment.members, deployment.members),
            "isolate": self._isolate,
            "reset": self._reset,
            "slow the store": lambda rng: self._slow(rng, deployment.servers, deployment.members),
            "slow a client": lambda rng: self._slow(rng, self._clients(), deployment.servers),
            "jump a clock": self._jump,
            "compact": self._compact,
            "move the leader": self._move_leader,
            "fill the quota": self._fill,
            "all servers": lambda rng: self._kill_all(rng, deployment.servers),
            "all etcd": lambda rng: self._kill_all(rng, deployment.members),
        }

    def _clients(self) -> list[PythonNode]:
        return [*self._on.publishers, *self._on.watchers]

    async def run(self, seconds: float) -> None:
        """Makes faults for so many seconds, and takes all of them back."""
        until_s = asyncio.get_running_loop().time() + seconds
        async with asyncio.TaskGroup() as lanes:
            for lane in range(2):
                lanes.create_task(self._lane(lane, until_s))
        self.heal()

    def heal(self) -> None:
        """Takes everything back at once: links, frozen and dead processes."""
        self._on.network.heal_all()
        for node in self._on.nodes:
            if node.is_frozen:
                node.thaw()
            if not node.is_alive:
                node.start()

    async def _lane(self, lane: int, until_s: float) -> None:
        rng = random.Random(f"{self._seed}/{self._mix.name}/{lane}")
        loop = asyncio.get_running_loop()
        names = [n for n in self._mix.weights if self._on.members or not _needs_etcd(n)]
        weights = [self._mix.weights[name] for name in names]
        while True:
            pause_s = rng.expovariate(1 / 2.5)
            (name,) = rng.choices(names, weights)
            # Drawn before anything is awaited, so that the next draws do not
            # depend on what this fault met.
            own = random.Random(rng.randrange(1 << 60))
            left_s = until_s - loop.time()
            if left_s < pause_s:
                await asyncio.sleep(max(left_s, 0))
                return
            await asyncio.sleep(pause_s)
            try:
                async with asyncio.timeout_at(until_s):
                    await self._kinds[name](own)
            except TimeoutError:
                return

    # ---------------------------------------------------------------- helpers

    def _take(self, rng: random.Random, nodes: Sequence[Node], count: int = 1) -> list[Node]:
        """Nodes that no other fault is about; held until `_release`."""
        free = [node for node in nodes if node.name not in self._busy]
        found = rng.sample(free, min(count, len(free)))
        self._busy |= {node.name for node in found}
        return found

    def _release(self, nodes: Sequence[Node]) -> None:
        self._busy -= {node.name for node in nodes}

    def _note(self, name: str, **facts: object) -> None:
        self._journal.note("fault", name=name, **facts)

    def _over(self, name: str, **facts: object) -> None:
        self._journal.note("fault over", name=name, **facts)

    # ----------------------------------------------------------------- faults

    async def _kill(self, rng: random.Random, nodes: Sequence[Node]) -> None:
        down_s = rng.choice((0.0, rng.uniform(0, 3), rng.uniform(3, 8)))
        again = rng.random() < 0.2
        taken = self._take(rng, nodes)
        try:
            for node in taken:
                self._note("kill", node=node.name, down_s=round(down_s, 2))
                node.kill()
                await asyncio.sleep(down_s)
                node.start()
                if again:
                    # While it starts.
                    await asyncio.sleep(rng.uniform(0.1, 1.5))
                    node.kill()
                    node.start()
                self._over("kill", node=node.name)
        finally:
            self._release(taken)

    async def _kill_all(self, rng: random.Random, nodes: Sequence[Node]) -> None:
        down_s = rng.choice((0.0, rng.uniform(1, 8)))
        taken = self._take(rng, nodes, len(nodes))
        try:
            self._note("kill all", nodes=[node.name for node in taken], down_s=round(down_s, 2))
            for node in taken:
                node.kill()
            await asyncio.sleep(down_s)
            for node in taken:
                node.start()
            self._over("kill all")
        finally:
            self._release(taken)

    async def _freeze(self, rng: random.Random, nodes: Sequence[Node]) -> None:
        for_s = rng.uniform(0.5, 3.0) * _LONGEST_TTL_S
        taken = self._take(rng, nodes)
        try:
            for node in taken:
                self._note("freeze", node=node.name, for_s=round(for_s, 2))
                node.freeze()
                await asyncio.sleep(for_s)
                node.thaw()
                self._over("freeze", node=node.name)
        finally:
            self._release(taken)

    async def _cut(self, rng: random.Random, ones: Sequence[Node], others: Sequence[Node]) -> None:
        """One link, in one direction or in both."""
        one = rng.choice(ones)
        other = rng.choice([node for node in others if node is not one])
        ways = rng.choice((((one, other),), ((other, one),), ((one, other), (other, one))))
        await self._hold(rng, [(a.name, b.name) for a, b in ways])

    async def _isolate(self, rng: random.Random) -> None:
        """Every link of a node, in one direction or in both."""
        node = rng.choice(self._on.nodes)
        inwards, outwards = rng.choice(((True, False), (False, True), (True, True)))
        ways = []
        for a, b in self._on.links():
            if node.name in (a, b):
                other = b if a == node.name else a
                ways += [(other, node.name)] * inwards + [(node.name, other)] * outwards
        await self._hold(rng, ways)

    async def _hold(self, rng: random.Random, ways: list[tuple[str, str]]) -> None:
        for_s = rng.choice((rng.uniform(0.3, 2), rng.uniform(2, 12)))
        shown = [f"{a}>{b}" for a, b in ways]
        self._note("cut", ways=shown, for_s=round(for_s, 2))
        for a, b in ways:
            self._on.network.cut(a, b)
        await asyncio.sleep(for_s)
        for a, b in ways:
            self._on.network.heal(a, b)
        self._over("cut", ways=shown)

    async def _reset(self, rng: random.Random) -> None:
        links = rng.sample(self._on.links(), 3)
        for a, b in links:
            self._note("reset", link=f"{a}-{b}", broken=self._on.network.reset(a, b))

    async def _slow(self, rng: random.Random, ones: Sequence[Node], others: Sequence[Node]) -> None:
        """Every link of one node, or of all, to others."""
        delay_s = rng.choice((0.02, 0.1, 0.3, 0.8))
        for_s = rng.uniform(2, 8)
        slowed = rng.choice(([rng.choice(ones)], list(ones)))
        ways = [(a.name, b.name) for a in slowed for b in others]
        ways += [(b, a) for a, b in ways] if rng.random() < 0.5 else []
        self._note("slow", nodes=[n.name for n in slowed], delay_s=delay_s, for_s=round(for_s, 2))
        for a, b in ways:
            self._on.network.slow(a, b, delay_s)
        await asyncio.sleep(for_s)
        for a, b in ways:
            self._on.network.slow(a, b, 0)
        self._over("slow")

    async def _jump(self, rng: random.Random) -> None:
        """The wall clock of a process, and perhaps back again."""
        node = rng.choice(self._on.python_nodes)
        offset_s = rng.choice(_JUMPS_S)
        for_s = rng.uniform(0.5, 10)
        self._note("jump", node=node.name, offset_s=offset_s, for_s=round(for_s, 2))
        node.jump(offset_s)
        await asyncio.sleep(for_s)
        if rng.random() < 0.5:
            node.jump(0.0)
            self._over("jump", node=node.name)

    async def _compact(self, rng: random.Random) -> None:
        nodes = [member.node for member in self._on.members]
        self._note("compact", result=await asyncio.to_thread(compact, nodes, rng))

    async def _move_leader(self, rng: random.Random) -> None:
        nodes = [member.node for member in self._on.members]
        self._note("move leader", result=await asyncio.to_thread(move_leader, nodes, rng))

    async def _fill(self, rng: random.Random) -> None:
        """The store is full for a while."""
        nodes = [member.node for member in self._on.members]
        for_s = rng.uniform(1, 8)
        if any(member.name in self._busy for member in self._on.members):
            return
        taken = self._take(rng, self._on.members, len(nodes))
        try:
            result = await asyncio.to_thread(fill, nodes)
            self._note("fill", result=result, for_s=round(for_s, 2))
            await asyncio.sleep(for_s)
        finally:
            self._over("fill", result=await asyncio.to_thread(free, nodes))
            self._release(taken)


def _needs_etcd(name: str) -> bool:
    return any(
        word in name for word in ("etcd", "store", "compact", "leader", "quota", "cut a server")
    )
