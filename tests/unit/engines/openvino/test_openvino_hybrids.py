"""Models with recurrent layers: rows that the plugin's operations get, checkpoints, and what such models refuse."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engines.errors import InvalidRequestError, UnsupportedError
from penstock.engines.kit.batch import NO_INTS, NO_TOKENS, GroupTables, StepBatch
from penstock.engines.kit.cache_size import state_interval
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.delta_prompts import prompt_inputs, requests_in_runs
from penstock.engines.openvino.families import parse_config
from penstock.engines.openvino.recurrent import delta_inputs, state_inputs
from penstock.engines.openvino.runner import check_hybrid
from support.draft_heads import make_eagle3
from support.engine import Driver as EngineDriver
from support.engine import Failing
from support.guesses import guessed
from support.models import SHAPE, load_reference, make_model, reference_answers, reference_tokens
from support.runner import Driver, prompt

_WIDE = {"mamba_d_ssm": None, "mamba_proj_bias": True, "tie_word_embeddings": True}
_WITHOUT_EXPERTS = ["linear_attention", "mlp", "full_attention"]
CONFIG = SHAPE | {"architectures": ["Lfm2ForCausalLM"]}


def test_which_rows_a_step_reads_and_writes() -> None:
    """A new request reads row 0, which has zeros; in the middle of an interval its row is read and written; behind a
    checkpoint the next row is written."""
    tables = [[10, 11, 12], [20, 21, 0], [30, 31, 32], [40, 41, 0]]
    inputs = state_inputs(*_step([0, 6, 4, 3], [9, 1, 6, 2], tables, 4), 4)
    expected = [[0, 11, 12, 13], [22, 22], [31, 32, 33], [41, 41, 42]]
    begins = inputs["la.block_indices_begins"]
    rows = inputs["la.block_indices"].tolist()
    assert [rows[a:b] for a, b in pairwise(begins)] == expected
    assert inputs["la.past_lens"].tolist() == [0, 6, 4, 3]
    assert inputs["la.cache_interval"].tolist() == [4, 8, 8, 4]
    assert all(values.dtype == np.int32 for values in inputs.values())


def _step(
    computed: list[int], scheduled: list[int], rows: list[list[int]], interval: int
) -> tuple[StepBatch, GroupTables]:
    first, count = np.array(computed), np.array(scheduled)
    batch = StepBatch(
        NO_TOKENS,
        NO_INTS,
        np.cumsum([0, *scheduled]),
        first,
        count,
        (),
        NO_INTS,
        adapter_slots=NO_INTS,
        wants_hidden=False,
    )
    tables = GroupTables(np.array(rows, np.int32), np.zeros(len(rows), np.int64), -(-(first + count) // interval))
    return batch, tables


def test_long_runs_go_beside_the_operation_with_rows() -> None:
    """The second request crosses a checkpoint, so it is computed up to there once more. What stands before it follows
    what stands behind it, with a sequence of no tokens between them."""
    step = _step([5, 10, 0, 20, 0], [1, 9, 8, 1, 2], [[1, 0], [2, 3], [4, 0], [5, 6], [7, 0]], 16)
    chosen = requests_in_runs(*step, 16)
    assert chosen.tolist() == [1, 2]
    inputs, rows = prompt_inputs(*step, 16, chosen)
    assert rows.tolist() == [3, 4, 5]
    assert inputs["prompts.rows"].tolist() == [3, 3, 0]
    assert inputs["prompts.length"] == 9
    live = inputs["prompts.live"].reshape(3, 9).astype(bool)
    tokens = inputs["prompts.tokens"].reshape(3, 9)
    assert [run[mask].tolist() for run, mask in zip(tokens, live, strict=True)] == [
        [*range(1, 7)],
        [*range(1, 10)],
        [*range(10, 18)],
    ]
    assert inputs["prompts.targets"].tolist() == [*range(1, 18)]
    assert inputs["prompts.places"].tolist() == [*range(9, 26)]
    alone = delta_inputs(step[0], state_inputs(*step, 16), chosen)
    assert alone["alone.subsequence_begins"].tolist() == [18, 19, 21, 0, 1]
    begins = alone["alone.la.block_indices_begins"]
    read_and_written = [alone["alone.la.block_indices"][a:b].tolist() for a, b in pairwise(begins)]
    assert read_and_written == [[7, 7], [0, 8], [0], [2, 2]]
    assert alone["alone.la.past_lens"].tolist()[:2] == [20, 0]


def test_runs_that_would_mostly_fill_up_a_batch_are_left_out() -> None:
    rows = [[*range(9)]] * 3
    assert requests_in_runs(*_step([0, 0, 0], [90, 31, 29], rows, 100), 100).tolist() == [0, 1]
    assert requests_in_runs(*_step([0, 0, 0], [90, 31, 29], rows, 16), 16).tolist() == [1, 2]
    assert not len(requests_in_runs(*_step([3, 4, 5], [1, 1, 7], rows, 16), 16))


def test_the_longest_of_many_go_in_runs() -> None:
    step = _step([0] * 12, [*range(20, 32)], [[0]] * 12, 100)
    assert requests_in_runs(*step, 100).tolist() == [*range(4, 12)]


def test_the_interval_follows_the_sizes_unless_it_is_set() -> None:
    assert state_interval(None, 1000, 2000, 32) == 32
    assert state_interval(None, 5000, 2000, 32) == 128
    assert state_interval(None, 10**9, 2000, 32) == 1024
    assert state_interval(96, 10**9, 2000, 32) == 96
    with pytest.raises(InvalidRequestError, match="state_interval=48 is not a multiple of the 32 tokens"):
        state_interval(48, 1, 1, 32)


@pytest.mark.families("lfm2-moe", "qwen3.5", "granite-hybrid", "nemotron-h")
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("lfm2", {"conv_bias": True, "conv_L_cache": 4}),
        ("lfm2", {"block_auto_adjust_ff_dim": False}),
        ("lfm2-moe", {}),
        ("qwen3.5", {}),
        ("qwen3.5", {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True}),
        ("qwen3.5", {"layer_types": ["full_attention", *["linear_attention"] * 3], "attention_bias": True}),
        ("qwen3.5-moe", {}),
        ("qwen3-next", {"norm_topk_prob": False, "mlp_only_layers": [2], "linear_num_key_heads": 1}),
        ("olmo-hybrid", {}),
        ("olmo-hybrid", {"rope_parameters": {"rope_type": "default", "rope_theta": None}, "num_key_value_heads": 4}),
        ("olmo-hybrid", {"linear_allow_neg_eigval": False, "layer_types": None, "linear_key_head_dim": None}),
        ("granite-hybrid", {}),
        ("granite-hybrid", {"num_local_experts": 0, "mamba_n_groups": 2, "position_embedding_type": "rope"}),
        ("granite-hybrid", {"mamba_proj_bias": True, "mamba_conv_bias": False, "mamba_d_conv": 3}),
        ("bamba", {}),
        ("bamba", {"mamba_n_groups": 4, "mamba_proj_bias": True, "mlp_bias": True, "attention_bias": True}),
        ("falcon-h1", {}),
        ("falcon-h1", {"mamba_rms_norm": True, "mamba_n_groups": 2, "mlp_bias": True, "attention_bias": True}),
        ("falcon-h1", {"mamba_rms_norm": True, "mamba_norm_before_gate": False, **_WIDE, "projectors_bias": True}),
        ("nemotron-h", {}),
        ("nemotron-h", {"moe_latent_size": 24, "use_bias": True, "mlp_bias": True, "n_group": 2, "n_groups": 8}),
        ("nemotron-h", {"norm_topk_prob": False, "use_conv_bias": False, "layers_block_type": _WITHOUT_EXPERTS}),
        ("lfm3", {}),
        ("lfm3", {"use_sandwich_norm": False, "use_attention_gate": False, "conv_bias": True, "attention_bias": True}),
        ("lfm2-moe", {"norm_topk_prob": False, "use_expert_bias": False, "num_dense_layers": 0}),
    ],
)
def test_variants(family: str, overrides: dict[str, Any], tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, family, **overrides)
    reference = load_reference(tmp_path)
    prompts = [prompt(5, 2), prompt(70, 1), prompt(1, 3)]
    answers = Driver(make_runner(tmp_path, state_interval=64)).generate(prompts, 8)
    assert answers == [reference_tokens(reference, tokens, 8) for tokens in prompts]


def test_experts_that_are_stored_in_pairs(tmp_path: Path, make_runner: Any) -> None:
    """As the mixtures of Qwen3.5 are published: one tensor has the first two matrices of all experts of a layer."""
    make_model(tmp_path, "qwen3.5-moe")
    expected = reference_tokens(load_reference(tmp_path), prompt(45, 1), 8)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for n in range(3):
        experts = f"model.layers.{n}.mlp.experts"
        gate, up, down = (
            torch.stack([tensors.pop(f"{experts}.{number}.{name}_proj.weight") for number in range(6)])
            for name in ("gate", "up", "down")
        )
        tensors |= {f"{experts}.gate_up_proj": torch.cat([gate, up], 1), f"{experts}.down_proj": down}
    save_file(tensors, path)
    assert Driver(make_runner(tmp_path)).generate([prompt(45, 1)], 8) == [expected]


@pytest.mark.parametrize("family", ["lfm2", "qwen3.5", "granite-hybrid"])
def test_a_chunk_may_end_anywhere(family: str, tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, family)
    driver = Driver(make_runner(tmp_path))
    request = driver.add(0, prompt(150, 3))
    for count in (1, 30, 1, 1, 31, 2, 62, 22):
        driver.step({0: count})
    for _ in range(5):
        driver.step()
    assert request.output == reference_tokens(load_reference(tmp_path), prompt(150, 3), 6)


@pytest.mark.parametrize("family", ["falcon-h1", "nemotron-h"])
def test_layers_with_both_kinds_of_caches_and_with_none(family: str, tmp_path: Path, make_runner: Any) -> None:
    """In chunks, beside others, preempted, and behind a prefix that ends at a checkpoint."""
    make_model(tmp_path, family)
    reference = load_reference(tmp_path)
    runner = make_runner(tmp_path, num_blocks=7, state_interval=64)
    driver = EngineDriver(runner, max_num_seqs=3, max_num_batched_tokens=44, enable_prefix_caching=True)
    prompts = [prompt(61, 1), prompt(80, 2), prompt(3, 3)]
    ids = [driver.add(tokens, 40)[0] for tokens in prompts]
    driver.run()
    assert [driver.tokens[i] for i in ids] == [reference_tokens(reference, tokens, 40) for tokens in prompts]
    assert driver.stats.preemptions > 0
    longer = [*prompts[1], *prompt(9, 4)]
    [request] = driver.add(longer, 4)
    driver.run()
    assert driver.cached[request] == 64
    assert driver.tokens[request] == reference_tokens(reference, longer, 4)


@pytest.mark.parametrize("precision", ["bf16", "f32"])
@pytest.mark.parametrize("family", ["lfm2", "qwen3.5", "granite-hybrid"])
def test_weights_in_8_bits(family: str, precision: str, tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, family)
    try:
        runner = make_runner(tmp_path, dtype=precision, weights="int8", kv_cache_dtype="u8")
    except UnsupportedError:
        pytest.skip(f"not of this CPU: {precision}")
    [tokens] = Driver(runner).generate([prompt(45, 1)], 4)
    assert len(tokens) == 4


def test_an_interval_is_made_of_blocks(tmp_path: Path, make_runner: Any) -> None:
    make_model(tmp_path, "lfm2")
    with pytest.raises(InvalidRequestError, match="state_interval=33 is not a multiple"):
        make_runner(tmp_path, state_interval=33)


def test_states_have_one_type() -> None:
    with pytest.raises(UnsupportedError, match="activations=mixed cannot be combined with recurrent layers"):
        check_hybrid(OpenVINOConfig(Path(), activations="mixed"))


def test_guesses_leave_a_state_behind_each_token() -> None:
    """The second request verifies two guesses, the third one goes on from where its last right guess was."""
    batch, tables = _step([3, 5, 9], [1, 3, 1], [[10, 0], [20, 21], [30, 31]], 8)
    batch.state_writes, batch.state_reads = {1: [50, 51]}, {2: 52}
    inputs = state_inputs(batch, tables, 8)
    begins, rows = inputs["la.block_indices_begins"], inputs["la.block_indices"].tolist()
    assert [rows[a:b] for a, b in pairwise(begins)] == [[11, 11], [21, 51, 52, 21], [53, 32]]
    assert inputs["la.cache_interval"].tolist() == [5, 1, 11], "none within the steps of the others"


def test_requests_with_guesses_do_not_go_in_runs() -> None:
    batch, tables = _step([3, 5, 9], [9, 9, 9], [[10, 0], [20, 0], [30, 0]], 32)
    batch.state_writes, batch.state_reads = {1: [*range(50, 58)]}, {2: 60}
    chosen = requests_in_runs(batch, tables, 32)
    assert chosen.tolist() == [0, 2]
    assert prompt_inputs(batch, tables, 32, chosen)[0]["prompts.rows"].tolist() == [11, 61]


@pytest.mark.parametrize("family", ["qwen3.5", "granite-hybrid"])
def test_guesses_change_no_token(family: str, tmp_path: Path, make_runner: Any) -> None:
    """Right and wrong ones, across checkpoints, by requests that run beside each other and preempt each other."""
    make_model(tmp_path, family)
    runner = make_runner(tmp_path, num_blocks=8)
    prompts = [prompt(20 + 9 * n, n) for n in range(4)]
    plain, stats = guessed(runner, prompts, "off")
    assert plain == reference_answers(load_reference(tmp_path), prompts, 40, plain)
    tokens, stats = guessed(runner, prompts, "ngram", [[*t[:9], 7, *t[10:23], 8, 9, *t[25:]] for t in plain])
    assert tokens == plain
    assert stats.preemptions
    assert 20 < stats.accepted_tokens < stats.draft_tokens


@pytest.mark.parametrize("kind", ["model", "head"])
def test_a_draft_guesses_for_it(kind: str, tmp_path: Path, make_runner: Any) -> None:
    """One that knows nothing of the model, and is mostly wrong."""
    make_model(tmp_path, "lfm2")
    if kind == "model":
        draft = make_model(tmp_path / "draft", "llama", num_hidden_layers=1)
    else:
        draft = make_eagle3(tmp_path / "draft", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    runner = make_runner(tmp_path, draft_model_dir=draft)
    plain, _ = guessed(runner, [prompt(40, 1), prompt(9, 2)], "off")
    tokens, stats = guessed(runner, [prompt(40, 1), prompt(9, 2)], "draft_model")
    assert tokens == plain
    assert stats.draft_tokens


def test_a_draft_model_has_no_states(llama_dir: Path, tmp_path: Path, make_runner: Any) -> None:
    with pytest.raises(UnsupportedError, match="speculative-model: the draft model has recurrent layers"):
        make_runner(llama_dir, draft_model_dir=make_model(tmp_path, "lfm2"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["conv"] * 3}, "no layer has full_attention"),
        ({"layer_types": ["conv", "mamba", "full_attention"]}, "layer_types is not understood"),
        ({"layer_types": "conv"}, "layer_types is not understood"),
        ({"conv_L_cache": 0}, "conv_L_cache=0, which is not a number from 1"),
        ({"conv_L_cache": "3"}, "conv_L_cache=3, which is not a number from 1"),
        ({"block_multiple_of": 0}, "block_multiple_of=0, which is not a positive number"),
        ({"block_ff_dim": 10**9}, "intermediate_size=1000000000, which is not a number"),
        ({"block_multiple_of": 10**9}, "intermediate_size=1000000000, which is not a number"),
    ],
)
def test_settings_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_config(CONFIG | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 3}, "heads of values do not go together with 3 of keys"),
        ({"linear_key_head_dim": 0}, "linear_key_head_dim=0, which is not a number from 1"),
        ({"full_attention_interval": None}, "full_attention_interval=None, which is not a number from 1"),
        ({"full_attention_interval": 9}, "no layer has full_attention"),
    ],
)
def test_settings_of_delta_nets_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_config(SHAPE | {"architectures": ["Qwen3_5ForCausalLM"], "num_hidden_layers": 4} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mamba_n_heads": 7}, "7 heads of 1 groups in 128 values do not go together"),
        ({"mamba_d_head": 3}, "do not go together in Mamba-2"),
        ({"mamba_d_state": "x"}, "mamba_d_state=x, which is not a number from 1"),
        ({"time_step_limit": [0.0, 0.1]}, "time_step_limit=.*: steps with limits are not supported"),
        ({"layer_types": ["mamba"] * 3}, "no layer has full_attention"),
        ({"layer_types": [{}] * 3}, "layer_types is not understood"),
    ],
)
def test_settings_of_state_spaces_that_are_not_understood(changes: dict[str, Any], message: str) -> None:
    kinds = ["mamba", "attention", "mamba"]
    config = SHAPE | {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": kinds, "mamba_n_heads": 8}
    assert list(parse_config(config | {"time_step_limit": [0.0, float("inf")]}).attention) == [1]
    with pytest.raises(UnsupportedError, match=message):
        parse_config(config | changes)


@pytest.mark.parametrize(
    ("architecture", "changes", "message"),
    [
        ("Bamba", {"attn_layer_indices": []}, "no layer has full_attention"),
        ("Bamba", {"attn_layer_indices": 1}, "attn_layer_indices=1, which is not a list"),
        ("Bamba", {"hidden_act": "gelu"}, "hidden_act=gelu: state spaces have silu"),
        ("FalconH1", {"mamba_d_ssm": 7}, "128 heads of 1 groups in 7 values do not go together"),
        ("FalconH1", {"mamba_d_ssm": "x"}, "mamba_d_ssm=x, which is not a size"),
        ("FalconH1", {"key_multiplier": 0}, "key_multiplier=0, which is not a positive number"),
        ("FalconH1", {"ssm_multipliers": [1.0]}, "ssm_multipliers=.*, which is not a list of 5 numbers"),
        ("FalconH1", {"mlp_multipliers": [1.0, "x"]}, "mlp_multipliers=x, which is not a positive number"),
        ("FalconH1", {"time_step_limit": [0.1, 1.0]}, "steps with limits are not supported"),
        ("NemotronH", {"hybrid_override_pattern": "M*X"}, "layer_types is not understood"),
        ("NemotronH", {"hybrid_override_pattern": "M*"}, "2 entries for 3 layers"),
        ("NemotronH", {"hybrid_override_pattern": 5}, "layer_types is not understood"),
        ("NemotronH", {"hybrid_override_pattern": "M-M"}, "no layer has full_attention"),
        ("NemotronH", {"hybrid_override_pattern": "M*-", "n_groups": 3}, "128 heads of 3 groups do not go together"),
        ("NemotronH", {"hybrid_override_pattern": "M*-", "mamba_n_groups": 5, "n_groups": 8}, "128 heads of 5 groups"),
        ("NemotronH", {"hybrid_override_pattern": "M*-", "mamba_dt_limit": [0.0, 0.5]}, "steps with limits"),
        ("NemotronH", {"hybrid_override_pattern": "M*-", "mamba_hidden_act": "relu"}, "state spaces have silu"),
        ("NemotronH", {"hybrid_override_pattern": "M*E", "moe_latent_size": -1}, "moe_latent_size=-1, which is not"),
        ("NemotronH", {"hybrid_override_pattern": "M*E", "n_group": 3}, "these do not go together"),
    ],
)
def test_settings_of_their_kin_that_are_not_understood(
    architecture: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        parse_config(SHAPE | {"architectures": [f"{architecture}ForCausalLM"], "attn_layer_indices": [1]} | changes)


def test_parts_of_nemotron_s_layers() -> None:
    config = SHAPE | {"architectures": ["NemotronHForCausalLM"], "num_hidden_layers": None}
    spec = parse_config(config | {"hybrid_override_pattern": "M-M*E"})
    kinds = [(type(layer.mixer).__name__, type(layer.mlp).__name__) for layer in spec.layers]
    state_space = ("Mamba2", "NoneType")
    attention, mlp, experts = ("Attention", "NoneType"), ("NoneType", "MLP"), ("NoneType", "Experts")
    assert kinds == [state_space, mlp, state_space, attention, experts]
    assert list(parse_config(config | {"layers_block_type": ["mamba", "attention"]}).attention) == [1]


def test_windows_of_lfm3() -> None:
    config = SHAPE | {"architectures": ["Lfm3ForCausalLM"], "num_hidden_layers": 7, "sliding_window": 24}
    spec = parse_config(config)
    assert {n: layer.window for n, layer in spec.attention.items()} == {2: 0, 4: 24, 6: 0}
    with pytest.raises(UnsupportedError, match="no sliding window is switched on"):
        parse_config(config | {"sliding_window": None})


def test_which_layers_have_attention() -> None:
    assert list(parse_config(CONFIG | {"full_attn_idxs": [1]}).attention) == [1]
    assert list(parse_config(CONFIG | {"layer_types": ["conv", "conv", "full_attention"]}).attention) == [2]
    assert not parse_config(CONFIG).is_hybrid


def test_logprobs_of_a_prompt_whose_steps_are_lost(tmp_path: Path, make_runner: Any) -> None:
    """What lies behind the last checkpoint is computed again, and counts once."""
    make_model(tmp_path, "lfm2")
    runner = make_runner(tmp_path, state_interval=64)
    found = []
    for marker in (None, 299):
        driver = EngineDriver(
            runner if marker is None else Failing(runner, marker), max_num_seqs=4, max_num_batched_tokens=44
        )
        driver.add(prompt(150, 2), 4, prompt_logprobs=1)
        driver.step()
        if marker is not None:
            driver.add([marker, 7], 4)
        infos = [output.prompt for _ in range(40) for output in driver.step() if output.prompt is not None]
        found.append(next(info.logprobs for info in infos if info.logprobs))
    assert len(found[0]) == 149
    assert [one.token_id for one in found[1]] == [one.token_id for one in found[0]]
