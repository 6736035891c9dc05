"""Train the demo model: a small Llama that answers questions about Python's standard library.

    python train.py --out out              # everything: tokenizer, training, export, loss curve
    python train.py --out out --init MODEL # more training of these weights

The run is determined by the seed as long as the limit `--minutes` is not reached.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from data import Library, Recipe
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tools import CHAT_TEMPLATE
from transformers import LlamaConfig, LlamaForCausalLM

START, END, TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
    "rope_scaling": None,
    "rms_norm_eps": 1e-05,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "pretraining_tp": 1,
    "use_cache": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}
ROW = 1024  # tokens in a packed row


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def train_tokenizer(library: Library, seed: int) -> Tokenizer:
    """Byte-level BPE with 4096 entries; ids 0, 1 and 2 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=[TEXT, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    recipe = Recipe(seed, library)
    texts = ("".join(text for text, _ in recipe.example()) for _ in range(20_000))
    tokenizer.train_from_iterator((t.replace(START, "").replace(END, "").replace(TEXT, "") for t in texts), trainer)
    return tokenizer


def documents(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[tuple[list[int], list[bool]]]:
    """Tokenized examples, each with a mask of the tokens that count in the loss."""
    while True:
        examples = [recipe.example() for _ in range(512)]
        flat = [text for pieces in examples for text, _ in pieces]
        encoded = iter(tokenizer.encode_batch(flat, add_special_tokens=False))
        for pieces in examples:
            ids: list[int] = []
            mask: list[bool] = []
            for _, trained in pieces:
                new = next(encoded).ids
                ids += new
                mask += [trained] * len(new)
            if len(ids) <= ROW:
                yield ids, mask


def packed_rows(recipe: Recipe, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Rows of ROW + 1 tokens: whole documents, packed from a small pool so that little is wasted."""
    source = documents(recipe, tokenizer)
    pool = [next(source) for _ in range(128)]
    while True:
        ids, mask = [], []
        while True:
            fits = next((i for i, (doc, _) in enumerate(pool) if len(ids) + len(doc) <= ROW + 1), None)
            if fits is None:
                break
            doc, doc_mask = pool.pop(fits)
            ids += doc
            mask += doc_mask
            pool.append(next(source))
        pad = ROW + 1 - len(ids)
        yield np.array(ids + [0] * pad), np.array(mask + [False] * pad)


def batch_of(rows: list[tuple[np.ndarray, np.ndarray]], length: int) -> tuple[torch.Tensor, ...]:
    """Inputs, the flat positions that have a target, and the targets; rows may be joined to longer ones."""
    ids = torch.from_numpy(np.stack([ids for ids, _ in rows]))
    mask = torch.from_numpy(np.stack([mask for _, mask in rows]))
    where = mask[:, 1:].reshape(-1).nonzero().squeeze(1)
    return ids[:, :-1].reshape(-1, length), where, ids[:, 1:].reshape(-1)[where]


def loss_of(model: LlamaForCausalLM, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    ids, where, targets = batch
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.model(input_ids=ids, use_cache=False)[0]
        logits = model.lm_head(hidden.reshape(-1, hidden.shape[-1])[where])
    return torch.nn.functional.cross_entropy(logits.float(), targets)


def export(model: LlamaForCausalLM, tokenizer: Tokenizer, out: Path) -> None:
    """Write the files of a Hugging Face model folder."""
    out.mkdir(parents=True, exist_ok=True)
    weights = {k: v.detach().to(torch.bfloat16).contiguous() for k, v in model.state_dict().items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    tokenizer.save(str(out / "tokenizer.json"))
    write_json(out / "config.json", CONFIG)
    write_json(
        out / "generation_config.json",
        {
            "bos_token_id": 1,
            "eos_token_id": [2, 0],
            "pad_token_id": 0,
            "do_sample": True,
            "temperature": 0.2,
            "top_p": 0.9,
        },
    )
    special = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONFIG["max_position_embeddings"],
            "add_bos_token": False,
            "add_eos_token": False,
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "bos_token": START,
            "eos_token": END,
            "pad_token": TEXT,
            "unk_token": None,
            "added_tokens_decoder": {str(i): {"content": t, **special} for i, t in enumerate([TEXT, START, END])},
            "chat_template": CHAT_TEMPLATE,
        },
    )


def plot(rows: list[dict[str, float]], path: Path) -> None:
    """Draw the loss curve as SVG, with a logarithmic loss axis."""
    width, height, left, bottom = 720, 380, 60, 40
    low, high = math.log(0.05), math.log(10)
    last = rows[-1]["tokens"]

    def point(tokens: float, loss: float) -> str:
        x = left + (width - left - 20) * tokens / last
        y = 20 + (height - bottom - 20) * (high - math.log(min(max(loss, 0.05), 10))) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif"']
    parts[0] += ' font-size="12"><rect width="100%" height="100%" fill="white"/>'
    for tick in (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10):
        y = point(0, tick).split(",")[1]
        parts.append(f'<path d="M{left},{y}H{width - 20}" stroke="#ddd"/><text x="20" y="{y}">{tick}</text>')
    for step in range(6):
        x = point(last * step / 5, 1).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - 20}" text-anchor="middle">{last * step / 5e6:.1f}M</text>')
    for key, colour, y in (("train_loss", "#3572a5", 40), ("val_loss", "#d9534f", 58)):
        line = " ".join(point(r["tokens"], r[key]) for r in rows if r[key] == r[key])
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        parts.append(f'<text x="{width - 120}" y="{y}" fill="{colour}">{key.replace("_", " ")}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 4}" text-anchor="middle">tokens seen</text></svg>')
    path.write_text("\n".join(parts) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out"))
    parser.add_argument("--init", type=Path, help="go on from this model and its tokenizer")
    parser.add_argument("--steps", type=int, default=3300)
    parser.add_argument("--minutes", type=float, default=1e9, help="finish the schedule early after this time")
    parser.add_argument("--batch", type=int, default=4, help="rows of 1024 tokens")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    random.seed(args.seed)
    library = Library()
    if args.init:
        tokenizer = Tokenizer.from_file(str(args.init / "tokenizer.json"))
        model = LlamaForCausalLM.from_pretrained(args.init, dtype=torch.float32)
    else:
        tokenizer = train_tokenizer(library, args.seed)
        model = LlamaForCausalLM(LlamaConfig(**CONFIG))
    rows = packed_rows(Recipe(args.seed + 1, library), tokenizer)
    held_out = packed_rows(Recipe(args.seed + 2, library), tokenizer)
    val = [batch_of([next(held_out) for _ in range(args.batch)], ROW) for _ in range(6)]

    print(f"{sum(p.numel() for p in model.parameters()):,} parameters", flush=True)
    matrices = [p for p in model.parameters() if p.ndim > 1]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)

    log: list[dict[str, float]] = []
    start, step, progress, running, saved = time.monotonic(), 0, 0.0, 0.0, 0.0
    while progress < 1:
        length = 2 * ROW if step % 4 == 3 else ROW  # one in four on longer contexts
        batch = batch_of([next(rows) for _ in range(args.batch)], length)
        rate = min(1.0, (step + 1) / 100) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * progress)))
        for group in optimizer.param_groups:
            group["lr"] = args.lr * rate
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        running += loss.item()
        minutes = (time.monotonic() - start) / 60
        progress = max(step / args.steps, minutes / args.minutes)
        if step % 25 == 0 or progress >= 1:
            val_loss = math.nan
            if step % 200 == 0 or progress >= 1:
                with torch.no_grad():
                    val_loss = sum(loss_of(model, b).item() for b in val) / len(val)
            tokens = step * args.batch * ROW
            row = {"step": step, "tokens": tokens, "minutes": round(minutes, 2)}
            log.append(row | {"train_loss": round(running / ((step - 1) % 25 + 1), 4), "val_loss": round(val_loss, 4)})
            running = 0.0
            print(log[-1], f"{tokens / minutes / 60:.0f} tok/s", flush=True)
        if minutes - saved > 3:
            saved = minutes
            export(model, tokenizer, args.out)

    export(model, tokenizer, args.out)
    with open(args.out / "loss.csv", "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, list(log[0]))
        writer.writeheader()
        writer.writerows({k: "" if v != v else v for k, v in row.items()} for row in log)
    plot(log, args.out / "loss.svg")


if __name__ == "__main__":
    main()
