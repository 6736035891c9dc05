"""Which models are compiled for two numbers of threads, and that it makes no difference to the tokens."""

from __future__ import annotations

import pytest

from helpers_engine import Driver
from helpers_models import load_reference, make_model, reference_tokens
from penstock.engines.openvino import lanes
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.lanes import LanePlan, plan_lanes
from penstock.engines.openvino.runner import OpenVINORunner

MIB = 1 << 20


@pytest.mark.parametrize(
    ("weights", "cores", "threads", "expected"),
    [
        (13 * MIB, 2, None, [LanePlan(1, 0), LanePlan(2, 2)]),
        (1 * MIB, 2, None, [LanePlan(1, 0), LanePlan(2, 24)]),
        (13 * MIB, 16, None, [LanePlan(1, 0), LanePlan(15, 14)]),
        (13 * MIB, 1, None, [LanePlan(1, 0)]),
        (13 * MIB, 2, 2, [LanePlan(2, 0)]),
        (1000 * MIB, 2, None, [LanePlan(2, 0)]),
        (1000 * MIB, 64, None, [LanePlan(31, 0)]),
        (1000, 2, None, [LanePlan(1, 0)]),
    ],
)
def test_plans(weights, cores, threads, expected):
    assert plan_lanes(weights, cores, threads, most_tokens=512) == expected


def test_tokens_do_not_depend_on_the_lane(tmp_path, monkeypatch):
    monkeypatch.setattr("penstock.engines.openvino.runner.usable_cores", lambda: 2)
    used = []
    choose = lanes.choose_lane
    monkeypatch.setattr(
        "penstock.engines.openvino.runner.choose_lane",
        lambda all_lanes, tokens: used.append(choose(all_lanes, tokens)) or used[-1],
    )
    folder = make_model(tmp_path, eos_token_id=None)
    config = OpenVINOConfig(model_dir=folder, dtype="f32", weights="f32", kv_cache_dtype="f32", num_blocks=16)
    runner = OpenVINORunner(config)
    prompt = [3 + n % 200 for n in range(120)]
    used.clear()
    driver = Driver(runner)
    [request] = driver.add(prompt, 20)
    driver.run()
    assert [lane.plan.threads for lane in used] == [2] + [1] * 19
    assert driver.tokens[request] == reference_tokens(load_reference(folder), prompt, 20)
