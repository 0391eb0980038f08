"""Settings: where they come from, and what they may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankbook.errors import BadRequest
from rankbook_server.config import Settings, load, parse_listen


def test_every_setting_has_help_and_an_origin() -> None:
    assert [n for n, field in Settings.model_fields.items() if not field.description] == []
    config = load({}, {}, None)
    assert set(config.origins) == set(Settings.model_fields)
    assert set(config.origins.values()) == {"default"}
    assert len(config.lines()) == len(Settings.model_fields)


def test_a_setting_not_given_is_not_the_same_as_false(tmp_path: Path) -> None:
    file = tmp_path / "f.toml"
    file.write_text("insecure = true\n")
    assert load({}, {}, file).settings.insecure
    assert not load({}, {"RANKBOOK_INSECURE": "false"}, file).settings.insecure


def test_an_empty_variable_counts_as_not_set() -> None:
    names = {f"RANKBOOK_{name.upper()}": "" for name in Settings.model_fields}
    config = load({}, names, None)
    assert config.settings == Settings()
    assert set(config.origins.values()) == {"default"}


def test_an_unrelated_variable_of_ours_is_left_alone() -> None:
    config = load({}, {"RANKBOOK_SERVER": "elsewhere:1", "RANKBOOK_TOKEN": "t"}, None)
    assert config.settings == Settings()


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("127.0.0.1:0", "127.0.0.1", 0), ("[::1]:7420", "::1", 7420), ("node-7:1", "node-7", 1)],
)
def test_an_address_reads_and_shows(text: str, host: str, port: int) -> None:
    listen = parse_listen(text)
    assert (listen.host, listen.port) == (host, port)
    assert str(listen) == text


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:65536", "host:-1"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_listen(text)


@pytest.mark.parametrize(
    ("listen", "loopback"),
    [("127.0.0.2:1", True), ("localhost:1", True), ("[::1]:1", True), ("10.0.0.1:1", False)],
)
def test_only_loopback_is_safe_without_tls(listen: str, loopback: bool) -> None:
    assert parse_listen(listen).is_loopback is loopback
    if loopback:
        assert load({"listen": listen}, {}, None).settings.listen == listen
        return
    with pytest.raises(BadRequest, match="insecure"):
        load({"listen": listen}, {}, None)
    assert load({"listen": listen, "insecure": True}, {}, None).settings.listen == listen


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(BadRequest, match="no-such-file"):
        load({}, {}, tmp_path / "no-such-file")


def test_a_wrong_value_is_shown_with_its_origin() -> None:
    with pytest.raises(BadRequest, match=r"RANKBOOK_MAX_CALLS.*") as caught:
        load({}, {"RANKBOOK_MAX_CALLS": "many"}, None)
    assert "'many'" in str(caught.value)
