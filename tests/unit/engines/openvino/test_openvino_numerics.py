"""Number types: which are chosen for a CPU, settings and a model, and what happens when a trial fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.engines.errors import PenstockError, UnsupportedError
from penstock.engines.host.cpu import Cpu, this_cpu
from penstock.engines.openvino import trials
from penstock.engines.openvino.numerics import CpuFacts, ModelFacts, Numerics, StoredTypes, Wish, cpu_facts, resolve
from penstock.engines.openvino.trials import Trial, predict, run_trials, settle
from support.cpu import FACTS, needs_bf16, needs_int8
from support.models import make_model

INTEGERS = ModelFacts(StoredTypes(block_bits=8.5), head_size=64)
SOME_INTEGERS = ModelFacts(StoredTypes(integers="int4"), head_size=64)
FLOATS = ModelFacts(head_size=64)
CAPPED = ModelFacts(head_size=64, is_capped=True)
ENCODER = ModelFacts()

ZEN4 = CpuFacts(("bf16", "f32"), frozenset({"bf16", "f32"}))
AMX = CpuFacts(("bf16", "f32"), frozenset({"f32"}))
ICE_LAKE = CpuFacts(("f32",), frozenset({"f32"}))
NO_INT8 = CpuFacts(("bf16", "f32"), frozenset())
UNPACKING = CpuFacts(("f32",), frozenset())
"""AVX2 alone, once a trial has shown that it rounds no activations."""


def types(numerics: Numerics) -> tuple[str, str | None, str]:
    return numerics.dtype, numerics.kv and numerics.kv.name, numerics.activations


@pytest.mark.parametrize(
    ("cpu", "model", "settings", "expected"),
    [
        (ZEN4, FLOATS, {}, ("bf16", "bf16", "bf16")),
        (ZEN4, FLOATS, {"dtype": "f32"}, ("f32", "f32", "f32")),
        (ZEN4, INTEGERS, {}, ("bf16", "bf16", "int8")),
        (ZEN4, INTEGERS, {"activations": "int8"}, ("bf16", "bf16", "int8")),
        (ZEN4, INTEGERS, {"dtype": "f32"}, ("f32", "f32", "int8")),
        (ZEN4, CAPPED, {}, ("f32", "f16", "f32")),
        (ZEN4, CAPPED, {"dtype": "f32"}, ("f32", "f32", "f32")),
        (ZEN4, ENCODER, {"dtype": "bf16"}, ("bf16", None, "bf16")),
        (AMX, INTEGERS, {}, ("f32", "f16", "int8")),
        (AMX, SOME_INTEGERS, {}, ("bf16", "bf16", "bf16")),
        (AMX, INTEGERS, {"dtype": "bf16"}, ("bf16", "bf16", "bf16")),
        (AMX, INTEGERS, {"activations": "bf16"}, ("bf16", "bf16", "bf16")),
        (AMX, SOME_INTEGERS, {"activations": "int8"}, ("f32", "f16", "int8")),
        (AMX, INTEGERS, {"activations": "int8", "kv_cache_dtype": "u8"}, ("f32", "u8", "int8")),
        (AMX, INTEGERS, {"activations": "int8", "dtype": "f32"}, ("f32", "f32", "int8")),
        (AMX, INTEGERS, {"dtype": "f32"}, ("f32", "f32", "int8")),
        (AMX, INTEGERS, {"activations": "mixed"}, ("f32", "u8", "int8")),
        (AMX, INTEGERS, {"activations": "mixed", "kv_cache_dtype": "u4"}, ("f32", "u4", "int8")),
        (ICE_LAKE, FLOATS, {}, ("f32", "f32", "f32")),
        (ICE_LAKE, INTEGERS, {}, ("f32", "f32", "int8")),
        (ICE_LAKE, CAPPED, {}, ("f32", "f16", "f32")),
        (NO_INT8, INTEGERS, {}, ("bf16", "bf16", "bf16")),
        (NO_INT8, INTEGERS, {"dtype": "f32"}, ("f32", "f32", "f32")),
    ],
)
def test_number_types_are_chosen_by_cpu_model_and_settings(
    cpu: CpuFacts, model: ModelFacts, settings: dict[str, Any], expected: tuple[str, str | None, str]
) -> None:
    assert types(resolve(cpu, Wish(**settings), model)) == expected


@pytest.mark.parametrize(
    ("cpu", "model", "settings", "message", "param"),
    [
        (ICE_LAKE, FLOATS, {"dtype": "bf16"}, "this CPU has no instructions for it; it has f32", "dtype"),
        (AMX, FLOATS, {"dtype": "f16"}, "this CPU has no instructions for it; it has bf16, f32", "dtype"),
        (AMX, INTEGERS, {"dtype": "bf16", "activations": "int8"}, "int8 with dtype=f32, or bf16 is", "activations"),
        (NO_INT8, INTEGERS, {"activations": "int8"}, "by this CPU with dtype=f32; f32 is", "activations"),
        (ZEN4, FLOATS, {"activations": "int8"}, "activations=int8 cannot be combined with weights=auto", "activations"),
        (
            ZEN4,
            FLOATS,
            {"kv_cache_dtype": "f16"},
            "cannot be combined with dtype=bf16; bf16, u8, u8-u4, u4 can",
            "kv_cache_dtype",
        ),
        (ZEN4, CAPPED, {"dtype": "bf16"}, "dtype=bf16 cannot be combined with capped scores", "dtype"),
        (
            ZEN4,
            CAPPED,
            {"kv_cache_dtype": "u8"},
            "kv_cache_dtype=u8 cannot be combined with capped scores",
            "kv_cache_dtype",
        ),
        (AMX, SOME_INTEGERS, {"activations": "mixed"}, "mixed needs weights=int8 or weights=int4", "activations"),
        (
            AMX,
            INTEGERS,
            {"activations": "mixed", "dtype": "f32"},
            "mixed cannot be combined with a dtype",
            "activations",
        ),
        (AMX, INTEGERS, {"activations": "mixed", "kv_cache_dtype": "f32"}, "u8, u8-u4, u4 can", "kv_cache_dtype"),
        (ZEN4, INTEGERS, {"activations": "mixed"}, "is for those with AMX", "activations"),
        (ICE_LAKE, INTEGERS, {"activations": "mixed"}, "is for those with AMX", "activations"),
        (NO_INT8, INTEGERS, {"activations": "mixed"}, "is for those with AMX", "activations"),
    ],
)
def test_what_the_cpu_or_the_model_does_not_allow_is_refused_by_name(
    cpu: CpuFacts, model: ModelFacts, settings: dict[str, Any], message: str, param: str
) -> None:
    with pytest.raises(PenstockError, match=message) as caught:
        resolve(cpu, Wish(**settings), model)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("stored", "setting", "expected"),
    [
        (StoredTypes(), "auto", ("auto", None)),
        (StoredTypes(), "int4", ("int4", "int4")),
        (StoredTypes(integers="int8"), "auto", ("auto", "int8")),
        (StoredTypes(integers="int8"), "bf16", ("bf16", None)),
        (StoredTypes(block_bits=4.9), "auto", ("int4", "int4")),
        (StoredTypes(block_bits=5.5), "auto", ("int8", "int8")),
        (StoredTypes(block_bits=5.5), "f32", ("f32", None)),
        (StoredTypes(has_mxfp4=True), "auto", ("auto", None)),
    ],
)
def test_weights_stay_as_stored_unless_a_setting_changes_them(
    stored: StoredTypes, setting: Any, expected: tuple[str, str | None]
) -> None:
    found = resolve(ZEN4, Wish(weights=setting), ModelFacts(stored, head_size=64))
    assert (found.weights, found.integers) == expected


@pytest.mark.parametrize(
    ("cpu", "model", "settings", "expected"),
    [
        (UNPACKING, INTEGERS, {"weights": "int4"}, True),
        (UNPACKING, ENCODER, {"weights": "int4"}, True),
        (UNPACKING, SOME_INTEGERS, {}, True),
        (UNPACKING, ModelFacts(StoredTypes(block_bits=4.9), head_size=64), {}, True),
        (UNPACKING, replace(SOME_INTEGERS, is_exported=True), {}, False),
        (UNPACKING, INTEGERS, {}, True),
        (UNPACKING, FLOATS, {}, False),
        (UNPACKING, SOME_INTEGERS, {"weights": "int8"}, True),
        (replace(UNPACKING, unpacks_i4=False), SOME_INTEGERS, {}, False),
        (NO_INT8, SOME_INTEGERS, {}, False),
        (NO_INT8, SOME_INTEGERS, {"dtype": "f32"}, True),
        (ICE_LAKE, SOME_INTEGERS, {}, False),
        (ICE_LAKE, SOME_INTEGERS, {"activations": "f32"}, True),
        (ZEN4, SOME_INTEGERS, {}, False),
        (AMX, SOME_INTEGERS, {}, False),
        (AMX, SOME_INTEGERS, {"activations": "int8"}, False),
        (AMX, INTEGERS, {"weights": "int4", "activations": "mixed"}, False),
    ],
)
def test_integers_are_arranged_for_unpacking_where_they_are_multiplied_with_f32(
    cpu: CpuFacts, model: ModelFacts, settings: dict[str, Any], expected: bool
) -> None:
    assert resolve(cpu, Wish(**settings), model).unpacks == expected


def test_roles_of_models() -> None:
    """A draft keeps its weights once, and an encoder's vectors are exact unless a type is set."""
    draft = replace(INTEGERS, is_draft=True)
    assert resolve(AMX, Wish(activations="mixed"), draft).large_steps is None
    assert resolve(AMX, Wish(activations="mixed"), INTEGERS).large_steps == "bf16"
    assert resolve(ZEN4, Wish(), ENCODER).dtype == "f32"
    with pytest.raises(UnsupportedError, match="not for models that OpenVINO's tools exported"):
        resolve(AMX, Wish(activations="mixed"), replace(SOME_INTEGERS, is_exported=True))


def cpu(*flags: str, machine: str = "x86_64") -> CpuFacts:
    return cpu_facts(Cpu("a CPU", machine, frozenset(flags)))


def test_what_a_cpu_computes_in_by_its_instructions() -> None:
    avx512 = ("avx2", "avx512f", "avx512_vnni")
    assert cpu("avx2") == cpu(*avx512) == ICE_LAKE
    assert cpu(*avx512, "avx512_bf16") == ZEN4
    assert cpu(*avx512, "avx512_bf16", "amx_tile", "amx_bf16") == AMX
    assert cpu(*avx512, "avx512_bf16", "avx512_fp16").dtypes == ("bf16", "f32", "f16")
    assert cpu() == ICE_LAKE, "a system that does not list them"


def test_arm_gets_what_openvino_offers_there() -> None:
    graviton = cpu("asimd", "asimdhp", "bf16", "sve", machine="aarch64")
    assert types(resolve(graviton, Wish(), INTEGERS)) == ("f32", "f32", "f32")
    assert not resolve(graviton, Wish(weights="int4"), FLOATS).unpacks
    assert types(resolve(graviton, Wish(), CAPPED)) == ("f32", "f32", "f32")
    assert types(resolve(graviton, Wish(dtype="f16"), FLOATS)) == ("f16", "u8", "f16")
    with pytest.raises(UnsupportedError, match=r"dtype=bf16 .* does not offer it on Arm; it has f16, f32"):
        resolve(graviton, Wish(dtype="bf16"), FLOATS)
    with pytest.raises(PenstockError, match="kv_cache_dtype=u4 cannot be combined with dtype=f32; f32, u8 can"):
        resolve(graviton, Wish(kv_cache_dtype="u4"), FLOATS)
    older = cpu("asimd", "asimdhp", machine="aarch64")
    with pytest.raises(UnsupportedError, match="only where the CPU has SVE; use --engine torch"):
        resolve(older, Wish(), FLOATS)
    assert resolve(older, Wish(), ENCODER).dtype == "f32", "it needs no paged attention"
    assert resolve(cpu(machine="arm64"), Wish(), FLOATS).dtype == "f32", "not known: trials will show it"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of trials that fail on a CPU with everything; the others work."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trials, "cpu_facts", lambda _: ZEN4)
    faults: dict[str, str] = {}
    monkeypatch.setattr(trials, "run_trials", lambda wanted: {each.name: faults.get(each.name, "") for each in wanted})
    return faults


def test_the_next_candidate_is_taken_where_a_trial_fails(
    results: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    results["attention bf16 bf16"] = "its attention is wrong"
    assert predict(Wish(), FLOATS).dtype == "bf16", "not tried yet"
    with caplog.at_level("INFO"):
        assert types(settle(Wish(), FLOATS)) == ("f32", "f32", "f32")
    assert caplog.messages == ["computing in f32, kv f32 (not bf16: its attention is wrong)"]
    assert types(settle(Wish(kv_cache_dtype="u8"), FLOATS)) == ("bf16", "u8", "bf16"), "another kernel"
    assert predict(Wish(), FLOATS).dtype == "f32", "known by now"


def test_activations_are_not_rounded_where_a_trial_shows_that_they_are_not(results: dict[str, str]) -> None:
    results["rounding bf16"] = "not rounded"
    assert types(settle(Wish(), INTEGERS)) == ("f32", "f16", "int8")
    results["rounding f32"] = "not rounded"
    os.remove(next(Path(os.environ["XDG_CACHE_HOME"]).rglob("*.json")))
    assert types(settle(Wish(), INTEGERS)) == ("bf16", "bf16", "bf16")


def test_a_setting_is_refused_where_its_trial_fails(results: dict[str, str]) -> None:
    results["attention bf16 bf16"] = "its attention is wrong"
    with pytest.raises(
        UnsupportedError, match="dtype=bf16 is not offered by this CPU: its attention is wrong"
    ) as error:
        settle(Wish(dtype="bf16"), FLOATS)
    assert error.value.param == "dtype"


def test_nothing_is_left_where_f32_fails(results: dict[str, str]) -> None:
    results |= {f"attention {dtype} {dtype}": "it is wrong" for dtype in ("bf16", "f32")}
    with pytest.raises(UnsupportedError, match="does not compute on this machine: it is wrong"):
        settle(Wish(), FLOATS)
    results["attention f32 u4"] = "it is wrong"
    with pytest.raises(UnsupportedError, match="kv_cache_dtype=u4: it is wrong; use auto") as error:
        settle(Wish(dtype="f32", kv_cache_dtype="u4"), FLOATS)
    assert error.value.param == "kv_cache_dtype"


def test_a_trial_runs_once(results: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(Wish(), INTEGERS)
    monkeypatch.setattr(trials, "run_trials", lambda wanted: pytest.fail(f"again: {wanted}"))
    settle(Wish(), INTEGERS)
    settle(Wish(), FLOATS)
    [file] = tmp_path.rglob("*.json")
    file.write_text("{broken")
    monkeypatch.setattr(trials, "run_trials", lambda wanted: {each.name: "" for each in wanted})
    assert settle(Wish(), FLOATS).dtype == "bf16"
    monkeypatch.setattr(trials.metadata, "version", lambda _: "9999.1")
    monkeypatch.setattr(trials, "run_trials", lambda wanted: {each.name: "new" for each in wanted if "f32" not in each})
    assert settle(Wish(), FLOATS).dtype == "f32", "another version tries again"


def test_where_nothing_can_be_kept(results: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert settle(Wish(), FLOATS).dtype == "bf16"


def crash(trial: Trial) -> str:
    if trial.operation == "rounding":
        os.kill(os.getpid(), signal.SIGSEGV)
    return ""


def killed(trial: Trial) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


def hanging(trial: Trial) -> str:
    signal.pause()
    return ""


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has not computed yet, so that trials are forked. This one may have, but these do not compute."""
    monkeypatch.setattr(trials, "_is_fresh", lambda: True)


BOTH = [Trial("product", "f32"), Trial("rounding", "f32")]


@pytest.mark.usefixtures("fresh")
def test_a_trial_that_crashes_harms_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_spawned", trials._forked)
    monkeypatch.setattr(trials, "_fault", crash)
    assert run_trials(BOTH) == {"product f32": "", "rounding f32": "OpenVINO crashed with SIGSEGV"}
    monkeypatch.setattr(trials, "_fault", killed)
    assert run_trials(BOTH) == {}, "the system has ended it: that says nothing"
    monkeypatch.setattr(trials, "_fault", hanging)
    assert run_trials(BOTH, timeout=0.01) == {}


@pytest.mark.usefixtures("fresh")
def test_a_crash_in_a_copy_of_the_process_is_believed_only_in_a_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trials, "_fault", crash)
    assert run_trials(BOTH)["product f32"] == ""
    assert "crashed" not in run_trials(BOTH)["rounding f32"]


def test_a_process_that_has_computed_is_not_copied() -> None:
    script = (
        "from penstock.engines.openvino import runner, trials\n"
        "import openvino\n"
        "before = trials._is_fresh()\n"
        "openvino.Core().get_property('CPU', 'FULL_DEVICE_NAME')\n"
        "print(before, trials._is_fresh())"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(sys.platform == "linux"), "False"]


@needs_bf16
@needs_int8
def test_a_runner_says_what_it_does(tmp_path: Path, make_runner: Any) -> None:
    folder = make_model(tmp_path)
    by_itself = make_runner(folder, dtype="auto", weights="int8").info
    assert f"activations int8, kv {'bf16' if 'bf16' in FACTS.rounds else 'f16'}" in by_itself.runner
    exact = make_runner(folder, dtype="auto", weights="int8", activations="bf16").info
    assert "activations bf16, kv bf16" in exact.runner
    assert exact.numerics == "bf16, activations bf16, kv bf16" != by_itself.numerics


DEMO = Path(__file__).parents[4] / "gateway/penstock/gateway/demo_model"
"""Its matrices are wide enough for the kernels that larger models use."""
ISAS = ("AVX512_CORE_BF16", "AVX512_CORE_VNNI", "AVX512_CORE", "AVX2")
NEEDED = {"AVX512_CORE_BF16": "avx512_bf16", "AVX512_CORE_VNNI": "avx512_vnni", "AVX512_CORE": "avx512f"}
SERVES = """
import sys
from pathlib import Path

from support.runner import Driver, prompt
from penstock.engines.openvino import runner, trials
from penstock.engines.openvino.config import OpenVINOConfig

runner.collapse_filled_memory = lambda seconds: None
if "--wrong-facts" in sys.argv:
    trials.cpu_facts = lambda cpu: trials.CpuFacts(("bf16", "f32"), frozenset({"bf16", "f32"}))
for weights in ("auto", "int8", "int4"):
    loaded = runner.OpenVINORunner(OpenVINOConfig(Path(sys.argv[1]), weights=weights, threads=1, num_blocks=64))
    tokens = Driver(loaded).generate([prompt(20, 1)], 6)
    print(loaded.info.numerics, "|", *tokens[0])
    loaded.close()
"""


def serves(isa: str, cache: Path, *arguments: str) -> list[tuple[str, list[int]]]:
    """Number types and tokens for weights as stored, in int8 and in int4, in a process that oneDNN holds back."""
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": isa, "XDG_CACHE_HOME": str(cache), "PYTHONPATH": "tests"}
    command = [sys.executable, "-c", SERVES, str(DEMO), *arguments]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, cwd=Path(__file__).parents[4])
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.partition(" | ") for line in done.stdout.splitlines()]
    return [(types, [int(token) for token in tokens.split()]) for types, _, tokens in rows]


@pytest.mark.parametrize("isa", ISAS)
def test_every_instruction_set_answers(isa: str, tmp_path: Path) -> None:
    if NEEDED.get(isa, "avx2") not in this_cpu().flags:
        pytest.skip(f"this CPU does not have {isa}")
    rows = serves(isa, tmp_path / "cache")
    dtype = "bf16" if isa == "AVX512_CORE_BF16" else "f32"
    assert [types.split(", ")[0] for types, _ in rows] == [dtype] * 3
    assert [len(tokens) for _, tokens in rows] == [6] * 3
    if isa == "AVX2":
        wrong = serves(isa, tmp_path / "other_cache", "--wrong-facts")
        assert wrong == rows, "a trial finds out what the instructions do not show"
