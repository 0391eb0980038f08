"""`rankbook register`: publishes records from a file."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import IO, Any

import click

import rankbook
from rankbook import _clock, limits, v1
from rankbook.cli.durations import SECONDS
from rankbook.cli.invocation import Invocation, Reported, global_options, pass_invocation
from rankbook.cli.output import error_json
from rankbook.cli.records import by_start, read_records
from rankbook.errors import BadRequest, DeadlineExceeded, RankbookError, Unavailable
from rankbook.model import Registered

__all__ = ["register"]

_LOOK_S = 0.5
"""How often a waiting command looks whether it was told to stop."""


@click.command()
@click.option(
    "-f",
    "--file",
    "file",
    required=True,
    type=click.File("r", encoding="utf-8-sig", errors="replace"),
    metavar="FILE|-",
    help="One record, a list, or JSON lines; - reads stdin.",
)
@click.option(
    "--ttl",
    "ttl_s",
    type=SECONDS,
    default="10s",
    show_default=True,
    metavar="DURATION",
    help="Time to live wished for; 2s to 300s are granted.",
)
@click.option("--hold", is_flag=True, help="Keep the lease until SIGINT or SIGTERM, then give up.")
@click.option(
    "--sequence",
    type=click.IntRange(min=1),
    help="Number of this write; it must rise for one boot_id.  [default: this host's clock]",
)
@global_options()
@pass_invocation
def register(
    invocation: Invocation, file: IO[str], ttl_s: float, hold: bool, sequence: int | None
) -> None:
    """Publishes records under a lease.

    Without --hold the lease is left to run out. With it the lease is kept until
    a signal and then given up cleanly (exit 0); a registry that is away is
    waited for, a newer start of the engine ends it (exit 5). A record without
    process.boot_id gets one.

    \b
    RPC: RegisterWorkers; with --hold also RenewLeases and RevokeLease
    Example:
      rankbook register -f records.json --ttl 30s --hold
    """
    if ttl_s < 0:
        raise BadRequest(
            f"ttl is {ttl_s:g} s: a time to live is not negative",
            metadata={"field": "ttl", "value": ttl_s, "rule": "2 s to 300 s; 0 takes the default"},
        )
    records = read_records(
        file.read(),
        name=file.name,
        namespace=invocation.settings.namespace,
        boot_id=rankbook.new_id(),
    )
    starts = by_start(records)
    if hold:
        _Hold(invocation, starts, ttl_s).run()
        return
    registered = []
    with invocation.client() as client:
        number = sequence or int(_clock.unix_s() * 1000)
        for start in starts:
            registered.append(
                client.register_workers(
                    start, sequence=number, lease_key=rankbook.new_id(), ttl_s=ttl_s or None
                )
            )
            number += len(start)
    _show(invocation, starts, registered)


def _show(
    invocation: Invocation, starts: list[list[v1.WorkerRecord]], registered: list[Registered]
) -> None:
    out = invocation.out
    parts: list[dict[str, Any]] = [
        {
            "engine_id": start[0].engine_id,
            "generation": start[0].generation,
            "lease_id": reply.lease.lease_id,
            "ttl_s": reply.lease.ttl_s,
            "epoch": reply.epoch,
            "revision": reply.revision,
            "records": len(start),
        }
        for start, reply in zip(starts, registered, strict=True)
    ]
    if out.as_json:
        first = parts[0]
        names = ("lease_id", "ttl_s", "epoch", "revision")
        out.json({**{name: first[name] for name in names}, "registrations": parts})
        return
    for part in parts:
        records = "1 record" if part["records"] == 1 else f"{part['records']} records"
        out.lines(
            [
                f"{part['engine_id']}  {records}  epoch {part['epoch']}  "
                f"revision {part['revision']}  lease {part['lease_id']}  ttl {part['ttl_s']:g}s"
            ]
        )


class _Hold:
    """Keeps records in the book until a signal, or until they are fenced."""

    def __init__(
        self, invocation: Invocation, starts: list[list[v1.WorkerRecord]], ttl_s: float
    ) -> None:
        self._invocation = invocation
        self._starts = starts
        self._wake = threading.Event()
        self._signal: int | None = None
        settings = invocation.settings
        self._registrations = [
            rankbook.Registration(
                start,
                endpoints=settings.endpoints,
                namespace=settings.namespace,
                ttl_s=min(max(ttl_s or limits.DEFAULT_TTL_S, limits.MIN_TTL_S), limits.MAX_TTL_S),
                token=settings.token,
                on_change=self._changed,
            )
            for start in starts
        ]
        self._said: dict[str, str] = {}

    def run(self) -> None:
        """Until a signal.

        Raises:
            RankbookError: A registration was refused for good, or fenced.
        """
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._stop)
        try:
            for registration in self._registrations:
                registration.start()
            registered = [self._registered(one) for one in self._registrations]
            if self._signal is None:
                held = [reply for reply in registered if reply is not None]
                _show(self._invocation, self._starts, held)
                try:
                    self._keep()
                except RankbookError as error:
                    if self._invocation.out.as_json:
                        self._invocation.out.json_line({"error": error_json(error)})
                    raise Reported(error) from error
        finally:
            for registration in self._registrations:
                registration.stop()
        self._invocation.out.note("given up")

    def _registered(self, registration: rankbook.Registration) -> Registered | None:
        """Waits for the first reply, for ever; None when a signal came first."""
        while self._signal is None:
            try:
                return registration.wait_registered(_LOOK_S)
            except (Unavailable, DeadlineExceeded) as trouble:
                self._say("registry", f"not published yet, trying on: {trouble.message}")
        return None

    def _keep(self) -> None:
        while self._signal is None:
            for registration in self._registrations:
                current = registration.current
                if current.state in (
                    rankbook.RegistrationState.FENCED,
                    rankbook.RegistrationState.STOPPED,
                ):
                    raise current.error or rankbook.Fenced(
                        "a newer start of the engine took over; nothing is held any more"
                    )
            self._wake.wait(_LOOK_S)
            self._wake.clear()

    def _changed(self, change: rankbook.RegistrationChange) -> None:
        if change.state is rankbook.RegistrationState.SUSPENDED:
            why = change.error.message if change.error else "the registry does not answer"
            self._say("registry", f"not renewed, trying on: {why}")
        elif change.state is rankbook.RegistrationState.REGISTERED and self._said:
            self._say("registry", "in the book again")
            self._said.clear()
        self._wake.set()

    def _say(self, about: str, words: str) -> None:
        """Says a thing once, not at every attempt."""
        if self._said.get(about) != words.split(":")[0]:
            self._said[about] = words.split(":")[0]
            self._invocation.out.note(words)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
        self._wake.set()
