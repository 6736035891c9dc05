"""Small models for tests: transformers classes with random weights, saved as safetensors beside a byte-level tokenizer.

Weights are larger than those of a fresh model, so that logits differ enough for greedy tokens to be compared.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GenerationConfig,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)
from transformers.pytorch_utils import Conv1D

from support.runner import VOCAB_SIZE as VOCAB_SIZE

torch.set_num_threads(1)
"""Models this small are computed several times faster without threads, most of all on a busy machine."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_TOKEN_ID = 2

CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": EOS_TOKEN_ID,
    "bos_token_id": None,
    "pad_token_id": 0,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
DELTA_NETS = {
    "head_dim": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FAMILIES: dict[str, tuple[type[PreTrainedModel], type[Any], dict[str, Any]]] = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-linear": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LINEAR}),
    "llama-llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": _LLAMA3}),
    "llama-yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": 24, "head_dim": 16}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen2-sliding": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 32}),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig,
        {"num_hidden_layers": 6, "head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 24},
    ),
    "lfm2": (
        Lfm2ForCausalLM,
        Lfm2Config,
        {"num_hidden_layers": 4, "layer_types": ["conv", "full_attention", "conv", "full_attention"]},
    ),
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, {"num_hidden_layers": 4, **DELTA_NETS}),
    "qwen3-moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig,
        {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
}
"""By name: the model's class, its config's class, and what its config says beyond the common shape."""


def make_model(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: int = 1,
    **overrides: Any,
) -> Path:
    """Saves a model and a tokenizer in `directory`, which is returned. `overrides` go to the model's config."""
    model_class, config_class, differences = FAMILIES.get(family) or _other_family(family)
    torch.manual_seed(seed)
    model = model_class(config_class(**{**SHAPE, **differences, **overrides}))
    spread(model)
    for name, values in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            values.copy_(torch.linspace(0.2, -0.2, values.numel()).reshape(values.shape))
        elif name.endswith("layer_scalar"):
            values.fill_(0.7)
    model = model.to(dtype)
    model.generation_config = GenerationConfig(eos_token_id=EOS_TOKEN_ID, pad_token_id=0)
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    model.save_pretrained(directory, max_shard_size=size if shards == 1 else -(-size // shards))
    make_tokenizer().save_pretrained(directory)
    return directory


def _other_family(family: str) -> tuple[type[PreTrainedModel], type[Any], dict[str, Any]]:
    from support.other_families import OTHER_FAMILIES  # not everywhere: see there

    return OTHER_FAMILIES[family]


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level without merges: three special tokens, then one token for each byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*SPECIAL_TOKENS, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = CHAT_TEMPLATE
    return fast


def edit_config(directory: Path, **changes: Any) -> None:
    """Rewrites keys of config.json; None removes a key."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR_LAYERS = (*ATTENTION_LAYERS, "gate_proj", "up_proj", "down_proj")


def make_adapter(
    directory: Path,
    model: PreTrainedModel,
    *,
    seed: int = 1,
    rank: int = 4,
    targets: Sequence[str] = LINEAR_LAYERS,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Path:
    """Saves a random LoRA adapter for a model as PEFT does; `directory` is returned.

    It changes all layers whose last name is one of `targets`, enough for other tokens to be chosen. `settings` go to
    adapter_config.json.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] not in targets:
            continue
        outputs, inputs = module.weight.shape
        if isinstance(module, Conv1D):
            inputs, outputs = outputs, inputs
        for side, shape, size in ("A", (rank, inputs), inputs), ("B", (outputs, rank), 4 * rank):
            values = torch.randn(shape, generator=generator) / size**0.5
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = values.to(dtype)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "bias": "none", "r": rank, "lora_alpha": 2 * rank}
    config = {**plain, "target_modules": list(targets), **settings}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merge_adapter(model: PreTrainedModel, directory: Path, scaling: float = 2.0) -> PreTrainedModel:
    """The model, in place, with an adapter added to its weights; `scaling` is that of `make_adapter` by default."""
    tensors = load_file(directory / "adapter_model.safetensors")
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            module = model.get_submodule(name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            delta = tensors[name.replace("lora_A", "lora_B")].float() @ tensors[name].float() * scaling
            with torch.no_grad():
                module.weight += delta.T if isinstance(module, Conv1D) else delta
    return model


def load_reference(directory: Path, attention: str = "eager") -> PreTrainedModel:
    """The model in float32, with transformers' plain attention unless told otherwise; it generates past EOS."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation=attention)
    model.generation_config.eos_token_id = None
    return model.eval()


def reference_tokens(
    model: PreTrainedModel, prompt: Sequence[int], count: int, guess: Sequence[int] = (), **inputs: Any
) -> list[int]:
    """`count` greedy tokens after the prompt, EOS or not. What is right in `guess` takes one step in all, instead of
    one for each token; the answer does not depend on it. `inputs`: of the model, beside its tokens."""
    tokens: list[int] = []
    with torch.inference_mode():
        if guess:
            logits = model(torch.tensor([[*prompt, *guess[: count - 1]]]), use_cache=False, **inputs).logits[0]
            best = logits[len(prompt) - 1 :].argmax(-1).tolist()
            right = next((n for n, pair in enumerate(zip(best, guess, strict=False)) if pair[0] != pair[1]), len(best))
            tokens = best[: right + 1]
        if len(tokens) < count:
            ids = torch.tensor([[*prompt, *tokens]])
            # Without a mask, generate() hides every token of the prompt that equals the pad token.
            mask = torch.ones_like(ids)
            left = count - len(tokens)
            output = model.generate(ids, attention_mask=mask, max_new_tokens=left, do_sample=False, **inputs)
            tokens = output[0, len(prompt) :].tolist()
    return tokens


def reference_answers(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], count: int, guesses: Sequence[Sequence[int]]
) -> list[list[int]]:
    """`reference_tokens` of each prompt, with its guess."""
    pairs = zip(prompts, guesses, strict=True)
    return [reference_tokens(model, prompt, count, guess) for prompt, guess in pairs]


def reference_logprobs(model: PreTrainedModel, token_ids: Sequence[int]) -> torch.Tensor:
    """log-softmax at every position, float64 [len(token_ids), vocab]."""
    with torch.inference_mode():
        logits = model(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits.double(), dim=-1)


def reference_hidden(model: PreTrainedModel, token_ids: Sequence[int]) -> list[float]:
    """The last hidden state of the last token, after the final norm."""
    with torch.inference_mode():
        return model.base_model(torch.tensor([list(token_ids)])).last_hidden_state[0, -1].tolist()


def spread(model: PreTrainedModel) -> None:
    """Gemma adds 1 to the weights of its norms, and multiplies embeddings by the square root of their size."""
    gemma = model.config.model_type in ("gemma", "gemma2", "gemma3_text")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim == 2:
                embedding = 0.05 if gemma else 0.4
                parameter.copy_(noise * (embedding if "embed" in name else 2.0 / parameter.shape[1] ** 0.5))
            elif re.search(r"(norm|ln_\w+)\.weight$", name):
                parameter.copy_((0.0 if gemma else 1.0) + 0.2 * noise)
            else:
                parameter.copy_(0.3 * noise)
