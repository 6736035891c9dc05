"""Rendering tokens as server-sent events of the OpenAI API."""

from __future__ import annotations

from functools import partial

from benchmarks.micro.benchmark import Benchmark, Work

_TOKENS = 500


def _frames(texts: tuple[str, ...], *, logprobs: bool = False) -> Work:
    """One frame for each token of a chat stream, rendered by itself."""
    from penstock.gateway.apis.openai.frames import Frames
    from penstock.gateway.apis.openai.objects import ResponseHead, chat_logprobs
    from penstock.gateway.models.language.dataplane import Candidate, ChoiceDelta, TokenLogprob

    frames = Frames(
        ResponseHead(
            "chatcmpl-0123456789abcdef0123456789abcdef", "chat.completion.chunk", 1_700_000_000, "model", "penstock"
        ),
        1,
        opening=b'"delta":{"content":',
        closing=b"}",
        logprobs=(lambda _, entries: chat_logprobs(entries)) if logprobs else None,
    )
    top = [Candidate(f" {n}", n, -float(n), [32, 48 + n]) for n in range(5)]
    batches = []
    for number in range(_TOKENS):
        delta = ChoiceDelta(0, texts[number % len(texts)], [number])
        if logprobs:
            delta.logprobs = [TokenLogprob(delta.text, number, -0.5, list(delta.text.encode()), top, 1)]
        batches.append([delta])

    def run() -> None:
        for batch in batches:
            frames.render(batch)

    return Work(run, _TOKENS)


BENCHMARKS = (
    Benchmark("sse/frame-ascii", "token", partial(_frames, (" the", " steam", " engine", "."))),
    Benchmark("sse/frame-escapes", "token", partial(_frames, ('"', "\n", "\t", "\\"))),
    Benchmark("sse/frame-cjk", "token", partial(_frames, ("蒸", "汽", "机", "。"))),
    Benchmark("sse/frame-logprobs-5", "token", partial(_frames, (" the", " steam", " engine", "."), logprobs=True)),
)
