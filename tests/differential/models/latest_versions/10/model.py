import json

import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    """OUTPUT0: which model and version this is."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.label = f"{args['model_name']}/{args['model_version']} {config['parameters']['label']['string_value']}"

    def execute(self, requests):
        value = np.array([self.label.encode()], dtype=np.object_)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", value)]) for _ in requests]
