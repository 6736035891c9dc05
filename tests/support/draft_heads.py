"""Draft heads for tests, with random weights in the published layouts, and what their published forward gives."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import silu
from transformers import PreTrainedModel

from support.models import VOCAB_SIZE, edit_config, load_reference, make_model

Weights = dict[str, torch.Tensor]

EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


def make_eagle3(
    directory: Path, *, target_hidden_size: int = 64, embeddings: bool = True, seed: int = 5, **changes: Any
) -> Path:
    """Saves a random head of `EAGLE3` with `changes` for a model with hidden states of that size."""
    config = {**EAGLE3, "target_hidden_size": target_hidden_size, **changes}
    hidden, draft, generator = config["hidden_size"], config["draft_vocab_size"], torch.Generator().manual_seed(seed)
    tensors = layer_weights("midlayer.", config, 2 * hidden, generator)
    tensors["midlayer.hidden_norm.weight"] = _norm(hidden, generator)
    tensors["norm.weight"] = _norm(hidden, generator)
    tensors["fc.weight"] = _matrix(hidden, 3 * target_hidden_size, generator)
    tensors["lm_head.weight"] = _matrix(draft, hidden, generator)
    if embeddings:
        tensors["embed_tokens.weight"] = 0.4 * torch.randn((config["vocab_size"], hidden), generator=generator)
    chosen = torch.randperm(config["vocab_size"], generator=generator)[:draft].sort().values
    tensors["d2t"] = chosen - torch.arange(draft)
    tensors["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True)
    return save_head(directory, config, tensors)


_MTP = "model.mtp_layers.0."


def make_mimo(directory: Path, agrees: bool = False, seed: int = 5) -> Path:
    """Saves a model with Qwen2's layers and a random layer for multi-token prediction, as MiMo's checkpoints are.
    `agrees`: in both, the next token follows from the newest, and is the same."""
    make_model(directory, "qwen2", tie_word_embeddings=False)
    config = json.loads((directory / "config.json").read_text())
    hidden, generator = config["hidden_size"], torch.Generator().manual_seed(seed)
    tensors = load_file(directory / "model.safetensors") | layer_weights(_MTP, config, hidden, generator)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{_MTP}{name}.weight"] = _norm(hidden, generator)
    tensors[f"{_MTP}input_proj.weight"] = _matrix(hidden, 2 * hidden, generator)
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = len(tensors[f"{_MTP}self_attn.{name}.weight"])
        tensors[f"{_MTP}self_attn.{name}.bias"] = 0.3 * torch.randn(rows, generator=generator)
    if agrees:
        tensors[f"{_MTP}input_proj.weight"] = torch.cat([torch.zeros(hidden, hidden), torch.eye(hidden)], 1)
        tensors[f"{_MTP}token_layernorm.weight"] = torch.ones(hidden)
        tensors[f"{_MTP}final_layernorm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if agrees:
        make_near_identity(directory)
    edit_config(directory, architectures=["MiMoForCausalLM"], num_nextn_predict_layers=1)
    return directory


def make_qwen_mtp(directory: Path, family: str = "qwen3.5", agrees: bool = False, seed: int = 5) -> Path:
    """Saves a model of Qwen3.5's kin and a random layer for multi-token prediction, as they are published; `agrees`: as
    for `make_mimo`."""
    make_model(directory, family, tie_word_embeddings=False)
    target, generator = load_reference(directory), torch.Generator().manual_seed(seed)
    hidden = target.config.hidden_size
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in _attending_layer(target).state_dict().items():
        scale = 0.2 if "norm" in name else tensor.shape[-1] ** -0.5
        tensors[f"mtp.layers.0.{name}"] = scale * torch.randn(tensor.shape, generator=generator)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.2 * torch.randn(hidden, generator=generator)
    tensors["mtp.fc.weight"] = _matrix(hidden, 2 * hidden, generator)
    if agrees:
        tensors["mtp.fc.weight"] = torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1)
        tensors["mtp.pre_fc_norm_embedding.weight"] = torch.zeros(hidden)
        tensors["mtp.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    if agrees:
        make_near_identity(directory)
    edit_config(directory, mtp_num_hidden_layers=1)
    return directory


def _attending_layer(target: PreTrainedModel) -> Any:
    """A layer of the target's kind with attention."""
    number = target.config.layer_types.index("full_attention")
    kind = type(target.base_model.layers[number])
    return kind(target.config, number).float().eval()


def save_head(directory: Path, config: dict[str, Any], tensors: Weights) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def layer_weights(prefix: str, config: dict[str, Any], width: int, generator: torch.Generator) -> Weights:
    """Of a decoder layer whose attention sees `width` values."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv = hidden * config["num_key_value_heads"] // config["num_attention_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, width),
        "self_attn.k_proj": (kv, width),
        "self_attn.v_proj": (kv, width),
        "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    found = {f"{prefix}{name}.weight": _matrix(*shape, generator) for name, shape in shapes.items()}
    norms = {
        f"{prefix}{name}.weight": _norm(hidden, generator) for name in ("input_layernorm", "post_attention_layernorm")
    }
    return found | norms


def _matrix(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return 2 * torch.randn((rows, columns), generator=generator) / columns**0.5


def _norm(size: int, generator: torch.Generator) -> torch.Tensor:
    return 1 + 0.2 * torch.randn(size, generator=generator)


# What the published code computes. Shapes: [T, size].


@dataclass
class Layer:
    """Attention and MLP of a decoder layer."""

    weights: Weights
    prefix: str
    config: dict[str, Any]

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal, with rotary embedding at positions 0.. ."""
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            self._project(x, f"self_attn.{name}_proj").unflatten(1, (count, -1)).transpose(0, 1)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        size = q.shape[-1]
        angles = torch.arange(len(x))[:, None] * self.config["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        cos, sin = (torch.cat([turn, turn], -1) for turn in (angles.cos(), angles.sin()))
        q, k = (each * cos + torch.cat([-each[..., size // 2 :], each[..., : size // 2]], -1) * sin for each in (q, k))
        k, v = (each.repeat_interleave(heads // kv_heads, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5 + torch.full((len(x), len(x)), -torch.inf).triu(1)
        return self._project((scores.softmax(-1) @ v).transpose(0, 1).flatten(1), "self_attn.o_proj")

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        y = silu(self._project(x, "mlp.gate_proj")) * self._project(x, "mlp.up_proj")
        return self._project(y, "mlp.down_proj")

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, self.weights[f"{self.prefix}{name}.weight"], self.config["rms_norm_eps"])

    def _project(self, x: torch.Tensor, name: str) -> torch.Tensor:
        y = x @ self.weights[f"{self.prefix}{name}.weight"].T
        bias = self.weights.get(f"{self.prefix}{name}.bias")
        return y if bias is None else y + bias


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


class HeadReference:
    """Guesses one token after the other: features of a position come with the token behind."""

    config: dict[str, Any]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int], guesses: Sequence[int]) -> torch.Tensor:
        """[len(guesses) + 1, size of its vocabulary]: behind the tokens, and behind each guess."""
        features, following, found = self._features(tokens[:-1]), list(tokens[1:]), []
        for guess in (*guesses, None):
            logits, hidden = self._forward(following, features)
            found.append(logits)
            features, following = torch.cat([features, hidden]), [*following, guess]
        return torch.cat(found)

    def _features(self, tokens: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError

    def _forward(self, tokens: Sequence[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [1, size] behind the last token, and what its features are for the next guess, [1, hidden size]."""
        raise NotImplementedError


class Eagle3Reference(HeadReference):
    """`layers`: the target's hidden states behind so many layers are the head's features."""

    def __init__(self, directory: Path, target: PreTrainedModel, layers: Sequence[int]) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self._weights = load_file(directory / "model.safetensors")
        self._target, self._layers = target, layers
        embeddings = self._weights.get("embed_tokens.weight")
        self._embeddings = target.get_input_embeddings().weight if embeddings is None else embeddings
        self._layer = Layer(self._weights, "midlayer.", self.config)

    def _features(self, tokens: Sequence[int]) -> torch.Tensor:
        states = self._target(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
        return torch.cat([states[n][0] for n in self._layers], -1) @ self._weights["fc.weight"].T

    def _forward(self, tokens: Sequence[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer, embedded = self._layer, self._embeddings[list(tokens)]
        embedded, normed = layer.norm(embedded, "input_layernorm"), layer.norm(features, "hidden_norm")
        residual = normed if self.config.get("norm_before_residual") else features
        x = residual + layer.attend(torch.cat([embedded, normed], -1))
        x = (x + layer.mlp(layer.norm(x, "post_attention_layernorm")))[-1:]
        normed = rms_norm(x, self._weights["norm.weight"], self.config["rms_norm_eps"])
        return normed @ self._weights["lm_head.weight"].T, x


class MtpReference(HeadReference):
    """Of a model of `make_mimo`."""

    def __init__(self, directory: Path, target: PreTrainedModel) -> None:
        self.config = {**json.loads((directory / "config.json").read_text()), "rope_theta": 10000.0}
        self._target = target
        self._layer = Layer(load_file(directory / "model.safetensors"), _MTP, self.config)

    def _features(self, tokens: Sequence[int]) -> torch.Tensor:
        """In front of the final norm."""
        found: list[torch.Tensor] = []
        hook = self._target.base_model.norm.register_forward_pre_hook(lambda module, inputs: found.append(inputs[0][0]))
        self._target(torch.tensor([list(tokens)]))
        hook.remove()
        return found[0]

    def _forward(self, tokens: Sequence[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        layer, embedded = self._layer, self._target.get_input_embeddings().weight[list(tokens)].clone()
        embedded[0] = 0
        both = torch.cat([layer.norm(features, "hidden_layernorm"), layer.norm(embedded, "token_layernorm")], -1)
        x = both @ layer.weights[f"{_MTP}input_proj.weight"].T
        x = x + layer.attend(layer.norm(x, "input_layernorm"))
        x = x + layer.mlp(layer.norm(x, "post_attention_layernorm"))
        x = layer.norm(x, "final_layernorm")[-1:]
        return x @ self._target.get_output_embeddings().weight.T, x


class QwenMtpReference(HeadReference):
    """Of a model of `make_qwen_mtp`, with transformers' layer and norms."""

    def __init__(self, directory: Path, target: PreTrainedModel) -> None:
        stored = load_file(directory / "model.safetensors").items()
        own = {name.removeprefix("mtp."): tensor for name, tensor in stored if name.startswith("mtp.")}
        self._target, self._layer, self._fc = target, _attending_layer(target), own.pop("fc.weight")
        norm = target.base_model.norm
        self._norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self._norms[name] = type(norm)(target.config.hidden_size, target.config.rms_norm_eps)
            self._norms[name].load_state_dict({"weight": own.pop(f"{name}.weight")})
        self._layer.load_state_dict({name.removeprefix("layers.0."): tensor for name, tensor in own.items()})

    def _features(self, tokens: Sequence[int]) -> torch.Tensor:
        """Behind the final norm."""
        return self._target.base_model(torch.tensor([list(tokens)])).last_hidden_state[0]  # type: ignore[no-any-return]

    def _forward(self, tokens: Sequence[int], features: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self._norms["pre_fc_norm_embedding"](self._target.get_input_embeddings().weight[list(tokens)])
        x = (torch.cat([embedded, self._norms["pre_fc_norm_hidden"](features)], -1) @ self._fc.T)[None]
        turns = self._target.base_model.rotary_emb(x, torch.arange(len(tokens))[None])
        x = self._layer(x, position_embeddings=turns, attention_mask=None)
        x = x[0] if isinstance(x, tuple) else x
        x = self._norms["norm"](x[0, -1:])
        return x @ self._target.get_output_embeddings().weight.T, x


def make_near_identity(directory: Path) -> Path:
    """Rewrites a model of `make_model`: what its layers add is tiny, so that the next token follows from the newest."""
    tensors = load_file(directory / "model.safetensors")
    for name in tensors:
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight")):
            tensors[name] = 1e-5 * tensors[name]
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def make_agreeing_eagle3(directory: Path, target_dir: Path, chosen: torch.Tensor) -> Path:
    """A head that guesses for a model of `make_near_identity` what follows from the newest token, by attending to the
    newest position alone, as far as it is among the `chosen` tokens."""
    target = load_file(target_dir / "model.safetensors")
    vocab, hidden = target["model.embed_tokens.weight"].shape
    changes = {
        "num_key_value_heads": EAGLE3["num_attention_heads"],
        "norm_before_residual": True,
        "draft_vocab_size": len(chosen),
    }
    config, generator = {**EAGLE3, **changes, "target_hidden_size": hidden}, torch.Generator().manual_seed(5)
    tensors = layer_weights("midlayer.", config, 2 * hidden, generator)
    ones = torch.ones(hidden)
    mixed = torch.cat([4 * _matrix(hidden, hidden, generator), torch.zeros(hidden, hidden)], 1)
    tensors |= {
        "midlayer.self_attn.q_proj.weight": mixed,  # a token is most like itself
        "midlayer.self_attn.k_proj.weight": mixed,
        "midlayer.self_attn.v_proj.weight": torch.cat([torch.eye(hidden), torch.zeros(hidden, hidden)], 1),
        "midlayer.self_attn.o_proj.weight": torch.eye(hidden),
        "midlayer.mlp.down_proj.weight": torch.zeros_like(tensors["midlayer.mlp.down_proj.weight"]),
        "midlayer.input_layernorm.weight": ones,
        "midlayer.hidden_norm.weight": 0.01 * ones,
        "fc.weight": _matrix(hidden, 3 * hidden, generator),
        "norm.weight": target["model.norm.weight"],
        "lm_head.weight": target["lm_head.weight"][chosen],
        "embed_tokens.weight": target["model.embed_tokens.weight"],
        "d2t": chosen - torch.arange(len(chosen)),
        "t2d": torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True),
    }
    return save_head(directory, config, tensors)
