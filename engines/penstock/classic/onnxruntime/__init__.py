"""ONNX models, run by ONNX Runtime in the threads of the server."""
