"""The same weights in transformers, in f32 on the CPU.

Floats are loaded by transformers itself. Packed weights, which it unpacks only with further packages, are unpacked by
our readers and put into its graph: so the graph is compared, and not the unpacking.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from penstock.engines.errors import PenstockError
from penstock.engines.formats.gguf.files import gguf_files
from penstock.engines.formats.model_files import exported_graph, read_json
from penstock.engines.formats.model_settings import text_settings
from penstock.engines.formats.quantized.schemes import parse_scheme
from penstock.engines.openvino.checkpoint import Checkpoint, full_name


@dataclass(frozen=True, slots=True)
class Reference:
    model: PreTrainedModel
    name: str

    def score(self, prompt: Sequence[int], continuation: Sequence[int]) -> list[tuple[float, bool]]:
        """Of each token of the continuation its logprob, and whether it is the likeliest one."""
        ids = torch.tensor([[*prompt, *continuation]])
        with torch.inference_mode():
            logits = self.model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.double(), dim=-1)
        own = logprobs.gather(1, ids[0, len(prompt) :, None])[:, 0]
        return list(zip(own.tolist(), (own == logprobs.amax(dim=-1)).tolist(), strict=True))


def load_reference(folder: Path) -> Reference | str:
    """Or why there is none."""
    version = f"transformers {transformers.__version__}"
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    transformers.utils.logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    if exported_graph(folder) is not None:
        return "an exported graph has no weights for transformers"
    try:
        settings = read_json(folder / "config.json")
        packed = bool(gguf_files(folder)) or text_settings(settings).get("quantization_config") is not None
        model = _unpacked(folder) if packed else _loaded(folder)
    except PenstockError as error:
        return f"{version} has no such model: {error}"
    except Exception as error:  # of any kind: its code for a family may do anything
        return f"{version} cannot load it: {str(error).splitlines()[0][:200] if str(error) else type(error).__name__}"
    model.train(False)
    return Reference(model, f"{version} with weights unpacked here" if packed else version)


def _loaded(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, use_safetensors=True, trust_remote_code=False, local_files_only=True
    )
    return model


def _unpacked(folder: Path) -> PreTrainedModel:
    """Raises ValueError where the names of the tensors are not those of transformers."""
    settings = text_settings(read_json(folder / "config.json"))
    checkpoint = Checkpoint(folder, full_name, parse_scheme(settings))
    plain = {name: value for name, value in settings.items() if name not in ("model_type", "quantization_config")}
    config = AutoConfig.for_model(settings.get("model_type") or _model_type(settings), **plain)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        config, dtype=torch.float32
    )
    weights = {name: torch.from_numpy(checkpoint[name].f32()) for name in checkpoint}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    tied = set(getattr(model, "_tied_weights_keys", None) or ())
    strange = [*unexpected, *(name for name in missing if name not in tied)]
    if strange:
        raise ValueError(f"it calls tensors otherwise: {strange[0]}")
    model.tie_weights()
    return model


def _model_type(settings: Mapping[str, Any]) -> str:
    """What a GGUF file does not say."""
    [architecture] = settings["architectures"]
    return next(kind for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name == architecture)
