"""`rankbook export` and `import` around what they move: files, and the server's part."""

from __future__ import annotations

import io
import json
import os
import stat
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from rankbook.cli import moving
from rankbook.cli.main import run
from rankbook.errors import Refused

TOLD = {"book_id": "b", "entries": 3, "revision": 7}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What stands in for the server's part was called with."""
    seen: list[Any] = []

    class Point:
        def __init__(self, name: str) -> None:
            self.name = name

        def load(self) -> Any:
            return {"export": out, "import": into}[self.name]

    def out(store: str, target: Any) -> dict[str, object]:
        seen.append(store)
        target.write(b"secret\n")
        if store == "sqlite:fails":
            raise Refused("half-way")
        return dict(TOLD)

    def into(store: str, source: Any, name: str, *, overwrite: bool) -> dict[str, object]:
        seen.append((store, source.read(), name, overwrite))
        return dict(TOLD)

    monkeypatch.setattr(moving, "entry_points", lambda group, name: [Point(name)])
    return seen


def points(*found: EntryPoint) -> Any:
    return lambda group, name: found


@pytest.mark.parametrize("name", ["export", "import"])
@pytest.mark.parametrize("module", ["no_such_package.moving", ""])
def test_without_the_server_it_says_what_to_install(
    name: str,
    module: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = [EntryPoint(name, f"{module}:run", "rankbook.moving")] if module else []
    monkeypatch.setattr(moving, "entry_points", points(*found))

    assert run([name, "sqlite:a.db", "-o", "json"]) == 1
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["reason"], error["metadata"]["extra"]) == ("NOT_INSTALLED", "server")
    assert "pip install 'rankbook[server]'" in error["message"]


def test_the_entry_points_are_the_two_of_the_server() -> None:
    found = {point.name: point.value for point in moving.entry_points(group="rankbook.moving")}

    assert found == {
        "export": "rankbook_server.moving.entry:export_to",
        "import": "rankbook_server.moving.entry:import_from",
    }


def test_a_file_is_made_for_its_user_alone_also_in_the_place_of_another(
    calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, link = tmp_path / "old", tmp_path / "link"
    old.write_text("before")
    old.chmod(0o644)
    link.symlink_to(old)
    before = os.umask(0)
    try:
        assert run(["export", "sqlite:a.db", str(link), "-o", "json"]) == 0
    finally:
        os.umask(before)

    assert json.loads(capsys.readouterr().out) == {**TOLD, "file": str(link)}
    assert (old.read_text(), stat.S_IMODE(old.stat().st_mode)) == ("secret\n", 0o600)
    assert link.is_symlink()
    assert sorted(tmp_path.iterdir()) == [link, old]


def test_an_export_that_fails_leaves_no_file_and_the_one_before(
    calls: list[Any], tmp_path: Path
) -> None:
    file = tmp_path / "f"
    assert run(["export", "sqlite:fails", str(file)]) == 5
    assert list(tmp_path.iterdir()) == []
    file.write_text("before")
    assert run(["export", "sqlite:fails", str(file)]) == 5
    assert file.read_text() == "before"


def test_an_import_reads_a_file_or_stdin(
    calls: list[Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "f"
    file.write_bytes(b"one")
    assert run(["import", "sqlite:a.db", str(file), "--overwrite"]) == 0
    assert "book id" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"two")))
    assert run(["import", "sqlite:a.db"]) == 0

    assert calls == [
        ("sqlite:a.db", b"one", str(file), True),
        ("sqlite:a.db", b"two", "stdin", False),
    ]


@pytest.mark.parametrize("name", ["no-such-file", ".", "a\0b"])
def test_a_file_that_cannot_be_read_is_wrong_usage(
    name: str, calls: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["import", "sqlite:a.db", str(tmp_path / name), "-o", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["metadata"]["field"] == "file"
    assert calls == []


def test_help_says_that_payloads_are_in_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["export", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "handshake payloads" in text
    assert "0600" in text
