"""Another client meanwhile: a call every 20 ms, and at the end how long they took."""

from __future__ import annotations

import json
import select
import sys
import time

import grpc
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub


def main() -> None:
    stub = GRPCInferenceServiceStub(grpc.insecure_channel(sys.argv[1]))
    taken, failed = [], 0
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0.02)[0]:
        begun = time.monotonic()
        try:
            stub.ServerLive(pb.ServerLiveRequest(), timeout=20)
        except grpc.RpcError:
            failed += 1
        taken.append(time.monotonic() - begun)
    taken.sort()
    print(json.dumps({"median": taken[len(taken) // 2], "p99": taken[int(len(taken) * 0.99)], "failed": failed}))


main()
