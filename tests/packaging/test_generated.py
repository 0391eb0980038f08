"""The committed code is what proto/ gives, and imports where vLLM lives."""

import filecmp
import os
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
ROOTS = ("client", "server")
GENERATED = ("client/rankbook/v1", "server/rankbook_server/etcd")
OURS = "rankbook/v1/"
"""Where our contract is; the other names and types are etcd's."""


def _google_include() -> str:
    import google.rpc

    return str(Path(next(iter(google.rpc.__path__))).parents[1])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[descriptor_pb2.FileDescriptorProto]:
    out = tmp_path_factory.mktemp("descriptors") / "set.binpb"
    protos = sorted(str(p.relative_to(ROOT / "proto")) for p in ROOT.glob("proto/**/*.proto"))
    done = protoc.main(
        [
            "protoc",
            f"-I{ROOT / 'proto'}",
            f"-I{_google_include()}",
            f"-I{Path(protoc.__file__).parent / '_proto'}",
            "--include_source_info",
            f"--descriptor_set_out={out}",
            *protos,
        ]
    )
    assert done == 0
    found = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes())
    return list(found.file)


def test_committed_code_is_what_the_pinned_generator_gives(tmp_path: Path) -> None:
    for folder in GENERATED:
        (tmp_path / folder).mkdir(parents=True)
    subprocess.run(
        [str(ROOT / "tests/packaging/generate.sh"), *(str(tmp_path / r) for r in ROOTS)],
        cwd=ROOT,
        check=True,
        env={**os.environ, "RANKBOOK_BIN": str(Path(sys.executable).parent)},
    )
    for folder in GENERATED:
        fresh = {p.name for p in (tmp_path / folder).glob("*_pb2*")}
        committed = {p.name for p in (ROOT / folder).glob("*_pb2*")}
        assert fresh
        assert fresh == committed
        _, different, errors = filecmp.cmpfiles(
            tmp_path / folder, ROOT / folder, sorted(fresh), shallow=False
        )
        assert (different, errors) == ([], []), "run `make proto` and commit what it changes"


def _elements(file: descriptor_pb2.FileDescriptorProto) -> dict[tuple[int, ...], str]:
    """Every element of a file that needs a comment, by its source path."""
    found: dict[tuple[int, ...], str] = {}

    def message(path: tuple[int, ...], kind: descriptor_pb2.DescriptorProto, name: str) -> None:
        found[path] = name
        for i, field in enumerate(kind.field):
            found[(*path, 2, i)] = f"{name}.{field.name}"
        for i, nested in enumerate(kind.nested_type):
            if not nested.options.map_entry:
                message((*path, 3, i), nested, f"{name}.{nested.name}")
        for i, oneof in enumerate(kind.oneof_decl):
            found[(*path, 8, i)] = f"{name}.{oneof.name}"

    for i, kind in enumerate(file.message_type):
        message((4, i), kind, kind.name)
    for i, enum in enumerate(file.enum_type):
        found[(5, i)] = enum.name
        for j, value in enumerate(enum.value):
            found[(5, i, 2, j)] = f"{enum.name}.{value.name}"
    for i, service in enumerate(file.service):
        found[(6, i)] = service.name
        for j, method in enumerate(service.method):
            found[(6, i, 2, j)] = f"{service.name}.{method.name}"
    return found


def test_every_element_of_the_contract_has_a_comment(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    bare = []
    for file in files:
        comments = {
            tuple(loc.path): loc.leading_comments.strip() for loc in file.source_code_info.location
        }
        bare += [
            f"{file.name}: {name}"
            for path, name in _elements(file).items()
            if not comments.get(path)
        ]
    assert bare == []


def test_enums_start_unspecified_and_durations_are_durations(
    files: list[descriptor_pb2.FileDescriptorProto],
) -> None:
    wrong = []
    for file in files:
        if not file.name.startswith(OURS):
            continue
        for enum in file.enum_type:
            if not enum.value[0].name.endswith("_UNSPECIFIED") or enum.value[0].number != 0:
                wrong.append(enum.name)
        for kind in file.message_type:
            for field in kind.field:
                timed = any(w in field.name for w in ("ttl", "timeout", "interval", "deadline"))
                plain = field.type != descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
                if timed and plain and not field.name.endswith("_millis"):
                    wrong.append(f"{kind.name}.{field.name}")
    assert wrong == []


def test_every_call_is_on_the_session(files: list[descriptor_pb2.FileDescriptorProto]) -> None:
    (service,) = [s for f in files for s in f.service]
    messages = {m.name: m for f in files for m in f.message_type}
    requests = {f.type_name.rpartition(".")[2] for f in messages["SessionRequest"].field}
    replies = {f.type_name.rpartition(".")[2] for f in messages["SessionResponse"].field}
    for method in service.method:
        if method.name == "Session":
            continue
        assert method.input_type.rpartition(".")[2] in requests, method.name
        assert method.output_type.rpartition(".")[2] in replies, method.name


USE = """
import warnings
warnings.simplefilter("error")
import google.protobuf
from rankbook import v1
from rankbook.v1 import registry_pb2_grpc
record = v1.WorkerRecord(engine_id="e", role=v1.ROLE_PRODUCER, slot=v1.Slot(pp_rank=1))
record.labels["zone"] = "a"
request = v1.SessionRequest(request_id=1, register_workers={"records": [record], "sequence": 1})
assert v1.SessionRequest.FromString(request.SerializeToString()) == request
from rankbook import convert
assert convert.from_json(convert.to_json(record), v1.WorkerRecord) == record
from rankbook_server.etcd import etcd_pb2
txn = etcd_pb2.TxnRequest(success=[{"put": {"key": b"k", "value": b"v"}}])
assert txn.SerializeToString() == bytes([18, 8, 18, 6, 10, 1, 107, 18, 1, 118])
print(google.protobuf.__version__, registry_pb2_grpc.RegistryStub.__name__)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("wanted", ["5.29.6", "6.33", "7.36"])
def test_the_contract_imports_on_protobuf(wanted: str, tmp_path: Path) -> None:
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env/bin/python"
    pin = f"=={wanted}" if wanted.count(".") == 2 else f"=={wanted}.*"
    subprocess.run(
        [python, "-m", "pip", "install", "-q", f"protobuf{pin}", "grpcio", "grpcio-status"],
        check=True,
        timeout=500,
    )
    done = subprocess.run(
        [python, "-c", USE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / root) for root in ROOTS)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(wanted)
