"""LoRA adapters on the torch runner: the tokens are those of the model with the adapter merged into its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from penstock.engines.contract.messages import FinishReason
from penstock.engines.torch.runner import TorchRunner
from support.adapters import load_adapter
from support.engine import Driver
from support.models import ATTENTION_LAYERS, load_reference, make_adapter, make_model, merge_adapter, reference_tokens
from support.runner import prompt
from unit.engines.torch.families import make_family

BLOCK = 32


@dataclass(frozen=True)
class Adapted:
    """A model, two adapters of it by key, and what each gives greedily; key "" is the model alone."""

    folder: Path
    adapters: dict[str, Path]
    references: dict[str, Any]

    def expect(self, key: str, tokens: Sequence[int], count: int, guess: Sequence[int] = ()) -> list[int]:
        return reference_tokens(self.references[key], tokens, count, guess)


@pytest.fixture(scope="module", params=["qwen2", pytest.param("llama", marks=pytest.mark.families("qwen2"))])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    """`b` changes less, and is of a lower rank."""
    folder = make_model(tmp_path_factory.mktemp(request.param), request.param, eos_token_id=None)
    plain = load_reference(folder)
    adapters = {
        "a:1": make_adapter(folder / "a", plain, seed=1, rank=8),
        "b:2": make_adapter(folder / "b", plain, seed=2, rank=3, targets=ATTENTION_LAYERS),
    }
    merged = {key: merge_adapter(load_reference(folder), path) for key, path in adapters.items()}
    return Adapted(folder, adapters, {"": plain, **merged})


@pytest.fixture
def runner(adapted: Adapted, make_runner: Any) -> TorchRunner:
    made: TorchRunner = make_runner(adapted.folder, max_loras=2, adapters=adapted.adapters)
    return made


def hooks_of(runner: TorchRunner) -> int:
    return sum(len(module._forward_hooks) for module in runner._threaded._model._model.modules())


@pytest.mark.parametrize("budget", [5, 33, 256])
def test_a_batch_of_all_kinds_in_chunks(adapted: Adapted, runner: TorchRunner, budget: int) -> None:
    driver = Driver(runner, max_num_seqs=5, max_num_batched_tokens=budget, enable_prefix_caching=False)
    asked = {}
    for n, key in enumerate(["", "a:1", "b:2", "a:1", ""]):
        tokens = prompt(30 + 9 * n, n)
        asked[driver.add(tokens, 14, adapter=key)[0]] = (key, tokens)
    driver.run()
    for request, (key, tokens) in asked.items():
        assert driver.tokens[request] == adapted.expect(key, tokens, 14, guess=driver.tokens[request])


def test_one_prompt_gives_three_answers(adapted: Adapted, runner: TorchRunner) -> None:
    """And n samples of an adapter share its prompt's blocks."""
    driver = Driver(runner, max_num_seqs=8, enable_prefix_caching=True)
    tokens = prompt(40, 1)
    ids = {key: driver.add(tokens, 20, n=2, adapter=key) for key in ("", "a:1", "b:2")}
    driver.run()
    answers = {key: [driver.tokens[i] for i in samples] for key, samples in ids.items()}
    assert answers == {key: [adapted.expect(key, tokens, 20)] * 2 for key in ids}
    assert len({tuple(samples[0]) for samples in answers.values()}) == 3


def test_preempted_requests_keep_their_adapter(adapted: Adapted, make_runner: Any) -> None:
    runner = make_runner(adapted.folder, max_loras=2, adapters=adapted.adapters, num_blocks=12)
    driver = Driver(runner, max_num_seqs=6, enable_prefix_caching=True)
    asked = {}
    for n, key in enumerate(["a:1", "", "b:2", "a:1", "b:2", ""]):
        tokens = prompt(40 + n, n)
        asked[driver.add(tokens, 70, adapter=key)[0]] = (key, tokens)
    driver.run()
    assert driver.stats.preemptions > 0
    for request, (key, tokens) in asked.items():
        assert driver.tokens[request] == adapted.expect(key, tokens, 70, guess=driver.tokens[request])


def test_adapters_share_no_blocks(adapted: Adapted, runner: TorchRunner) -> None:
    driver = Driver(runner, enable_prefix_caching=True)
    tokens = prompt(2 * BLOCK + 5, 3)
    hits = []
    for key in ["", "a:1", "b:2", "a:1", "", "b:2"]:
        [request] = driver.add(tokens, 8, adapter=key)
        driver.run()
        assert driver.tokens[request] == adapted.expect(key, tokens, 8, guess=driver.tokens[request])
        hits.append(driver.stats.prefix_hits)
    assert hits == [0, 0, 0, 2 * BLOCK, 4 * BLOCK, 6 * BLOCK]


def test_coming_and_going_while_others_run(adapted: Adapted, make_runner: Any) -> None:
    """A name that gets other weights gets another key, and nothing of the old one's cache."""
    runner = make_runner(adapted.folder, max_loras=1)
    driver = Driver(runner, enable_prefix_caching=True)
    tokens, other = prompt(50, 4), prompt(45, 5)
    [running] = driver.add(other, 60)
    answers = []
    for key, path in ("name:1", adapted.adapters["a:1"]), ("name:2", adapted.adapters["b:2"]):
        driver.step()
        load_adapter(runner, key, path)
        [request] = driver.add(tokens, 12, adapter=key)
        driver.run(until=lambda request=request: request in driver.ends)
        answers.append(driver.tokens[request])
        runner.unload_adapter(key)
    assert running not in driver.ends
    driver.run()
    assert driver.tokens[running] == adapted.expect("", other, 60, guess=driver.tokens[running])
    assert answers == [adapted.expect(key, tokens, 12) for key in ("a:1", "b:2")]
    assert driver.stats.prefix_hits == 0


def test_steps_without_adapters_run_the_bare_model(adapted: Adapted, runner: TorchRunner) -> None:
    driver = Driver(runner, max_num_seqs=4)
    bare = hooks_of(runner)
    [first] = driver.add(prompt(20, 6), 3, adapter="a:1")
    [second] = driver.add(prompt(20, 7), 10)
    driver.step()
    layers = 3 * 7
    assert hooks_of(runner) == bare + layers
    driver.run(until=lambda: first in driver.ends)
    driver.step()
    assert hooks_of(runner) == bare
    driver.run()
    assert driver.tokens[second] == adapted.expect("", prompt(20, 7), 10, guess=driver.tokens[second])


def test_a_request_whose_adapter_is_not_there_fails_alone(adapted: Adapted, runner: TorchRunner) -> None:
    driver = Driver(runner, max_num_batched_tokens=16, max_num_seqs=4)
    [lost] = driver.add(prompt(30, 8), 8, adapter="a:9", prompt_logprobs=0)
    [fine] = driver.add(prompt(30, 9), 8, adapter="a:1")
    driver.run()
    assert driver.ends[lost].finish_reason is FinishReason.ERROR
    assert driver.ends[lost].error.message == "the adapter 'a:9' is not loaded in this engine"
    assert driver.ends[lost].error.code == "model_not_found"
    assert driver.tokens[lost] == []
    assert driver.tokens[fine] == adapted.expect("a:1", prompt(30, 9), 8, guess=driver.tokens[fine])


def test_logprobs_of_an_adapter(adapted: Adapted, runner: TorchRunner) -> None:
    driver = Driver(runner, enable_prefix_caching=False)
    tokens = prompt(30, 10)
    driver.add(tokens, 1, adapter="b:2", prompt_logprobs=0)
    driver.add(tokens, 1)
    outputs = []
    while driver.core.has_work or not outputs:
        outputs += driver.step()
    [info] = [output.prompt for output in outputs if output.prompt is not None and output.prompt.logprobs]
    with torch.inference_mode():
        logits = adapted.references["b:2"](torch.tensor([tokens])).logits[0]
    wanted = torch.log_softmax(logits.double(), dim=-1)
    assert [entry.logprob for entry in info.logprobs] == pytest.approx(
        [float(wanted[i, token]) for i, token in enumerate(tokens[1:])], abs=1e-4
    )


def test_the_output_layer(adapted: Adapted, make_runner: Any) -> None:
    """It sees only the tokens whose logits are wanted. Tied to the embeddings, those stay as they are."""
    reference = load_reference(adapted.folder)
    reference.lm_head.weight = nn.Parameter(reference.lm_head.weight.detach().clone())
    path = make_adapter(adapted.folder / "head", reference, seed=3, targets=("lm_head", "v_proj"))
    merged = merge_adapter(reference, path)
    driver = Driver(
        make_runner(adapted.folder, max_loras=1, adapters={"h": path}), max_num_seqs=4, max_num_batched_tokens=19
    )
    asked = {driver.add(prompt(20 + n, n), 10, adapter=key)[0]: (key, n) for n, key in enumerate(["", "h", "h", ""])}
    driver.run()
    for request, (key, n) in asked.items():
        wanted = reference_tokens(merged if key else adapted.references[""], prompt(20 + n, n), 10)
        assert driver.tokens[request] == wanted


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("gpt2", ("c_attn", "c_proj", "c_fc")),
        ("phi3", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("deepseek_v3", ("q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")),
        ("gemma3_text", ("q_proj", "down_proj")),
    ],
)
def test_other_families(family: str, targets: tuple[str, ...], tmp_path: Path, make_runner: Any) -> None:
    """Fused projections, GPT-2's layers with their weights the other way round, latent attention."""
    make_family(tmp_path, family)
    plain = load_reference(tmp_path)
    path = make_adapter(tmp_path / "adapter", plain, targets=targets)
    driver = Driver(make_runner(tmp_path, max_loras=1, adapters={"x": path}), max_num_seqs=2, max_num_batched_tokens=17)
    tokens = [t % 300 for t in prompt(30, 2)]
    [base], [changed] = driver.add(tokens, 10), driver.add(tokens, 10, adapter="x")
    driver.run()
    wanted = reference_tokens(plain, tokens, 10)
    assert driver.tokens[base] == wanted
    assert driver.tokens[changed] == reference_tokens(merge_adapter(plain, path), tokens, 10) != wanted


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
def test_half_precision(dtype: str, adapted: Adapted, make_runner: Any) -> None:
    """In f32 files, or in bf16: the model's precision counts."""
    path = make_adapter(adapted.folder / dtype, adapted.references[""], dtype=torch.bfloat16)
    merged = merge_adapter(load_reference(adapted.folder), path)
    runner = make_runner(adapted.folder, dtype=dtype, max_loras=1, adapters={"x": path})
    driver = Driver(runner, enable_prefix_caching=False)
    driver.add(prompt(40, 1), 1, adapter="x", logprobs=0)
    outputs = []
    while driver.core.has_work or not outputs:
        outputs += driver.step()
    [entry] = [entry for output in outputs for entry in output.logprobs or ()]
    with torch.inference_mode():
        logits = merged(torch.tensor([prompt(40, 1)])).logits[0, -1]
    assert entry.logprob == pytest.approx(float(torch.log_softmax(logits.double(), dim=-1)[entry.token_id]), abs=0.5)
