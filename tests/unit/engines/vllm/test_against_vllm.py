"""vLLM's own generate, with vLLM's own scheduler, gives the same tokens."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from support.engine import Driver

SETTINGS = [
    {"temperature": 0.0, "max_tokens": 40},
    {"temperature": 0.0, "max_tokens": 40, "presence_penalty": 0.7, "frequency_penalty": 0.5},
    {"temperature": 0.0, "max_tokens": 40, "repetition_penalty": 1.3},
    {"temperature": 0.0, "max_tokens": 40, "logit_bias": {17: 4.0, 300: 3.0}},
    {"temperature": 0.0, "max_tokens": 1},
    {"temperature": 0.0, "max_tokens": 33},
    {"temperature": 0.0, "max_tokens": 60, "min_tokens": 20},
    {"temperature": 0.0, "max_tokens": 50},
]


def prompts():
    rng = random.Random(5)
    return [[rng.randrange(3, 259) for _ in range(length)] for length in (1, 31, 32, 33, 64, 90, 130, 20)]


@pytest.fixture(scope="module")
def expected(model_dir, tmp_path_factory):
    result = tmp_path_factory.mktemp("reference") / "tokens.json"
    asked = {"model_dir": str(model_dir), "prompts": prompts(), "settings": SETTINGS, "result": str(result)}
    environ = os.environ | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("reference_generate.py")
    subprocess.run(
        [sys.executable, str(script)], input=json.dumps(asked), text=True, env=environ, check=True, timeout=110
    )
    return json.loads(result.read_text())


def run(driver):
    ids = [driver.add(prompt, **settings)[0] for prompt, settings in zip(prompts(), SETTINGS, strict=True)]
    driver.run()
    return [driver.tokens[i] for i in ids]


@pytest.mark.parametrize(
    "scheduler",
    [
        pytest.param({}, id="whole-prompts"),
        pytest.param({"max_num_batched_tokens": 16}, id="chunks"),
        pytest.param({"max_num_seqs": 3, "max_num_batched_tokens": 9}, id="small-chunks-few-seats"),
    ],
)
def test_the_same_tokens_under_our_scheduler(runner, expected, scheduler):
    assert run(Driver(runner, **{"max_num_seqs": 8, "max_num_batched_tokens": 256} | scheduler)) == expected


@pytest.mark.parametrize("max_num_seqs", [8, 3])
def test_the_same_tokens_behind_our_queue(batcher, expected, max_num_seqs):
    assert run(Driver(batcher, max_num_seqs=max_num_seqs, max_num_batched_tokens=256)) == expected


def test_the_same_tokens_under_preemption_and_prefix_hits(engine, expected):
    driver = Driver(engine, max_num_seqs=8, max_num_batched_tokens=64)
    # strangers that take most of the 24 blocks, so that everybody is preempted in turn
    for n in range(4):
        driver.add([7 + n] * 60, 150)
    for _ in range(2):
        assert run(driver) == expected
    assert driver.stats.preemptions > 0
    assert driver.stats.prefix_hits > 0
