"""Where every global value comes from: flag, then RANKBOOK_* variable, then default.

One table makes the flags, the variables, the defaults and `config show`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rankbook.cli.durations import parse_duration
from rankbook.errors import BadRequest

__all__ = ["FORMS", "TABLE", "Setting", "Settings", "Value", "resolve"]

FORMS = ("table", "wide", "json")


@dataclass(frozen=True, slots=True)
class Setting:
    """One global value."""

    name: str
    """Name in `config show`, and of the flag without its dashes."""
    flags: tuple[str, ...]
    """Flags that set it."""
    variable: str
    """Environment variable that sets it; an empty one counts as not set."""
    default: str
    """Value when nothing sets it."""
    help: str
    """What it is, for --help."""
    secret: bool = False
    """Shown only as set or not set."""


TABLE = (
    Setting(
        "server",
        ("--server", "-s"),
        "RANKBOOK_SERVER",
        "127.0.0.1:7420",
        "Registry to ask: HOST:PORT, or several with commas; the next is tried when one is away.",
    ),
    Setting(
        "namespace",
        ("--namespace", "-n"),
        "RANKBOOK_NAMESPACE",
        "default",
        "Part of the book to look at.",
    ),
    Setting(
        "output",
        ("--output", "-o"),
        "RANKBOOK_OUTPUT",
        "table",
        "Form of the data on stdout: table, wide or json.",
    ),
    Setting(
        "timeout",
        ("--timeout",),
        "RANKBOOK_TIMEOUT",
        "5s",
        "Longest time for one call: 500ms, 5s, 2m.",
    ),
    Setting(
        "token",
        ("--token",),
        "RANKBOOK_TOKEN",
        "",
        "Token that names you to the registry. Prefer the variable: flags show in ps.",
        secret=True,
    ),
)
"""Every global value, in the order of --help."""


@dataclass(frozen=True, slots=True)
class Value:
    """A value with where it came from."""

    setting: Setting
    value: str
    origin: str
    """For example "flag --server", "env RANKBOOK_SERVER" or "default"."""

    @property
    def shown(self) -> str:
        """The value for people: a secret only as set or not set."""
        if self.setting.secret:
            return "(set)" if self.value else "(not set)"
        # What stands there may be a password, though no address takes one.
        return re.sub(r"[^/,:@]*(:[^/,@]*)?@", "***@", self.value)


@dataclass(frozen=True, slots=True)
class Settings:
    """All global values, checked."""

    endpoints: tuple[str, ...]
    namespace: str
    form: str
    timeout_s: float
    token: str | None
    values: tuple[Value, ...]


def resolve(flags: Mapping[str, Any], environ: Mapping[str, str]) -> Settings:
    """Takes every value from the first place that has it.

    Args:
        flags: By `Setting.name`; None counts as not given.
        environ: The environment.

    Raises:
        BadRequest: A value is none that its setting takes; the message names
            where it came from.
    """
    found: dict[str, Value] = {}
    for setting in TABLE:
        flag = flags.get(setting.name)
        if flag is not None:
            found[setting.name] = Value(setting, str(flag), f"flag {setting.flags[0]}")
        elif environ.get(setting.variable):
            origin = f"env {setting.variable}"
            found[setting.name] = Value(setting, environ[setting.variable], origin)
        else:
            found[setting.name] = Value(setting, setting.default, "default")
    server = found["server"].value.strip()
    # The URL of a store has commas of its own.
    parts = [server] if server.startswith("etcd:") else server.split(",")
    endpoints = tuple(part.strip() for part in parts if part.strip())
    if not endpoints:
        raise _wrong(found["server"], "HOST:PORT, several with commas, or etcd:HOST:PORT,...")
    if found["output"].value not in FORMS:
        raise _wrong(found["output"], "table, wide or json")
    try:
        timeout_s = parse_duration(found["timeout"].value)
    except ValueError:
        raise _wrong(found["timeout"], "a duration such as 500ms, 5s or 2m") from None
    if timeout_s <= 0:
        raise _wrong(found["timeout"], "a duration above zero")
    return Settings(
        endpoints=endpoints,
        namespace=found["namespace"].value,
        form=found["output"].value,
        timeout_s=timeout_s,
        token=found["token"].value or None,
        values=tuple(found.values()),
    )


def _wrong(value: Value, rule: str) -> BadRequest:
    return BadRequest(
        f"{value.setting.name} is {value.value!r} ({value.origin}): it takes {rule}",
        metadata={
            "field": value.setting.name,
            "value": value.value,
            "origin": value.origin,
            "rule": rule,
        },
    )
