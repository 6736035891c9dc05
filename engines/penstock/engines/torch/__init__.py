"""The torch runner: causal language models of transformers, their attention replaced by ours over paged blocks.

The reference for architectures that the OpenVINO runner lacks, and the fallback. `runner.TorchRunner` is the way in.
"""
