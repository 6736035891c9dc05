"""What the operator says about the gRPC port, as the library and our own transport get it."""

from __future__ import annotations

import pytest

from penstock.engines import errors
from penstock.gateway.apis.kserve.grpc.rpc import shutting_down, status
from penstock.gateway.apis.kserve.grpc.settings import GrpcSettings
from penstock.gateway.transports.grpc.call import ConnectionSettings
from penstock.gateway.transports.http2.bounds import PingRules


def test_every_setting_becomes_an_option_of_grpc() -> None:
    options = dict(
        GrpcSettings(
            max_message_bytes=1234,
            keepalive_time=1,
            keepalive_timeout=2,
            keepalive_permit_without_calls=True,
            http2_max_pings_without_data=3,
            http2_min_recv_ping_interval_without_data=4,
            http2_max_ping_strikes=5,
            max_connection_age=6,
            max_connection_age_grace=7,
            infer_response_compression_level="high",
        ).options()
    )
    assert options == {
        "grpc.so_reuseport": 0,
        "grpc.max_receive_message_length": 1234,
        "grpc.max_send_message_length": 2**31 - 1,
        "grpc.max_metadata_size": 16384,
        "grpc.absolute_max_metadata_size": 16384,
        "grpc.max_concurrent_streams": 1024,
        "grpc.keepalive_time_ms": 1,
        "grpc.keepalive_timeout_ms": 2,
        "grpc.keepalive_permit_without_calls": 1,
        "grpc.http2.max_pings_without_data": 3,
        "grpc.http2.min_ping_interval_without_data_ms": 4,
        "grpc.http2.max_ping_strikes": 5,
        "grpc.max_connection_age_ms": 6,
        "grpc.max_connection_age_grace_ms": 7,
        "grpc.default_compression_level": 3,
    }


def test_the_same_for_our_own_transport() -> None:
    settings = GrpcSettings(
        max_message_bytes=1234,
        keepalive_time=1000,
        keepalive_timeout=2000,
        keepalive_permit_without_calls=True,
        http2_max_pings_without_data=3,
        http2_min_recv_ping_interval_without_data=4000,
        http2_max_ping_strikes=5,
        max_connection_age=6000,
        max_connection_age_grace=7000,
        infer_response_compression_level="high",
    )
    assert settings.connections() == ConnectionSettings(
        max_message_bytes=1234,
        compression_level="high",
        keepalive_time=1,
        keepalive_timeout=2,
        keepalive_without_calls=True,
        max_pings_without_data=3,
        max_age=6,
        max_age_grace=7,
    )
    limits = settings.limits()
    assert limits.pings == PingRules(min_seconds=4, max_strikes=5, allowed_when_idle=True)
    assert (limits.max_streams, limits.max_header_list_bytes) == (1024, 16384)
    assert (GrpcSettings().connections().max_age, GrpcSettings().connections().max_age_grace) == (None, None)


def test_what_is_not_said_is_not_passed_on() -> None:
    names = dict(GrpcSettings().options())
    assert "grpc.max_connection_age_ms" not in names
    assert "grpc.default_compression_level" not in names


def subclasses(cls: type[errors.PenstockError]) -> list[type[errors.PenstockError]]:
    children = (child for child in cls.__subclasses__() if child.__module__ == errors.__name__)
    return [cls, *(leaf for child in children for leaf in subclasses(child))]


@pytest.mark.parametrize("error", subclasses(errors.PenstockError))
def test_every_error_has_a_status(error: type[errors.PenstockError]) -> None:
    code, details = status(error("text"))
    assert code.name != "OK"
    assert details == "text"


def test_errors_get_their_status_and_hide_what_is_inside() -> None:
    def name(error: Exception) -> str:
        return status(error)[0].name

    assert name(errors.QueueFullError("x")) == "UNAVAILABLE"
    assert name(errors.UnsupportedError("x")) == "UNIMPLEMENTED"
    assert name(errors.AlreadyExistsError("x")) == "ALREADY_EXISTS"
    assert name(errors.CancelledError("x")) == "CANCELLED"
    assert name(shutting_down()) == "UNAVAILABLE"
    code, details = status(OSError("/some/path"))
    assert code.name == "INTERNAL"
    assert "/some" not in details
    assert len(status(errors.EngineError("x" * 10_000))[1]) <= 512
