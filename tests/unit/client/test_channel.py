"""Claims about `rankbook._channel`: where the registry is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankbook import TLS, BadRequest
from rankbook._channel import Endpoint, Settings, parse_endpoint, parse_endpoints, target


@pytest.mark.parametrize(
    ("text", "host", "port", "shown"),
    [
        ("registry", "registry", 7420, "registry:7420"),
        ("registry:9", "registry", 9, "registry:9"),
        (" 10.0.0.1:80 ", "10.0.0.1", 80, "10.0.0.1:80"),
        ("[2001:db8::1]:9", "2001:db8::1", 9, "[2001:db8::1]:9"),
        ("[::1]", "::1", 7420, "[::1]:7420"),
        ("2001:db8::1", "2001:db8::1", 7420, "[2001:db8::1]:7420"),
        ("::", "::", 7420, "[::]:7420"),
    ],
)
def test_an_endpoint_is_read_and_shown_in_one_form(text, host, port, shown):
    endpoint = parse_endpoint(text)
    assert endpoint == Endpoint(host, port)
    assert str(endpoint) == shown
    assert parse_endpoint(shown) == endpoint


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", ":80", "h:", "h:0", "h:65536", "h:x", "h:-1", "h: 80"),
        *("http://h:80", "h:80/path", "[::1", "[::1]80", "[::1]:", "[no]:1", "1:2:3", "a b:1"),
    ],
)
def test_what_is_no_endpoint_is_refused_with_its_text(text):
    with pytest.raises(BadRequest) as caught:
        parse_endpoint(text)
    assert caught.value.metadata["value"] == text


@given(st.ip_addresses(), st.integers(1, 65_535))
def test_every_address_survives_being_written(address, port):
    endpoint = Endpoint(str(address), port)
    assert parse_endpoint(str(endpoint)) == endpoint
    assert target(endpoint) == f"ipv{address.version}:{endpoint}"


def test_several_endpoints_keep_their_order_and_come_once():
    assert [str(e) for e in parse_endpoints("b:1,a:2, b:1,")] == ["b:1", "a:2"]
    assert [str(e) for e in parse_endpoints(["b:1,a:2", "[::1]:3"])] == ["b:1", "a:2", "[::1]:3"]
    with pytest.raises(BadRequest):
        parse_endpoints(" , ")


def settings(**given):
    defaults = dict.fromkeys(("namespace", "tls", "token", "retry"))
    return Settings.make(given.pop("endpoints", None), **{**defaults, "timeout_s": 1.0, **given})


def test_what_is_left_out_comes_from_the_environment_and_then_from_the_defaults(monkeypatch):
    for name in ("SERVER", "NAMESPACE", "TOKEN"):
        monkeypatch.delenv(f"RANKBOOK_{name}", raising=False)
    plain = settings()
    assert (plain.endpoints, plain.namespace) == ((Endpoint("127.0.0.1", 7420),), "default")
    assert plain.metadata == ()
    monkeypatch.setenv("RANKBOOK_SERVER", "r1,r2:5")
    monkeypatch.setenv("RANKBOOK_NAMESPACE", "team")
    monkeypatch.setenv("RANKBOOK_TOKEN", "secret")
    taken = settings()
    assert [str(e) for e in taken.endpoints] == ["r1:7420", "r2:5"]
    assert (taken.namespace, taken.metadata) == ("team", (("authorization", "Bearer secret"),))
    assert settings(endpoints="x:1", namespace="own").namespace == "own"


def test_a_token_is_in_no_text_of_the_settings():
    assert "secret" not in repr(settings(token="secret"))


@pytest.mark.parametrize("token", ["secret\n", "s\u00e9cret", "sec\x00ret"])
def test_a_token_that_no_header_carries_is_refused_and_not_shown(token):
    with pytest.raises(BadRequest, match="token") as caught:
        settings(token=token)
    assert "cret" not in f"{caught.value} {caught.value.metadata}"
    assert "\x00ret" not in f"{caught.value} {caught.value.metadata}"


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan")])
def test_a_wait_without_an_end_is_refused(timeout_s):
    with pytest.raises(BadRequest, match="timeout_s"):
        settings(timeout_s=timeout_s)


def test_a_certificate_comes_with_its_key():
    with pytest.raises(BadRequest):
        TLS(cert_file="cert.pem")


def test_a_tls_file_that_is_missing_is_named(tmp_path):
    missing = tmp_path / "ca.pem"
    with pytest.raises(BadRequest, match=r"ca\.pem"):
        settings(tls=TLS(ca_file=missing)).credentials(Endpoint("host", 1))


def test_a_socket_file_is_an_endpoint_of_this_machine_that_tls_says_nothing_of():
    endpoint = parse_endpoint("unix:/run/rankbook.sock")
    assert str(endpoint) == target(endpoint) == "unix:/run/rankbook.sock"
    assert settings(tls=TLS(ca_file="never-read.pem")).credentials(endpoint) is None


@pytest.mark.parametrize("text", ["unix:", "unix:run/book", "unix:/" + "x" * 107])
def test_a_socket_path_is_absolute_and_fits(text):
    with pytest.raises(BadRequest, match="absolute path of at most 107 bytes"):
        parse_endpoint(text)


@pytest.mark.parametrize(
    "given",
    [
        "etcd:10.0.0.1:2379,10.0.0.2:2379/prod",
        ["etcd:10.0.0.1:2379", "10.0.0.2:2379/prod"],
        [" etcd:10.0.0.1:2379,10.0.0.2:2379/prod "],
    ],
)
def test_a_store_is_one_endpoint_whoever_cut_it_at_its_commas(given):
    (endpoint,) = parse_endpoints(given)
    assert str(endpoint) == "etcd:10.0.0.1:2379,10.0.0.2:2379/prod"
    assert endpoint.is_local
