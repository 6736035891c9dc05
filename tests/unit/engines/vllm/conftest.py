"""One small model on vLLM for the tests of this folder; they are skipped where vLLM is not installed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from penstock.engines.contract.loading import silent
from penstock.engines.registry import BATCHERS, EngineSpec, load_runner
from support.models import make_model, make_tokenizer

OPTIONS: dict[str, Any] = {
    "dtype": "f32",
    "num_blocks": 24,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
}


@pytest.fixture(scope="session")
def needs_vllm() -> None:
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed: .ci/vllm runs this in an environment of its own")


@pytest.fixture(scope="session")
def model_dir(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vllm"), "llama", hidden_size=128, head_dim=32)


@pytest.fixture(scope="session")
def windows_dir(needs_vllm: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with a window of 40 tokens, one with full attention: three groups of KV cache."""
    folder = tmp_path_factory.mktemp("gemma3")
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=384,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        query_pre_attn_scalar=32,
        max_position_embeddings=512,
        sliding_window=40,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=0,
        tie_word_embeddings=False,  # else it repeats its input
    )
    model = Gemma3ForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.copy_(torch.randn(parameter.shape) * 2 / parameter.shape[1] ** 0.5)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def runner(model_dir: Path) -> Any:
    runner = load_runner(EngineSpec(runner="vllm", options=OPTIONS | {"model_dir": str(model_dir)}))
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def batcher(model_dir: Path) -> Any:
    batcher = BATCHERS["vllm"](OPTIONS | {"model_dir": str(model_dir)}, silent)
    yield batcher
    batcher.close()


@pytest.fixture(params=["runner", "batcher"])
def engine(request: pytest.FixtureRequest) -> Any:
    return request.getfixturevalue(request.param)
