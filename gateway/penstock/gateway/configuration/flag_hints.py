"""Flags of other servers, and what to use here in their place. They are shown, never obeyed: what a name means differs
from server to server, and a start script should say what happens.

Triton's flags are accepted where they mean something here; `triton_flags` has the others.
"""

from __future__ import annotations

_MODEL = "the model is written without a flag: penstock serve MODEL"
_DEVICES = "the engine decides what runs on a GPU; --device cpu, cuda or cuda:1 chooses one"
_KERNELS = "leave it out: the engine chooses its kernels"
_LOADING = "leave it out: the engine decides how it reads the weights"
_TOOLS = "leave it out: tool calls work where the chat template has them; --tool-parser names another parser"
_NO_CODE = "leave it out: code that comes with a model is never run"
_LOGS = "leave it out: prompts are never logged; --access-log off turns the line for each request off"
_HUB_CACHE = "the hub's own variable HF_HOME says where models are kept; --data-dir is for files and responses"
_SPECULATIVE = "use --speculative-model, or --speculative ngram"
_LORA = "use --lora NAME=DIR for each adapter, or --lora-directory"
_SCALING = "leave it out: the model's config.json says how positions are scaled; --max-model-len bounds the context"
_PARALLEL = "use --replicas for several engines with the same model"
_SERVED = "use --served-model-name"
_CONTEXT = "use --max-model-len"
_SEQUENCES = "use --max-num-seqs"
_BATCH = "use --max-num-batched-tokens"
_DEVICES_SHARED = "use --tensor-parallel-size"
_MEMORY_SHARE = "use --kv-cache-memory, as 4GiB or 40%, or --gpu-memory-utilization for GPUs"
_TEMPLATE = "use --chat-template FILE"
_KV_TYPE = "use --kv-cache-dtype"
_GRAMMARS = "leave it out: structured outputs are always there"
_TIMEOUT = "use --request-timeout"
_CERT, _KEY = "use --http-use-ssl with --http-server-cert FILE", "use --http-use-ssl with --http-server-key FILE"
_TASK = "leave it out: embedding and ranking models are known by their files; --embedding-model adds more of them"
_SAMPLING = "each request says it; defaults come from the model's generation_config.json"

FLAG_HINTS: dict[str, str] = {
    # several servers
    **dict.fromkeys(("--model", "-m", "--model-path", "--model-id", "--hf-repo", "-hf", "-hfr"), _MODEL),
    **dict.fromkeys(("--hf-file", "-hff", "--model-url", "-mu"), f"{_MODEL}, a folder, a GGUF file or a hub id"),
    "-p": "use --http-port",
    **dict.fromkeys(("--hostname", "--bind", "-H"), "use --host"),
    **dict.fromkeys(("--alias", "-a", "--model-name"), _SERVED),
    **dict.fromkeys(("--tls-cert", "--ssl-certfile", "--ssl-cert-file"), _CERT),
    **dict.fromkeys(("--tls-key", "--ssl-keyfile", "--ssl-key-file"), _KEY),
    **dict.fromkeys(("--cors-allow-origin", "--allowed-origin"), "use --allowed-origins"),
    **dict.fromkeys(("--verbose", "-v", "-lv", "--verbosity"), "use --log-level debug"),
    **dict.fromkeys(("--timeout", "-to", "--timeout-keep-alive"), f"{_TIMEOUT}, or --keep-alive for idle connections"),
    **dict.fromkeys(("--draft-model", "--model-draft", "-md", "--speculative-config"), _SPECULATIVE),
    **dict.fromkeys(("--speculative-algorithm", "--speculative-draft-model-path"), _SPECULATIVE),
    **dict.fromkeys(("--num-speculative-tokens", "--draft-max", "--draft", "--speculate"), "use --max-draft-tokens"),
    # vLLM
    "-tp": _DEVICES_SHARED,
    "-pp": "use --pipeline-parallel-size",
    **dict.fromkeys(("--data-parallel-size", "-dp", "--dp", "--dp-size"), _PARALLEL),
    **dict.fromkeys(("--enforce-eager", "--compilation-config", "-O", "--disable-cuda-graph"), _KERNELS),
    **dict.fromkeys(("--attention-backend", "--block-size", "--cuda-graph-max-bs", "--page-size"), _KERNELS),
    "--trust-remote-code": _NO_CODE,
    "--download-dir": _HUB_CACHE,
    **dict.fromkeys(("--load-format", "--safetensors-load-strategy"), _LOADING),
    **dict.fromkeys(("--enable-auto-tool-choice", "--tool-parser-plugin"), _TOOLS),
    "--tool-call-parser": "use --tool-parser",
    "--enable-reasoning": "leave it out: reasoning is found where the model has it; --reasoning-parser names a parser",
    "--enable-lora": f"leave it out: {_LORA.removeprefix('use ')} is enough",
    **dict.fromkeys(("--lora-modules", "--lora-paths", "--lora-adapters"), _LORA),
    **dict.fromkeys(("--disable-log-requests", "--enable-log-requests", "--disable-log-stats"), _LOGS),
    "--uvicorn-log-level": "use --log-level",
    "--swap-space": "use --kv-offload-dir and --kv-offload-bytes",
    "--cpu-offload-gb": "there is no such thing: a model whose weights are too large may fit with --weights int4",
    "--kv-cache-memory-bytes": "use --kv-cache-memory, as 4GiB",
    "--num-gpu-blocks-override": "use --num-kv-blocks",
    **dict.fromkeys(("--enable-prefix-caching", "--enable-chunked-prefill"), "leave it out: it is always on"),
    **dict.fromkeys(("--no-enable-prefix-caching", "--disable-radix-cache"), "use --no-prefix-caching"),
    "--scheduling-policy": "use --policy",
    "--api-server-count": "use --fronts",
    "--guided-decoding-backend": _GRAMMARS,
    "--structured-outputs-config": _GRAMMARS,
    "--chat-template-kwargs": "requests have chat_template_kwargs; --chat-template FILE is another template",
    "--generation-config": _SAMPLING,
    "--override-generation-config": _SAMPLING,
    "--hf-overrides": "--engine-args takes options of the vllm engine itself, as a JSON object",
    "--hf-token": "set the variable HF_TOKEN",
    "--tokenizer": "leave it out: the tokenizer is the model's own",
    "--tokenizer-mode": "leave it out: the tokenizer is the model's own",
    **dict.fromkeys(("--task", "--runner", "--is-embedding", "--embedding", "--embeddings", "--reranking"), _TASK),
    "--max-logprobs": "leave it out: requests ask for as many as the API allows",
    "--limit-mm-per-prompt": "leave it out: models take text only",
    # llama.cpp
    **dict.fromkeys(("--ctx-size", "-c", "--n-ctx"), _CONTEXT),
    **dict.fromkeys(("--n-gpu-layers", "--gpu-layers", "-ngl"), _DEVICES),
    **dict.fromkeys(("--main-gpu", "-mg", "--split-mode", "-sm", "--tensor-split", "-ts"), _DEVICES),
    **dict.fromkeys(("--parallel", "-np"), _SEQUENCES),
    **dict.fromkeys(("-t", "--threads-batch", "-tb"), "use --threads"),
    **dict.fromkeys(("--batch-size", "-b", "--ubatch-size", "-ub"), _BATCH),
    **dict.fromkeys(("--flash-attn", "-fa"), _KERNELS),
    "--jinja": "leave it out: chat templates are always rendered",
    "--chat-template-file": _TEMPLATE,
    **dict.fromkeys(("--mmproj", "-mm"), "leave it out: models take text only"),
    **dict.fromkeys(("--mlock", "--no-mmap", "--mmap"), _LOADING),
    **dict.fromkeys(("--numa",), "use --numa-nodes"),
    **dict.fromkeys(("--cache-type-k", "-ctk", "--cache-type-v", "-ctv"), _KV_TYPE),
    **dict.fromkeys(("--cont-batching", "-cb"), "leave it out: it is always on"),
    **dict.fromkeys(("--n-predict", "-n", "--temp", "--top-k", "--top-p"), _SAMPLING),
    **dict.fromkeys(("--rope-scaling", "--rope-freq-base", "--yarn-ext-factor"), _SCALING),
    "--reasoning-format": "use --reasoning-parser",
    **dict.fromkeys(("--metrics", "--slots", "--props"), "leave it out: it is there, on --metrics-port"),
    "--lora-scaled": _LORA,
    # Text Generation Inference
    **dict.fromkeys(("--max-total-tokens", "--max-input-tokens", "--max-input-length"), _CONTEXT),
    **dict.fromkeys(("--max-batch-prefill-tokens", "--max-batch-total-tokens"), _BATCH),
    "--max-concurrent-requests": "use --max-queued-requests, and --max-num-seqs for those that run together",
    "--max-batch-size": _SEQUENCES,
    **dict.fromkeys(("--num-shard", "--sharded"), _DEVICES_SHARED),
    "--quantize": "use --weights int8 or int4, or --quantization with the vllm engine",
    "--cuda-memory-fraction": _MEMORY_SHARE,
    "--huggingface-hub-cache": _HUB_CACHE,
    "--otlp-service-name": "set the variable OTEL_SERVICE_NAME",
    # SGLang
    **dict.fromkeys(("--context-length", "--max-seq-len"), _CONTEXT),
    "--mem-fraction-static": _MEMORY_SHARE,
    **dict.fromkeys(("--tp", "--tp-size"), _DEVICES_SHARED),
    **dict.fromkeys(("--pp-size",), "use --pipeline-parallel-size"),
    "--max-running-requests": _SEQUENCES,
    "--chunked-prefill-size": _BATCH,
    "--max-prefill-tokens": _BATCH,
    "--schedule-policy": "use --policy",
    "--enable-metrics": "leave it out: it is there, on --metrics-port",
    # Ollama's are variables; these are what its users look for
    "--keepalive": "use --sleep-idle-seconds for models, or --keep-alive for idle connections",
    "--num-ctx": _CONTEXT,
    "--num-parallel": _SEQUENCES,
}
"""By the flag that was given. The flags that a hint names are flags of `penstock serve`."""
