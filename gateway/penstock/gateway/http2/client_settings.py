"""What a client has said in SETTINGS frames."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.http2 import frames
from penstock.gateway.http2.errors import ConnectionFault, ErrorCode
from penstock.gateway.http2.frames import Setting


@dataclass(slots=True)
class ClientSettings:
    initial_window: int = frames.DEFAULT_WINDOW
    max_frame_bytes: int = frames.MAX_FRAME_BYTES
    header_table_bytes: int = 4096


def read_settings(payload: bytes, settings: ClientSettings) -> None:
    """Changes `settings`. The last value of a setting counts, so a frame with thousands of them costs no more than one
    with six. Raises ConnectionFault."""
    if len(payload) % frames.SETTING.size:
        raise ConnectionFault(ErrorCode.FRAME_SIZE_ERROR, "a SETTINGS frame has a wrong length")
    for name, value in frames.SETTING.iter_unpack(payload):
        if name == Setting.INITIAL_WINDOW_SIZE:
            if value > frames.MAX_WINDOW:
                raise ConnectionFault(ErrorCode.FLOW_CONTROL_ERROR, "the initial window is too large")
            settings.initial_window = value
        elif name == Setting.MAX_FRAME_SIZE:
            if not frames.MAX_FRAME_BYTES <= value <= frames.LARGEST_FRAME_BYTES:
                raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "the maximum frame size is out of range")
            settings.max_frame_bytes = value
        elif name == Setting.HEADER_TABLE_SIZE:
            settings.header_table_bytes = value
        elif name == Setting.ENABLE_PUSH and value > 1:
            raise ConnectionFault(ErrorCode.PROTOCOL_ERROR, "ENABLE_PUSH is neither 0 nor 1")
