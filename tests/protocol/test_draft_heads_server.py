"""A server of models with draft heads: MiMo's own, and an EAGLE-3 head that a model of a repository names."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from support.draft_heads import make_agreeing_eagle3, make_mimo, make_near_identity
from support.models import VOCAB_SIZE, load_reference, make_model, make_tokenizer, reference_tokens
from support.server import Server, serving


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    target = make_near_identity(make_model(root / "models" / "eagle" / "1", "llama", num_hidden_layers=8))
    make_agreeing_eagle3(root / "head", target, torch.arange(VOCAB_SIZE)[:370])
    (target.parent / "config.pbtxt").write_text('backend: "penstock"')
    (target / "model.json").write_text(json.dumps({"speculative_model": str(root / "head")}))
    return {"mimo": make_mimo(root / "mimo", agrees=True), "eagle": target}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path]) -> Iterator[Server]:
    settings = ["--dtype", "f32", "--kv-cache-memory", "16MiB", "--threads", "1", "--max-draft-tokens", "3"]
    repository = ["--model-repository", str(folders["eagle"].parents[1])]
    with serving(str(folders["mimo"]), "--speculative", "mtp", *settings, *repository) as running:
        yield running


@pytest.mark.parametrize("name", ["mimo", "eagle"])
def test_answers_are_those_of_the_model(server: Server, folders: dict[str, Path], name: str) -> None:
    """Whether a guess is worth its time is measured, so there may be some or none."""
    prompt = "What is a penstock?"
    answer = server.client().completions.create(
        model=name, prompt=prompt, max_tokens=150, temperature=0, extra_body={"ignore_eos": True}
    )
    tokenizer = make_tokenizer()
    wanted = reference_tokens(load_reference(folders[name]), tokenizer(prompt)["input_ids"], 150)
    assert answer.choices[0].text == tokenizer.decode(wanted, skip_special_tokens=True)


def test_the_version_names_the_heads(server: Server) -> None:
    runners = httpx.get(server.url + "/version").json()["runners"]
    assert runners["mimo"].endswith(", MTP head")
    assert runners["eagle"].endswith(", EAGLE-3 head")
