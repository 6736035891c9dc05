"""From settings to what an engine process is told; what an engine would not heed is refused by name."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from socket import gethostname
from typing import Any

import pytest

from penstock.engines.host.placement import Placement
from penstock.engines.kv_events.settings import KVEventsConfig
from penstock.engines.registry import EngineSpec
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.configuration.config import ConfigError, load_config
from penstock.gateway.configuration.sections.language_model import OF_OUR_SCHEDULER
from penstock.gateway.models.language.adapters import new_adapter
from penstock.gateway.models.language.engine_spec import engine_spec
from penstock.gateway.models.language.model_builder import ModelBuilder
from penstock.gateway.models.language.models import ModelSource, choose_parsers, find_model
from penstock.gateway.models.language.prompts import ChatValues, chat_text
from penstock.tokenizers import Tokenizer
from support.adapters import save_adapter

DEMO = find_model(None)
TOKENIZER = Tokenizer(DEMO.folder)
EVENTS = "tcp://127.0.0.1:5557"


def spec(**settings: Any) -> EngineSpec:
    return engine_spec(load_config(settings, environ={}).models, DEMO, TOKENIZER)


def test_where_an_engine_runs() -> None:
    [cpu, *_] = sorted(os.sched_getaffinity(0))
    assert spec().placement == Placement()
    found = spec(engine="simulated", cpus=str(cpu), numa_nodes="auto")
    assert found.placement == Placement(str(cpu), "auto")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"cpus": "99999"}, r"cpus: CPU 99999 is not available \(available: "),
        ({"cpus": "some"}, r"cpus: 'some' is not a list of numbers such as 0-3,8"),
        ({"numa_nodes": "999"}, r"numa-nodes: this machine has no NUMA node 999"),
    ],
)
def test_where_no_engine_can_run(setting: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(**setting)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events": None, "kv_events_replay": EVENTS}, "kv-events-replay: nothing is published without kv-events"),
        ({"kv_events": None, "kv_events_topic": "kv@"}, "kv-events-topic: nothing is published without kv-events"),
        ({"kv_events": "127.0.0.1:5557"}, "kv-events: '127.0.0.1:5557': it is tcp://ADDRESS:PORT"),
        ({"prefix_caching": False}, "kv-events: nothing is stored where prefix-caching is off"),
        ({"scheduler": "engine"}, "kv-events: does not apply to an engine that uses its own scheduler"),
        ({"engine": "tensorrt_llm"}, "kv-events: does not apply to an engine that uses its own scheduler"),
    ],
)
def test_events_that_cannot_be_published(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(**{"engine": "simulated", "kv_events": EVENTS, **settings})


def test_events_are_named_after_machine_and_model() -> None:
    found = engine_spec(load_config({"kv_events": EVENTS}, environ={}).models, DEMO, TOKENIZER, (), ["chat", "alias"])
    assert found.scheduler.kv_events == KVEventsConfig(endpoint=EVENTS, topic=f"kv@{gethostname()}@chat")
    assert spec().scheduler.kv_events is None


def test_the_large_engines_are_told_of_devices_memory_and_options_of_their_own() -> None:
    found = spec(
        engine="vllm",
        scheduler="engine",
        tensor_parallel_size=2,
        gpu_memory_utilization=0.5,
        quantization="fp8",
        prefix_caching=False,
        engine_args='{"enforce_eager": true}',
    )
    assert (found.runner, found.scheduling) == ("vllm", "engine")
    assert found.options["tensor_parallel_size"] == 2
    assert found.options["memory_share"] == 0.5
    assert found.options["quantization"] == "fp8"
    assert found.options["prefix_caching"] is False
    assert found.options["engine_args"] == {"enforce_eager": True}


def test_tensorrt_llm_is_told_the_same() -> None:
    found = spec(engine="tensorrt_llm", engine_args={"max_beam_width": 1})
    assert found.runner == "tensorrt_llm"
    assert found.options["engine_args"] == {"max_beam_width": 1}
    assert found.options["model_dir"] == str(DEMO.folder)


@pytest.mark.parametrize("engine", ["openvino", "torch", "simulated"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tensor_parallel_size", 2),
        ("pipeline_parallel_size", 2),
        ("gpu_memory_utilization", 0.5),
        ("quantization", "awq"),
        ("engine_args", '{"enforce_eager": true}'),
    ],
)
def test_other_engines_refuse_these_settings(engine: str, name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name.replace('_', '-')}: the {engine} engine does not have"):
        spec(engine=engine, **{name: value})


@pytest.mark.parametrize("engine", ["openvino", "torch"])
def test_engines_without_a_scheduler_refuse_to_use_it(engine: str) -> None:
    with pytest.raises(ConfigError, match=f"scheduler: the {engine} engine has no scheduler of its own"):
        spec(engine=engine, scheduler="engine")


def test_tensorrt_llm_cannot_be_driven_step_by_step() -> None:
    with pytest.raises(ConfigError, match="scheduler: the tensorrt_llm engine runs under its own scheduler"):
        spec(engine="tensorrt_llm", scheduler="penstock")


def test_the_simulated_engine_has_both_schedulers() -> None:
    assert spec(engine="simulated", scheduler="engine").scheduling == "engine"
    assert spec(engine="simulated").scheduling == "auto"


def test_the_scheduler_is_told_of_its_settings() -> None:
    given = {"itl_target_ms": 50.0, "steps_in_flight": 1, "speculative": "ngram", "max_draft_tokens": 4}
    found = spec(engine="openvino", **given).scheduler
    assert {name: getattr(found, name) for name in given} == given
    assert all(getattr(SchedulerConfig(), name) == default for name, default in OF_OUR_SCHEDULER.items())


@pytest.mark.parametrize("engine", [{"engine": "tensorrt_llm"}, {"engine": "vllm", "scheduler": "engine"}])
@pytest.mark.parametrize(
    ("name", "value"),
    [("itl_target_ms", 50), ("steps_in_flight", 1), ("speculative", "ngram"), ("max_draft_tokens", 4)],
)
def test_engines_that_schedule_by_themselves_refuse_settings_of_our_scheduler(
    engine: dict[str, str], name: str, value: Any
) -> None:
    with pytest.raises(ConfigError, match=f"{name.replace('_', '-')}: does not apply to an engine that uses its own"):
        spec(**engine, **{name: value})


@pytest.mark.parametrize("engine", ["openvino", "torch", "vllm", "simulated"])
def test_a_number_of_guesses_is_nothing_without_guesses(engine: str) -> None:
    with pytest.raises(ConfigError, match="max-draft-tokens: nothing is guessed without speculative=ngram"):
        spec(engine=engine, max_draft_tokens=4)


def test_the_models_own_head_guesses_for_openvino_alone() -> None:
    found = spec(engine="openvino", speculative="mtp", max_draft_tokens=4)
    assert (found.options["mtp"], found.scheduler.speculative) == (True, "draft_model")
    assert spec(engine="openvino", speculative="ngram").options["mtp"] is False
    for engine in ("torch", "simulated"):
        with pytest.raises(ConfigError, match=f"speculative: the {engine} engine has no mtp"):
            spec(engine=engine, speculative="mtp")


def test_a_draft_model_guesses_for_openvino_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    found = spec(engine="openvino", speculative_model=str(tmp_path), max_draft_tokens=4)
    assert found.options["draft_model_dir"] == str(tmp_path)
    assert (found.scheduler.speculative, found.scheduler.max_draft_tokens) == ("draft_model", 4)
    assert spec(engine="openvino").options["draft_model_dir"] is None
    for engine in ("torch", "vllm", "simulated", "tensorrt_llm"):
        with pytest.raises(ConfigError, match=f"speculative-model: the {engine} engine has no draft models"):
            spec(engine=engine, speculative_model=str(tmp_path))
    with pytest.raises(ConfigError, match="speculative-model: guesses are either those of a draft model or those of"):
        spec(engine="openvino", speculative_model=str(tmp_path), speculative="ngram")
    with pytest.raises(ConfigError, match="speculative-model: guesses are either those of a draft model or those of"):
        spec(engine="openvino", speculative_model=str(tmp_path), speculative="mtp")
    with pytest.raises(ConfigError, match=r"speculative-model: there is no folder or file \./nope"):
        spec(engine="openvino", speculative_model="./nope")


@pytest.mark.parametrize(
    ("settings", "ready_timeout"),
    [
        ({}, 10),
        ({"watchdog_timeout": 2}, 1),
        ({"ready_timeout": 59}, 59),
        ({"watchdog_timeout": 2, "ready_timeout": 1.5}, 1.5),
    ],
)
def test_readiness_ends_before_the_engine_is_replaced(settings: dict[str, Any], ready_timeout: float) -> None:
    config = load_config({"engine": "simulated"} | settings, environ={})
    model = ModelBuilder(config.server).build(config.models, DEMO)
    assert model.engine._watchdog.ready_timeout == ready_timeout


@pytest.mark.parametrize("scheduler", ["auto", "penstock"])
def test_vllm_guesses_under_its_own_scheduler_alone(scheduler: str) -> None:
    with pytest.raises(ConfigError, match="speculative: the vllm engine guesses only under its own scheduler"):
        spec(engine="vllm", scheduler=scheduler, speculative="ngram")


@pytest.mark.parametrize("text", ["{", "[1]", "nonsense", "1"])
def test_engine_args_must_be_an_object(text: str) -> None:
    with pytest.raises(ConfigError, match="engine-args: not a JSON object"):
        spec(engine="vllm", engine_args=text)


@pytest.mark.parametrize(("name", "value"), [("weights", "int8"), ("device", "cuda")])
def test_the_large_engines_refuse_what_they_decide_themselves(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: this engine"):
        spec(engine="vllm", **{name: value})


def test_adapters_are_no_reason_for_another_engine() -> None:
    assert spec(lora_directory="adapters").runner == "openvino"


@pytest.mark.parametrize(
    ("given", "settings", "room"),
    [
        (0, {}, 0),
        (0, {"lora_directory": "."}, 8),
        (2, {}, 8),
        (2, {"max_loras": 1, "lora_directory": "."}, 2),
        (2, {"max_loras": 5, "max_lora_rank": 64}, 5),
    ],
)
@pytest.mark.parametrize("engine", ["openvino", "vllm", "tensorrt_llm", "torch", "simulated"])
def test_engines_are_told_of_adapters_by_their_keys(
    engine: str, given: int, settings: dict[str, Any], room: int
) -> None:
    adapters = [new_adapter("same name", Path(f"/adapters/{number}")) for number in range(given)]
    options = engine_spec(
        load_config({"engine": engine, **settings}, environ={}).models, DEMO, TOKENIZER, adapters
    ).options
    assert list(options["adapters"].values()) == [f"/adapters/{number}" for number in range(given)]
    assert list(options["adapters"]) == [adapter.key for adapter in adapters]
    assert (options["max_loras"], options["max_lora_rank"]) == (room, settings.get("max_lora_rank", 16))


def test_a_model_has_the_adapters_of_its_settings(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "weights")
    settings = {"engine": "simulated", "lora": [f"tuned={folder}"], "lora_directory": str(tmp_path), "max_loras": 3}
    adapters = ModelBuilder().build(load_config(settings, environ={}).models, DEMO).adapters
    assert [(adapter.name, adapter.folder) for adapter in adapters] == [("tuned", folder)]
    assert (adapters.directory, adapters.max_loaded) == (tmp_path, 3)
    assert ModelBuilder().build(load_config({"engine": "simulated"}, environ={}).models, DEMO).adapters.max_loaded == 0


def test_steps_are_larger_where_a_gpu_computes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.gateway.models.language.engine_spec.visible_gpus", lambda: 1)
    assert spec(engine="vllm").scheduler.max_num_batched_tokens == 4096
    assert spec(engine="torch", device="cpu").scheduler.max_num_batched_tokens == 512
    assert spec(engine="openvino").scheduler.max_num_batched_tokens == 512
    assert spec(engine="vllm", max_num_batched_tokens=300).scheduler.max_num_batched_tokens == 300


def test_how_chats_are_written(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{% for m in messages %}<think>{{ m.content }}{% endfor %}")
    given = {"engine": "simulated", "chat_template": str(template)}
    model = ModelBuilder().build(load_config(given, environ={}).models, DEMO)
    assert model.guard is not None
    assert model.guard.tokens.keys() >= set(TOKENIZER.special_tokens.values())
    assert model.chat_template is not None
    assert model.chat_template.content_format == "string"
    settings = given | {"chat_template_content_format": "openai", "special_tokens_in_content": True}
    other = ModelBuilder().build(load_config(settings, environ={}).models, DEMO)
    assert other.guard is None
    assert other.chat_template is not None
    assert other.chat_template.content_format == "openai"


def with_templates(folder: Path, templates: dict[str, str]) -> ModelSource:
    """The demo model with chat templates of these names."""
    shutil.copytree(DEMO.folder, folder)
    path = folder / "tokenizer_config.json"
    named = [{"name": name, "template": template} for name, template in templates.items()]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": named}))
    return ModelSource(folder, "named")


TURNS = "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}{% endfor %}"
CALLS = "{% for t in tools %}<tool_call>{{ t.function.name }}<|endoftext|>{% endfor %}<think>" + TURNS


def test_a_model_may_have_a_template_for_chats_with_tools(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock")
    strict = TURNS.replace("{{ m.content", "{{ raise_exception('') if m.role == 'system' else m.content")
    source = with_templates(tmp_path / "m", {"default": strict, "tool_use": CALLS, "unknown": "{% if %}"})
    model = ModelBuilder().build(load_config({"engine": "simulated"}, environ={}).models, source)
    assert model.chat_template is not None
    assert (model.chat_template.source, model.chat_template.with_tools.source) == (strict, CALLS)
    assert model.parsers.tools is not None, "only the template for tools shows calls"
    assert "<tool_call>" in model.parsers.tools.markers
    assert model.parsers.reasoning is not None
    assert model.guard is not None
    assert "<|endoftext|>" in model.guard.tokens
    [line] = [record.getMessage() for record in caplog.records if "needs" in record.getMessage()]
    assert line.startswith("named: its chat template (default) ")
    assert line.endswith(str(model.chat_template.needs))
    values = ChatValues([{"role": "user", "content": "q"}], None, None, None, True, False)
    assert chat_text(model, model.chat_template, values).text == "<|im_start|>user q"
    tools = [{"type": "function", "function": {"name": "f"}}]
    offered = dataclasses.replace(values, tools=tools)
    assert chat_text(model, model.chat_template, offered).text.startswith("<tool_call>f<|endoftext|>")


def test_the_operator_s_template_is_the_one_for_all_chats(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TURNS)
    source = with_templates(tmp_path / "m", {"default": CALLS, "tool_use": CALLS})
    model = ModelBuilder().build(
        load_config({"engine": "simulated", "chat_template": str(template)}, environ={}).models, source
    )
    assert model.chat_template is not None
    assert model.chat_template.with_tools.source == TURNS
    assert model.parsers.tools is None


def test_templates_without_a_default(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config({"engine": "simulated"}, environ={}).models
    only = ModelBuilder().build(config, with_templates(tmp_path / "one", {"tool_use": CALLS})).chat_template
    assert only is not None
    assert only.source == only.with_tools.source == CALLS
    assert "chat templates" not in caplog.text
    source = with_templates(tmp_path / "two", {"tool_use": CALLS, "rag": TURNS})
    assert ModelBuilder().build(config, source).chat_template is None
    assert "has the chat templates rag, tool_use and none for other chats" in caplog.text


def test_the_tags_of_gpt_oss_are_not_the_assistant_s_to_send_back() -> None:
    parsers = choose_parsers("gpt_oss", "gpt_oss", None, TOKENIZER)
    assert parsers.own_tags == {"<think>", "</think>"}
    assert "<tool_call>" in choose_parsers("hermes", "none", None, TOKENIZER).own_tags
