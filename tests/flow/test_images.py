"""Images from a request's body to the model's tokens, which are those of transformers with its own processor."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import pytest_asyncio
import torch
from PIL import Image
from transformers import AutoTokenizer
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from penstock.classic.messages import InferRequest
from penstock.classic.tensors import Tensor
from penstock.engines.errors import InvalidRequestError, NotFoundError, UnsupportedError
from penstock.engines.openvino.config import OpenVINOConfig
from penstock.engines.openvino.runner import OpenVINORunner
from penstock.engines.scheduler.config import SchedulerConfig
from penstock.gateway.commands.offline.parameters import chat_request
from penstock.gateway.models.language.dataplane import DataPlane
from penstock.gateway.models.language.images.family import PreparedImage
from penstock.gateway.models.language.images.processes import PROCESSES
from penstock.gateway.models.language.images.reader import image_reader
from penstock.gateway.models.language.images.sources import ImageSources
from penstock.gateway.models.language.kserve.language_model import LanguageModel
from penstock.gateway.models.language.model_metrics import ModelMetrics
from penstock.gateway.models.language.models import LoadedModel
from penstock.gateway.server.ports.http_apps import build_app
from penstock.gateway.transports.http.settings import AppSettings
from penstock.tokenizers import ChatTemplate, Tokenizer
from protocol.asgi_client import call
from support.images import CHAT_TEMPLATE, PROCESSOR, TOKENS, make_seeing_model
from support.inline_engine import InlineEngine

COUNT = 8
BODY = {"model": "seeing", "temperature": 0, "max_tokens": COUNT}


def picture(seed: int, size: tuple[int, int] = (100, 60)) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), np.uint8))


def encoded(image: Image.Image) -> str:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return base64.b64encode(buffer.getvalue()).decode()


def part(image: Image.Image, **more: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded(image)}", **more}}


def text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Its folder, and transformers' model."""
    folder = tmp_path_factory.mktemp("seeing")
    return folder, make_seeing_model(folder)


class LastingRunner(OpenVINORunner):
    """Outlives the engines of single tests."""

    def close(self) -> None:
        self.reset()

    def end(self) -> None:
        super().close()


@pytest.fixture(scope="module")
def runner(seeing: tuple[Path, Any]) -> Iterator[LastingRunner]:
    runner = LastingRunner(OpenVINOConfig(seeing[0], dtype="f32", threads=1, num_blocks=64, max_num_seqs=4))
    yield runner
    runner.end()


@pytest_asyncio.fixture
async def model(seeing: tuple[Path, Any], runner: LastingRunner) -> AsyncIterator[LoadedModel]:
    folder = seeing[0]
    engine, tokenizer = InlineEngine(runner, SchedulerConfig(max_num_seqs=4)), Tokenizer(folder)
    template = ChatTemplate(CHAT_TEMPLATE, tokenizer.special_tokens)
    metrics = ModelMetrics("seeing", lambda: engine.stats, lambda: engine.ready)
    guard = tokenizer.special_text_guard(template.source)
    loaded = LoadedModel(("seeing",), "root", engine, tokenizer, template, metrics, {}, guard=guard)
    loaded.images = image_reader(folder, tokenizer)
    loaded.loaded = True
    await engine.start()
    yield loaded
    await engine.stop()


async def ask(
    model: LoadedModel,
    path: str,
    sources: ImageSources | None = None,
    settings: AppSettings | None = None,
    **fields: Any,
) -> Any:
    plane = DataPlane(image_sources=sources, salt_key=b"key")
    plane.models.add(model)
    done = await call(build_app(plane, settings or AppSettings()), path, BODY | fields)
    return done.status, done.json()


async def chat(model: LoadedModel, *content: dict[str, Any], **fields: Any) -> tuple[int, Any]:
    messages = [{"role": "user", "content": list(content)}]
    return await ask(model, "/v1/chat/completions", messages=messages, return_token_ids=True, **fields)  # type: ignore[no-any-return]


def reference(
    seeing: tuple[Path, Any], prompt: str, images: list[Image.Image], **options: Any
) -> tuple[int, list[int]]:
    """`prompt` has <image> where they are. Returns the prompt's length, and the answer's tokens."""
    folder, network = seeing
    processor = SmolVLMImageProcessorPil(**{**PROCESSOR, **options})
    tensors = processor([images], return_tensors="pt", return_row_col_info=True)
    first, *rest = prompt.split("<image>")
    for rows, columns, text in zip(tensors["rows"][0], tensors["cols"][0], rest, strict=True):
        places = get_image_prompt_string(rows, columns, TOKENS, "<fake_token_around_image>", "<image>", "<global-img>")
        first += places + text
    ids = AutoTokenizer.from_pretrained(folder)(first, return_tensors="pt", add_special_tokens=False).input_ids
    values = {name: tensors[name] for name in ("pixel_values", "pixel_attention_mask")}
    with torch.inference_mode():
        mask = torch.ones_like(ids)
        output = network.generate(ids, attention_mask=mask, max_new_tokens=COUNT, do_sample=False, **values)
    tokens = output[0, ids.shape[1] :].tolist()
    return ids.shape[1], tokens[: tokens.index(2)] if 2 in tokens else tokens


@pytest.mark.asyncio
async def test_chats_with_images(seeing: tuple[Path, Any], model: LoadedModel) -> None:
    one, two = picture(1), picture(2, (20, 70))
    status, answer = await chat(model, text("a"), part(one), text("b"), part(two))
    length, tokens = reference(
        seeing, "<|im_start|>user:a<image>b<image><|im_end|>\n<|im_start|>assistant:", [one, two]
    )
    assert status == 200
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"]) == length
    assert answer["choices"][0]["token_ids"][: len(tokens)] == tokens
    _, again = await chat(model, text("a"), part(one), text("b"), part(two))
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == length // 32 * 32
    assert again["choices"][0]["token_ids"] == answer["choices"][0]["token_ids"]


@pytest.mark.asyncio
async def test_little_detail_is_one_tile(seeing: tuple[Path, Any], model: LoadedModel) -> None:
    one = picture(3)
    _, answer = await chat(model, part(one, detail="low"))
    prompt = "<|im_start|>user:<image><|im_end|>\n<|im_start|>assistant:"
    length, tokens = reference(seeing, prompt, [one], do_image_splitting=False)
    assert answer["usage"]["prompt_tokens"] == length
    assert answer["choices"][0]["token_ids"][: len(tokens)] == tokens


@pytest.mark.asyncio
async def test_an_image_is_decoded_once_for_each_tenant_salt_and_detail(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[bytes] = []
    prepare = PROCESSES.prepare

    def counted(file: bytes, *how: Any) -> PreparedImage:
        decoded.append(file)
        return prepare(file, *how)

    monkeypatch.setattr(PROCESSES, "prepare", counted)
    fair, one = AppSettings(policy="fair"), part(picture(6))
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture(6))}

    async def chat_of(image: dict[str, Any], **fields: Any) -> Any:
        messages = [{"role": "user", "content": [image, one]}]
        return await ask(model, "/v1/chat/completions", settings=fair, messages=messages, **fields)

    async def message_of(user: str) -> Any:
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        return await ask(model, "/v1/messages", settings=fair, messages=messages, metadata={"user_id": user})

    requests = [
        (lambda: chat_of(one, user="a"), 1),
        (lambda: chat_of(one, user="a"), 0),
        (lambda: message_of("a"), 0),
        (lambda: message_of("b"), 1),
        (lambda: chat_of(one, user="b"), 0),
        (lambda: chat_of(one, user="b", cache_salt="c"), 1),
        (lambda: chat_of(part(picture(6), detail="low"), user="a"), 1),
        (lambda: chat_of(part(picture(7)), user="a"), 1),
    ]
    for number, (request, count) in enumerate(requests):
        decoded.clear()
        status, answer = await request()
        assert (number, status, len(decoded)) == (number, 200, count), answer


@pytest.mark.asyncio
async def test_all_apis_show_the_same(model: LoadedModel) -> None:
    one = picture(4)
    _, answer = await chat(model, text("see"), part(one))
    expected = answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]
    source = {"type": "base64", "media_type": "image/png", "data": encoded(one)}
    content: list[dict[str, Any]] = [text("see"), {"type": "image", "source": source}]
    status, message = await ask(model, "/v1/messages", messages=[{"role": "user", "content": content}])
    assert status == 200, message
    usage = message["usage"]
    assert (usage["input_tokens"] + usage["cache_read_input_tokens"], message["content"][0]["text"]) == expected
    status, counted = await ask(model, "/v1/messages/count_tokens", messages=[{"role": "user", "content": content}])
    assert counted["input_tokens"] == expected[0]
    url = f"data:image/png;base64,{encoded(one)}"
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}]}
    ]
    status, response = await ask(model, "/v1/responses", input=items, max_tokens=None, max_output_tokens=COUNT)
    assert status == 200, response
    assert (response["usage"]["input_tokens"], response["output"][0]["content"][0]["text"]) == expected


@pytest.mark.asyncio
async def test_ollama_s_images(model: LoadedModel) -> None:
    one, two = picture(4), picture(5)
    options = {"temperature": 0, "num_predict": COUNT}
    _, expected = await chat(model, part(one), text("see"))
    messages: list[dict[str, Any]] = [{"role": "user", "content": "see", "images": [encoded(one)]}]
    status, answer = await ask(model, "/api/chat", messages=messages, options=options, stream=False)
    assert status == 200, answer
    assert answer["prompt_eval_count"] == expected["usage"]["prompt_tokens"]
    assert answer["message"]["content"] == expected["choices"][0]["message"]["content"]
    status, answer = await ask(
        model, "/api/generate", prompt="see", images=[encoded(one)], options=options, stream=False
    )
    assert answer["response"] == expected["choices"][0]["message"]["content"]
    assert "context" not in answer
    messages[0] |= {"content": "a[img]b", "images": [encoded(one), encoded(two)]}
    _, placed = await ask(model, "/api/chat", messages=messages, options=options, stream=False)
    _, expected = await chat(model, part(two), text("a"), part(one), text("b"))
    assert placed["message"]["content"] == expected["choices"][0]["message"]["content"]
    _, shown = await ask(model, "/api/show")
    assert "vision" in shown["capabilities"]


@pytest.mark.asyncio
async def test_a_context_of_ollama_s_stands_before_an_image(model: LoadedModel) -> None:
    options = {"temperature": 0, "num_predict": COUNT}
    fields = {"prompt": "see", "images": [encoded(picture(4))], "options": options, "stream": False}
    _, first = await ask(model, "/api/generate", prompt="hi", options=options, stream=False)
    _, alone = await ask(model, "/api/generate", **fields)
    status, behind = await ask(model, "/api/generate", context=first["context"], **fields)
    assert status == 200, behind
    assert behind["prompt_eval_count"] == len(first["context"]) + alone["prompt_eval_count"]


@pytest.mark.asyncio
async def test_a_long_conversation_of_ollama_s_loses_its_oldest_images(model: LoadedModel) -> None:
    turn = {"role": "user", "content": "see", "images": [encoded(picture(4))]}
    counts = []
    for count in (1, 2, 20):
        status, answer = await ask(model, "/api/chat", messages=[turn] * count, stream=False)
        assert status == 200, answer
        counts.append(answer["prompt_eval_count"])
    one, two, cut = counts
    assert cut > two
    assert (cut - one) % (two - one) == 0  # whole messages are left
    images = [encoded(picture(4))] * 20
    status, answer = await ask(model, "/api/chat", messages=[{**turn, "images": images}], stream=False)
    assert (status, answer["error"][:26]) == (400, "The images of this prompt ")
    status, answer = await ask(model, "/api/chat", messages=[{**turn, "images": [7]}], stream=False)
    assert (status, answer["error"]) == (400, "messages[0].images[0] must be an image in base64.")


class Outside:
    """Images that are not in requests, by their URLs or the ids of their files."""

    def __init__(self, **images: Image.Image) -> None:
        self._images = {name: base64.b64decode(encoded(image)) for name, image in images.items()}
        self.read: list[str] = []

    async def fetch(self, url: str, most: int, where: str) -> bytes:
        self.read.append(url)
        return self._images[url.rpartition("/")[2]]

    async def image(self, tenant: str, file_id: str, most: int, where: str) -> bytes:
        self.read.append(file_id)
        try:
            return self._images[file_id]
        except KeyError:
            raise NotFoundError("no") from None


@pytest.fixture
def outside() -> tuple[Outside, ImageSources]:
    images = Outside(a=picture(4))
    sources = ImageSources(images)
    sources.files = images
    return images, sources


@pytest.mark.asyncio
async def test_images_of_other_servers(model: LoadedModel, outside: tuple[Outside, ImageSources]) -> None:
    images, sources = outside
    _, answer = await chat(model, text("see"), part(picture(4)))
    expected = answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]
    url = "https://pictures.test/a"
    content: list[dict[str, Any]] = [text("see"), {"type": "image_url", "image_url": {"url": url}}]
    messages = [{"role": "user", "content": content}]
    status, answer = await ask(model, "/v1/chat/completions", sources, messages=messages)
    assert status == 200, answer
    assert (answer["usage"]["prompt_tokens"], answer["choices"][0]["message"]["content"]) == expected
    content = [text("see"), {"type": "image", "source": {"type": "url", "url": url}}]
    status, message = await ask(model, "/v1/messages", sources, messages=[{"role": "user", "content": content}])
    assert message["content"][0]["text"] == expected[1]
    content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "image_url": url}]
    fields = {"max_tokens": None, "max_output_tokens": COUNT, "truncation": "auto"}
    items = [{"role": "user", "content": content}]
    status, response = await ask(model, "/v1/responses", sources, input=items, **fields)
    assert response["output"][0]["content"][0]["text"] == expected[1]
    assert images.read == [url] * 3
    status, answer = await ask(model, "/v1/responses", input=items, **fields)
    assert (status, answer["error"]["param"]) == (400, "input[0].content[1].image_url")


@pytest.mark.asyncio
async def test_images_in_files(model: LoadedModel, outside: tuple[Outside, ImageSources]) -> None:
    images, sources = outside
    _, answer = await chat(model, text("see"), part(picture(4)))
    expected = answer["choices"][0]["message"]["content"]
    fields = {"max_tokens": None, "max_output_tokens": COUNT}
    content = [{"type": "input_text", "text": "see"}, {"type": "input_image", "file_id": "a"}]
    items = [{"role": "user", "content": content}]
    status, response = await ask(model, "/v1/responses", sources, input=items, **fields)
    assert response["output"][0]["content"][0]["text"] == expected
    source = {"type": "file", "file_id": "a"}
    blocks = [{"role": "user", "content": [text("see"), {"type": "image", "source": source}]}]
    status, message = await ask(model, "/v1/messages", sources, messages=blocks)
    assert message["content"][0]["text"] == expected
    assert images.read == ["a"] * 2
    content[1]["file_id"] = "b"
    status, answer = await ask(model, "/v1/responses", sources, input=items, **fields)
    assert (status, answer["error"]["message"]) == (400, "input[0].content[1].file_id: there is no file with this id.")
    status, answer = await ask(model, "/v1/responses", input=items, **fields)
    assert status == 400
    assert answer["error"]["message"].endswith(".file_id: this server keeps no files (--data-dir, --data-memory).")
    del content[1]["file_id"]
    status, answer = await ask(model, "/v1/responses", sources, input=items, **fields)
    assert (status, answer["error"]["param"]) == (400, "input[0].content[1].image_url")


@pytest.mark.asyncio
async def test_images_from_outside_are_bounded(
    model: LoadedModel, outside: tuple[Outside, ImageSources], monkeypatch: pytest.MonkeyPatch
) -> None:
    images, sources = outside
    content = [{"type": "image_url", "image_url": {"url": "https://pictures.test/a"}}] * 65
    messages = [{"role": "user", "content": content}]
    status, answer = await ask(model, "/v1/chat/completions", sources, messages=messages)
    assert (status, answer["error"]["message"][:28], images.read) == (400, "A request can have 64 images", [])
    limits: list[int] = []

    async def fetch(url: str, most: int, where: str) -> bytes:
        limits.append(most)
        return bytes(most)

    monkeypatch.setattr(images, "fetch", fetch)
    messages = [{"role": "user", "content": content[:5]}]
    status, answer = await ask(model, "/v1/chat/completions", sources, messages=messages)
    assert (status, limits) == (400, [20 << 20, 20 << 20, 20 << 20, 4 << 20])
    assert "more than 64 MiB together" in answer["error"]["message"]


@pytest.mark.asyncio
async def test_what_reads_text_only_fetches_nothing(model: LoadedModel, outside: tuple[Outside, ImageSources]) -> None:
    images, sources = outside
    model.images = None
    content = [text("see"), {"type": "image_url", "image_url": {"url": "https://pictures.test/a"}}]
    messages = [{"role": "user", "content": content}]
    status, _ = await ask(model, "/v1/chat/completions", sources, messages=messages)
    assert (status, images.read) == (200, [])


def infer_request(prompt: str, *images: str) -> InferRequest:
    inputs = {"text_input": Tensor("text_input", "BYTES", np.array([prompt.encode()], np.object_))}
    if images:
        array = np.array([image.encode() for image in images], np.object_)
        inputs["image"] = Tensor("image", "BYTES", array)
    return InferRequest(inputs=inputs, parameters={"temperature": 0, "max_tokens": COUNT})


@pytest.mark.asyncio
async def test_kserve_s_input_for_images(model: LoadedModel) -> None:
    one, two = picture(4), picture(5)
    _, answer = await chat(model, text("a"), part(one), text("b"), part(two))
    prompt = "<|im_start|>user:a<image>b<image><|im_end|>\n<|im_start|>assistant:"
    kserve = LanguageModel(DataPlane(), model, "seeing", policy="fcfs")
    [listed] = [item for item in kserve.config.input if item.name == "image"]
    assert (listed.optional, list(listed.dims)) == (True, [-1])
    response = await kserve.infer(infer_request(prompt, encoded(one), encoded(two)))
    assert response.outputs is not None
    assert response.outputs[0].array.tolist() == [(prompt + answer["choices"][0]["message"]["content"]).encode()]
    refused = {"must have a place for each image": (prompt, encoded(one)), "not in base64": ("<image>", "?")}
    for message, request in refused.items():
        with pytest.raises(InvalidRequestError, match=message):
            await kserve.infer(infer_request(*request))


@pytest.mark.asyncio
async def test_kserve_has_no_such_input_without_a_reader(model: LoadedModel) -> None:
    model.images = None
    kserve = LanguageModel(DataPlane(), model, "seeing", policy="fcfs")
    assert "image" not in [item.name for item in kserve.config.input]
    with pytest.raises(UnsupportedError, match="this model reads text only"):
        await kserve.infer(infer_request("<image>", encoded(picture(4))))


@pytest.mark.asyncio
async def test_pictures_of_pillow_in_a_program(model: LoadedModel) -> None:
    one = picture(4)
    _, answer = await chat(model, text("see"), part(one))
    for shown in ({"type": "image", "image": one}, {"type": "image_pil", "image_pil": one}, one):
        [message] = chat_request("seeing", [{"role": "user", "content": [text("see"), shown]}], {}).messages
        assert isinstance(message.content, list)
        found = [msgspec.to_builtins(item) for item in message.content]
        _, again = await chat(model, *found)
        assert again["prompt_token_ids"] == answer["prompt_token_ids"]
        assert again["choices"] == answer["choices"]
    turned = one.copy()
    turned.getexif()[0x0112] = 3
    content = [{"type": "image", "image": turned, "detail": "low"}, {"type": "image", "image": one.convert("CMYK")}]
    [message] = chat_request("seeing", [{"role": "user", "content": content}], {}).messages
    assert isinstance(message.content, list)
    upright, _ = (item.image_url for item in message.content)
    assert upright["detail"] == "low"
    file = io.BytesIO(base64.b64decode(upright["url"].partition(",")[2]))
    assert Image.open(file).tobytes() == one.rotate(180).tobytes()


@pytest.mark.asyncio
async def test_a_tool_s_result_may_be_an_image(model: LoadedModel) -> None:
    """An agent that looks at a picture."""
    source = {"type": "base64", "media_type": "image/png", "data": encoded(picture(5))}
    messages = [
        {"role": "user", "content": "look"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "view", "input": {}}]},
        {
            "role": "user",
            "content": [{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}],
        },
    ]
    status, counted = await ask(model, "/v1/messages/count_tokens", messages=messages)
    assert status == 200, counted
    assert counted["input_tokens"] > 13 * TOKENS


@pytest.mark.asyncio
async def test_the_list_of_models_says_which_sees(model: LoadedModel) -> None:
    assert "vision" in model.describe("seeing").capabilities
    model.images = None
    assert "vision" not in model.describe("seeing").capabilities


@pytest.mark.asyncio
async def test_text_that_looks_like_an_image_is_text(model: LoadedModel) -> None:
    _, plain = await chat(model, text("<image>"))
    assert 259 not in plain["prompt_token_ids"]
    status, answer = await chat(model, text("<image><global-img>"), part(picture(1)))
    assert status == 200
    assert answer["prompt_token_ids"].count(259) == 13 * TOKENS


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("image", "message"),
    [
        ({"url": "https://example.com/a.png"}, "does not fetch images"),
        ({"url": "file:///etc/passwd"}, "does not fetch images"),
        ({"url": "data:image/png;base64,AAAA"}, "no JPEG, PNG, WebP or GIF"),
        ({"url": "data:image/png;base64,?"}, "not in base64"),
        ({"url": "data:image/png,abc"}, "must be in base64"),
        ({"url": "data:;base64," + "A" * (2 << 20)}, "more than 1 MiB"),
        ({}, "URL is missing"),
    ],
)
async def test_images_that_cannot_be_shown(
    image: dict[str, Any], message: str, model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.gateway.models.language.images.reader.MOST_BYTES", 1 << 20)
    status, answer = await chat(model, {"type": "image_url", "image_url": image})
    assert status == 400
    assert message in answer["error"]["message"]
    assert answer["error"]["param"] == "messages[0].content[0].image_url"


@pytest.mark.asyncio
async def test_more_images_than_there_is_room_for(model: LoadedModel) -> None:
    one = part(picture(1, (4, 4)), detail="low")
    status, answer = await chat(model, *[one] * 65)
    assert (status, answer["error"]["message"][:28]) == (400, "A request can have 64 images")
    status, answer = await chat(model, *[part(picture(1))] * 12)
    assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
    status, answer = await chat(model, one, truncate_prompt_tokens=20)
    assert (status, answer["error"]["message"]) == (400, "A prompt with images cannot be truncated.")


@pytest.mark.asyncio
async def test_a_model_without_a_reader_gets_a_note(model: LoadedModel) -> None:
    model.images = None
    status, answer = await chat(model, text("a"), part(picture(1)))
    _, noted = await chat(model, text("a"), text("[image left out: this model reads text only]"))
    assert status == 200
    assert answer["prompt_token_ids"] == noted["prompt_token_ids"]
