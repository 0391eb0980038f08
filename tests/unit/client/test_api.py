"""Claims about what `import rankbook` gives."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
import threading
import tomllib
from pathlib import Path

import pytest

import rankbook
from rankbook._ids import make_id

ROOT = Path(rankbook.__file__).parents[2]
FACES = (rankbook.Client, rankbook.AsyncClient)
PURE = (
    *("_attempts", "_session", "_retry", "_cache", "_calls", "_scripts"),
    *("_keeper", "_status", "_replies"),
)


def test_every_listed_name_is_there_and_nothing_else_is_public():
    listed = set(rankbook.__all__)
    for name in listed:
        assert getattr(rankbook, name) is not None
    modules = {p.stem for p in Path(rankbook.__file__).parent.iterdir()}
    public = {n for n in vars(rankbook) if not n.startswith("_")} - modules
    assert public - listed <= {"Any", "TYPE_CHECKING", "annotations", "importlib"}
    assert len(listed) == len(rankbook.__all__)


def test_the_version_is_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert rankbook.__version__ == project["version"]


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_name"):
        rankbook.no_such_name  # noqa: B018


def test_importing_it_and_a_registration_loads_no_grpc():
    text = (
        "import sys, rankbook\n"
        "assert 'grpc' not in sys.modules and 'google.protobuf' not in sys.modules\n"
        "rankbook.Registration, rankbook.RankbookError, rankbook.Topology\n"
        "assert 'grpc' not in sys.modules and 'asyncio' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", text], check=True)


def public_methods(face: type) -> dict:
    return {
        name: member
        for name, member in vars(face).items()
        if not name.startswith("_") and callable(member)
    }


def test_both_faces_have_the_same_methods_with_the_same_parameters_and_words():
    blocking, asyncio_face = (public_methods(face) for face in FACES)
    assert set(blocking) == set(asyncio_face)
    for name, method in blocking.items():
        other = asyncio_face[name]
        ours, theirs = inspect.signature(method), inspect.signature(other)
        assert ours.parameters == theirs.parameters, name
        if name != "watch":
            assert ours.return_annotation == theirs.return_annotation, name
            assert inspect.iscoroutinefunction(other), name
        assert method.__doc__ == other.__doc__, name
    assert inspect.signature(FACES[0]).parameters == inspect.signature(FACES[1]).parameters


def test_every_call_of_a_face_has_a_timeout_of_its_own():
    for face in FACES:
        for name, method in public_methods(face).items():
            if name not in ("close", "watch"):
                assert "timeout_s" in inspect.signature(method).parameters, name


def test_every_public_thing_says_what_it_is():
    for name in rankbook.__all__:
        thing = getattr(rankbook, name)
        if inspect.isclass(thing) or inspect.isfunction(thing):
            assert thing.__doc__, name
        if inspect.isclass(thing) and name in ("Registration", "TopologyView", "Client"):
            for method, member in public_methods(thing).items():
                assert member.__doc__, f"{name}.{method}"


@pytest.mark.parametrize("module", PURE)
def test_what_decides_imports_nothing_that_waits(module):
    path = Path(rankbook.__file__).parent / f"{module}.py"
    forbidden = {
        *("grpc", "asyncio", "threading", "time", "random", "socket", "os", "logging"),
        *("subprocess", "queue", "selectors"),
    }
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        assert not {name.partition(".")[0] for name in names} & forbidden


def test_only_one_module_of_the_client_reads_a_clock():
    reads = re.compile(r"\btime\.(time|monotonic|perf_counter)\(|datetime\.now\(")
    for path in Path(rankbook.__file__).parent.glob("_*.py"):
        # A docstring may name the caller's own clock.
        lines = [line for line in path.read_text().splitlines() if "`time." not in line]
        assert path.name == "_clock.py" or not reads.search("\n".join(lines)), path.name


def test_making_anything_public_opens_and_starts_nothing():
    before = threading.active_count()
    client = rankbook.Client("127.0.0.1:1")
    rankbook.AsyncClient("127.0.0.1:1")
    rankbook.TopologyView(client)
    rankbook.Registration([], endpoints="127.0.0.1:1")
    rankbook.TLS()
    rankbook.RetryPolicy()
    assert threading.active_count() == before
    client.close()


def test_ids_are_well_formed_unique_and_sort_by_time():
    made = [rankbook.new_id() for _ in range(1000)]
    assert len(set(made)) == 1000
    assert all(re.fullmatch(r"[0-9A-Z]{26}", one) for one in made)
    assert make_id(1, b"\xff" * 10) < make_id(2, b"\x00" * 10)
    # Crockford's alphabet: 5 bits a character, the instant first.
    assert make_id(0, b"\x00" * 10) == "0" * 26
    assert make_id(2**48 - 1, b"\xff" * 10) == "7" + "Z" * 25
