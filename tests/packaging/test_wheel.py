"""What people install: a light client, and a server as an extra."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {"rankbook", "rankbook_server", "rankbook_vllm"}
# The client's own, and what these need themselves. It goes into vLLM's
# environment, so whatever comes on top is to be a decision.
BASE = {
    *("click", "grpcio", "grpcio-status", "protobuf", "rich"),
    *("googleapis-common-protos", "markdown-it-py", "mdurl", "pygments", "typing-extensions"),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    hidden = ("RANKBOOK_", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    return {**clean, "HOME": str(tmp_path_factory.mktemp("home"))}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    _run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)],
        environment,
    )
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def base(
    wheel: Path, tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]
) -> Path:
    """The commands' folder of an environment with the wheel and no extra."""
    home = tmp_path_factory.mktemp("env")
    venv.create(home, with_pip=True)
    _run([str(home / "bin/python"), "-m", "pip", "install", "-q", str(wheel)], environment)
    return home / "bin"


def _run(
    command: Sequence[str], environment: dict[str, str], code: int = 0
) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, env=environment, cwd="/", capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == code, (command, done.stdout, done.stderr)
    return done


def test_the_wheel_holds_the_three_packages_with_their_types_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == TOP_LEVEL
    assert {f"{top}/py.typed" for top in TOP_LEVEL} <= set(names)
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    ours = {
        name.partition("/")[2]
        for name in tracked
        if name.endswith((".py", ".pyi")) and name.split("/")[0] in ("client", "server")
    }
    assert ours - set(names) == set()


def test_the_base_install_is_the_client_and_pulls_in_nothing_heavy(
    base: Path, environment: dict[str, str]
) -> None:
    listed = _run([str(base / "python"), "-m", "pip", "list", "--format", "json"], environment)
    names = {re.sub(r"[-_.]+", "-", one["name"]).lower() for one in json.loads(listed.stdout)}
    assert names - {"pip", "setuptools", "wheel", "rankbook"} <= BASE


def test_the_base_install_runs_the_client_and_its_command(
    base: Path, environment: dict[str, str]
) -> None:
    assert "doctor" in _run([str(base / "rankbook"), "--help"], environment).stdout
    text = (
        "import rankbook, rankbook.transfer\n"
        "client = rankbook.Client('127.0.0.1:1', timeout_s=0.1)\n"
        "try:\n    client.status()\nexcept rankbook.Unavailable:\n    print('away')\n"
    )
    assert _run([str(base / "python"), "-W", "error", "-c", text], environment).stdout == "away\n"


@pytest.mark.parametrize("command", [["rankbookd"], ["python", "-m", "rankbook_server"]])
def test_the_server_without_its_extra_says_what_to_install(
    base: Path, environment: dict[str, str], command: list[str]
) -> None:
    done = _run([str(base / command[0]), *command[1:], "--help"], environment, code=1)
    assert "pip install 'rankbook[server]'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["export", "import"])
def test_moving_a_book_without_the_server_says_what_to_install(
    base: Path, environment: dict[str, str], command: str
) -> None:
    done = _run([str(base / "rankbook"), command, "sqlite:a.db"], environment, code=1)
    assert "pip install 'rankbook[server]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_proxy_without_its_extra_says_what_to_install(
    base: Path, environment: dict[str, str]
) -> None:
    command = [str(base / "python"), "-m", "rankbook_vllm.proxy", "--help"]
    done = _run(command, environment, code=1)
    assert "pip install 'rankbook[vllm]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_with_its_extra_the_server_serves(
    base: Path, wheel: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    python = str(base / "python")
    _run([python, "-m", "pip", "install", "-q", f"{wheel}[server]"], environment)
    assert "--store" in _run([str(base / "rankbookd"), "--help"], environment).stdout
    ready = tmp_path / "ready.json"
    server = subprocess.Popen(
        [
            *(str(base / "rankbookd"), "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0"),
            *("--store", "memory:", "--ready-file", str(ready)),
        ],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not ready.exists():
            with pytest.raises(subprocess.TimeoutExpired):
                server.wait(0.05)
        address = json.loads(ready.read_text())["grpc"]
        shown = _run([str(base / "rankbook"), "-s", address, "status", "-o", "json"], environment)
        assert json.loads(shown.stdout)["store"] == "memory:"
    finally:
        server.terminate()
        assert server.wait(20) == 0
