"""LoRA adapters by key, beside the base model in one batch, under both schedulers."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from penstock.engines.contract.loading import silent
from penstock.engines.contract.runner import AdapterHost
from penstock.engines.errors import InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.registry import BATCHERS, RUNNERS
from support.adapters import load_adapter
from support.engine import Driver
from support.models import load_reference, reference_tokens

ALPHA, WIDTH = 8, 128
PROMPT = [3 + 7 * i % 250 for i in range(50)]


def make_adapter(folder, seed, *, rank=4, width=WIDTH, module="self_attn.q_proj", layers=3, **settings):
    """A folder in PEFT's format; returns its matrices by layer."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows, columns):
        return torch.randn(rows, columns, generator=generator) * 0.3

    weights = {layer: (matrix(rank, width), matrix(width, rank)) for layer in range(layers)}
    tensors = {}
    for layer, (a, b) in weights.items():
        stem = f"base_model.model.model.layers.{layer}.{module}"
        tensors |= {f"{stem}.lora_A.weight": a, f"{stem}.lora_B.weight": b}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": [module.split(".")[-1]]}
    (folder / "adapter_config.json").write_text(json.dumps(config | {"bias": "none"} | settings))
    return weights


@pytest.fixture(scope="module")
def adapters(model_dir, tmp_path_factory):
    """Folders, and the tokens of the model with each one's weights merged into its own; "" is the base."""
    root = tmp_path_factory.mktemp("adapters")
    folders, expected = {}, {}
    for seed, name in enumerate(("", "poet", "judge")):
        reference = load_reference(model_dir)
        if name:
            folders[name] = root / name
            for layer, (a, b) in make_adapter(folders[name], seed).items():
                reference.model.layers[layer].self_attn.q_proj.weight.data += ALPHA / 4 * b @ a
        expected[name] = reference_tokens(reference, PROMPT, 30)
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    return folders, expected


@pytest.fixture(scope="module", params=[RUNNERS, BATCHERS], ids=["runner", "batcher"])
def host(request, model_dir, adapters):
    """With two slots, one of them taken from the start."""
    options = {"model_dir": str(model_dir), "dtype": "f32", "num_blocks": 24, "max_num_seqs": 4}
    options |= {"max_num_batched_tokens": 64, "max_loras": 2, "max_lora_rank": 4}
    engine = request.param["vllm"](options | {"adapters": {"poet:0": str(adapters[0]["poet"])}}, silent)
    assert isinstance(engine, AdapterHost)
    return engine


def driver_of(host):
    return Driver(host, max_num_seqs=4, max_num_batched_tokens=64)


def tokens_of(host, *keys):
    driver = driver_of(host)
    ids = [driver.add(PROMPT, 30, adapter=key)[0] for key in keys]
    driver.run()
    return [driver.tokens[i] for i in ids]


def test_adapters_come_and_go_beside_the_base_model(host, adapters):
    folders, expected = adapters
    assert tokens_of(host, "", "poet:0") == [expected[""], expected["poet"]]
    driver = driver_of(host)
    [base], [poet] = driver.add(PROMPT, 30), driver.add(PROMPT, 30, adapter="poet:0")
    for _ in range(5):
        driver.step()
    load_adapter(host, "judge:0", folders["judge"])  # in the middle of the others
    [judge] = driver.add(PROMPT, 30, adapter="judge:0")
    driver.run()
    assert [driver.tokens[i] for i in (base, poet, judge)] == [expected[name] for name in ("", "poet", "judge")]
    with pytest.raises(OverloadedError, match="all 2 adapter slots are taken"):
        load_adapter(host, "poet:1", folders["poet"])
    host.unload_adapter("poet:0")
    host.unload_adapter("nobody")
    driver = driver_of(host)
    [gone], [base] = driver.add(PROMPT, 30, adapter="poet:0"), driver.add(PROMPT, 30)
    driver.run()
    assert "no LoRA adapter is loaded as 'poet:0'" in driver.ends[gone].error.message
    assert driver.tokens[base] == expected[""]
    load_adapter(host, "poet:1", folders["poet"])
    found = tokens_of(host, "judge:0", "poet:1", "")
    assert found == [expected[name] for name in ("judge", "poet", "")]
    host.unload_adapter("judge:0")
    host.unload_adapter("poet:1")


def test_an_equal_key_cannot_be_loaded_twice(host, adapters):
    load_adapter(host, "twice", adapters[0]["judge"])
    with pytest.raises(InvalidRequestError, match="this adapter is loaded already"):
        load_adapter(host, "twice", adapters[0]["poet"])
    assert tokens_of(host, "twice") == [adapters[1]["judge"]]
    host.unload_adapter("twice")


@pytest.mark.parametrize(
    ("faults", "message"),
    [
        ({"rank": 8}, "has rank 8, more than max_lora_rank=4"),
        ({"width": 64}, r"lora_A.weight is \[4, 64\], which does not fit the model's \[128, 128\]"),
        ({"module": "self_attn.k_proj"}, r"lora_B.weight is \[128, 4\], which does not fit the model's \[64, 128\]"),
        ({"module": "self_attn.oracle"}, "vLLM cannot load the adapter: .*oracle"),
        ({"use_dora": True}, "vLLM cannot load the adapter: .*DoRA"),
        ({"peft_type": "PROMPT_TUNING"}, "adapters of type PROMPT_TUNING are not supported, only LORA"),
        ({"r": "x"}, "adapter_config.json is no configuration of LoRA: Expected `int`, got `str`"),
        ({"lora_alpha": None}, "adapter_config.json is no configuration of LoRA: Expected `float`, got `null`"),
        ({"layers": 0}, "no matrix of an adapter"),
    ],
)
def test_adapters_that_do_not_fit_leave_the_engine_as_it_was(host, adapters, tmp_path, faults, message):
    make_adapter(tmp_path / "bad", 9, **faults)
    for _ in range(3):  # more often than there are slots
        with pytest.raises(InvalidRequestError, match=message):
            load_adapter(host, "bad", tmp_path / "bad")
    load_adapter(host, "good", adapters[0]["judge"])
    assert tokens_of(host, "good", "") == [adapters[1]["judge"], adapters[1][""]]
    host.unload_adapter("good")


def test_files_that_are_not_there(host, tmp_path):
    with pytest.raises(InvalidRequestError, match=r"adapter_config\.json cannot be read"):
        load_adapter(host, "x", tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 8}')
    (tmp_path / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(InvalidRequestError, match=r"the adapter has no adapter_model\.safetensors"):
        load_adapter(host, "x", tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not that")
    with pytest.raises(InvalidRequestError, match=r"adapter_model\.safetensors cannot be read"):
        load_adapter(host, "x", tmp_path)


def test_without_slots_there_is_no_lora(engine, adapters):
    with pytest.raises(UnsupportedError, match="loaded without LoRA: --lora or --lora-directory"):
        engine.prepare_adapter("poet", adapters[0]["poet"])


def test_adapters_survive_a_failed_step(host, adapters, monkeypatch):
    if not hasattr(host, "reset"):
        pytest.skip("a step that fails ends the process of a batcher")
    load_adapter(host, "judge:7", adapters[0]["judge"])
    driver = driver_of(host)
    [victim] = driver.add(PROMPT, 30, adapter="judge:7")
    driver.step()

    def broken(*arguments, **options):
        raise RuntimeError("the device fell off the bus")

    with monkeypatch.context() as patch:
        patch.setattr(host._executor, "sample_tokens", broken)
        driver.run()
    assert driver.ends[victim].error.code == "step_failed"
    assert tokens_of(host, "judge:7") == [adapters[1]["judge"]]
    host.unload_adapter("judge:7")
