"""docs/architectures.md: it is what the code says, and the code says something of every architecture."""

from __future__ import annotations

from pathlib import Path

import pytest
import transformers

from benchmarks.architectures.main import PAGE, ROOT, model_types, on_openvino, read, render
from benchmarks.architectures.torch_probe import verdict
from penstock.engines.errors import UnsupportedError
from penstock.engines.formats.model_settings import TEXT_PARTS
from penstock.engines.openvino.families import FAMILIES, parse_config
from penstock.engines.openvino.families_refused import REFUSED_FAMILIES

pytestmark = pytest.mark.skipif(
    transformers.__version__ != read().transformers, reason="the page is about another version of transformers"
)


def test_the_page_is_what_the_code_says() -> None:
    """Else: python loadtest/benchmarks architectures, with --probe for a new version of transformers."""
    assert (ROOT / PAGE).read_text(encoding="utf-8") == render(read())


def test_every_architecture_is_served_or_refused_with_a_reason() -> None:
    served = {*FAMILIES, *TEXT_PARTS}
    assert set(model_types()) - served == set(REFUSED_FAMILIES)
    assert served & set(REFUSED_FAMILIES) == set()
    assert set(read().verdicts) == set(model_types())


def test_the_registry_refuses_what_the_page_refuses() -> None:
    for name in model_types():
        said = on_openvino(name)
        with pytest.raises(UnsupportedError) as caught:
            parse_config({"architectures": [name]})
        is_refused = f"architecture {name} is not supported by the openvino runner: {said}" in caught.value.message
        assert is_refused == (said != "text only" and not said.startswith("yes")), name


@pytest.mark.parametrize("name", ["OlmoForCausalLM", "BertLMHeadModel", "MambaForCausalLM", "Qwen3_5ForCausalLM"])
def test_torch_does_what_the_page_says(name: str, tmp_path: Path) -> None:
    assert verdict(name, model_types()[name]) == read().verdicts[name]
