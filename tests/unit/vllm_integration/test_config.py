"""Settings come from the connector's extra config, then the environment, then the default."""

import pytest

from rankbook.errors import BadRequest, Reason
from rankbook.model import Address
from rankbook_vllm.config import DEFAULT_ENDPOINT, load


def test_nothing_set_gives_a_local_registry_that_is_not_required():
    settings = load(None, {})
    assert settings.endpoints == (DEFAULT_ENDPOINT,)
    assert settings.namespace == "default"
    assert settings.required is False
    assert settings.ttl_s == 10.0


def test_the_extra_config_wins_over_the_environment():
    settings = load({"group": "prefill-a"}, {"RANKBOOK_GROUP": "x", "RANKBOOK_REPLICA": "r1"})
    assert (settings.group, settings.replica) == ("prefill-a", "r1")


def test_every_text_setting_has_its_variable():
    settings = load(
        None,
        {
            "RANKBOOK_SERVER": "a:1, b:2",
            "RANKBOOK_NAMESPACE": "ns",
            "RANKBOOK_TTL_S": "2.5",
            "RANKBOOK_REQUIRED": "true",
            "RANKBOOK_LABELS": "zone=a, rack=7",
            "RANKBOOK_HOST": "10.0.0.5",
            "RANKBOOK_SERVING_ADDRESS": "10.0.0.5:8000",
            "RANKBOOK_TOKEN": "t",
        },
    )
    assert settings.endpoints == ("a:1", "b:2")
    assert settings.namespace == "ns"
    assert settings.ttl_s == 2.5
    assert settings.required is True
    assert settings.labels == {"zone": "a", "rack": "7"}
    assert settings.host == "10.0.0.5"
    assert settings.serving_address == "10.0.0.5:8000"
    assert settings.token == "t"


def test_an_empty_variable_counts_as_unset():
    assert load(None, {"RANKBOOK_SERVER": "", "RANKBOOK_TTL_S": ""}) == load(None, {})


def test_an_unknown_key_is_an_error_that_names_it_and_the_known_ones():
    with pytest.raises(BadRequest) as caught:
        load({"server": "a:1"}, {})
    assert caught.value.reason is Reason.UNKNOWN_FIELD
    assert caught.value.metadata["field"] == "server"
    assert "endpoints" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ttl_s", 1.9),
        ("ttl_s", 301),
        ("ttl_s", "soon"),
        ("ttl_s", True),
        ("ttl_s", float("nan")),
        ("required", "maybe"),
        ("required", 1),
        ("endpoints", []),
        ("endpoints", " , "),
        ("endpoints", 7420),
        ("labels", "zone"),
        ("labels", {"zone": 1}),
        ("labels", {str(number): "" for number in range(65)}),
        ("addresses", "10.0.0.5"),
        ("addresses.host", [{"scheme": "tcp", "host": "10.0.0.5:80"}]),
        ("addresses.host", [{"scheme": "tcp", "host": 7}]),
        ("addresses", [{"host": "10.0.0.5"}]),
        ("addresses", [{"scheme": "tcp", "host": "10.0.0.5", "prot": 1}]),
        ("group", 7),
        ("host", "10.0.0.5:8000"),
        ("host", "node 7"),
        ("serving_address", "http://10.0.0.5:8000"),
        ("serving_address", "2001:db8::1"),
    ],
)
def test_a_value_that_its_key_does_not_take_is_an_error_that_names_the_key(name, value):
    with pytest.raises(BadRequest) as caught:
        load({name.partition(".")[0]: value}, {})
    assert caught.value.metadata["field"] == name


def test_a_wrong_variable_is_named_as_the_variable():
    with pytest.raises(BadRequest, match="RANKBOOK_TTL_S"):
        load(None, {"RANKBOOK_TTL_S": "forever"})


def test_settings_that_are_no_object_are_an_error():
    with pytest.raises(BadRequest):
        load("127.0.0.1:7420", {})


def test_addresses_are_taken_as_given_and_in_order():
    given = [
        {"scheme": "rdma", "host": "192.168.7.1", "port": 18515, "label": "ib0"},
        {"scheme": "tcp", "host": "[2001:DB8:0::1]"},
    ]
    assert load({"addresses": given}, {}).addresses == (
        Address("rdma", "192.168.7.1", 18515, "ib0"),
        Address("tcp", "2001:db8::1", 0, ""),
    )


def test_the_token_is_not_shown():
    assert "s3cret" not in repr(load({"token": "s3cret"}, {}))


@pytest.mark.parametrize(
    "extra",
    [
        '{"token": "s3cret"}',
        [{"token": "s3cret"}],
        {"token": ["s3cret"]},
        {"token": {"value": "s3cret"}},
    ],
    ids=str,
)
def test_the_token_is_not_in_what_is_said_of_settings_that_are_wrong(extra):
    with pytest.raises(BadRequest) as caught:
        load(extra, {})
    assert "s3cret" not in f"{caught.value} {caught.value.metadata}"
