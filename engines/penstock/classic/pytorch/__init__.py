"""PyTorch models: TorchScript, torch.export archives and AOTInductor packages, in the threads of the server."""
