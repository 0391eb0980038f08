"""Everything that runs in a run: etcd nodes, servers, publishers, watchers, links.

    publishers-0..3 --+                +--> etcd-0 <--+
                      +--> server-0..2-+--> etcd-1 <--+  (each with each)
    watchers-0..2   --+                +--> etcd-2 <--+

Every arrow is a link of `Network`; nothing of ours talks past it but the
checker's last questions and the faults of etcd itself (compaction, quota).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from tests.contract.etcd_server import EtcdNode, free_ports, program, store_url

from .cast import Scale
from .network import Network
from .nodes import EtcdMember, Node, PythonNode
from .stage import Stage

__all__ = ["Deployment"]

_PREFIX = "chaos"
_READY_S = 30.0


class Deployment:
    """The nodes of a run. For one event loop."""

    def __init__(
        self, stage: Stage, scale: Scale, seed: int, *, etcd_flags: Sequence[str] = ()
    ) -> None:
        """Starts nothing.

        Args:
            stage: The folder of the run.
            scale: How many there are of each; without etcd nodes there is one
                server, over sqlite.
            seed: For the chance of the publishers and watchers.
            etcd_flags: More flags of every etcd node.
        """
        self.stage = stage
        self.scale = scale
        self.network = Network()
        self._seed = seed
        self._etcd_flags = etcd_flags
        self.members: list[EtcdMember] = []
        self.servers: list[PythonNode] = []
        self.publishers: list[PythonNode] = []
        self.watchers: list[PythonNode] = []
        self.addresses: list[str] = []
        """Where each server really listens."""

    @property
    def nodes(self) -> list[Node]:
        """All of them."""
        return [*self.members, *self.servers, *self.publishers, *self.watchers]

    @property
    def python_nodes(self) -> list[PythonNode]:
        """Those whose wall clock can jump."""
        return [*self.servers, *self.publishers, *self.watchers]

    def links(self) -> list[tuple[str, str]]:
        """Every link, by the nodes at its ends."""
        members = [member.name for member in self.members]
        servers = [server.name for server in self.servers]
        clients = [node.name for node in (*self.publishers, *self.watchers)]
        found = [(client, server) for client in clients for server in servers]
        found += [(server, member) for server in servers for member in members]
        found += [(a, b) for a in members for b in members if a < b]
        return found

    async def start(self) -> None:
        """Starts everything, and waits until the servers serve."""
        await self._make_members()
        await self._make_servers()
        await self._make_clients()
        for member in self.members:
            member.start()
        for member in self.members:
            await asyncio.to_thread(member.node.wait_ready)
        if self.members:
            await asyncio.to_thread(self._name_members)
        for server in self.servers:
            server.start()
        for server in self.servers:
            await self.wait_serving(server, _READY_S)
        for client in (*self.publishers, *self.watchers):
            client.start()

    # ------------------------------------------------------------------- etcd

    async def _make_members(self) -> None:
        count = self.scale.etcd_nodes
        if not count:
            return
        binary = program()
        ports = free_ports(3 * count)
        names = [f"etcd-{number}" for number in range(count)]
        doors = [
            await self.network.listen("?", name, ("127.0.0.1", ports[3 * n + 1]), _who_dials)
            for n, name in enumerate(names)
        ]
        cluster = ",".join(
            f"{name}=http://127.0.0.1:{door}" for name, door in zip(names, doors, strict=True)
        )
        for n, name in enumerate(names):
            client, peer, health = ports[3 * n : 3 * n + 3]
            node = EtcdNode(
                binary=binary,
                name=name,
                # It advertises the door; it listens behind it.
                ports=(client, doors[n], health),
                initial_cluster=cluster,
                flags=["--listen-peer-urls", f"http://127.0.0.1:{peer}", *self._etcd_flags],
            )
            self.members.append(EtcdMember(name, node))

    def _name_members(self) -> None:
        listed = self.members[0].node.call("/v3/cluster/member/list")["members"]
        for member in listed:
            self.network.aliases[f"{int(member['ID']):x}"] = member["name"]

    # ---------------------------------------------------------------- servers

    async def _make_servers(self) -> None:
        ports = free_ports(self.scale.servers)
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        for n, port in enumerate(ports):
            name = f"server-{n}"
            store = f"sqlite:{self.stage.folder / 'book.db'}"
            if self.members:
                doors = [
                    await self.network.listen(name, member.name, _address(member.node.endpoint))
                    for member in self.members
                ]
                store = store_url([f"127.0.0.1:{door}" for door in doors], _PREFIX)
            self.servers.append(
                PythonNode(name, self.stage.folder, self._server(name, port, store))
            )

    def _server(self, name: str, port: int, store: str) -> Callable[[int], list[str]]:
        def arguments(life: int) -> list[str]:
            return [
                *("-m", "rankbook_server.app", "--http", "off", "--store", store),
                *("--listen", f"127.0.0.1:{port}", "--log-format", "json"),
                *("--ready-file", str(self.stage.folder / f"{name}.ready")),
            ]

        return arguments

    async def wait_serving(self, server: PythonNode, timeout_s: float) -> None:
        """Waits until a server takes connections.

        Raises:
            TimeoutError: It does not.
        """
        ready = self.stage.folder / f"{server.name}.ready"
        async with asyncio.timeout(timeout_s):
            while not ready.exists():
                if not server.is_alive:
                    raise AssertionError(f"{server.name} ended:\n{server.log_file.read_text()}")
                await asyncio.sleep(0.05)

    # ---------------------------------------------------------------- clients

    async def _make_clients(self) -> None:
        for kind, count, made in (
            ("publishers", self.scale.publisher_processes, self.publishers),
            ("watchers", self.scale.watcher_processes, self.watchers),
        ):
            module = "tests.chaos.publishing" if kind == "publishers" else "tests.chaos.watching"
            for number in range(count):
                name = f"{kind}-{number}"
                doors = [
                    await self.network.listen(name, server.name, _address(address))
                    for server, address in zip(self.servers, self.addresses, strict=True)
                ]
                endpoints = ",".join(f"127.0.0.1:{door}" for door in doors)
                made.append(
                    PythonNode(name, self.stage.folder, self._client(module, number, endpoints))
                )

    def _client(self, module: str, number: int, endpoints: str) -> Callable[[int], list[str]]:
        def arguments(life: int) -> list[str]:
            return [
                *("-m", module, str(self.stage.folder), str(number), str(life)),
                *(str(self._seed), endpoints),
            ]

        return arguments

    # -------------------------------------------------------------------- end

    async def close(self) -> None:
        """Ends every process and every link, and removes what etcd kept."""
        for node in reversed(self.nodes):
            node.kill()
        for member in self.members:
            (self.stage.folder / f"{member.name}.log").write_text(member.node.log)
            member.node.close()
        await self.network.close()


def _address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    return host, int(port)


def _who_dials(first: bytes) -> str | None:
    """The member that a connection between members comes from, by etcd's own header."""
    head, end, _ = first.partition(b"\r\n\r\n")
    if not end:
        return None
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.lower() == b"x-server-from":
            return value.strip().decode()
    return "?"
