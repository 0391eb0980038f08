"""Every setting of rankbookd, from one table.

A setting is a flag (`--max-sessions`), an environment variable
(`RANKBOOK_MAX_SESSIONS`) and a line of the TOML file (`max_sessions = 100`);
the first of these that is there wins, else the default does. An empty variable
counts as not set.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rankbook.errors import BadRequest
from rankbook_server.logs import LogFormat, LogLevel

__all__ = ["ENV_PREFIX", "Config", "Listen", "Settings", "load", "parse_listen"]

ENV_PREFIX = "RANKBOOK_"


@dataclass(frozen=True, slots=True)
class Listen:
    """An address to listen on."""

    host: str
    """A name or an IP literal, IPv6 without brackets."""
    port: int
    """Zero takes a free one."""

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach it."""
        return self.host in ("localhost", "::1") or self.host.startswith(("127.", "unix:"))

    def with_port(self, port: int) -> str:
        """HOST:PORT with another port; an IPv6 literal in brackets; a socket file as it is."""
        if self.host.startswith("unix:"):
            return self.host
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    def __str__(self) -> str:
        """HOST:PORT."""
        return self.with_port(self.port)


def parse_listen(value: str) -> Listen:
    """Reads HOST:PORT or unix:PATH.

    Raises:
        ValueError: It is not of that form.
    """
    if value.startswith("unix:/"):
        return Listen(value, 0)
    host, colon, port = value.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(
            f"{value!r} is no HOST:PORT, for example 127.0.0.1:7420, [::1]:7420 or 127.0.0.1:0"
        )
    return Listen(host, int(port))


class Settings(BaseSettings):
    """All settings; each field's description is its help text."""

    model_config = SettingsConfigDict(env_prefix=ENV_PREFIX, extra="forbid", frozen=True)

    listen: str = Field(
        "127.0.0.1:7420",
        description="HOST:PORT for gRPC; port 0 takes a free one; or unix:PATH, a socket file",
    )
    http: str = Field(
        "127.0.0.1:7421",
        description="HOST:PORT for /healthz, /livez, /readyz and /metrics; 'off' for none",
    )
    store: str = Field(
        "sqlite:",
        description="where the book is kept: sqlite:PATH, sqlite: (your state folder), memory: "
        "(lost at the end), or etcd:HOST:PORT,...[/PREFIX], which any number of servers may share",
    )
    ready_file: Path | None = Field(
        None,
        description="written once serving, as JSON (grpc, http, pid); removed at the end",
    )
    tls_cert: Path | None = Field(None, description="PEM certificate chain; with --tls-key")
    tls_key: Path | None = Field(None, description="PEM private key; with --tls-cert")
    tls_client_ca: Path | None = Field(
        None, description="PEM authorities; clients must then show a certificate of theirs"
    )
    insecure: bool = Field(
        False, description="allow --listen beyond this machine without TLS: anyone may then write"
    )
    log_format: LogFormat = Field(
        "auto", description="auto, json or console; auto is console on a terminal, json elsewhere"
    )
    log_level: LogLevel = Field("info", description="debug, info, warning or error")
    max_sessions: int = Field(10_000, ge=1, description="most session streams at a time")
    max_watchers: int = Field(10_000, ge=1, description="most watches at a time")
    max_waiters: int = Field(10_000, ge=1, description="most calls that wait at a time")
    max_calls: int = Field(20_000, ge=1, description="most unary calls in flight at a time")
    max_leases: int = Field(100_000, ge=1, description="most leases alive in a namespace")
    max_engines: int = Field(
        20_000, ge=1, description="most engines in a namespace, tombstones included"
    )
    max_namespaces: int = Field(1024, ge=1, description="most namespaces")
    max_reporters: int = Field(
        100_000, ge=1, description="most processes whose connections are remembered"
    )
    tombstone_ttl: float = Field(
        3600.0, gt=0, description="seconds for which an engine that is gone is remembered"
    )
    drain_grace: float = Field(
        2.0, ge=0, description="seconds that open calls get to end when the server stops"
    )

    @field_validator("listen", "http")
    @classmethod
    def _check_listen(cls, value: str) -> str:
        if value != "off":
            parse_listen(value)
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if self.listen == "off":
            raise ValueError("listen is 'off': a server without gRPC serves nobody")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key")
        listen = parse_listen(self.listen)
        if not listen.is_loopback and self.tls_cert is None and not self.insecure:
            raise ValueError(
                f"listen is {self.listen}, which other machines can reach, without TLS: give "
                "tls_cert and tls_key, listen on 127.0.0.1, or say insecure by name"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` found: it has looked everywhere and kept the origins."""
        return (init_settings,)


@dataclass(frozen=True, slots=True)
class Config:
    """Settings, and where each came from."""

    settings: Settings
    """The values."""
    origins: Mapping[str, str]
    """By setting: "flag --x", "env RANKBOOK_X", "file PATH" or "default"."""

    def lines(self) -> list[str]:
        """One line a setting, in the order of the table: name, value, origin."""
        values = self.settings.model_dump(mode="json")
        width = max(map(len, values))
        return [
            f"{name:<{width}}  {'' if value is None else value}  ({self.origins[name]})"
            for name, value in values.items()
        ]


def load(flags: Mapping[str, Any], environ: Mapping[str, str], file: Path | None) -> Config:
    """Puts the settings together.

    Args:
        flags: Settings given on the command line.
        environ: The process's environment.
        file: A TOML file, or None.

    Raises:
        BadRequest: The file cannot be read or has a setting there is not, or a
            value is not what its setting takes; the message names it and where
            it came from.
    """
    names = Settings.model_fields
    values: dict[str, Any] = {}
    origins = dict.fromkeys(names, "default")
    if file is not None:
        for name, value in _read(file).items():
            if name not in names:
                raise _bad(
                    f"{file} has a setting {name!r} that there is not: known are "
                    f"{', '.join(names)}",
                    name,
                )
            values[name], origins[name] = value, f"file {file}"
    for name in names:
        variable = f"{ENV_PREFIX}{name.upper()}"
        if environ.get(variable):
            values[name], origins[name] = environ[variable], f"env {variable}"
    for name, value in flags.items():
        values[name], origins[name] = value, f"flag --{name.replace('_', '-')}"
    try:
        return Config(Settings(**values), origins)
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        words = first["msg"].removeprefix("Value error, ")
        if not name:
            raise _bad(words, "") from None
        raise _bad(f"{name} is {first['input']!r} ({origins[name]}): {words}", name) from None


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise _bad(f"the file {file} cannot be read: {error.strerror}", "config") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _bad(f"the file {file} is no TOML: {error}", "config") from None


def _bad(message: str, field: str) -> BadRequest:
    return BadRequest(message, metadata={"field": field})
