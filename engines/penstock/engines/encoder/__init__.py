"""Encoder models on OpenVINO: texts in, one vector or one row of logits each out. Torch-free.

`model.EncoderModel` computes a batch, `engine.EncoderEngine` batches what is asked of it. `families` lists what can be
run, and is where a family is added.
"""
