"""Claims about TLS between the client and a server with a certificate."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from concurrent import futures

import grpc
import pytest

import rankbook
from rankbook import v1

NAMES = "subjectAltName=DNS:registry.test"


def openssl(*arguments: str) -> None:
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """An authority, and a server's and a client's certificate of it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    ca = ["-CA", str(folder / "ca.pem"), "-CAkey", str(folder / "ca.key")]
    for name, issuer in (("ca", []), ("server", ca), ("client", ca)):
        openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-days", "2", "-subj", f"/CN={name}"),
            *(("-addext", NAMES) if name == "server" else ()),
            *(("-addext", "basicConstraints=critical,CA:FALSE") if issuer else ()),
            *("-keyout", str(folder / f"{name}.key"), "-out", str(folder / f"{name}.pem")),
            *issuer,
        )
    return folder


@pytest.fixture
def server(certificates):
    """Answers GetStatus to who has a certificate of the authority."""
    handler = grpc.unary_unary_rpc_method_handler(
        lambda request, context: v1.GetStatusResponse(version="secure"),
        request_deserializer=v1.GetStatusRequest.FromString,
        response_serializer=v1.GetStatusResponse.SerializeToString,
    )
    one = grpc.server(futures.ThreadPoolExecutor(4))
    one.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("rankbook.v1.Registry", {"GetStatus": handler}),)
    )
    credentials = grpc.ssl_server_credentials(
        [((certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes())],
        root_certificates=(certificates / "ca.pem").read_bytes(),
        require_client_auth=True,
    )
    port = one.add_secure_port("127.0.0.1:0", credentials)
    one.start()
    yield f"127.0.0.1:{port}"
    one.stop(0).wait()


def tls(folder, **changes):
    given = {
        "ca_file": folder / "ca.pem",
        "cert_file": folder / "client.pem",
        "key_file": folder / "client.key",
        "server_name": "registry.test",
    }
    return rankbook.TLS(**{**given, **changes})


def test_both_sides_prove_who_they_are(server, certificates):
    with rankbook.Client(server, tls=tls(certificates)) as client:
        assert client.status().version == "secure"

    async def run() -> str:
        async with rankbook.AsyncClient(server, tls=tls(certificates)) as client:
            return (await client.status()).version

    assert asyncio.run(run()) == "secure"


@pytest.mark.parametrize(
    "changes",
    [
        {"server_name": "someone.else"},
        {"ca_file": None},
        {"cert_file": None, "key_file": None},
    ],
)
def test_who_proves_too_little_is_not_talked_to(server, certificates, changes):
    with (
        rankbook.Client(server, tls=tls(certificates, **changes), timeout_s=2) as client,
        pytest.raises(rankbook.Unavailable),
    ):
        client.status()
