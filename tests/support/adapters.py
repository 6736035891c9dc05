"""Folders with LoRA adapters that have no weights: enough for the gateway and the simulated engine."""

from __future__ import annotations

from pathlib import Path

from penstock.engines.contract.runner import AdapterHost


def save_adapter(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (folder / "adapter_model.safetensors").write_bytes(b"")
    return folder


def load_adapter(engine: AdapterHost, key: str, folder: Path) -> None:
    """Between two steps: what an engine's thread and its loop do one after the other."""
    engine.install_adapter(key, engine.prepare_adapter(key, folder))
