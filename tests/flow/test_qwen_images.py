"""Images from a request's body to the tokens of Qwen's models, which are those of transformers with its processor."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoTokenizer

from flow.test_images import COUNT, chat, part, picture, text
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.models.language.images.reader import image_reader
from penstock.gateway.models.language.model_metrics import ModelMetrics
from penstock.gateway.models.language.models import LoadedModel
from penstock.tokenizers import ChatTemplate, Tokenizer
from support.images import IMAGE_TOKEN
from support.inline_engine import InlineEngine
from support.qwen_images import CHAT_TEMPLATE, make_qwen, processor

FAMILY = "qwen3-vl"


@pytest_asyncio.fixture
async def seeing(tmp_path: Path) -> AsyncIterator[tuple[LoadedModel, Any]]:
    """The model, and transformers'."""
    network = make_qwen(tmp_path, FAMILY)
    runner = OpenVINORunner(OpenVINOConfig(tmp_path, dtype="f32", threads=1, num_blocks=64, max_num_seqs=4))
    engine, tokenizer = InlineEngine(runner, SchedulerConfig(max_num_seqs=4)), Tokenizer(tmp_path)
    template = ChatTemplate(CHAT_TEMPLATE, tokenizer.special_tokens)
    metrics = ModelMetrics("seeing", lambda: engine.stats, lambda: engine.ready)
    guard = tokenizer.special_text_guard(template.source)
    loaded = LoadedModel(("seeing",), "root", engine, tokenizer, template, metrics, {}, guard=guard)
    loaded.images = image_reader(tmp_path, tokenizer)
    loaded.loaded = True
    await engine.start()
    yield loaded, network
    await engine.stop()


def reference(folder: Path, network: Any, text: str, images: list[Any]) -> tuple[list[int], list[int]]:
    """The tokens of a prompt with a place for each image, and of the answer."""
    tensors = processor(FAMILY)(images, return_tensors="pt")
    for _, rows, columns in tensors["image_grid_thw"].tolist():
        text = text.replace(
            "<image>", "<|vision_start|>" + "<|image_pad|>" * (rows * columns // 4) + "<|vision_end|>", 1
        )
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt", add_special_tokens=False).input_ids
    kinds = (ids == IMAGE_TOKEN).int()
    with torch.inference_mode():
        output = network.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            mm_token_type_ids=kinds,
            max_new_tokens=COUNT,
            do_sample=False,
            **tensors,
        )
    tokens = output[0, ids.shape[1] :].tolist()
    return ids[0].tolist(), tokens[: tokens.index(2)] if 2 in tokens else tokens


@pytest.mark.asyncio
async def test_chats_with_images(seeing: tuple[LoadedModel, Any], tmp_path: Path) -> None:
    model, network = seeing
    assert "vision" in model.describe("seeing").capabilities
    one, two = picture(1), picture(2, (20, 70))
    status, answer = await chat(model, text("a"), part(one), text("b"), part(two), text("c"))
    prompt, tokens = reference(
        tmp_path, network, "<|im_start|>user:a<image>b<image>c<|im_end|>\n<|im_start|>assistant:", [one, two]
    )
    assert status == 200, answer
    assert answer["prompt_token_ids"] == prompt
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["token_ids"][: len(tokens)] == tokens
    _, again = await chat(model, text("a"), part(one), text("b"), part(two), text("c"))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) // 32 * 32
    assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]
    _, plain = await chat(model, text("<|image_pad|>"))
    assert IMAGE_TOKEN not in plain["prompt_token_ids"], "a client's text stays text"
    status, answer = await chat(model, part(picture(1, (210, 1))))
    assert (status, answer["error"]["param"]) == (400, "messages[0].content[0].image_url")
