"""A key's limits: what is let in, what is taken off and given back, and what clients are told."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.engines.errors import RateLimitedError
from penstock.gateway.models.language.generation import Usage
from penstock.gateway.requests.call import RequestJournal
from penstock.gateway.requests.context import Principal, RequestContext
from penstock.gateway.requests.quota import Limits, Quota
from penstock.gateway.requests.record import Outcome


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def headers(quota: Quota) -> dict[str, str]:
    return {name.decode().removeprefix("x-ratelimit-"): value.decode() for name, value in quota.headers()}


def test_requests_of_a_minute() -> None:
    clock = Clock()
    quota = Quota(Limits(requests_per_minute=3), clock)
    for _ in range(3):
        quota.begin()
    with pytest.raises(RateLimitedError, match="3 requests per minute") as refused:
        quota.begin()
    assert refused.value.retry_after == pytest.approx(20)
    assert headers(quota) == {"limit-requests": "3", "remaining-requests": "0", "reset-requests": "1m0s"}
    clock.now += 20
    quota.begin()


def test_a_large_request_is_let_in_and_pays_afterwards() -> None:
    clock = Clock()
    quota = Quota(Limits(tokens_per_minute=60), clock)
    quota.begin()
    quota.spend_tokens(90)
    with pytest.raises(RateLimitedError, match="60 tokens per minute") as refused:
        quota.begin()
    assert refused.value.retry_after == pytest.approx(31)
    assert headers(quota) == {"limit-tokens": "60", "remaining-tokens": "0", "reset-tokens": "1m30s"}
    clock.now += 31.5
    quota.begin()
    assert headers(quota) == {"limit-tokens": "60", "remaining-tokens": "1", "reset-tokens": "58.5s"}


def test_requests_at_one_time() -> None:
    quota = Quota(Limits(concurrent_requests=2))
    quota.begin()
    quota.begin()
    with pytest.raises(RateLimitedError, match="2 requests at one time"):
        quota.begin()
    quota.end()
    quota.begin()
    assert headers(quota) == {}


def counted(quota: Quota) -> tuple[RequestJournal, RequestContext]:
    context = RequestContext(principal=Principal(tenant="t", quota=quota))
    journal = RequestJournal()
    journal.begin(context)
    context.count()
    return journal, context


@pytest.mark.parametrize(
    ("usage", "outcome", "left"),
    [
        (Usage(prompt_tokens=10, completion_tokens=5), Outcome.OK, 85),
        (Usage(prompt_tokens=10), Outcome.REFUSED, 100),
        (None, Outcome.CLIENT_ERROR, 100),
    ],
)
def test_what_was_not_used_is_given_back_at_the_end(usage: Usage | None, outcome: Outcome, left: int) -> None:
    quota = Quota(Limits(tokens_per_minute=100, concurrent_requests=1), Clock())
    journal, context = counted(quota)
    context.pay_tokens(60)
    assert headers(quota)["remaining-tokens"] == "40"
    context.record.usage, context.record.outcome = usage, outcome
    for _ in range(2):  # a request ends once
        journal.end(context)
        assert (headers(quota)["remaining-tokens"], quota.in_flight) == (str(left), 0)


def test_each_request_of_a_stream_counts_for_itself() -> None:
    quota = Quota(Limits(requests_per_minute=10))
    _, context = counted(quota)
    following = context.next_request()
    following.end()
    assert quota.in_flight == 1
    following.count()
    assert quota.in_flight == 2


class QuotaMachine(RuleBasedStateMachine):
    """Beside the sums of everything that was let in and spent."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.quota = Quota(Limits(requests_per_minute=6, tokens_per_minute=100, concurrent_requests=3), self.clock)
        self.start = self.clock.now
        self.begun = self.spent = self.in_flight = 0

    @rule(seconds=st.floats(0, 90))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule()
    def begin(self) -> None:
        if self.in_flight < 3 and all(account.left >= 1 for account in self.quota._accounts.values()):
            self.quota.begin()
            self.begun += 1
            self.in_flight += 1
            return
        with pytest.raises(RateLimitedError) as refused:
            self.quota.begin()
        assert refused.value.retry_after is not None
        assert refused.value.retry_after > 0

    @rule(tokens=st.integers(0, 300))
    def spend(self, tokens: int) -> None:
        self.quota.spend_tokens(tokens)
        self.spent += tokens

    @rule()
    def end(self) -> None:
        if self.in_flight:
            self.quota.end()
            self.in_flight -= 1

    @invariant()
    def no_more_than_the_minutes_allow(self) -> None:
        minutes = (self.clock.now - self.start) / 60
        assert self.begun <= 6 + 6 * minutes + 1e-6
        assert self.quota.in_flight == self.in_flight <= 3
        left = self.quota._accounts["tokens"].left
        assert 100 - self.spent <= left <= 100


TestQuotaMachine = QuotaMachine.TestCase
