from __future__ import annotations

import pytest

from rankbook.cli.settings import TABLE, resolve
from rankbook.errors import BadRequest


def origins(flags: dict[str, str], environ: dict[str, str]) -> dict[str, tuple[str, str]]:
    values = resolve(flags, environ).values
    return {value.setting.name: (value.value, value.origin) for value in values}


@pytest.mark.parametrize("setting", TABLE, ids=lambda setting: setting.name)
def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default(setting: object) -> None:
    name, variable = setting.name, setting.variable  # type: ignore[attr-defined]
    samples = {
        "server": ("a:1", "b:2"),
        "namespace": ("one", "two"),
        "output": ("json", "wide"),
        "timeout": ("7s", "8s"),
        "token": ("x", "y"),
    }
    flag, env = samples[name]
    assert origins({name: flag}, {variable: env})[name] == (flag, f"flag --{name}")
    assert origins({}, {variable: env})[name] == (env, f"env RANKBOOK_{name.upper()}")
    assert origins({}, {})[name][1] == "default"


def test_an_empty_variable_counts_as_not_set() -> None:
    assert origins({}, {"RANKBOOK_SERVER": ""})["server"] == ("127.0.0.1:7420", "default")


def test_several_endpoints_stand_with_commas() -> None:
    assert resolve({"server": "a:1, b:2,"}, {}).endpoints == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"RANKBOOK_OUTPUT": "yaml"}, r"output is 'yaml' \(env RANKBOOK_OUTPUT\)"),
        ({"RANKBOOK_TIMEOUT": "soon"}, r"timeout is 'soon' \(env RANKBOOK_TIMEOUT\)"),
        ({"RANKBOOK_TIMEOUT": "-1s"}, "above zero"),
        ({"RANKBOOK_SERVER": ","}, "HOST:PORT"),
    ],
)
def test_a_bad_value_names_where_it_came_from(environ: dict[str, str], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        resolve({}, environ)


def test_a_token_is_never_shown() -> None:
    token = next(v for v in resolve({"token": "t0p"}, {}).values if v.setting.name == "token")
    assert token.shown == "(set)"
