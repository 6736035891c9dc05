"""Real weights: what an adapter says is what the model says with the adapter merged into its weights."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.gateway.models.language.models import find_model
from penstock.tokenizers import Tokenizer
from support.models import make_adapter, merge_adapter
from support.server import serving

PROMPT = "def join(a, b):"


def expected(adapter: Path | None) -> list[int]:
    """What transformers generates, greedily and in f32."""
    folder = find_model(None).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if adapter is not None:
        merge_adapter(model, adapter)
    prompt = torch.tensor([Tokenizer(folder).encode(PROMPT, True)])
    with torch.inference_mode():
        ids = model.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False)
    return [int(token) for token in ids[0, prompt.shape[1] :]]


HAS_VLLM = find_spec("vllm") is not None
VLLM = pytest.mark.skipif(not HAS_VLLM, reason="vllm is not installed")


@pytest.mark.slow
@pytest.mark.parametrize(
    "engine",
    [
        "openvino",
        "torch",
        pytest.param("vllm", marks=VLLM),
        pytest.param("vllm --scheduler engine", marks=VLLM),
    ],
)
def test_adapters_with_weights(tmp_path: Path, engine: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(find_model(None).folder, dtype=torch.float32)
    folders = {name: make_adapter(tmp_path / name, base, seed=seed) for seed, name in enumerate(("first", "second"), 1)}
    flags = ("--lora", f"first={folders['first']}", "--lora-directory", str(tmp_path), "--max-loras", "2")
    with serving("--engine", *engine.split(), "--dtype", "f32", "--threads", "1", *flags) as server:

        def tokens(model: str) -> list[int]:
            body = {"model": model, "prompt": PROMPT, "max_tokens": 12, "min_tokens": 12, "temperature": 0}
            answer = server.post("/v1/completions", body | {"return_token_ids": True})
            return list(answer.json()["choices"][0]["token_ids"])

        loaded = server.post("/v1/load_lora_adapter", {"lora_name": "second", "lora_path": "second"})
        assert loaded.status_code == 200, loaded.text
        names = {"penstock-demo": None, **folders}
        assert {name: tokens(name) for name in names} == {name: expected(folder) for name, folder in names.items()}
        assert len({tuple(tokens(name)) for name in names}) == 3
        shape = {"model": "second", "prompt": PROMPT, "max_tokens": 9, "guided_regex": "[ab]{4}"}
        assert re.fullmatch("[ab]{4}", server.post("/v1/completions", shape).json()["choices"][0]["text"])
        make_adapter(tmp_path / "large", base, rank=64)
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "large", "lora_path": "large"})
        assert refused.status_code in (400, 503)
        assert str(tmp_path) not in refused.text
        assert server.post("/v1/unload_lora_adapter", {"lora_name": "first"}).status_code == 200
        refused = server.post("/v1/load_lora_adapter", {"lora_name": "large", "lora_path": "large"})
        assert refused.status_code == 400
        assert "rank" in refused.json()["error"]["message"]
        assert str(tmp_path) not in refused.text
        assert tokens("second") == expected(folders["second"])
