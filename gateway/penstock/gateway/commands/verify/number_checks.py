"""Checks of the numbers: losses on texts, tokens beside transformers, divergence from the stored weights, speed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from importlib.resources import as_file, files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.engines.errors import PenstockError
from penstock.engines.formats.model_files import exported_graph
from penstock.engines.host.memory import available_memory
from penstock.gateway.commands.bench import engine_bench, perplexity_bench
from penstock.gateway.commands.bench.loading import find
from penstock.gateway.commands.bench.options import EngineBench, PerplexityBench
from penstock.gateway.commands.bench.perplexity_report import PerplexityRow
from penstock.gateway.commands.bench.text import first_token, library_text
from penstock.gateway.commands.verify.prompts import TEXT_BEGINNINGS
from penstock.gateway.commands.verify.report import Notes, Result, Row
from penstock.gateway.commands.verify.subject import Subject
from penstock.gateway.configuration.config import Config, ConfigError, overlay
from penstock.gateway.models.memory.budget import size_text
from penstock.gateway.models.memory.estimate import estimate

if TYPE_CHECKING:  # it needs torch
    from penstock.gateway.commands.verify.reference import Reference

_TEXT = "text.txt"
_LIBRARY_CHARACTERS = 3000
POOR, ABSURD = 0.4, 0.7
"""Losses as shares of chance, the logarithm of the vocabulary's size. How often each token occurs, known without any
order, is worth about 0.6 to 0.7; models that work are at 0.1 to 0.35, the demo model at 0.3."""
_NUMBERS = ("dtype", "weights", "activations", "kv_cache_dtype")
_MOVED, _BROKEN = 0.2, 1.5
"""KL divergence in nats; int4 weights of the demo model: 0.05."""
_SAME = 0.02
"""Largest difference of logprobs in f32 that the order of sums explains, with room."""
_MOSTLY, _HARDLY = 0.75, 0.4
"""Shares of greedy tokens that are the same where one side has fewer bits: one logprob may differ by anything there,
where another expert is chosen."""
_SHORTEST = 32
"""Tokens of a prompt whose speed says something."""


def check_losses(subject: Subject) -> Row:
    """Whether the model predicts text at all: exchanged and damaged tensors agree with themselves everywhere else."""
    notes = Notes("text")
    if not subject.info.supports_logprobs:
        notes.add("skipped", "the engine has no logprobs")
        return notes.row()
    tokenizer, chance = subject.model.tokenizer, math.log(subject.info.vocab_size)
    lead = [] if (first := first_token(tokenizer)) is None else [first]
    room = min(1024, subject.info.context_length - 1)
    shares = {}
    for name, text in _texts().items():
        losses = subject.losses([*lead, *tokenizer.encode(text, add_special_tokens=False)][:room])
        shares[name] = sum(losses) / len(losses) / chance
    name, best = min(shares.items(), key=lambda item: item[1])
    result: Result = "pass" if best < POOR else "warn" if best < ABSURD else "FAIL"
    of_each = ", ".join(f"{name} {math.exp(share * chance):,.0f}" for name, share in shares.items())
    words = {"pass": "", "warn": ", which is poor", "FAIL": ", which is absurd: weights are wrong, or in wrong places"}
    notes.add(
        result,
        f"the loss on {name} is {best:.2f} of chance{words[result]}; perplexity: {of_each} "
        f"(chance {subject.info.vocab_size:,})",
    )
    return notes.row(shares_of_chance=shares, chance=chance)


def _texts() -> dict[str, str]:
    """A model of one field knows at least one of them."""
    prose, _, code = files(__package__).joinpath(_TEXT).read_text(encoding="utf-8").partition("\n\n\n")
    return {
        "prose": prose,
        "Python": code,
        "docstrings of Python's library": library_text("docstrings", _LIBRARY_CHARACTERS)[:_LIBRARY_CHARACTERS],
    }


Score = Callable[[Sequence[int], Sequence[int]], list[tuple[float, bool]]]
"""Of a prompt and a continuation: each token's logprob, and whether it is the likeliest one."""


def check_tokens(config: Config) -> Row:
    """The engine in f32 beside transformers in f32; without transformers, the engine as it is set beside itself."""
    notes, ours = Notes("greedy tokens"), exact(config)
    reference: Reference | str = _lacks_memory(ours, ours) or _transformers(find(ours).source.folder)
    if not isinstance(reference, str):
        with Subject(ours) as subject:
            count, same, difference = compare(subject, reference.score)
        beside = f"in f32, beside {reference.name}"
        result: Result = "pass" if difference <= _SAME else "warn" if difference <= 10 * _SAME else "FAIL"
    elif not (lacking := _lacks_memory(ours, config)):
        with Subject(config) as subject, Subject(ours) as stored:
            count, same, difference = compare(subject, partial(_score, stored))
        beside = f"beside this engine in f32 ({reference})"
        share = same / count
        result = "pass" if share >= _MOSTLY else "warn" if share >= _HARDLY else "FAIL"
    else:
        notes.add("skipped", f"{reference}; beside this engine in f32, {lacking}")
        return notes.row()
    notes.add(result, f"{beside}: {same} of {count} are the same, logprobs differ by {difference:.5f} at most")
    return notes.row(beside=beside, tokens=count, same=same, difference=difference)


def _transformers(folder: Path) -> Reference | str:
    if find_spec("transformers") is None or find_spec("torch") is None:
        return "transformers is not installed"
    from penstock.gateway.commands.verify.reference import load_reference

    return load_reference(folder)


def compare(subject: Subject, score: Score) -> tuple[int, int, float]:
    """Greedy tokens, how many of them are the likeliest ones elsewhere, the largest difference of their logprobs."""
    scores: list[tuple[float, bool]] = []
    logprobs: list[float] = []
    for answer in subject.generate(TEXT_BEGINNINGS, max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True):
        scores += score(answer.prompt_token_ids, answer.outputs[0].token_ids)
        logprobs += [entry.logprob for entry in answer.outputs[0].logprobs or ()]
    differences = np.abs(np.array(logprobs) - [logprob for logprob, _ in scores])
    return len(scores), sum(best for _, best in scores), float(differences.max())


def _score(subject: Subject, prompt: Sequence[int], continuation: Sequence[int]) -> list[tuple[float, bool]]:
    [answer] = subject.generate([*prompt, *continuation], max_tokens=1, temperature=0.0, prompt_logprobs=0)
    entries = [entry for entry in answer.prompt_logprobs or () if entry is not None]
    return [(entry.logprob, entry.rank == 1) for entry in entries[-len(continuation) :]]


def exact(config: Config, weights: str = "f32") -> Config:
    """Everything in f32, as far as the engine can, so that only rounding is left of the differences. `weights`: f32, or
    auto, which takes less memory and means those of the checkpoint, which may be rounded again. Raises as `find`."""
    floats = {"dtype": "f32", "kv_cache_dtype": "auto"}
    if exported_graph(find(config).source.folder) is not None:
        weights = "auto"  # they stay as they are
    for settings in ({"weights": weights, "activations": "f32"}, {"weights": weights, "activations": "auto"}):
        with suppress(ConfigError, PenstockError):
            exact_config = overlay(config, floats | settings)
            find(exact_config)
            return exact_config
    return overlay(config, floats | {"weights": "auto", "activations": "auto"})


def _lacks_memory(*models: Config) -> str:
    """Why models with these settings do not fit beside one another; empty: they do."""
    needs = [estimate(find(config).spec).host for config in models]
    needed, there = sum(need.weights + need.rest for need in needs), available_memory()
    if needed <= there:
        return ""
    return f"it takes {size_text(needed)} of memory, and {size_text(there)} are free"


def check_divergence(config: Config, *, quick: bool) -> Row:
    """What the types of weights, activations and KV cache cost, beside f32 with the weights as they are stored."""
    notes = Notes("numeric types")
    fitting = [stored for weights in ("f32", "auto") if not _lacks_memory(stored := exact(config, weights), config)]
    if not fitting:
        notes.add("skipped", _lacks_memory(exact(config, "auto"), config))
        return notes.row()
    chosen = ",".join(f"{name}={getattr(config.models.model, name)}" for name in _NUMBERS)
    with as_file(files(__package__).joinpath(_TEXT)) as file:
        options = PerplexityBench(compare=(chosen,), text_tokens=256 if quick else 2048)
        report = perplexity_bench.run(fitting[0], options, file if quick else None)
    reference, row = report.rows
    away = row.divergence
    if away is None:
        notes.add("skipped", report.without_divergence)
        return notes.row(**_perplexities(reference, row))
    result: Result = "pass" if away.mean < _MOVED else "warn" if away.mean < _BROKEN else "FAIL"
    notes.add(
        result,
        f"{row.runner}: KL divergence {away.mean:.4f} from {reference.runner}, the same likeliest token at "
        f"{away.same_best:.1%}, perplexity {row.perplexity:,.1f} and {reference.perplexity:,.1f}",
    )
    return notes.row(kl_mean=away.mean, kl_most=away.most, same_best=away.same_best, **_perplexities(reference, row))


def _perplexities(reference: PerplexityRow, row: PerplexityRow) -> dict[str, float]:
    return {"perplexity": row.perplexity, "perplexity_stored": reference.perplexity}


def check_speed(config: Config, context_length: int) -> Row:
    """A short `bench engine`."""
    notes, length = Notes("speed"), min(512, context_length // 2)
    if length < _SHORTEST:
        notes.add("skipped", f"a context of {context_length} tokens is too short")
        return notes.row()
    options = EngineBench(prompt_lengths=(length,), batch_sizes=(1, 8), context_lengths=(length // 2,), repeats=1)
    report = engine_bench.run(config, options)
    parts = [f"prompts {row.tokens_per_second.median:,.0f} tokens/s" for row in report.prompts]
    parts += [_decode_words(row.batch_size, row.tokens_per_second.median) for row in report.decode]
    parts += [f"left out: {reason}" for reason in report.left_out]
    notes.add("pass", f"{', '.join(parts)}; loaded in {report.load.seconds:.1f} s")
    return notes.row(
        load_seconds=report.load.seconds,
        prompt_tokens_per_second=[row.tokens_per_second.median for row in report.prompts],
        decode_tokens_per_second={str(row.batch_size): row.tokens_per_second.median for row in report.decode},
    )


def _decode_words(batch_size: int, speed: float) -> str:
    return f"{batch_size} {'request' if batch_size == 1 else 'requests'} {speed:,.0f}"
