"""vLLM's own scheduler at the seam of batchers: how requests begin and end, and what is told of them."""

from __future__ import annotations

import pytest

from penstock.engines.contract.continuous_batcher import StartRequest
from penstock.engines.contract.messages import FinishReason, Grammar, SamplingParams, Thought, ThoughtBudget
from penstock.engines.errors import ContextLengthError, InvalidRequestError, OverloadedError, UnsupportedError
from penstock.engines.vllm.config import VLLMConfig
from support.engine import Driver
from support.models import load_reference, reference_logprobs, reference_tokens

EOS = 2


def prompt(n, length=50):
    return [3 + (7 * n + 11 * i + i * i) % 250 for i in range(length)]


def request(request_id, tokens, count, *, seed=None, salt="", priority=0, **params):
    sampling = SamplingParams(**{"max_tokens": count, "temperature": 0, "ignore_eos": True} | params)
    return StartRequest(request_id, tokens, sampling, seed, priority, salt)


class Collected:
    """All that a batcher said of each request until they had ended."""

    def __init__(self, batcher, *requests):
        self.parts = {r.id: [] for r in requests}
        for r in requests:
            batcher.start(r)
        running = set(self.parts)
        while running:
            for new in batcher.step().tokens:
                assert new.id in running
                self.parts[new.id].append(new)
                if new.finish_reason is not None:
                    running.remove(new.id)

    def tokens(self, request_id):
        return [token for new in self.parts[request_id] for token in new.token_ids]

    def end(self, request_id):
        return self.parts[request_id][-1]


@pytest.fixture(autouse=True)
def idle_afterwards(request):
    """Whatever a test did, all blocks are free at its end."""
    yield
    if "batcher" in request.fixturenames:
        batcher = request.getfixturevalue("batcher")
        assert batcher.num_free_blocks == batcher.info.num_blocks
        batcher.reset_prefix_cache()


@pytest.fixture(scope="module")
def reference(model_dir):
    return load_reference(model_dir)


def test_tokens_and_lengths(batcher, reference):
    found = Collected(batcher, request(1, prompt(1), 12), request(2, prompt(2), 1))
    assert found.tokens(1) == reference_tokens(reference, prompt(1), 12)
    assert found.tokens(2) == reference_tokens(reference, prompt(2), 1)
    assert [found.end(i).finish_reason for i in (1, 2)] == [FinishReason.LENGTH] * 2


def test_stop_tokens_and_the_end_of_sequence_are_told_apart(batcher, reference):
    expected = reference_tokens(reference, prompt(3), 40)
    stop = expected[7]
    bias = {EOS: 100.0}
    found = Collected(
        batcher,
        request(1, prompt(3), 40, stop_token_ids=(stop,)),
        request(2, prompt(3), 40, ignore_eos=False, logit_bias=bias),
        request(3, prompt(3), 40, logit_bias=bias),
        request(4, prompt(3), 40, stop_token_ids=(EOS,), logit_bias=bias, min_tokens=5),
    )
    assert found.tokens(1) == expected[: expected.index(stop) + 1]
    assert (found.end(1).finish_reason, found.end(1).stop_token_id) == (FinishReason.STOP, stop)
    assert found.tokens(2) == [EOS]
    assert (found.end(2).finish_reason, found.end(2).stop_token_id) == (FinishReason.STOP, None)
    assert found.tokens(3) == [EOS] * 40
    assert found.end(3).finish_reason is FinishReason.LENGTH
    assert len(found.tokens(4)) == 6
    assert EOS not in found.tokens(4)[:5]
    assert found.end(4).stop_token_id is None


def test_logprobs_of_outputs_and_prompts(batcher, reference):
    tokens = prompt(4, 40)
    widths = {1: None, 2: 0, 3: 4}
    found = Collected(
        batcher,
        *(request(i, prompt(i), 6, logprobs=k) for i, k in widths.items()),
        request(4, tokens, 6, prompt_logprobs=2, logprobs=1),
    )
    for i, width in widths.items():
        entries = [entry for new in found.parts[i] for entry in new.logprobs or ()]
        assert [len(entry.top) for entry in entries] == ([] if width is None else [width] * 6)
    table = reference_logprobs(reference, tokens + found.tokens(4))
    scored = found.parts[4][0].prompt_logprobs
    assert [entry.token_id for entry in scored] == tokens[1:]
    for position, entry in enumerate(scored):
        assert entry.logprob == pytest.approx(table[position, entry.token_id].item(), abs=1e-3)
        assert [token for token, _ in entry.top] == table[position].topk(2).indices.tolist()
    entries = [entry for new in found.parts[4] for entry in new.logprobs]
    for offset, entry in enumerate(entries, len(tokens) - 1):
        assert entry.logprob == pytest.approx(table[offset, entry.token_id].item(), abs=1e-3)
    assert all(new.prompt_logprobs is None for new in found.parts[4][1:])


def test_a_seed_says_the_same_alone_and_in_a_crowd(batcher):
    def run(seed):
        return Collected(batcher, request(1, prompt(1), 20, temperature=1.0, seed=seed)).tokens(1)

    crowd = Collected(batcher, *(request(i, prompt(i % 2), 20, temperature=1.0, seed=i // 2) for i in range(6)))
    assert run(0) == run(0) == crowd.tokens(1)
    assert run(1) == crowd.tokens(3) != run(0)
    assert run(None) != run(None)


def test_a_seed_gives_the_same_whatever_the_chunks_and_preemptions(batcher):
    """vLLM's own generators for CPUs cannot be set back behind a chunk of a prompt."""
    asked = [request(i, prompt(i, 120), 60, temperature=1.0, seed=i) for i in range(4)]
    expected = [Collected(batcher, r).tokens(r.id) for r in asked]
    strangers = [request(9 + i, prompt(9 + i, 150), 100) for i in range(2)]
    crowd = Collected(batcher, *strangers, *asked)  # 256 tokens a step
    assert [crowd.tokens(r.id) for r in asked] == expected


def test_cached_prompts_are_shared_within_a_salt(batcher):
    tokens = prompt(5, 70)
    cached = [
        Collected(batcher, request(1, tokens, 3, salt=salt)).parts[1][0].num_cached_tokens
        for salt in ("", "a", "a", "b", "")
    ]
    assert cached == [0, 0, 64, 0, 64]


def test_aborted_requests_are_gone_with_the_next_step(batcher, reference):
    for i in range(4):
        batcher.start(request(i, prompt(i), 100))
    batcher.step()
    assert batcher.num_free_blocks == 24 - 8
    batcher.abort([1, 2, 77])
    output = batcher.step()
    assert output.released == [1, 2]
    assert {new.id for new in output.tokens} == {0, 3}
    assert batcher.num_free_blocks == 24 - 4
    batcher.abort([0, 3])
    assert batcher.step().released == [0, 3]
    assert batcher.step().released == []
    # the same ids again, and nothing of the old ones
    assert Collected(batcher, request(1, prompt(9), 9)).tokens(1) == reference_tokens(reference, prompt(9), 9)


def test_steps_count_their_tokens_and_preemptions(batcher):
    for i in range(4):
        batcher.start(request(i, prompt(i), 140))
    first = batcher.step()
    assert (first.num_scheduled_tokens, first.num_preemptions) == (200, 0)
    assert batcher.step().num_scheduled_tokens == 4
    preempted, running = 0, 4
    while running:
        output = batcher.step()
        preempted += output.num_preemptions
        running -= sum(new.finish_reason is not None for new in output.tokens)
    assert preempted == 0  # 4 * 190 tokens fit into 24 blocks
    for i in range(6):
        batcher.start(request(i, prompt(i), 140))
    running = 6
    while running:
        output = batcher.step()
        preempted += output.num_preemptions
        running -= sum(new.finish_reason is not None for new in output.tokens)
    assert preempted > 0


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"temperature": 3.0}, InvalidRequestError, "temperature must be in"),
        ({"logit_bias": {999: 1.0}}, InvalidRequestError, "999"),
        ({"max_tokens": 463}, ContextLengthError, "could grow to 513 tokens, more than 512"),
    ],
)
def test_what_vllm_does_not_take_ends_its_request_alone(batcher, params, error, message):
    batcher.start(request(1, prompt(1), 5))
    with pytest.raises(error, match=message):
        batcher.start(request(2, prompt(2), 5, **params))
    with pytest.raises(InvalidRequestError, match="request 1 runs already"):
        batcher.start(request(1, prompt(1), 5))
    assert [new.id for _ in range(5) for new in batcher.step().tokens] == [1] * 5


def test_broken_logits_end_their_request_alone(batcher, reference):
    embedding = batcher._core.model_executor.driver_worker.worker.model_runner.model.model.embed_tokens.weight.data
    kept = embedding[260].clone()
    embedding[260] = float("nan")
    bad = [*prompt(8, 40), 260, *prompt(8, 40)]
    try:
        driver = Driver(batcher, max_num_seqs=8, max_num_batched_tokens=256)
        [broken], [good] = driver.add(bad, 40), driver.add(prompt(7), 40)
        driver.run()
    finally:
        embedding[260] = kept
    assert driver.ends[broken].error.code == "numerical_error"
    expected = reference_tokens(reference, prompt(7), 40)
    assert driver.tokens[good] == expected
    # whatever blocks they get: nothing is left in them that could spread, and nothing of it is found in the cache
    healed = Collected(batcher, request(1, bad, 10))
    assert healed.parts[1][0].num_cached_tokens == 0
    assert healed.tokens(1) == reference_tokens(reference, bad, 10)
    for _ in range(6):
        crowd = Collected(batcher, *(request(i, prompt(7, 50), 40, salt=str(i)) for i in range(4)))
        assert all(crowd.tokens(i) == expected for i in range(4))


def test_what_it_says_of_itself(batcher):
    info = batcher.info
    assert (info.vocab_size, info.context_length, info.block_size, info.num_blocks) == (384, 512, 32, 24)
    assert info.eos_token_ids == (EOS,)
    assert info.runner.startswith("vllm 0.3")
    assert info.runner.endswith("vLLM's scheduler")


BUDGET = ThoughtBudget(12, ("<think>",), ("</think>",), "</think>", inside=True, again=False)


@pytest.mark.parametrize(
    "given", [{"thought": Thought("<think>", "</think>")}, {"preface": "Answer: "}, {"budget": BUDGET}]
)
def test_answers_behind_thoughts_are_refused(batcher, given):
    with pytest.raises(UnsupportedError, match="behind a thought"):
        batcher.start(request(1, prompt(1), 4, grammar=Grammar("regex", "a", **given)))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        *(("json_schema", schema) for schema in ('{"not": {}}', '{"oneOf": [{}, {}]}', '{"minItems": 1000000000}')),
        ("json_schema", '{"type": "integer", "multipleOf": 1000003}'),
        *(("regex", "("), ("grammar", "x")),
    ],
)
def test_what_makes_no_grammar_is_refused(batcher, kind, text):
    with pytest.raises(InvalidRequestError):
        batcher.start(request(1, prompt(1), 4, grammar=Grammar(kind, text)))


def test_without_a_tokenizer_there_are_no_grammars(needs_vllm, tmp_path):
    from penstock.engines.vllm.start import own_scheduler

    config = VLLMConfig(model_dir=tmp_path)
    assert own_scheduler(config)["skip_tokenizer_init"] is True
    (tmp_path / "tokenizer.json").touch()
    assert own_scheduler(config)["skip_tokenizer_init"] is False


def test_the_prefix_cache_is_emptied_while_nothing_runs(batcher):
    Collected(batcher, request(1, prompt(9), 2))
    assert Collected(batcher, request(2, prompt(9), 2)).parts[2][0].num_cached_tokens > 0
    batcher.start(request(3, prompt(9), 4))
    batcher.step()
    with pytest.raises(OverloadedError, match="prefix cache"):
        batcher.reset_prefix_cache()
    batcher.abort([3])
    batcher.step()
    batcher.reset_prefix_cache()
    assert Collected(batcher, request(4, prompt(9), 2)).parts[4][0].num_cached_tokens == 0
