"""What deploy/ ships is taken by the programs it is for."""

from __future__ import annotations

import re
import subprocess
import threading
import tomllib
import urllib.request
from pathlib import Path

import pytest
from tests.contract.etcd_server import NoProgramError, free_ports, program, versions

from rankbook_server.config import Settings, load

DEPLOY = Path(__file__).parents[2] / "deploy"


@pytest.mark.parametrize("label", versions())
def test_etcd_takes_its_settings_and_compacts_by_itself(label: str, tmp_path: Path) -> None:
    try:
        binary = program(label)
    except NoProgramError as missing:
        pytest.skip(str(missing))
    text = (DEPLOY / "etcd.conf.yml").read_text()
    assert re.search(r"^auto-compaction-mode: periodic$", text, re.M)
    client, peer = free_ports(2)
    text = text.replace("127.0.0.1:2379", f"127.0.0.1:{client}")
    text = text.replace("127.0.0.1:2380", f"127.0.0.1:{peer}")
    text = text.replace("/var/lib/etcd", str(tmp_path / "data"))
    # So short that the first compaction comes within the test.
    text = re.sub(r"(?m)^auto-compaction-retention: .*$", "auto-compaction-retention: 1s", text)
    settings = tmp_path / "etcd.conf.yml"
    settings.write_text(text)
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen([binary, "--config-file", settings], stdout=out, stderr=out)
    try:
        pause = threading.Event()
        for _ in range(600):
            assert process.poll() is None, log.read_text()
            if re.search("start(ing|ed).*auto.*compaction", log.read_text(), re.I):
                break
            pause.wait(0.05)
        else:
            raise AssertionError(f"no compaction:\n{log.read_text()}")
        with urllib.request.urlopen(f"http://127.0.0.1:{client}/health", timeout=5) as reply:
            assert b'"health":"true"' in reply.read().replace(b" ", b"")
    finally:
        process.kill()
        process.wait()


def test_the_servers_settings_are_ones_that_it_has() -> None:
    path = DEPLOY / "rankbookd.toml"
    commented = re.findall(r"^# ([a-z_]+) = ", path.read_text(), re.M)
    assert set(commented) | set(tomllib.loads(path.read_text())) <= set(Settings.model_fields)
    assert load({}, {}, path).settings.store.startswith("sqlite:")
