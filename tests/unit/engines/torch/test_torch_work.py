"""What a step reads and computes, by the model's own count."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.models import make_model
from unit.engines.torch.conftest import MakeRunner
from unit.engines.torch.families import make_family


@pytest.mark.parametrize("tied", [True, False])
def test_each_matrix_counts_once_and_an_embedding_only_as_the_head(
    make_runner: MakeRunner, tmp_path: Path, tied: bool
) -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16}
    shape |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    info = make_runner(make_model(tmp_path / "m", "llama", tie_word_embeddings=tied, **shape)).info
    layer = (4 * 16 + 2 * 2 * 16) * 32 + 32 * 4 * 16 + 3 * 48 * 32
    assert info.work is not None
    assert info.work.token_flops == 2 * 2 * layer
    assert info.work.logits_flops == 2 * info.vocab_size * 32
    assert info.work.weight_bytes == 4 * (2 * layer + info.vocab_size * 32)
    assert info.work.kv_bytes == (2 * 2 * 2 * 16 * 4,)
    assert info.work.attention_flops == (2 * 4 * 4 * 16,)
    assert (info.work.weights, info.work.threads) == ("f32", ((0, 1),))


def test_of_experts_nothing_is_counted(make_runner: MakeRunner, tmp_path: Path) -> None:
    assert make_runner(make_family(tmp_path, "mixtral")).info.work is None
