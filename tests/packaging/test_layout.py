"""The rooms: where things are, and what they may be called."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import rankbook
from rankbook.cli.settings import resolve as command_settings
from rankbook_server.config import Settings as ServerSettings
from rankbook_vllm.config import load as connector_settings

ROOT = Path(__file__).parents[2]
ROOMS = {"proto", "server", "client", "vllm_integration", "tests", "deploy"}
LONG_WITH_REASON = {
    "client/rankbook/_calls.py": "one row a call: a table, read by row",
    "tests/contract/store_contract.py": "one suite that every store runs whole",
    "tests/unit/core/test_rules.py": "one state machine over all ten rules",
}


def _tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


def _modules() -> list[str]:
    return [name for name in _tracked() if name.endswith(".py") and "_pb2" not in name]


def test_top_level_holds_the_agreed_folders_only() -> None:
    folders = {name.split("/")[0] for name in _tracked() if "/" in name}
    assert folders - {".ci"} <= ROOMS


def test_top_level_folders_hold_no_init_file() -> None:
    assert [room for room in ROOMS if (ROOT / room / "__init__.py").exists()] == []


def test_no_module_has_a_name_that_says_nothing() -> None:
    vague = re.compile(r"(^|/)_?(utils?|common|helpers?|misc|manager)(/|\.py$)")
    assert [name for name in _tracked() if vague.search(name)] == []


def test_modules_stay_small() -> None:
    long = {
        name: count
        for name in _modules()
        if (count := len((ROOT / name).read_text().splitlines())) > 600
        and name not in LONG_WITH_REASON
    }
    assert long == {}


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert rankbook.__version__ == version
    newest = re.search(r"^## \[?(\d+\.\d+\.\d+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == version


def test_client_command_server_and_connectors_meet_at_one_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("RANKBOOK_SERVER", raising=False)
    with rankbook.Client() as client:
        assert client.endpoints == command_settings({}, {}).endpoints
        assert client.endpoints == connector_settings({}, {}).endpoints
        assert client.endpoints == (ServerSettings().listen,)


def test_the_source_archive_names_its_parts_from_the_root() -> None:
    tool = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    parts = tool["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [part for part in parts if not part.startswith("/")] == []
    assert [part for part in parts if not (ROOT / part[1:]).exists()] == []


def test_every_dependency_has_a_reason() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[\[<>=!~ ]", dep)[0] for dep in wanted}
    decisions = (ROOT / "DECISIONS.md").read_text()
    assert sorted(name for name in names if f"`{name}`" not in decisions) == []
