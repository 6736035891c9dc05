"""From messages to token ids: chat template and tokenizer."""

from __future__ import annotations

from functools import partial

from benchmarks.micro.benchmark import Benchmark, Work


def _render(number: int) -> Work:
    """A conversation of so many messages of 200 characters, with the demo model's template (ChatML). The change to a
    thread that is watched, which renders, and back is part of it."""
    from benchmarks.micro.suite.texts import demo_tokenizer, text
    from penstock.tokenizers import ChatTemplate

    tokenizer = demo_tokenizer()
    template = ChatTemplate(tokenizer.chat_template or "", tokenizer.special_tokens)
    roles = ("user", "assistant")
    messages = [{"role": roles[index % 2], "content": text("ascii", 200)} for index in range(number)]

    def run() -> str:
        return template.render(template.normalize(messages), add_generation_prompt=True)

    if run().count("<|im_start|>") != number + 1:
        raise RuntimeError("this is not the demo model's template")
    return Work(run)


def _encode(kind: str, length: int) -> Work:
    from benchmarks.micro.suite.texts import demo_tokenizer, text

    tokenizer = demo_tokenizer()
    prompt = text(kind, length)

    def run() -> None:
        tokenizer.encode(prompt)

    return Work(run)


BENCHMARKS = (
    Benchmark("chat/render-1", "prompt", partial(_render, 1)),
    Benchmark("chat/render-32", "prompt", partial(_render, 32)),
    Benchmark("tokenizer/encode-ascii-100", "text of 100 characters", partial(_encode, "ascii", 100)),
    Benchmark("tokenizer/encode-ascii-4k", "text of 4000 characters", partial(_encode, "ascii", 4000)),
    Benchmark("tokenizer/encode-cjk-4k", "text of 4000 characters", partial(_encode, "cjk", 4000)),
)
