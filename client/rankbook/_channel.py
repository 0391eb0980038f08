"""Where the registry is and how to reach it: endpoints, TLS, token, channel options."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankbook import limits
from rankbook._retry import RetryPolicy
from rankbook._serving import serve
from rankbook.errors import BadRequest

if TYPE_CHECKING:
    import grpc

__all__ = [
    "CONNECT_TIMEOUT_S",
    "DEFAULT_ENDPOINT",
    "DEFAULT_PORT",
    "TLS",
    "Endpoint",
    "Settings",
    "parse_endpoint",
    "parse_endpoints",
    "shown",
    "target",
]

DEFAULT_PORT = 7420
DEFAULT_ENDPOINT = f"127.0.0.1:{DEFAULT_PORT}"
CONNECT_TIMEOUT_S = 2.0
"""Longest wait for one endpoint to answer a new connection. gRPC's minimum
reconnect backoff is also its connect timeout: 100 ms failed on a loaded
machine, 2 s did not."""
_MAX_SOCKET_PATH = 107
# What Linux takes, less the zero at the end.
MAX_RECEIVE_BYTES = limits.MAX_MESSAGE_BYTES

_OPTIONS: tuple[tuple[str, Any], ...] = (
    ("grpc.max_receive_message_length", MAX_RECEIVE_BYTES),
    ("grpc.max_send_message_length", MAX_RECEIVE_BYTES),
    ("grpc.min_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    ("grpc.initial_reconnect_backoff_ms", int(CONNECT_TIMEOUT_S * 1000)),
    # A silent peer is noticed in 15 s; servers of rankbook allow a ping every 5 s.
    # Without the ping's own timeout gRPC waits a minute for the answer.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A shared subchannel that waits out its backoff would hold up the next attempt.
    ("grpc.use_local_subchannel_pool", 1),
    # The registry is inside the cluster; a web proxy from the environment is not on the way.
    ("grpc.enable_http_proxy", 0),
    ("grpc.primary_user_agent", "rankbook-python"),
)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One address of the registry."""

    host: str
    """Host name or IP literal, without brackets; or `unix:` and a path."""
    port: int
    """TCP port, 1 to 65,535; zero for a socket file and for a store."""
    store: str = ""
    """URL of a store that this process serves itself from, in place of a host."""

    @property
    def is_local(self) -> bool:
        """Whether it is reached by a file on this machine, which TLS says nothing of."""
        return not self.port

    def __str__(self) -> str:
        """`host:port`, an IPv6 literal in brackets; `unix:PATH`; or the store's URL."""
        if self.is_local:
            return self.store or self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _bad_endpoint(text: str, rule: str) -> BadRequest:
    return BadRequest(
        f"endpoint {text!r}: {rule}",
        metadata={"field": "endpoint", "value": text, "rule": rule},
    )


def parse_endpoint(text: str) -> Endpoint:
    """Reads `host`, `host:port`, `[v6]:port`, `[v6]`, a bare IPv6 literal or `unix:PATH`.

    Without a port it is 7420.

    Raises:
        BadRequest: It is none of these.
    """
    given = text.strip()
    if given.startswith("unix:"):
        path = given.removeprefix("unix:")
        if not path.startswith("/") or len(path.encode()) > _MAX_SOCKET_PATH:
            rule = f"unix: is followed by an absolute path of at most {_MAX_SOCKET_PATH} bytes"
            raise _bad_endpoint(text, rule)
        return Endpoint(given, 0)
    if "://" in given or "/" in given:
        raise _bad_endpoint(text, "host:port without a scheme or a path")
    host, port_text = given, ""
    if given.startswith("["):
        host, bracket, rest = given[1:].partition("]")
        if not bracket or (rest and not rest.startswith(":")):
            raise _bad_endpoint(text, "an IPv6 literal in brackets is written [address]:port")
        port_text = rest[1:]
        if rest == ":":
            raise _bad_endpoint(text, "a port is 1 to 65535")
        _check_v6(host, text)
    elif given.count(":") == 1:
        host, _, port_text = given.partition(":")
        if not port_text:
            raise _bad_endpoint(text, "a port is 1 to 65535")
    elif ":" in given:
        _check_v6(given, text)
    if not host or any(char.isspace() for char in host):
        raise _bad_endpoint(text, "the host is missing")
    if not port_text:
        return Endpoint(host, DEFAULT_PORT)
    if not (port_text.isascii() and port_text.isdigit() and 1 <= int(port_text) <= 65_535):
        raise _bad_endpoint(text, "a port is 1 to 65535")
    return Endpoint(host, int(port_text))


def _check_v6(host: str, text: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise _bad_endpoint(text, "not an IPv6 literal") from None


def parse_endpoints(given: str | Sequence[str]) -> tuple[Endpoint, ...]:
    """Reads one or several endpoints, also separated by commas; order kept, each once.

    An `etcd:` URL stands alone; it has commas of its own.

    Raises:
        BadRequest: There is none, or one is malformed.
    """
    texts = [given] if isinstance(given, str) else list(given)
    if texts and texts[0].strip().startswith("etcd:"):
        for text in texts:
            if "@" in text.partition("?")[0]:
                raise BadRequest(
                    "endpoint etcd:...: a user or password has no place before the hosts, where "
                    "everybody sees it: give ?user=NAME&password_file=FILE",
                    metadata={"field": "endpoint", "value": "etcd:...", "rule": "no user before @"},
                )
        # Whoever cut a list at its commas has cut this too.
        return (Endpoint("", 0, ",".join(text.strip() for text in texts)),)
    parts = [part for text in texts for part in text.split(",") if part.strip()]
    if not parts:
        raise _bad_endpoint(str(given), "at least one endpoint is needed")
    return tuple(dict.fromkeys(parse_endpoint(part) for part in parts))


@dataclass(frozen=True, slots=True)
class TLS:
    """How to prove who the registry is, and who we are. Files are read at each connect."""

    ca_file: str | Path | None = None
    """PEM file of the authorities to trust. None: those of the system."""
    cert_file: str | Path | None = None
    """PEM file of our own certificate chain, for mutual TLS."""
    key_file: str | Path | None = None
    """PEM file of our own key; needed with `cert_file`."""
    server_name: str | None = None
    """Name the server's certificate must have, where it is not the host's."""

    def __post_init__(self) -> None:
        """Checks that certificate and key come together.

        Raises:
            BadRequest: One is given without the other.
        """
        if (self.cert_file is None) != (self.key_file is None):
            raise BadRequest(
                "TLS.cert_file and TLS.key_file come together",
                metadata={"field": "tls", "value": str(self.cert_file), "rule": "both or none"},
            )


def _read(path: str | Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as problem:
        raise BadRequest(
            f"TLS file {path} cannot be read: {problem.strerror}",
            metadata={"field": "tls", "value": str(path), "rule": "a readable PEM file"},
        ) from problem


@dataclass(frozen=True, slots=True)
class Settings:
    """What both faces need to know of the registry. Immutable."""

    endpoints: tuple[Endpoint, ...]
    """Where the registry is looked for, in order."""
    namespace: str
    """Namespace of every call."""
    timeout_s: float
    """Longest wait of one call, in seconds."""
    tls: TLS | None = None
    """Absent: no TLS."""
    token: str | None = field(default=None, repr=False)
    """Sent with every call."""
    retry: RetryPolicy = field(default_factory=RetryPolicy)
    """How often and how soon a call is repeated."""

    @classmethod
    def make(
        cls,
        endpoints: str | Sequence[str] | None,
        *,
        namespace: str | None,
        timeout_s: float,
        tls: TLS | None,
        token: str | None,
        retry: RetryPolicy | None,
    ) -> Settings:
        """Fills in what was left out, from `RANKBOOK_*` and the defaults.

        Raises:
            BadRequest: A value is malformed.
        """
        if not timeout_s > 0:
            raise BadRequest(
                f"timeout_s is {timeout_s}: every wait has an end, so it is above 0 s",
                metadata={"field": "timeout_s", "value": timeout_s, "rule": "above 0 s"},
            )
        if endpoints is None:
            endpoints = os.environ.get("RANKBOOK_SERVER") or DEFAULT_ENDPOINT
        if namespace is None:
            namespace = os.environ.get("RANKBOOK_NAMESPACE", "")
        if token is None:
            token = os.environ.get("RANKBOOK_TOKEN") or None
        if token is not None and not (token.isascii() and token.isprintable()):
            # gRPC refuses such a header in words that name neither the cause nor the remedy.
            raise BadRequest(
                "the token has a character that no header carries: it is printable ASCII, and a "
                "file's last line end is not part of it",
                metadata={"field": "token", "value": "(not shown)", "rule": "printable ASCII"},
            )
        return cls(
            endpoints=parse_endpoints(endpoints),
            namespace=limits.check_namespace(namespace),
            timeout_s=timeout_s,
            tls=tls,
            token=token,
            retry=retry or RetryPolicy(),
        )

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of every rpc."""
        return (("authorization", f"Bearer {self.token}"),) if self.token else ()

    def options(self) -> list[tuple[str, Any]]:
        """Options of every channel."""
        options = list(_OPTIONS)
        if self.tls is not None and self.tls.server_name:
            options.append(("grpc.ssl_target_name_override", self.tls.server_name))
        return options

    def credentials(self, endpoint: Endpoint) -> grpc.ChannelCredentials | None:
        """Credentials read from the files now; None without TLS.

        Raises:
            BadRequest: A file cannot be read.
        """
        if self.tls is None or endpoint.is_local:
            return None
        import grpc

        return grpc.ssl_channel_credentials(
            root_certificates=_read(self.tls.ca_file),
            private_key=_read(self.tls.key_file),
            certificate_chain=_read(self.tls.cert_file),
        )


def target(endpoint: Endpoint) -> str:
    """What gRPC calls the endpoint; a store is served from here on.

    Raises:
        BadRequest: The store's URL is malformed.
        Unavailable: The part of rankbook that serves a store is not installed.
    """
    if endpoint.store:
        return serve(endpoint.store)
    if endpoint.is_local:
        return endpoint.host
    try:
        version = ipaddress.ip_address(endpoint.host).version
    except ValueError:
        return f"dns:///{endpoint}"
    return f"ipv{version}:{endpoint}"


def shown(endpoints: Iterable[Endpoint]) -> str:
    """The endpoints for an error message."""
    return ", ".join(str(endpoint) for endpoint in endpoints)
