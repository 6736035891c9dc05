"""The callback that gives Ray Serve's proxies our middleware, and the environment that names it
(`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`)."""

from __future__ import annotations

import os

from starlette.middleware import Middleware

from penstock.gateway.ray_serve.stream_guard import StreamGuard

ENVIRONMENT = {
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "penstock.gateway.ray_serve.proxy:middlewares",
    "RAY_SERVE_PROXY_PREFER_LOCAL_NODE_ROUTING": "0",  # else a proxy sees no replica but those beside it
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",  # a second one delays every first token
    "RAY_SERVE_PROXY_USE_GRPC": "1",  # an answer is one gRPC stream, not an object of Ray's for each of its pieces
}
"""What proxies need. `penstock deploy ray` sets it; for `serve deploy` it has to be that of `ray start`, on all
nodes."""
_SESSION_HEADER = "RAY_SERVE_SESSION_ID_HEADER_KEY"


def middlewares() -> list[Middleware]:
    name = os.environ.get(_SESSION_HEADER, "x-session-id").lower().encode()
    return [Middleware(StreamGuard, session_header=name)]
