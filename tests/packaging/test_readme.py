"""The README's promises: its tour runs as written, its claims name what is there."""

import contextlib
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankbook.cli.main import cli
from rankbook.errors import TABLE, BadRequest
from rankbook_vllm.config import Settings, load

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BIN = Path(sys.executable).parent
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("deploy/**/*.md"), *ROOT.glob("vllm_integration/*.md")]
TOUR = re.findall(r"<!-- tour -->\n```console\n(.*?)```", README, re.S)


def _commands() -> list[tuple[str, int, bool, list[str]]]:
    """Every command of the tour: text, exit code, whether it stays in the
    background, and the lines the README shows of its output."""
    found: list[tuple[str, int, bool, list[str]]] = []
    for block in TOUR:
        for line in block.splitlines():
            if not line.startswith("$ "):
                found[-1][3].append(line)
                continue
            code = re.search(r"# exit (\d+)", line)
            text = line[2:].split("  #")[0].strip()
            found.append(
                (
                    text.removesuffix("&").strip(),
                    int(code[1]) if code else 0,
                    text.endswith("&"),
                    [],
                )
            )
    return found


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RANKBOOK_")}
    return {**clean, "PATH": f"{BIN}:{os.environ['PATH']}", "HOME": str(tmp_path)}


def _free_port_server(text: str) -> str:
    # The README's ports may be taken on a machine that runs tests.
    return text.replace("rankbookd ", "rankbookd --listen 127.0.0.1:0 --http 127.0.0.1:0 ")


def _shape(line: str) -> str:
    """A line of output without what differs from run to run."""
    return re.sub(r"\s+", " ", re.sub(r"\b\d+s\b", "Ns", line)).strip()


@pytest.mark.timeout(180)
def test_the_tour_runs_as_written(tmp_path: Path, environment: dict[str, str]) -> None:
    commands = _commands()
    assert len(commands) > 15
    background: list[subprocess.Popen[bytes]] = []
    ready = tmp_path / "ready.json"
    try:
        for text, code, stays, shown in commands:
            if stays:
                background.append(
                    subprocess.Popen(
                        ["bash", "-c", f"exec {_free_port_server(text)}"],
                        cwd=tmp_path,
                        env=environment,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                    )
                )
                if text.startswith("rankbookd"):
                    _await_file(ready, background[-1])
                    environment["RANKBOOK_SERVER"] = json.loads(ready.read_text())["grpc"]
                continue
            done = subprocess.run(
                ["bash", "-c", text],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == code, (text, done.stdout, done.stderr)
            printed = {_shape(line) for line in done.stdout.splitlines()}
            for line in shown:
                assert line == "..." or _shape(line) in printed, (text, line, done.stdout)
    finally:
        for process in reversed(background):
            process.send_signal(signal.SIGTERM)
        codes = [process.wait(20) for process in background]
    assert codes == [0] * len(background)


def _await_file(path: Path, process: subprocess.Popen[bytes]) -> None:
    # The server renames the file into place, so a directory watch would do; its
    # end is what must not be waited for in vain.
    while not path.exists():
        try:
            process.wait(0.02)
        except subprocess.TimeoutExpired:
            continue
        raise AssertionError(f"rankbookd ended with {process.returncode}")


def test_the_python_example_runs_against_a_server(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.S)
    ready = tmp_path / "ready.json"
    server = subprocess.Popen(
        [
            BIN / "rankbookd",
            "--listen",
            "127.0.0.1:0",
            "--http",
            "off",
            "--store",
            "memory:",
            "--ready-file",
            str(ready),
        ],
        env=environment,
        stderr=subprocess.DEVNULL,
    )
    try:
        _await_file(ready, server)
        address = json.loads(ready.read_text())["grpc"]
        engines = subprocess.Popen(
            [BIN / "rankbook", "-s", address, "simulate", "--pp", "2", "--group", "prefill-a"],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            assert "127.0.0.1:7420" in code
            done = subprocess.run(
                [sys.executable, "-c", code.replace("127.0.0.1:7420", address)],
                env=environment,
                capture_output=True,
                text=True,
                timeout=60,
            )
        finally:
            engines.send_signal(signal.SIGTERM)
            engines.wait(20)
        assert done.returncode == 0, done.stderr
        assert len(done.stdout.splitlines()) == 2
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)


def test_every_file_the_documents_link_to_is_there() -> None:
    broken = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            if not (page.parent / target).exists():
                broken.append(f"{page.name}: {target}")
    assert broken == []


def _connector_settings(text: str) -> list[dict[str, Any]]:
    """Every `"rankbook": {...}` that a page or a docstring shows."""
    found = re.findall(r'"rankbook": (\{.*?\})', text, re.S)
    return [json.loads(re.sub(r"\s+", " ", one)) for one in found]


def test_every_connector_configuration_that_is_shown_is_one_that_loads() -> None:
    pages = [*PAGES, *ROOT.glob("vllm_integration/rankbook_vllm/*.py")]
    shown = [one for page in pages for one in _connector_settings(page.read_text())]
    assert len(shown) >= 3
    for settings in shown:
        assert load(settings, {}).group == "prefill-a"


def test_the_table_of_connector_settings_is_the_table_that_is_read() -> None:
    page = (ROOT / "vllm_integration/README.md").read_text()
    (section,) = re.findall(r"^## Settings\n(.*?)^## ", page, re.M | re.S)
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", section, re.M)
    fields = {field.name for field in dataclasses.fields(Settings)}
    assert {name for name, _ in rows} == fields
    for name, variable in rows:
        if not variable:
            continue
        # A value that no setting takes is refused by the name it came under.
        with contextlib.suppress(BadRequest):
            assert load({}, {variable: "x"}) != Settings(), name


def test_every_command_but_completion_takes_an_output_form_and_the_changelog_names_all() -> None:
    groups = {"config": cli.commands["config"]}
    for name, command in cli.commands.items():
        for one in groups[name].commands.values() if name in groups else (command,):  # type: ignore[attr-defined]
            takes = any("--output" in parameter.opts for parameter in one.params)
            assert takes is (name != "completion"), name
    (added,) = re.findall(r"operator's tool: (.*?)\.\n", (ROOT / "CHANGELOG.md").read_text(), re.S)
    named = {name.split()[0] for name in re.findall(r"`([a-z ]+)`", added)}
    assert named == set(cli.commands)


def test_the_exit_codes_that_are_promised_are_those_of_the_table() -> None:
    (promised,) = re.findall(r"exits with 0 done, (.*?) interrupted\.", README, re.S)
    codes = {int(code) for code in re.findall(r"\b(\d+)\b", promised)}
    assert codes == {rule.exit_code for rule in TABLE.values()}


def test_every_make_target_the_documents_name_exists() -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = README + (ROOT / "CONTRIBUTING.md").read_text()
    blocks = "\n".join(re.findall(r"```\n(.*?)```", text, re.S)) + "\n".join(
        re.findall(r"`(make [a-z0-9 -]+)`", text)
    )
    named = {
        t for words in re.findall(r"make ([a-z0-9 -]+?)(?: #|$|\n)", blocks) for t in words.split()
    }
    assert named
    assert named <= targets


def test_the_shipped_settings_file_is_one_the_server_takes(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [BIN / "rankbookd", "--config", str(ROOT / "deploy/rankbookd.toml"), "--show-config"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert "/var/lib/rankbook/book.db" in done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd on this machine")
def test_the_systemd_unit_is_well_formed() -> None:
    unit = ROOT / "deploy/systemd/rankbookd.service"
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        timeout=30,
    )
    lines = [x for x in done.stderr.splitlines() if "is not executable" not in x]
    assert [x for x in lines if "rankbookd.service" in x] == []
