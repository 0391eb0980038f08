"""TLS: who has no certificate of the right authority is not served."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import grpc
import pytest

from rankbook import v1
from rankbook.v1 import registry_pb2_grpc

OPENSSL = shutil.which("openssl")
pytestmark = pytest.mark.skipif(OPENSSL is None, reason="needs openssl to make certificates")


def openssl(*arguments: str, folder: Path) -> None:
    assert OPENSSL is not None
    subprocess.run([OPENSSL, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and a certificate for a server and for a client."""
    folder = tmp_path_factory.mktemp("pki")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    openssl(
        *("req", "-x509", *curve, "-days", "2", "-subj", "/CN=test authority"),
        *("-keyout", "ca.key", "-out", "ca.pem"),
        folder=folder,
    )
    (folder / "ext").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name in ("server", "client"):
        openssl(
            *("req", *curve, "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
            folder=folder,
        )
        openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key"),
            *("-CAcreateserial", "-days", "2", "-extfile", "ext", "-out", f"{name}.pem"),
            folder=folder,
        )
    return folder


def status(address: str, credentials: grpc.ChannelCredentials | None) -> Any:
    """What the server says of itself, over a channel of its own."""
    if credentials is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(address, credentials)
    with channel:
        return registry_pb2_grpc.RegistryStub(channel).GetStatus(v1.GetStatusRequest(), timeout=5)


def test_a_server_with_a_certificate_serves_who_trusts_it_and_no_plain_text(
    rankbookd: Any, pki: Path
) -> None:
    server = rankbookd("--tls-cert", str(pki / "server.pem"), "--tls-key", str(pki / "server.key"))
    trusting = grpc.ssl_channel_credentials((pki / "ca.pem").read_bytes())
    assert status(server.grpc, trusting).store_available
    for credentials in (None, grpc.ssl_channel_credentials()):
        with pytest.raises(grpc.RpcError) as caught:
            status(server.grpc, credentials)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_client_without_a_certificate_of_the_authority_is_not_served(
    rankbookd: Any, pki: Path
) -> None:
    server = rankbookd(
        *("--tls-cert", str(pki / "server.pem"), "--tls-key", str(pki / "server.key")),
        *("--tls-client-ca", str(pki / "ca.pem")),
        listen="127.0.0.1:0",
    )
    authority = (pki / "ca.pem").read_bytes()
    known = grpc.ssl_channel_credentials(
        authority, (pki / "client.key").read_bytes(), (pki / "client.pem").read_bytes()
    )
    assert status(server.grpc, known).store_available
    with pytest.raises(grpc.RpcError) as caught:
        status(server.grpc, grpc.ssl_channel_credentials(authority))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_a_certificate_that_cannot_be_read_is_named(tmp_path: Path, pki: Path) -> None:
    from .test_rankbookd import run

    missing = str(tmp_path / "missing.pem")
    failed = run(
        *("--store", "memory:", "--listen", "127.0.0.1:0", "--http", "off"),
        *("--tls-cert", missing, "--tls-key", str(pki / "server.key")),
    )
    assert failed.returncode == 1
    assert missing in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_certificate_lets_it_listen_beyond_this_machine(rankbookd: Any, pki: Path) -> None:
    server = rankbookd(
        *("--tls-cert", str(pki / "server.pem"), "--tls-key", str(pki / "server.key")),
        listen="0.0.0.0:0",
    )
    trusting = grpc.ssl_channel_credentials((pki / "ca.pem").read_bytes())
    port = server.grpc.rpartition(":")[2]
    assert status(f"127.0.0.1:{port}", trusting).store_available
