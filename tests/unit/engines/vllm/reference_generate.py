"""Run as a script: what vLLM's own LLM.generate gives, greedily, with its own scheduler. JSON in, JSON out."""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    asked = json.load(sys.stdin)
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=asked["model_dir"],
        dtype="float32",
        skip_tokenizer_init=True,
        enforce_eager=True,
        block_size=32,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=8,
        load_format="safetensors",
    )
    for settings in asked["settings"]:  # JSON's keys are text
        settings["logit_bias"] = {int(token): value for token, value in settings.get("logit_bias", {}).items()} or None
    params = [SamplingParams(ignore_eos=True, detokenize=False, **settings) for settings in asked["settings"]]
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in asked["prompts"]], params, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    Path(asked["result"]).write_text(json.dumps(tokens))


if __name__ == "__main__":
    main()
