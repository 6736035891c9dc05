"""The torch runner on a GPU: what it computes on the CPU it computes there."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]

PROMPTS = [[3 + (7 * j + 13 * i) % 290 for j in range(30 + 40 * i)] for i in range(4)]


def tokens_on(folder: Path, device: str, dtype: str) -> list[list[int]]:
    from penstock.engines.torch.config import TorchConfig
    from penstock.engines.torch.runner import TorchRunner
    from support.engine import Driver

    runner = TorchRunner(TorchConfig(folder, device=device, dtype=dtype, num_blocks=128, max_num_seqs=8))
    driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=True)
    ids = [driver.add(prompt, 24, n=2) for prompt in PROMPTS]
    driver.run()
    runner.close()
    return [driver.tokens[i] for samples in ids for i in samples]


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_greedy_tokens_in_f32(family: str, tmp_path: Path) -> None:
    from support.models import make_model

    make_model(tmp_path, family, eos_token_id=None)
    assert tokens_on(tmp_path, "cuda", "f32") == tokens_on(tmp_path, "cpu", "f32")


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss", "mixtral", "phi3"])
def test_caps_sinks_windows_and_experts(family: str, tmp_path: Path) -> None:
    from unit.engines.torch.families import make_family

    make_family(tmp_path, family)
    assert tokens_on(tmp_path, "cuda", "f32") == tokens_on(tmp_path, "cpu", "f32")


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision_runs(dtype: str, tmp_path: Path) -> None:
    from support.models import make_model

    make_model(tmp_path, "llama", eos_token_id=None)
    assert all(len(tokens) == 24 for tokens in tokens_on(tmp_path, "cuda", dtype))


def test_the_cache_takes_what_the_device_has_left(tmp_path: Path) -> None:
    from penstock.engines.torch.config import TorchConfig
    from penstock.engines.torch.runner import TorchRunner
    from support.models import make_model

    make_model(tmp_path, "llama")
    runner = TorchRunner(TorchConfig(tmp_path, device="cuda", kv_cache_memory="1%", dtype="f32"))
    total = torch.cuda.get_device_properties(0).total_memory
    held = runner.info.num_blocks * 16 * 768
    runner.close()
    assert runner.info.block_size == 16
    assert 0 < held <= total // 100


def test_adapters_beside_the_base_model(tmp_path: Path) -> None:
    """The tokens of the CPU."""
    from penstock.engines.torch.config import TorchConfig
    from penstock.engines.torch.runner import TorchRunner
    from support.engine import Driver
    from support.models import load_reference, make_adapter, make_model

    reference = load_reference(make_model(tmp_path / "model", "llama", eos_token_id=None))
    adapters = {f"{n}:1": make_adapter(tmp_path / str(n), reference, seed=n) for n in (1, 2)}
    answers = []
    for device in ("cuda", "cpu"):
        config = TorchConfig(
            tmp_path / "model",
            device=device,
            dtype="f32",
            num_blocks=128,
            max_num_seqs=8,
            max_loras=2,
            adapters=adapters,
        )
        runner = TorchRunner(config)
        driver = Driver(runner, max_num_seqs=8, max_num_batched_tokens=64, enable_prefix_caching=True)
        ids = [driver.add(prompt, 24, adapter=key)[0] for prompt in PROMPTS[:2] for key in ("", *adapters)]
        driver.run()
        runner.close()
        answers.append([driver.tokens[i] for i in ids])
    assert answers[0] == answers[1]
    assert len({tuple(tokens) for tokens in answers[0]}) == 6
