"""`rankbook export` and `import`: a book out of a store, and into another.

What touches stores is the server's and comes with it. It is found by its entry
points, so that the client needs nothing of the server until one of these runs.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, BinaryIO

import click

from rankbook.cli.invocation import Invocation, global_options, pass_invocation
from rankbook.cli.output import Column, Table
from rankbook.errors import BadRequest, RankbookError, Reason

__all__ = ["export", "import_"]

_GROUP = "rankbook.moving"
_STREAM = "-"


@click.command()
@click.argument("store", metavar="STORE_URL")
@click.argument("file", metavar="[FILE]", default=_STREAM)
@global_options()
@pass_invocation
def export(invocation: Invocation, store: str, file: str) -> None:
    """Writes a whole book from its store to a file.

    Opens the store itself, so it needs rankbook[server]. The server of a
    sqlite: store must be stopped; with etcd: servers may run, and what they
    take after the moment of the export is not in it. Without FILE, or with -,
    the export goes to stdout.

    The file holds everything, handshake payloads too, as JSON lines up to a
    digest. FILE is made for you alone (mode 0600), once all of it is there.

    \b
    RPC: none
    Example:
      rankbook export sqlite:book.db book.jsonl
      rankbook export sqlite:book.db | rankbook import sqlite:new.db
    """
    move = _server_part("export")
    out = invocation.out
    if file == _STREAM:
        try:
            told = move(store, sys.stdout.buffer)
            sys.stdout.buffer.flush()
        except BrokenPipeError:
            # Python flushes stdout once more when it ends; that must not fail again.
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise _unwritten("stdout", "its reader has gone") from None
        except RankbookError:
            # One of them is an OSError too.
            raise
        except OSError as error:
            raise _unwritten("stdout", error.strerror or str(error)) from None
        out.note(f"exported {told['entries']} keys at revision {told['revision']}")
        return
    try:
        with _fresh_file(Path(file)) as target:
            told = move(store, target)
    except RankbookError:
        raise
    except OSError as error:
        raise _unwritten(file, error.strerror or str(error)) from None
    _show(invocation, {**told, "file": file})


@click.command("import")
@click.argument("store", metavar="STORE_URL")
@click.argument("file", metavar="[FILE]", default=_STREAM)
@click.option("--overwrite", is_flag=True, help="Take out what is in the store.")
@global_options()
@pass_invocation
def import_(invocation: Invocation, store: str, file: str, overwrite: bool) -> None:
    """Brings a book from a file into an empty store.

    Opens the store itself, so it needs rankbook[server]; stop the store's
    servers first. Without FILE, or with -, the export is read from stdin.

    The file is checked whole before anything is written. Engines, epochs, seals
    and leases are as they were, so workers that renew within their lease's time
    to live after the server's start lose nothing. Revisions are the new book's:
    everyone who watches takes the full state anew.

    An import that was broken off leaves a book that no server reads and no
    import adds to; --overwrite begins it anew. Epochs that a book had given out
    before it was overwritten are not given out again.

    \b
    RPC: none
    Example:
      rankbook import sqlite:new.db book.jsonl
    """
    move = _server_part("import")
    if file == _STREAM:
        told = move(store, sys.stdin.buffer, "stdin", overwrite=overwrite)
    else:
        try:
            source = open(file, "rb")  # noqa: SIM115
        except (OSError, ValueError) as error:
            words = getattr(error, "strerror", None) or str(error)
            raise BadRequest(
                f"{file} cannot be read: {words}", metadata={"field": "file", "value": file}
            ) from None
        with source:
            told = move(store, source, file, overwrite=overwrite)
    _show(invocation, told)


def _server_part(name: str) -> Any:
    """A function of the server's.

    Raises:
        BadRequest: The server is not installed here.
    """
    found = list(entry_points(group=_GROUP, name=name))
    missing = "its entry point"
    if found:
        try:
            return found[0].load()
        except ModuleNotFoundError as error:
            missing = (error.name or "").partition(".")[0]
            if missing == "rankbook":
                raise
    raise BadRequest(
        f"rankbook {name} opens a store itself, with the server's code, and this environment has "
        f"the client without the server ({missing} is missing): pip install 'rankbook[server]'",
        reason=Reason.NOT_INSTALLED,
        metadata={"missing": missing, "extra": "server"},
    )


@contextlib.contextmanager
def _fresh_file(path: Path) -> Iterator[BinaryIO]:
    """A file for this user alone, in place once it was written whole."""
    path = path.resolve()
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.stat().st_mode):
            # A pipe or a device is written to; a file of that name must not take its place.
            with open(path, "wb") as target:
                yield target
            return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(fresh, flags, 0o600), "wb") as target:
            yield target
            target.flush()
            os.fsync(target.fileno())
        os.replace(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise


def _unwritten(file: str, why: str) -> BadRequest:
    return BadRequest(
        f"{file} cannot be written: {why}; the export is not whole",
        metadata={"field": "file", "value": file},
    )


def _show(invocation: Invocation, told: dict[str, Any]) -> None:
    out = invocation.out
    if out.as_json:
        out.json(told)
        return
    table = Table([Column("WHAT"), Column("VALUE")])
    for name, value in told.items():
        table.add(name.replace("_", " "), str(value))
    out.table(table)
