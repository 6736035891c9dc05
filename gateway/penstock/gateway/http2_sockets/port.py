"""What the HTTP/2 connections of a port share."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gateway.front.intake import BodyBudget
from penstock.gateway.front.port_connections import PortConnections
from penstock.gateway.front.unread_answers import UnreadAnswers
from penstock.gateway.http2.bounds import Http2Limits
from penstock.gateway.http2_sockets.settings import SocketSettings


@dataclass(slots=True, kw_only=True)
class SocketPort:
    settings: SocketSettings
    limits: Http2Limits
    connections: PortConnections
    bodies: BodyBudget
    unread: UnreadAnswers
