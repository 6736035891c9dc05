"""Settings of the gRPC port."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.gateway.requests.tls import TlsSettings
from penstock.gateway.transports.grpc.call import ConnectionSettings
from penstock.gateway.transports.http2.bounds import Http2Limits, PingRules

MAX_METADATA_BYTES = 16 << 10
MAX_STREAMS = 1024
"""RPCs at once on one connection; more wait at the client. Those that it cancels count until the server has dealt with
that, and beyond the limit the library refuses: clients that cancel much need room."""
_MAX_SEND_BYTES = 2**31 - 1
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}

CompressionLevel = Literal["none", "low", "medium", "high"]
Transport = Literal["penstock", "grpcio"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcSettings:
    """Names and defaults are those of Triton's `--grpc-*` options; times in milliseconds."""

    host: str = "127.0.0.1"
    port: int = 8001
    transport: Transport = "penstock"
    """Who speaks HTTP/2: this server's event loop, or the gRPC library."""
    max_message_bytes: int = 64 << 20
    """Of one request message; the same limit as for HTTP bodies."""
    max_requests_per_stream: int = 64
    """Requests in flight on one ModelStreamInfer; the next is read when one of them has ended."""
    tls: TlsSettings = field(default_factory=lambda: TlsSettings(port="grpc"))
    keepalive_time: int = 7_200_000
    keepalive_timeout: int = 20_000
    keepalive_permit_without_calls: bool = False
    http2_max_pings_without_data: int = 2
    http2_min_recv_ping_interval_without_data: int = 300_000
    http2_max_ping_strikes: int = 2
    max_connection_age: int = 0
    """0: connections live as long as they like."""
    max_connection_age_grace: int = 0
    """0: what runs on a connection that is too old may end."""
    infer_response_compression_level: CompressionLevel = "none"
    header_forward_pattern: re.Pattern[str] | None = None
    """Names of the metadata that go to the model as parameters."""

    def connections(self) -> ConnectionSettings:
        """For the transport on the event loop."""
        age, grace = self.max_connection_age, self.max_connection_age_grace
        return ConnectionSettings(
            max_message_bytes=self.max_message_bytes,
            compression_level=self.infer_response_compression_level,
            keepalive_time=self.keepalive_time / 1000,
            keepalive_timeout=self.keepalive_timeout / 1000,
            keepalive_without_calls=self.keepalive_permit_without_calls,
            max_pings_without_data=self.http2_max_pings_without_data,
            max_age=age / 1000 if age else None,
            max_age_grace=grace / 1000 if grace else None,
        )

    def limits(self) -> Http2Limits:
        """The same."""
        pings = PingRules(
            min_seconds=self.http2_min_recv_ping_interval_without_data / 1000,
            max_strikes=self.http2_max_ping_strikes,
            allowed_when_idle=self.keepalive_permit_without_calls,
        )
        return Http2Limits(
            max_streams=MAX_STREAMS, max_header_list_bytes=MAX_METADATA_BYTES, spaces_in_values=True, pings=pings
        )

    def options(self) -> list[tuple[str, Any]]:
        """For the gRPC library."""
        options: list[tuple[str, Any]] = [
            ("grpc.so_reuseport", 0),  # by default two servers would share a port in silence
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.max_send_message_length", _MAX_SEND_BYTES),
            ("grpc.max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
            ("grpc.max_concurrent_streams", MAX_STREAMS),
            ("grpc.keepalive_time_ms", self.keepalive_time),
            ("grpc.keepalive_timeout_ms", self.keepalive_timeout),
            ("grpc.keepalive_permit_without_calls", int(self.keepalive_permit_without_calls)),
            ("grpc.http2.max_pings_without_data", self.http2_max_pings_without_data),
            ("grpc.http2.min_ping_interval_without_data_ms", self.http2_min_recv_ping_interval_without_data),
            ("grpc.http2.max_ping_strikes", self.http2_max_ping_strikes),
        ]
        if self.max_connection_age:
            options.append(("grpc.max_connection_age_ms", self.max_connection_age))
        if self.max_connection_age_grace:
            options.append(("grpc.max_connection_age_grace_ms", self.max_connection_age_grace))
        if self.infer_response_compression_level != "none":
            # the library chooses the algorithm among those that the client accepts
            level = _COMPRESSION_LEVELS[self.infer_response_compression_level]
            options.append(("grpc.default_compression_level", level))
        return options
