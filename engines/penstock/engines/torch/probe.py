"""Probes of a model: whether it can be driven with flat tokens and attention of ours, and the work of its steps.

transformers' models are many and change; their own descriptions are not enough. So each is run twice at loading:
once to see what its layers ask of attention, and once to compare chunks of two requests with the model's own attention
over one of them alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from penstock.engines.contract.model_info import ModelWork
from penstock.engines.errors import PenstockError, UnsupportedError
from penstock.engines.kit.batch import GroupTables, Int32s, Ints, StepBatch
from penstock.engines.torch.attention import ATTENTION, LayerLayout, TorchKVCache, attach, groups_of
from penstock.engines.torch.config import NAMES
from penstock.engines.torch.loading import layer_types
from penstock.engines.torch.model import PagedModel
from penstock.engines.torch.recurrent import (
    RECURRENT,
    StateLayouts,
    StateRecorder,
    TorchStates,
    catch_calls,
    set_handler,
)

_UNDERSTOOD = {"scaling", "sliding_window", "softcap", "s_aux", "position_ids", "is_causal", "dropout"}
_LENGTH, _CHUNK, _BLOCK_SIZE = 24, 13, 8
"""Tokens of the request that is compared, of its first chunk, and of a block."""


@dataclass
class _Recorder:
    """Notes what layers ask for, and answers with zeros."""

    calls: list[tuple[nn.Module, LayerLayout]] = field(default_factory=list)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        unknown = [
            name
            for name, value in options.items()
            if name not in _UNDERSTOOD and value is not None and value is not False
        ]
        if unknown:
            raise UnsupportedError(f"its attention asks for {', '.join(sorted(unknown))}")
        if mask is not None:
            raise UnsupportedError("it brings a mask of its own")
        if options.get("is_causal") is False or getattr(module, "is_causal", True) is False:
            raise UnsupportedError("it attends to later tokens")
        if query.shape[0] != 1 or key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
            raise UnsupportedError(f"its attention is of an unknown form: {list(query.shape)}, {list(key.shape)}")
        window = options.get("sliding_window") or 0
        self.calls.append((module, LayerLayout(key.shape[1], key.shape[3], value.shape[3], key.dtype, window)))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


@dataclass(frozen=True, slots=True)
class Layers:
    """What a model's layers keep."""

    attention: dict[nn.Module, LayerLayout]
    """Of a token, in order."""
    states: StateLayouts
    """Of a request: recurrent layers."""

    @property
    def layouts(self) -> list[LayerLayout]:
        return list(self.attention.values())


def inspect_layers(model: PreTrainedModel, max_model_len: int) -> tuple[Layers, int]:
    """What the layers keep, and the size of the vocabulary.

    Raises UnsupportedError for a model that does not leave its attention to us, or asks for what we do not know.
    """
    name, config = type(model).__name__, model.config
    taken = inspect.signature(model.forward).parameters
    lacking = [p for p in ("input_ids", "position_ids", "logits_to_keep") if p not in taken]
    if lacking:
        raise UnsupportedError(f"{name} cannot be run: its forward does not take {', '.join(lacking)}")
    recorder, states = _Recorder(), StateRecorder(config)
    attach(model, recorder)
    users = catch_calls(model) if layer_types(config) & RECURRENT else []
    set_handler(users, states)
    ids = torch.arange(3, device=model.device)[None]
    try:
        with torch.inference_mode():
            logits = model(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1).logits
    except PenstockError as e:
        raise UnsupportedError(f"{name} cannot be run: {e.message}") from e
    except Exception as e:  # whatever a model's code may raise that was not made for this
        raise UnsupportedError(f"{name} cannot be run with attention of ours: {type(e).__name__}: {e}") from e
    finally:
        set_handler(users, None)
    if not states.layouts and getattr(model, "_is_stateful", False):
        raise UnsupportedError(f"{name} keeps state outside the KV cache, which is not supported")
    if not recorder.calls:
        raise UnsupportedError(f"{name} cannot be run: it does not let its attention be replaced")
    layouts = dict(recorder.calls)
    count = len(_attending(model)) if states.layouts else config.num_hidden_layers
    if len(recorder.calls) != count or len(layouts) != len(recorder.calls):
        raise UnsupportedError(
            f"{name} cannot be run: its {count} layers called attention {len(recorder.calls)} "
            f"times, from {len(layouts)} places; each has to call it once"
        )
    _check_windows(model, [layout.window for layout in layouts.values()], max_model_len)
    # A window that no request outgrows is none.
    layouts = {
        m: layout if layout.window < max_model_len else replace(layout, window=0) for m, layout in layouts.items()
    }
    if states.layouts and any(layout.window for layout in layouts.values()):
        raise UnsupportedError(f"{name} cannot be run: sliding windows beside recurrent layers are not supported")
    return Layers(layouts, states.layouts), int(logits.shape[-1])


def _attending(model: PreTrainedModel) -> list[str]:
    """Types of the layers that have attention."""
    kinds = getattr(model.config, "layer_types", None) or ()
    return [kind for kind in kinds if (kind.endswith("attention") and kind != "linear_attention") or "hybrid" in kind]


def _check_windows(model: PreTrainedModel, windows: list[int], max_model_len: int) -> None:
    """Some models tell only their own masks of a window."""
    name, config = type(model).__name__, model.config
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        if (getattr(config, "sliding_window", None) or max_model_len) < max_model_len and not any(windows):
            raise UnsupportedError(f"{name} cannot be run: its attention is not told of sliding_window")
    elif [kind == "sliding_attention" for kind in _attending(model)] != [window > 0 for window in windows]:
        raise UnsupportedError(f"{name} cannot be run: its layers' windows are not those of layer_types")


def verify(model: PreTrainedModel, layers: Layers, vocab_size: int) -> None:
    """Raises UnsupportedError when the model computes something else in steps than at once with its own attention."""
    name = type(model).__name__
    tokens = np.random.default_rng(0).integers(0, vocab_size, (2, _LENGTH)).astype(np.int32)
    try:
        ours = _in_steps(model, layers, tokens)
        theirs = _at_once(model, layers, tokens[0])
    except Exception as e:  # as above
        raise UnsupportedError(f"{name} cannot be run: {type(e).__name__}: {e}") from e
    finite = theirs.isfinite().all(dim=-1)
    if not finite.any():
        return  # weights that are broken tell nothing; the requests that meet them will fail
    size = theirs[finite].norm(dim=-1).clamp_min(torch.finfo(theirs.dtype).tiny)  # logits may all be zero
    errors = (ours - theirs)[finite].norm(dim=-1) / size
    # The median: a few tokens of a mixture may be sent to other experts by mere rounding.
    error, most = float(errors.median()), 2 * torch.finfo(model.dtype).eps ** 0.5
    if not error <= most:
        raise UnsupportedError(
            f"{name} cannot be run: in steps it computes something else than at once "
            f"(logits differ by {error:.2g} of their size; up to {most:.2g} would be rounding)"
        )


def _in_steps(model: PreTrainedModel, layers: Layers, tokens: Any) -> Tensor:
    """Logits of the first request, in two chunks, beside a second one that is a few tokens behind."""
    blocks = -(-_LENGTH // _BLOCK_SIZE)
    num_groups = len(groups_of(layers.layouts)) + bool(layers.states)
    paged = _paged(model, layers, 2 * num_groups * blocks)
    tables = np.arange(2 * num_groups * blocks, dtype=np.int32)[::-1].reshape(num_groups, blocks, 2).swapaxes(1, 2)
    parts = []
    for computed, scheduled in ([0, 0], [_CHUNK, 5]), ([_CHUNK, 5], [_LENGTH - _CHUNK, 1]):
        batch = _batch(tokens, tables, computed, scheduled, logits_at=np.arange(scheduled[0]))
        step = paged.make_step(batch)
        logits_at = torch.from_numpy(step.places[batch.logits_at]).to(model.device)
        parts.append(paged.compute(step, logits_at)[0])
    return torch.cat(parts)


def _paged(model: PreTrainedModel, layers: Layers, count: int) -> PagedModel:
    """With so many blocks, and rows of states that are as long."""
    states = TorchStates(layers.states, count, model.device) if layers.states else None
    return PagedModel(model, TorchKVCache(layers.attention, count, _BLOCK_SIZE, model.device), states)


def _batch(tokens: Int32s, tables: Int32s, computed: list[int], scheduled: list[int], logits_at: Ints) -> StepBatch:
    """`tokens` [S, length] of S requests, their `tables` [groups, S, blocks]; the other arguments as in `StepBatch`."""
    ranges = [np.arange(start, start + count) for start, count in zip(computed, scheduled, strict=True)]
    ends = np.full(len(tokens), tables.shape[2])
    return StepBatch(
        token_ids=np.concatenate([row[positions] for row, positions in zip(tokens, ranges, strict=True)]),
        positions=np.concatenate(ranges),
        begins=np.cumsum([0, *scheduled]),
        computed=np.array(computed),
        scheduled=np.array(scheduled),
        groups=tuple(GroupTables(table, np.zeros_like(ends), ends) for table in tables),
        logits_at=logits_at,
        adapter_slots=np.zeros_like(ends),
        wants_hidden=False,
    )


def _at_once(model: PreTrainedModel, layers: Layers, tokens: Any) -> Tensor:
    """Logits [T, vocab] by the model's plain attention, with masks and positions of its own."""
    model.set_attn_implementation("eager")
    set_handler(list(layers.states), None)
    try:
        with torch.inference_mode():
            ids = torch.from_numpy(tokens.astype(np.int64)).to(model.device)
            logits: Tensor = model(input_ids=ids[None], use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(ATTENTION)
    return logits


def step_memory(model: PreTrainedModel, layers: Layers, num_tokens: int) -> int:
    """Bytes that a step with a prompt of so many tokens takes on a CUDA device, beside weights and cache; 0 on the CPU,
    where a share of the memory is left free instead."""
    if model.device.type != "cuda":
        return 0
    blocks = -(-num_tokens // _BLOCK_SIZE)
    num_groups = len(groups_of(layers.layouts)) + bool(layers.states)
    paged = _paged(model, layers, num_groups * blocks)
    tables = np.arange(num_groups * blocks, dtype=np.int32).reshape(num_groups, 1, blocks)
    torch.cuda.reset_peak_memory_stats(model.device)
    before = torch.cuda.memory_allocated(model.device)
    last = np.array([num_tokens - 1])
    step = paged.make_step(_batch(np.zeros((1, num_tokens), np.int32), tables, [0], [num_tokens], last))
    paged.compute(step, torch.from_numpy(last).to(model.device))
    torch.cuda.synchronize(model.device)
    return int(torch.cuda.max_memory_allocated(model.device) - before)


def count_work(model: PreTrainedModel, layouts: Sequence[LayerLayout], threads: int) -> ModelWork | None:
    """None for a model with experts: which of its weights a step reads depends on the tokens."""
    kernels = {id(module.weight) for module in model.modules() if isinstance(module, nn.Conv1d)}
    if any(
        (parameter.ndim > 2 and id(parameter) not in kernels) or ".experts." in name
        for name, parameter in model.named_parameters()
    ):
        return None
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    precision = NAMES[model.dtype]
    matrices = [(module is head, weight) for module in model.modules() if (weight := _matrix(module)) is not None]
    query_heads = int(model.config.get_text_config().num_attention_heads)
    groups = [[layouts[n] for n in group.layers] for group in groups_of(layouts)]
    return ModelWork(
        weight_bytes=sum(weight.numel() * weight.element_size() for _, weight in matrices),
        token_flops=sum(2 * weight.numel() for is_head, weight in matrices if not is_head),
        logits_flops=sum(2 * weight.numel() for is_head, weight in matrices if is_head),
        kv_bytes=tuple(sum(layout.token_bytes for layout in group) for group in groups),
        attention_flops=tuple(
            sum(2 * query_heads * (layout.key_size + layout.value_size) for layout in group) for group in groups
        ),
        weights=precision,
        activations=precision,
        precision=precision,
        threads=((0, threads),) if model.device.type == "cpu" else (),
    )


def _matrix(module: nn.Module) -> Tensor | None:
    """What it multiplies by; an embedding is looked up."""
    weight = None if isinstance(module, nn.Embedding) else getattr(module, "weight", None)
    return weight if isinstance(weight, Tensor) and weight.ndim == 2 else None
