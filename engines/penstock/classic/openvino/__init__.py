"""Models of OpenVINO's formats (IR, ONNX, TensorFlow, PaddlePaddle), in the threads of the server."""
