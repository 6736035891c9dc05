"""A server that keeps evicted blocks in files: prompts hit again after a restart, each tenant's own."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from penstock.gateway.configuration.config import Config, ConfigError, overlay
from penstock.gateway.models.language.engine_spec import engine_spec
from penstock.gateway.models.language.models import find_model
from penstock.tokenizers import Tokenizer
from support.server import OPENVINO, VLLM, WITH_VLLM, Server, serving

PROMPT = "def " + " ".join(f"value_{number}," for number in range(120))


def complete(server: Server, key: str, prompt: str = PROMPT) -> tuple[str, int]:
    """The text, and how many tokens of the prompt were cached."""
    body = {"model": "penstock-demo", "prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"}).json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("engine", [OPENVINO, pytest.param(VLLM, marks=WITH_VLLM)], ids=["openvino", "vllm"])
def test_a_restart_keeps_prefixes(engine: tuple[str, ...], tmp_path: Path) -> None:
    flags = ("--kv-offload-dir", str(tmp_path / "kv"), "--kv-offload-bytes", str(64 << 20), "--num-kv-blocks", "40")
    keys = ("--api-key", "one", "--api-key", "two")
    with serving(*engine, *flags, *keys, seconds=120) as server:
        first, cached = complete(server, "one")
        assert cached == 0
        others = [complete(server, "one", f"{number} {PROMPT}")[0] for number in range(3)]
        text, cached = complete(server, "one")
        assert text == first
        assert cached > 200, "it was evicted, and has come back"
        metrics = httpx.get(server.operator + "/metrics").text
        assert 'penstock_kv_offload_waits_total{model="penstock-demo"} 1.0' in metrics
        assert server.stop() == 0
        server.wait_for_log("blocks were written for the next start")
    with serving(*engine, *flags, *keys, seconds=120) as server:
        server.wait_for_log("evicted blocks are kept in .*: room for")
        assert complete(server, "two") == (first, 0), "tenants share no prefixes"
        assert complete(server, "one") == (first, cached)
        assert complete(server, "one", f"2 {PROMPT}")[0] == others[2]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"engine": "torch"}, "kv-offload-dir: only the openvino engine"),
        ({"engine": "simulated", "scheduler": "engine"}, "kv-offload-dir: does not apply"),
        ({"prefix_caching": False}, "kv-offload-dir: nothing is evicted"),
        ({"kv_offload_dir": None, "kv_offload_bytes": 5}, "kv-offload-bytes: nothing is kept without"),
    ],
)
def test_what_does_not_go_together_is_refused(settings: dict[str, object], message: str) -> None:
    source = find_model(None)
    config = overlay(Config(), {"kv_offload_dir": "/nowhere", **settings})
    with pytest.raises(ConfigError, match=message):
        engine_spec(config.models, source, Tokenizer(source.folder))
