"""`penstock doctor`: what it finds on a machine, and what it says of a model."""

from __future__ import annotations

import json
import re
import resource
import socket
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec
import pytest
from packaging.requirements import Requirement

from penstock.engines.host.cpu import Cpu
from penstock.gateway.cli import main
from penstock.gateway.commands.doctor import machine_checks, model_advice, package_checks
from penstock.gateway.commands.doctor.findings import DoctorReport, Finding, Section, page
from penstock.gateway.commands.doctor.machine_checks import cpu_class, machine_findings
from penstock.gateway.commands.doctor.model_advice import model_findings
from penstock.gateway.commands.doctor.package_checks import backend_findings, engine_findings
from penstock.gateway.configuration.config import Config, load_config
from support.models import make_model

GIB = 1 << 30


@pytest.fixture(autouse=True)
def nothing_slow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Memory is not read, and no package is imported."""
    monkeypatch.setattr(machine_checks, "read_speeds", lambda *_: [20e9])
    monkeypatch.setattr(package_checks, "_import_fault", lambda module: "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config(**settings: Any) -> Config:
    ports = {"http_port": 0, "grpc_port": 0, "metrics_port": 0}
    return load_config({**ports, **settings}, environ={})


def by_subject(findings: Any) -> dict[str, Finding]:
    return {finding.subject: finding for finding in findings}


def machine(**settings: Any) -> dict[str, Finding]:
    return by_subject(machine_findings(config(**settings), 20e9))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("avx2 fma", "AVX2"),
        ("avx2 fma avx512f avx512bw avx512vl avx512dq avx512_vnni", "AVX-512 with VNNI"),
        ("avx2 fma avx512f avx512_vnni avx512_bf16 amx_tile amx_int8 amx_bf16", "AMX"),
        ("asimd sve", "SVE"),
        ("sse4_2", "none of those that help"),
    ],
)
def test_a_cpu_belongs_to_the_newest_class_that_it_has(
    monkeypatch: pytest.MonkeyPatch, flags: str, expected: str
) -> None:
    monkeypatch.setattr(machine_checks, "this_cpu", lambda: Cpu("a CPU", "x86_64", frozenset(flags.split())))
    assert cpu_class() == expected
    slow = expected == "none of those that help"
    assert machine()["CPU"].verdict == ("note" if slow else "ok")


def test_a_port_in_use_is_a_problem_and_its_flag_is_named() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        finding = machine(grpc_port=port)[f"port {port}"]
    assert finding.verdict == "problem"
    assert "--grpc-port" in finding.detail
    assert machine(grpc_port=port)[f"port {port}"].verdict == "ok"


def test_too_little_memory_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    assert machine()["memory"].figures["bytes_per_second"] == 20_000_000_000
    monkeypatch.setattr(machine_checks, "available_memory", lambda: 500 << 20)
    assert machine()["memory"].verdict == "problem"


def test_few_open_files_and_little_shared_memory_are_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 64 << 20))
    findings = machine()
    assert findings["open files"].verdict == "note"
    assert "--shm-size" in findings["/dev/shm"].detail
    assert "free" in findings["cache"].detail, "a disk with little room"
    assert findings["cache"].verdict == "note"


def test_a_repository_that_cannot_be_read_is_a_problem(tmp_path: Path) -> None:
    repository = tmp_path / "models"
    assert machine(model_repository=(str(repository),))["repository"].verdict == "problem"
    repository.mkdir()
    finding = machine(model_repository=(str(repository),))["repository"]
    assert finding.verdict == "ok"
    assert f"penstock check {repository}" in finding.detail


def test_a_package_that_is_missing_is_noted_with_its_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.13.0", "transformers": "5.24.0", "vllm": "0.1"}
    monkeypatch.setattr(package_checks, "_version", versions.get)
    findings = by_subject(engine_findings())
    assert findings["openvino"].verdict == "ok"
    assert findings["torch"].verdict == "ok"
    assert findings["vllm"].verdict == "problem"
    assert "Penstock needs vllm" in findings["vllm"].detail
    assert findings["tensorrt_llm"].verdict == "note"
    assert "pip install 'penstock-server[tensorrt-llm]'" in findings["tensorrt_llm"].detail
    backends = by_subject(backend_findings())
    assert backends["python"].verdict == "ok"
    assert "penstock-server[onnx]" in backends["onnxruntime"].detail


def test_a_package_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package_checks, "_version", lambda name: "5.24.0" if name == "transformers" else "2.13.0")
    monkeypatch.setattr(package_checks, "_requirements", lambda extra: [Requirement("torch")])
    monkeypatch.setattr(package_checks, "_import_fault", lambda module: "ImportError: libgomp.so.1: not there")
    finding = by_subject(engine_findings())["torch"]
    assert finding.verdict == "problem"
    assert "libgomp" in finding.detail


def test_every_engine_and_backend_with_packages_names_an_extra_of_the_distribution() -> None:
    extras = metadata.metadata("penstock-server").get_all("Provides-Extra") or []
    packages = [*package_checks._ENGINES.values(), *package_checks._BACKENDS.values()]
    assert {package.extra for package in packages} <= set(extras)


def test_an_import_fault_is_the_last_line_of_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert package_checks._import_fault("json") == ""
    assert package_checks._import_fault("no_such_module") == "ModuleNotFoundError: No module named 'no_such_module'"


def advice(model: str, **settings: Any) -> list[Finding]:
    return list(model_findings(config(model=model, **settings).models, 20e9))


def test_the_demo_model_is_served_as_it_is() -> None:
    engine, *options, choice = advice("penstock-demo")
    assert engine.figures == {"engine": "openvino"}
    assert [option.figures["weights"] for option in options] == ["auto", "int8", "int4"]
    rates = [option.figures["tokens_per_second"] for option in options]
    assert rates == sorted(rates)
    assert choice.detail.startswith("penstock serve penstock-demo: ")


def test_the_command_to_choose_is_one_for_this_folder(tmp_path: Path) -> None:
    model = make_model(tmp_path / "a model", "qwen2")
    assert advice(str(model))[-1].detail.startswith(f"penstock serve '{model}': ")


@pytest.mark.parametrize(("speed", "weights"), [(200e9, "auto"), (1e7, "int4")])
def test_the_most_exact_weights_that_are_quick_enough_are_chosen(
    monkeypatch: pytest.MonkeyPatch, speed: float, weights: str
) -> None:
    monkeypatch.setattr(model_advice, "available_memory", lambda: 64 * GIB)
    choice = list(model_findings(config(model="penstock-demo").models, speed))[-1]
    assert choice.figures == {"weights": weights}


def test_a_model_that_fits_in_no_form_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """A little more than what it needs at least, which differs from CPU to CPU, is enough for its smallest form."""
    monkeypatch.setattr(model_advice, "available_memory", lambda: 1 << 20)
    choice = advice("penstock-demo")[-1]
    assert choice.verdict == "problem"
    assert "does not fit" in choice.detail
    [least] = re.findall(r"at least (\d+) MiB", choice.detail)
    monkeypatch.setattr(model_advice, "available_memory", lambda: (int(least) + 1) << 20)
    choice = list(model_findings(config(model="penstock-demo").models, 20e9))[-1]
    assert choice.figures == {"weights": "int4"}


@pytest.mark.parametrize(
    ("model", "expected"),
    [("/no/such/folder", "there is no folder"), ("Qwen/Qwen2.5-0.5B-Instruct", "penstock pull Qwen/Qwen2.5")],
)
def test_a_model_that_is_not_here_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, model: str, expected: str
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    [finding] = advice(model)
    assert finding.verdict == "problem"
    assert expected in finding.detail


def test_the_simulated_engine_needs_memory_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, memory = advice("penstock-demo", engine="simulated")
    assert engine.figures == {"engine": "simulated"}
    assert memory.verdict == "ok"


def test_the_exit_status_is_that_of_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    ports = ["--http-port", "0", "--grpc-port", "0", "--metrics-port", "0"]
    assert main(["doctor", "--json", *ports]) == 0
    report = msgspec.json.decode(capsys.readouterr().out, type=DoctorReport)
    assert report.sections[0].title == "This machine"
    assert main(["doctor", "/no/such/folder", *ports]) == 1
    assert "PROBLEM" in capsys.readouterr().out


def test_the_page_names_the_problems_and_what_a_report_needs() -> None:
    problem = Finding("port 8000", "problem", "HTTP cannot listen")
    text = page(DoctorReport(versions={"penstock-server": "1"}, sections=[Section("This machine", [problem])]))
    assert "1 problem: port 8000" in text
    assert "penstock debug bundle" in text
    assert json.loads(msgspec.json.encode(problem))["verdict"] == "problem"
