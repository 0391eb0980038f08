"""What needs no registry: usage, help, settings, completion scripts."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from click import Command, Group

from rankbook.cli.main import cli, run


def commands(group: Group, prefix: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], Command]]:
    found: list[tuple[tuple[str, ...], Command]] = []
    for name, command in group.commands.items():
        if isinstance(command, Group):
            found += commands(command, (*prefix, name))
        else:
            found.append(((*prefix, name), command))
    return found


@pytest.mark.parametrize(
    ("path", "command"), commands(cli), ids=lambda v: "-".join(v) if isinstance(v, tuple) else ""
)
def test_every_command_names_its_rpc_and_has_an_example_that_parses(
    path: tuple[str, ...],
    command: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = command.help or ""
    assert re.search(r"^ *RPC: \w", text, re.M), "names no RPC"
    examples = re.findall(r"rankbook (.*)$", text.split("Example:")[1], re.M)
    assert examples
    monkeypatch.chdir(tmp_path)
    (tmp_path / "records.json").write_text("[]")
    for example in examples:
        words = shlex.split(re.split(r' [|>] |\)"$', example)[0])
        assert tuple(words[: len(path)]) == path
        with command.make_context(path[-1], words[len(path) :]):
            pass


def test_every_command_takes_the_output_flag_after_its_name() -> None:
    without = [
        path
        for path, command in commands(cli)
        if path != ("completion",) and not any(p.name == "output" for p in command.params)
    ]
    assert without == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus", "-o", "json"],
        ["-o", "json", "topology"],
        ["topology", "e", "--bogus", "--output=json"],
        ["-ojson", "plan", "--from", "p"],
        ["plan", "--from", "p", "--to", "d", "--tp-size", "2", "-o", "json"],
        ["plan", "--from", "p", "--tp-size", "2", "--layers", "a,b", "-o", "json"],
        ["engines", "--label", "novalue", "-o", "json"],
        ["wait", "e", "--timeout", "soon", "-o", "json"],
        ["wait", "e", "--timeout", "-3s", "-o", "json"],
        ["--timeout", "0", "engines", "-o", "json"],
        ["watch", "--from-revision", "5", "-o", "json"],
        ["register", "-f", "/nonexistent/r.json", "-o", "json"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_exit_2_with_the_object_on_stdout(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    data, words = capsys.readouterr()
    error = json.loads(data)["error"]
    assert set(error) == {"reason", "message", "metadata", "code"}
    assert (error["reason"], error["code"]) == ("INVALID_REQUEST", "INVALID_ARGUMENT")
    assert words.startswith("rankbook: ")


def test_wrong_usage_without_json_leaves_stdout_empty(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bogus"]) == 2
    data, words = capsys.readouterr()
    assert data == ""
    assert "No such command 'bogus'" in words


def test_choices_of_a_missing_argument_stand_on_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(["completion"]) == 2
    assert "Choose from: bash, zsh, fish. See: " in capsys.readouterr().err


def test_a_bad_variable_is_exit_2_and_says_so_in_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKBOOK_TIMEOUT", "soon")
    assert run(["engines", "-o", "json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["metadata"]["origin"] == (
        "env RANKBOOK_TIMEOUT"
    )


def test_a_flag_after_the_command_wins_over_one_before_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKBOOK_NAMESPACE", "from-env")
    assert run(["-s", "a:1", "-o", "table", "config", "show", "-s", "b:2", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)["settings"]
    values = {one["name"]: (one["value"], one["origin"]) for one in shown}
    assert values["server"] == ("b:2", "flag --server")
    assert values["namespace"] == ("from-env", "env RANKBOOK_NAMESPACE")
    assert values["timeout"] == ("5s", "default")


def test_a_token_is_not_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKBOOK_TOKEN", "s3cret")
    assert run(["config", "show", "-o", "json"]) == 0
    assert "s3cret" not in capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_call_the_command_back(
    shell: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["completion", shell]) == 0
    assert f"_RANKBOOK_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_help_and_version_are_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    assert run(["--version"]) == 0
    assert run(["topology", "--help"]) == 0
    assert "Exits 0 for READY" in capsys.readouterr().out
