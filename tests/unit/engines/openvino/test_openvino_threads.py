"""Which models are compiled for two numbers of threads, and that it makes no difference to the tokens."""

from __future__ import annotations

import pytest

from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.device import ThreadPlan, plan_threads
from penstock.engines.openvino.model import BufferedDecoder
from penstock.engines.openvino.runner import OpenVINORunner
from support.models import load_reference, make_model, reference_tokens
from support.runner import Driver, prompt

MIB = 1 << 20


@pytest.mark.parametrize(
    ("weights", "cores", "threads", "expected"),
    [
        (13 * MIB, 2, None, [ThreadPlan(1, 0), ThreadPlan(2, 2)]),
        (1 * MIB, 2, None, [ThreadPlan(1, 0), ThreadPlan(2, 24)]),
        (13 * MIB, 16, None, [ThreadPlan(1, 0), ThreadPlan(15, 14)]),
        (13 * MIB, 1, None, [ThreadPlan(1, 0)]),
        (13 * MIB, 2, 2, [ThreadPlan(2, 0)]),
        (1000 * MIB, 2, None, [ThreadPlan(2, 0)]),
        (1000 * MIB, 64, None, [ThreadPlan(31, 0)]),
        (1000, 2, None, [ThreadPlan(1, 0)]),
    ],
)
def test_a_small_model_has_a_second_plan_for_steps_of_many_tokens(weights, cores, threads, expected):
    assert plan_threads(weights, cores, threads, most_tokens=512) == expected


def test_tokens_do_not_depend_on_the_threads(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.engines.openvino.loading.usable_cores", lambda: 2)
    used = []
    prepare = BufferedDecoder.prepare

    def observe(model, buffer, batch):
        prepare(model, buffer, batch)
        used.append(model._buffers[buffer].requests.index(model._buffers[buffer].chosen))

    folder = make_model(tmp_path, eos_token_id=None)
    config = OpenVINOConfig(model_dir=folder, dtype="f32", weights="f32", kv_cache_dtype="f32", num_blocks=16)
    runner = OpenVINORunner(config)
    monkeypatch.setattr(BufferedDecoder, "prepare", observe)
    tokens = prompt(120, 1)
    assert Driver(runner).generate([tokens], 20) == [reference_tokens(load_reference(folder), tokens, 20)]
    assert used == [1] + [0] * 19
    runner.close()
