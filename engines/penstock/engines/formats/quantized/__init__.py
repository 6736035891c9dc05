"""Checkpoints in safetensors whose weights are quantized already, by `quantization_config` of config.json."""
