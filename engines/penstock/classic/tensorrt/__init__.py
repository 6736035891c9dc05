"""TensorRT engines (plan files), run through the packages tensorrt and cuda-python."""
