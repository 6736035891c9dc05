"""Which ports may listen where without a key, and what the server is told about names and origins."""

from __future__ import annotations

import pytest

from penstock.gateway.configuration.config import Config, ConfigError, load_config
from penstock.gateway.requests.addresses import is_loopback
from penstock.gateway.requests.exposure import asks_for_keys, browser_rules, check_exposure


def told(**settings: object) -> Config:
    return load_config(settings, environ={})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.255.0.9", "::1", "localhost", "LOCALHOST", "::ffff:127.0.0.1"])
def test_loopback_needs_no_key(host):
    assert is_loopback(host)
    check_exposure(told(host=host))


BEYOND = ["0.0.0.0", "::", "192.168.1.5", "10.0.0.1", "fe80::1", "models.internal", "127.1", "127.0.0.1.example.org"]


@pytest.mark.parametrize("host", BEYOND)
def test_anything_else_needs_a_key_or_the_flag(host):
    assert not is_loopback(host)
    with pytest.raises(ConfigError, match=rf"^HTTP on {host}: .*--api-key.*--allow-anonymous"):
        check_exposure(told(host=host))
    check_exposure(told(host=host, api_key=["k"]))
    check_exposure(told(host=host, allow_anonymous=True))


@pytest.mark.parametrize(("port", "named"), [("http", "HTTP"), ("grpc", "gRPC"), ("metrics", "metrics")])
def test_each_port_is_looked_at_where_it_listens(port, named):
    there = {f"{port}_address": "0.0.0.0"}
    with pytest.raises(ConfigError, match=f"^{named} on 0.0.0.0"):
        check_exposure(told(**there))
    check_exposure(told(**there, **{f"allow_{port}": False}))
    with pytest.raises(ConfigError):
        check_exposure(told(host="0.0.0.0", **{f"{port}_address": "127.0.0.1"}))


def test_clients_that_must_show_a_certificate_are_not_anonymous():
    check_exposure(told(grpc_address="0.0.0.0", grpc_use_ssl_mutual=True))
    with pytest.raises(ConfigError, match="gRPC"):
        check_exposure(told(grpc_address="0.0.0.0", grpc_use_ssl=True))
    with pytest.raises(ConfigError, match="HTTP"):
        check_exposure(told(http_address="0.0.0.0", grpc_use_ssl_mutual=True))
    check_exposure(told(http_address="0.0.0.0", http_use_ssl_mutual=True))
    with pytest.raises(ConfigError, match="HTTP"):
        check_exposure(told(http_address="0.0.0.0", http_use_ssl=True))
    with pytest.raises(ConfigError, match="gRPC"):
        check_exposure(told(grpc_address="0.0.0.0", http_use_ssl_mutual=True))


@pytest.mark.parametrize(
    ("settings", "asks"),
    [
        ({}, False),
        ({"api_key": ["k"]}, False),
        ({"host": "0.0.0.0", "api_key": ["k"]}, True),
        ({"host": "0.0.0.0", "metrics_address": "::1", "api_key": ["k"]}, False),
        ({"host": "0.0.0.0", "api_key": ["k"], "allow_anonymous": True}, False),
        ({"host": "0.0.0.0", "allow_anonymous": True}, False),
    ],
)
def test_metrics_ask_for_keys_beyond_loopback(settings, asks):
    server = told(**settings).server
    assert asks_for_keys(server, "metrics") is asks
    assert asks_for_keys(server, "http") is ("api_key" in settings)


def test_rules_are_each_port_s_own():
    server = told(
        host="Models.Internal", metrics_address="127.0.0.1", allowed_hosts=["GPU-box.", "[2001:DB8::0:1]"]
    ).server
    http, metrics = browser_rules(server, "http"), browser_rules(server, "metrics")
    assert http.hosts == {"models.internal", "gpu-box", "2001:db8::1"}
    assert metrics.hosts == {"127.0.0.1", "gpu-box", "2001:db8::1"}
    assert (http.any_address, metrics.any_address) == (True, False)


@pytest.mark.parametrize("text", ["http://gpu-box", "gpu-box:8000", "a/b", "*", "a b", "-"])
def test_an_allowed_host_is_a_name_or_an_address(text):
    with pytest.raises(ConfigError, match="allowed-hosts"):
        check_exposure(told(allowed_hosts=[text]))


@pytest.mark.parametrize(
    ("text", "origin"),
    [
        ("http://localhost:3000", "http://localhost:3000"),
        (" HTTPS://App.Example.org/ ", "https://app.example.org"),
        ("chrome-extension://abcdef", "chrome-extension://abcdef"),
        ("http://[::1]:3000", "http://[::1]:3000"),
    ],
)
def test_origins_are_taken_as_browsers_send_them(text, origin):
    server = told(allowed_origins=[text]).server
    assert browser_rules(server, "http").origins == {origin}


@pytest.mark.parametrize("text", ["app.example.org", "https://app.example.org/chat", "null", "https://", "https://a@b"])
def test_what_no_browser_sends_is_no_origin(text):
    with pytest.raises(ConfigError, match="allowed-origins"):
        check_exposure(told(allowed_origins=[text]))


def test_every_origin_is_only_for_ports_that_ask_for_a_key():
    with pytest.raises(ConfigError, match="without --api-key"):
        check_exposure(told(allowed_origins=["*"]))
    server = told(allowed_origins=["*"], api_key=["k"]).server
    assert browser_rules(server, "http").origins == {"*"}
    assert browser_rules(server, "metrics").origins == set()
