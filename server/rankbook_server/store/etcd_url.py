"""What a URL of a store on etcd says."""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote

__all__ = ["DEFAULT_PREFIX", "PASSWORD_VARIABLE", "EtcdAddress", "parse_etcd"]

DEFAULT_PREFIX = "rankbook"
"""Where the book is kept if the URL does not say."""

PASSWORD_VARIABLE = "RANKBOOK_ETCD_PASSWORD"
"""Environment variable with the password of the URL's user."""

MAX_PREFIX = 200
"""Most characters of a prefix: every key of the book starts with it."""

_HOST = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_PREFIX = re.compile(r"[A-Za-z0-9._/-]+")
_OPTIONS = ("tls", "ca", "cert", "key", "user", "password_file")
_OWN_NAMES = frozenset({"book", "live", "server"})


@dataclass(frozen=True, slots=True)
class EtcdAddress:
    """Where a book on etcd is, and how to get there."""

    endpoints: tuple[str, ...]
    """HOST:PORT of each member, an IPv6 literal in brackets."""
    prefix: str = DEFAULT_PREFIX
    """Every key of the book starts with it and a slash."""
    tls: bool = False
    """Whether to connect with TLS."""
    ca: Path | None = None
    """Authority of etcd's certificates; None for the system's."""
    cert: Path | None = None
    """Our certificate."""
    key: Path | None = None
    """Its key."""
    user: str = ""
    """Our user's name; empty for none."""
    password_file: Path | None = None
    """Where its password is; read at each log-in."""
    password: str = field(default="", repr=False)
    """Its password, where there is no file."""

    def __str__(self) -> str:
        """The URL without options, so without secrets."""
        return f"etcd:{','.join(self.endpoints)}/{self.prefix}"


def parse_etcd(rest: str, environ: Mapping[str, str]) -> EtcdAddress:
    """Reads what follows `etcd:` in a URL.

    Args:
        rest: `HOST:PORT,...[/PREFIX][?OPTIONS]`, maybe after two slashes.
        environ: Where the password may be.

    Raises:
        ValueError: What is wrong, in words that repeat no value but the names
            of options.
    """
    place, _, query = rest.partition("?")
    if "@" in place:
        raise ValueError(
            "a user or a password does not belong in the address, where it shows in lists of "
            f"processes: write ?user=NAME and password_file=FILE, or set {PASSWORD_VARIABLE}"
        )
    hosts, slash, prefix = place.removeprefix("//").partition("/")
    endpoints = tuple(
        dict.fromkeys(
            _endpoint(text, number) for number, text in enumerate(hosts.split(","), start=1)
        )
    )
    options = _options(query)
    prefix = _prefix(prefix) if slash and prefix else DEFAULT_PREFIX
    files = {name: _path(options[name]) for name in ("ca", "cert", "key") if name in options}
    if ("cert" in files) != ("key" in files):
        raise ValueError("cert and key come together")
    tls = options.get("tls", "on" if files else "off")
    if tls not in ("on", "off"):
        raise ValueError("tls is on or off")
    if tls == "off" and files:
        raise ValueError("tls=off and a certificate contradict each other")
    user = options.get("user", "")
    password_file = options.get("password_file")
    password = environ.get(PASSWORD_VARIABLE, "")
    if password_file is not None and not user:
        raise ValueError("password_file needs user=NAME")
    if user and password_file is None and not password:
        raise ValueError(f"user needs a password: password_file=FILE, or {PASSWORD_VARIABLE}")
    return EtcdAddress(
        endpoints=endpoints,
        prefix=prefix,
        tls=tls == "on",
        ca=files.get("ca"),
        cert=files.get("cert"),
        key=files.get("key"),
        user=user,
        password_file=None if password_file is None else _path(password_file),
        password=password if user and password_file is None else "",
    )


def _endpoint(text: str, number: int) -> str:
    where = f"endpoint {number}"
    host, colon, port = text.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{where} is not HOST:PORT (etcd's own port is 2379)")
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
        raise ValueError(f"the port of {where} is not a number from 1 to 65535")
    if host.startswith("[") and host.endswith("]"):
        try:
            # With a zone, which etcd's certificates cannot name, it would be taken.
            if ipaddress.IPv6Address(host[1:-1]).scope_id is not None:
                raise ValueError("a zone")
        except ValueError:
            raise ValueError(f"{where} has no IPv6 literal in its brackets") from None
    elif not _HOST.fullmatch(host):
        raise ValueError(
            f"the host of {where} is neither a name nor an address (IPv6 goes in brackets)"
        )
    return f"{host}:{int(port)}"


def _prefix(prefix: str) -> str:
    if len(prefix) > MAX_PREFIX:
        raise ValueError(f"the prefix has {len(prefix)} characters and may have {MAX_PREFIX}")
    if not _PREFIX.fullmatch(prefix):
        raise ValueError("a prefix is made of A-Z, a-z, 0-9, dot, underscore, hyphen and slash")
    parts = prefix.split("/")
    if not all(parts):
        raise ValueError("no part of a prefix may be empty")
    if not _OWN_NAMES.isdisjoint(parts[1:]):
        # P/book/... and so on are keys of the book at P.
        raise ValueError("no part of a prefix but the first may be book, live or server")
    return prefix


def _options(query: str) -> dict[str, str]:
    options: dict[str, str] = {}
    for part in query.split("&") if query else ():
        name, _, value = part.partition("=")
        if name not in _OPTIONS:
            shown = repr(name) if re.fullmatch(r"[a-z_]{1,20}", name) else "of that name"
            raise ValueError(f"there is no option {shown}, only {', '.join(_OPTIONS)}")
        if name in options:
            raise ValueError(f"{name} is there twice")
        options[name] = unquote(value, errors="surrogateescape")
        if not options[name] or "\0" in options[name]:
            raise ValueError(f"{name} has no value")
    return options


def _path(text: str) -> Path:
    return Path(os.path.abspath(os.path.expanduser(text)))
