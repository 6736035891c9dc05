"""One sample of one prompt, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Container, Sequence
from enum import IntEnum

from penstock.engines.contract.messages import (
    AddRequest,
    FinishReason,
    PoolingParams,
    PromptChunk,
    PromptInfo,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)
from penstock.engines.scheduler.guessers import Guesser
from penstock.engines.scheduler.pending import Compilation, ImageEncoding, Pending, PlacedImages
from penstock.kvcache import BlockTables, HashChain, Retention

_MAX_TRACED_CHUNKS = 128

OrderKey = tuple[bool, float, int]
"""(in the background, since when it waits by the policy, id)"""


class RequestStatus(IntEnum):
    """Ordered so that "finished" is one comparison."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again, with its blocks given back: its tokens will be computed again."""
    FINISHED = 3


class Request:
    """One sample, from its arrival to its end, queued or running."""

    __slots__ = (
        "adapter",
        "arrival_time",
        "background",
        "cache_salt",
        "chains",
        "charged_tokens",
        "chunks",
        "deadline",
        "first_scheduled",
        "followers",
        "grammar",
        "guesser",
        "id",
        "images",
        "key",
        "label",
        "leader",
        "looks_ahead",
        "max_num_tokens",
        "min_num_tokens",
        "needs",
        "num_cached_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_shortages",
        "num_tokens",
        "params",
        "pooling",
        "priority",
        "prompt_logprobs",
        "retention",
        "run",
        "seed",
        "status",
        "stop_token_ids",
        "tenant",
        "token_ids",
        "whole_tiles",
    )

    def __init__(
        self,
        request_id: int,
        message: AddRequest,
        seed: int,
        stop: frozenset[int],
        needs: Sequence[Pending] = (),
    ) -> None:
        request_params, prompt, output = message.params, message.prompt_token_ids, message.output_token_ids
        params = SamplingParams(max_tokens=1) if isinstance(request_params, PoolingParams) else request_params
        self.id = request_id
        self.token_ids = [*prompt, *output] if output else prompt
        """Prompt, then output, as far as it is known. The message's own list until the first output: other samples
        and the gateway may have it, too."""
        self.num_prompt_tokens = len(prompt)
        self.num_tokens = len(self.token_ids)
        self.num_cached_tokens = 0
        """Of the prompt, found in the prefix cache when it was first scheduled."""
        self.params = params
        self.pooling = request_params if isinstance(request_params, PoolingParams) else None
        """Set for a request for a vector, which ends when its prompt is computed."""
        self.max_num_tokens = len(prompt) + params.max_tokens
        self.min_num_tokens = len(prompt) + params.min_tokens
        self.stop_token_ids = stop
        """EOS (unless ignored) and the caller's stop tokens."""
        self.seed = seed
        self.arrival_time = message.arrival_time
        self.deadline = message.deadline
        self.priority = message.priority
        self.background = message.background
        self.tenant = message.tenant
        self.label = message.label
        self.cache_salt = message.cache_salt
        self.retention = Retention(message.cache_retention, message.tenant) if message.cache_retention else None
        self.adapter = message.adapter
        self.needs = needs
        """What it waits for before it can run, as far as that is known from its arrival on."""
        self.grammar = next((need for need in needs if isinstance(need, Compilation)), None)
        """Of `params.grammar`."""
        self.images: PlacedImages | None = None
        if message.images:
            self.images = PlacedImages(message.images, [need for need in needs if isinstance(need, ImageEncoding)])
        self.whole_tiles: Sequence[tuple[int, int]] = ()
        """(first, end) of tokens between which no step may end (`ModelInfo.whole_tiles`)."""
        self.status = RequestStatus.WAITING
        self.key: OrderKey = (False, 0.0, request_id)
        """The policy's order, fixed at arrival: lower runs first, and the highest is preempted first. That it never
        changes is why preemption cannot livelock: the lowest key always advances."""
        self.run: Run | None = None
        """Set exactly while it has a seat."""
        self.chains: tuple[HashChain, ...] | None = None
        """Hashes of its tokens, once an admission needed them."""
        self.followers: list[Request] = []
        """Samples that will fork from this one once its prompt is computed."""
        self.leader: Request | None = None
        """The sample that this one follows, until it has forked."""
        self.looks_ahead = False
        """Its next tokens are guessed, or a grammar may force them (`Speculation`)."""
        self.guesser: Guesser | None = None
        self.first_scheduled: float | None = None
        self.num_preemptions = 0
        self.num_shortages = 0
        """Those of its preemptions that gave its blocks to requests that ran."""
        self.charged_tokens = 0
        """Leading tokens that policy `fair` does not charge again: charged, found in the cache, or forked with."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.chunks: list[PromptChunk] | None = [] if message.traced else None
        """What steps computed of its prompt, for traced requests."""

    @property
    def pending(self) -> Pending | None:
        """What it has to wait for first, of its `needs`."""
        for need in self.needs:
            if need.is_pending:
                return need
        return None

    @property
    def scores_prompt(self) -> bool:
        """Its prompt's logprobs are asked for, so all of it must be computed."""
        return self.params.prompt_logprobs is not None

    @property
    def prompt_info(self) -> PromptInfo:
        queued = (self.first_scheduled or self.arrival_time) - self.arrival_time
        return PromptInfo(self.num_cached_tokens, queued, self.prompt_logprobs or None, self.chunks or None)

    def cut(self, start: int, count: int, *, advances: bool) -> int:
        """How many tokens from `start` on a step computes that could compute `count`: fewer, if it would end inside of
        a tile. `advances`: more rather than none."""
        for first, end in self.whole_tiles:
            if count and first < start + count < end:
                return end - start if advances and first <= start else max(first - start, 0)
        return count

    def trace(self, scheduled: float, done: float, num_tokens: int) -> None:
        """A step has computed so many tokens of the prompt."""
        if self.chunks is not None and len(self.chunks) < _MAX_TRACED_CHUNKS:
            self.chunks.append(PromptChunk(scheduled, done, num_tokens))

    def append(self, tokens: list[int], eos: Container[int]) -> RequestOutput:
        """Takes in sampled tokens, up to the one that ends the request, and returns what its client gets."""
        output = RequestOutput(self.id, tokens)
        num_tokens = self.num_tokens
        if num_tokens == self.num_prompt_tokens:
            output.prompt = self.prompt_info
        stop = self.stop_token_ids
        for token in tokens:
            num_tokens += 1
            if token in stop and num_tokens > self.min_num_tokens:
                output.finish_reason = FinishReason.STOP
                output.stop_token_id = None if token in eos else token
            elif num_tokens >= self.max_num_tokens:
                output.finish_reason = FinishReason.LENGTH
            else:
                continue
            output.token_ids = tokens = tokens[: num_tokens - self.num_tokens]
            break
        if self.num_tokens == self.num_prompt_tokens:
            self.token_ids = self.token_ids + tokens
        else:
            self.token_ids += tokens
        self.num_tokens = num_tokens
        return output

    def lead(self, followers: list[Request]) -> None:
        """Computes the prompt for these as well."""
        self.followers = followers
        for request in followers:
            request.leader = self

    def dismiss_followers(self) -> list[Request]:
        """Makes the followers requests of their own, and returns them."""
        followers, self.followers = self.followers, []
        for request in followers:
            request.leader = None
        return followers


class Run:
    """A request's state while it runs: from its seat on, until no step writes for it.

    The invariant that scheduling rests on: `num_computed_tokens` catches up with the request's known and pending
    tokens. What a step computes is some of the difference, whether that is a prompt, a part of one, the newest token,
    or everything after a preemption.
    """

    __slots__ = ("forced", "has_seat", "id", "last_step", "num_computed_tokens", "request", "tables", "verifies")

    def __init__(self, request: Request, tables: BlockTables, num_computed_tokens: int) -> None:
        self.id = request.id
        self.request = request
        self.tables = tables
        self.has_seat = True
        """False once the request ended or was preempted."""
        self.num_computed_tokens = num_computed_tokens
        """Steps under way included."""
        self.last_step = 0
        """Number of the newest step that computes tokens of it."""
        self.verifies = False
        """A step under way verifies guesses for it: how many tokens that gives is not known yet."""
        self.forced: Sequence[int] = ()
        """The tokens behind `request.token_ids`, as far as its grammar leaves no choice."""

    @property
    def num_pending_tokens(self) -> int:
        """Tokens behind `request.token_ids` that steps under way will add: one if all known tokens are computed, and
        forced ones. Not for a run that `verifies`."""
        return max(0, self.num_computed_tokens + 1 - self.request.num_tokens)

    def cut(self, start: int, count: int, *, advances: bool) -> int:
        """How many tokens from `start` on a step computes that could compute `count`: as the request has it, and fewer
        where a step had better end (`BlockTables.step_end`)."""
        end = self.tables.step_end
        if start < end < start + count:
            count = end - start
        return self.request.cut(start, count, advances=advances)

    def verified(self, start: int, num_tokens: int) -> int:
        """A step that computed from `start` on has given so many tokens: those guesses that were right, and the token
        behind them. Returns up to where the request's known tokens are computed now."""
        self.verifies = False
        self.num_computed_tokens = start + num_tokens
        return min(self.num_computed_tokens, self.request.num_tokens)

    def rewind(self, num_computed_tokens: int) -> None:
        """Forgets steps under way: their tokens will be computed again."""
        self.num_computed_tokens = num_computed_tokens
        self.verifies = False
