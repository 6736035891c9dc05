"""What a Serve configuration names so that proxies speak KServe's service."""

ADDS_SERVICE = "tritonclient.grpc.service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server"
