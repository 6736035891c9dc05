"""One sample of one prompt, as the scheduler sees it."""

from __future__ import annotations

from enum import IntEnum

from penstock.engines.contract.messages import AddRequest, TokenLogprobs
from penstock.kvcache import BlockTable


class RequestStatus(IntEnum):
    """Ordered so that "finished" is one comparison."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    """Waiting again, with its blocks given back: its tokens will be computed anew."""
    FINISHED = 3


class Request:
    """The state of one sample.

    The invariant that scheduling rests on: `num_computed_tokens` catches up with `num_tokens`. What a step computes is
    some of the difference, whether that is a prompt, a part of one, the newest token, or everything after a preemption.
    """

    __slots__ = (
        "adapter",
        "arrival_time",
        "block_hashes",
        "cache_salt",
        "charged_tokens",
        "deadline",
        "first_scheduled",
        "followers",
        "id",
        "key",
        "leader",
        "max_num_tokens",
        "min_num_tokens",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "priority",
        "prompt_logprobs",
        "seed",
        "status",
        "stop_token_ids",
        "table",
        "tenant",
        "token_ids",
    )

    def __init__(
        self, request_id: int, message: AddRequest, token_ids: list[int], seed: int, stop: frozenset[int]
    ) -> None:
        self.id = request_id
        self.token_ids = token_ids
        """Prompt, then output."""
        self.num_tokens = self.num_prompt_tokens = len(token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = 0
        """Of the prompt, found in the prefix cache when it was first scheduled."""
        self.params = message.params
        self.max_num_tokens = len(token_ids) + message.params.max_tokens
        self.min_num_tokens = len(token_ids) + message.params.min_tokens
        self.stop_token_ids = stop
        """EOS (unless ignored) and the caller's stop tokens."""
        self.seed = seed
        self.arrival_time = message.arrival_time
        self.deadline = message.deadline
        self.priority = message.priority
        self.tenant = message.tenant
        self.cache_salt = message.cache_salt
        self.adapter = message.adapter
        self.status = RequestStatus.WAITING
        self.key: tuple[float, int] = (0.0, request_id)
        """The policy's order, fixed at arrival: lower runs first, and the highest is preempted first. That it never
        changes is why preemption cannot livelock: the lowest key always advances."""
        self.table: BlockTable | None = None
        self.block_hashes: list[bytes] = []
        """Of its leading full blocks, as far as an admission has had to know them."""
        self.followers: list[Request] = []
        """Samples that will fork from this one once its prompt is computed."""
        self.leader: Request | None = None
        """The sample that this one follows, until it has forked."""
        self.first_scheduled: float | None = None
        self.num_preemptions = 0
        self.charged_tokens = 0
        """Leading tokens that a fair policy charges nobody for any more: paid, found in the cache, or forked with."""
        self.prompt_logprobs: list[TokenLogprobs] = []

    def lead(self, followers: list[Request]) -> None:
        """Computes the prompt for these as well."""
        self.followers = followers
        for request in followers:
            request.leader = self

    def dismiss_followers(self) -> list[Request]:
        """They go on by themselves."""
        followers, self.followers = self.followers, []
        for request in followers:
            request.leader = None
        return followers
