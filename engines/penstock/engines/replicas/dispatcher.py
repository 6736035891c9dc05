"""Requests on their way to replicas and back: sent, refused, lost with a replica, gone on with at another one."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import msgspec

from penstock.engines.contract.messages import (
    AddRequest,
    FinishReason,
    RequestError,
    RequestOutput,
    SamplingParams,
)
from penstock.engines.errors import (
    DeadlineExceededError,
    EngineDeadError,
    NotReadyError,
    OverloadedError,
    PenstockError,
    QueueFullError,
)
from penstock.engines.replicas.membership import Membership
from penstock.engines.replicas.replica import Replica
from penstock.engines.replicas.routing import RoutedRequest, Router
from penstock.engines.replicas.sample import Sample, is_untouched
from penstock.engines.replicas.state import MoveCounts, ReplicaSettings
from penstock.engines.replicas.streams import Part, ReplicatedStream, WaitingPart
from penstock.kvcache import BlockHasher

logger = logging.getLogger(__name__)

_MOST_DEATHS = 3
"""Replicas in a row that may die with a request which gets no token meanwhile: it may be the one that kills them."""
_BETWEEN_TRIES = 0.25
"""Seconds until replicas that have all refused a request are asked again."""
_RETRY_AFTER = 2.0
_ANOTHER_MAY = (EngineDeadError.code, QueueFullError.code, NotReadyError.code)
"""Errors that say something of the replica, and not of the request."""


class Dispatcher:
    """Lives on the event loop; starts nothing that waits. `is_member` is asked for a replica before it gets anything.
    `waits` is called when a request has to wait for a replica: `retry` has to be called from time to time until nothing
    is `waiting`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        members: Membership,
        settings: ReplicaSettings,
        clock: Callable[[], float],
        is_member: Callable[[Replica], bool],
        waits: Callable[[], None],
        hasher: BlockHasher | None = None,
    ) -> None:
        """`hasher`: as `Router`."""
        self._replicas = replicas
        self._members = members
        self._is_member = is_member
        self._settings = settings
        self.roles = Roles(settings.num_prefill, settings.handover_min_tokens)
        self._clock = clock
        self._waits = waits
        self._hasher = hasher
        self._ids = count(1)
        self._parts: dict[int, tuple[Part, Sample]] = {}
        """By the ids that clients know."""
        self._router: Router | None = None
        """None: closed."""
        self.waiting: list[WaitingPart] = []
        self.moves = MoveCounts()

    def open(self) -> None:
        """Requests may come: there is a replica."""
        members = self._members
        blocks = [members.num_blocks(replica.number) for replica in self._replicas]
        self._router = Router(self._settings.policy, blocks, members.info.block_size, self._hasher)

    @property
    def _resumes(self) -> bool:
        """Requests go on elsewhere behind their tokens."""
        return self._settings.resume and self._members.can_resume

    @property
    def words(self) -> str:
        """For the log."""
        words = f"(routing: {self._settings.policy}; resume: {'on' if self._resumes else 'off'})"
        num_prefill = self.roles.num_prefill
        return f"{words}, {num_prefill} of them for prompts" if num_prefill else words

    def close(self, error: PenstockError) -> None:
        """Nothing goes anywhere any more: what waits ends with this error, and what replicas lose with theirs."""
        self._router = None
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            self._fail(entry.part, entry.part.samples, RequestError.of(error))

    def new_ids(self, number: int) -> tuple[int, ...]:
        return tuple(next(self._ids) for _ in range(number))

    # -- requests in -----------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[AddRequest]) -> ReplicatedStream:
        """As `Engine.submit`. Raises NotReadyError, QueueFullError when no replica takes one of them."""
        stream = ReplicatedStream((i for request in requests for i in request.ids), self.abort)
        try:
            for request in requests:
                message = self._seeded(request)
                samples = [Sample(request_id, message, index) for index, request_id in enumerate(message.ids)]
                self._send(self._part(stream, samples))
        except PenstockError:
            stream.close()
            raise
        return stream

    def _seeded(self, message: AddRequest) -> AddRequest:
        """With the seed that an engine would draw, where another replica may have to draw the same numbers."""
        params = message.params
        if not self._resumes or not isinstance(params, SamplingParams) or params.seed is not None:
            return message
        if not params.is_random:
            return message
        return msgspec.structs.replace(message, params=msgspec.structs.replace(params, seed=random.getrandbits(62)))

    def _part(self, stream: ReplicatedStream, samples: Sequence[Sample], tried: set[int] | None = None) -> Part:
        message = samples[0].message
        routed = RoutedRequest(0)
        if self._router is not None:
            known = [*message.prompt_token_ids, *samples[0].tokens]
            session = f"{message.tenant}\0{message.session}" if message.session else ""
            routed = self._router.request(known, adapter=message.adapter, salt=message.cache_salt, session=session)
        part = Part(stream, samples, routed, tried or ())
        stream.parts.append(part)
        self._parts.update((sample.id, (part, sample)) for sample in samples)
        return part

    def _send(self, part: Part) -> None:
        """To the best replica that takes it. Raises OverloadedError when none does."""
        refusal: OverloadedError | None = None
        router = self._router
        if router is None:
            raise _nobody()
        choices = self._choices(part, router)
        able = [replica.number for replica in choices]
        for replica in choices:
            ids = replica.engine.new_ids(len(part.samples))
            part.hands_over = self._resumes and self.roles.hands_over(replica.number, able, part.samples)
            try:
                stream = replica.engine.submit(_messages(part, ids))
            except OverloadedError as error:
                refusal = refusal or error
                part.tried.add(replica.number)
                continue
            for sample in part.samples:
                sample.fingerprint = self._members.fingerprint(replica.number)
            part.at(replica, stream, ids, router.to_compute(part.routed, replica.number))
            router.sent(part.routed, replica.number)
            stream.listen(partial(self._receive, part))
            return
        raise refusal or _nobody()

    def _choices(self, part: Part, router: Router) -> list[Replica]:
        """Replicas that have not refused it yet, the best one first. One that is slow only where all are."""
        able = [replica for replica in self._replicas if replica.number not in part.tried and self._is_member(replica)]
        able = [
            replica for replica in able if part.adapter not in replica.missing and self._may_go_on_at(replica, part)
        ]
        able = [replica for replica in able if replica.engine.ready] or able
        ranked = router.rank(part.routed, [replica.load() for replica in able])
        return [self._replicas[number] for number in self.roles.sorted(ranked, part.samples, part.routed, router)]

    def _may_go_on_at(self, replica: Replica, part: Part) -> bool:
        """Its engine would have given the same tokens so far."""
        fingerprint = self._members.fingerprint(replica.number)
        return all(sample.fingerprint == fingerprint for sample in part.samples if sample.tokens)

    def abort(self, ids: Sequence[int]) -> None:
        """As `Engine.abort`."""
        for request_id in ids:
            part, sample = self._parts.pop(request_id, (None, None))
            if part is None or sample is None:
                continue
            known = part.forget(sample)
            if known and part.replica is not None:
                part.replica.engine.abort(known)
            part.client.end(request_id, FinishReason.ABORT)

    # -- outputs ---------------------------------------------------------------------------------------------

    def _receive(self, part: Part) -> None:
        """A replica has something for its part."""
        client, lost, cause = part.client, [], None
        handed: list[Sample] = []
        is_heard = False
        for output in part.stream.take() if part.stream is not None else ():
            sample = part.by_id.get(output.id)
            if sample is None:
                continue
            error = output.error
            if error is not None and error.code in _ANOTHER_MAY:
                lost.append(sample)
                cause = error
                if not output.token_ids and output.prompt is None:
                    continue
                output.error = output.finish_reason = None  # what came before it is the client's
            elif part.hands_over and output.finish_reason is FinishReason.LENGTH:
                handed.append(sample)
                output.finish_reason = None  # it was sent for its first token only
            elif output.finish_reason is not None:
                del self._parts[sample.id]
                part.forget(sample)
            part.begun()
            is_heard = client.add(sample.take(output)) or is_heard
        if handed:
            self._hand_over(part, handed)
        if cause is not None:
            self._move(part, lost, cause)
        if is_heard:
            client.call_listener()

    # -- prompts that one replica computes for another -------------------------------------------------------

    def _hand_over(self, part: Part, samples: Sequence[Sample]) -> None:
        """Sends samples on that have their first token: the full blocks of their prompt are in the shared memory. What
        is not, the other replica computes."""
        for sample in samples:
            part.forget(sample)
            sample.moves()
        size = self._members.info.block_size
        known = part.routed.num_tokens // size * size
        going = self._part(part.client, _in_order(samples))
        going.routed = replace(going.routed, num_handed=known)
        going.is_handed_over = True
        self._go_on(going, RequestError.of(_nobody()), may_wait=True)

    # -- replicas that are lost ------------------------------------------------------------------------------

    def _move(self, part: Part, lost: Sequence[Sample], error: RequestError) -> None:
        """Sends samples elsewhere that their replica has refused, or that died with it."""
        died = error.code == EngineDeadError.code
        if died and part.replica is not None and part.life == part.replica.life:
            self.replica_lost(part.replica)
        for sample in lost:
            part.forget(sample)
            sample.num_deaths += died
            sample.moves()
        # who has refused it, or died with it, before it got its newest token may try again
        tried = set() if died and all(sample.num_deaths == 1 for sample in lost) else part.tried
        if part.replica is not None:
            tried = tried | {part.replica.number}
        going = _in_order(sample for sample in lost if self._may_go_on(sample))
        self._fail(part, [sample for sample in lost if sample not in going], error)
        if going:
            self._go_on(self._part(part.client, going, tried), error, may_wait=died)

    def _may_go_on(self, sample: Sample) -> bool:
        if self._router is None or sample.num_deaths >= _MOST_DEATHS:
            return False
        return self._resumes or not sample.tokens

    def _go_on(self, part: Part, error: RequestError, *, may_wait: bool) -> None:
        """Sends a part to a replica that it has not been at, or lets it wait for one. Only what is under way waits:
        who has got nothing but a refusal may try again by himself."""
        is_resumed = any(sample.tokens for sample in part.samples)
        try:
            self._send(part)
        except OverloadedError:
            if self._router is None or not self._resumes or not (may_wait or is_resumed):
                self._fail(part, part.samples, error)
                return
            now = self._clock()
            self.waiting.append(WaitingPart(part, error, now + self._settings.resume_wait, now + _BETWEEN_TRIES))
            self._waits()
        except PenstockError as refusal:
            self._fail(part, part.samples, RequestError.of(refusal))
        else:
            self._count_moved(part)

    def _count_moved(self, part: Part) -> None:
        if part.is_handed_over:
            self.moves.handed_over += len(part.samples)
            return
        resumed = sum(1 for sample in part.samples if sample.tokens)
        self.moves.resumed += resumed
        self.moves.failed_over += len(part.samples) - resumed

    def retry(self) -> None:
        """Looks for replicas for what waits."""
        now = self._clock()
        waiting, self.waiting = self.waiting, []
        for entry in waiting:
            part = entry.part
            if not part.samples:
                continue
            deadline = part.samples[0].message.deadline
            if deadline is not None and now >= deadline:
                error = DeadlineExceededError("The request's time was over before it was complete.")
                self._fail(part, part.samples, RequestError.of(error))
            elif now >= entry.until or all(replica.engine.failed for replica in self._replicas):
                self._fail(part, part.samples, entry.error)
            elif now < entry.next_try:
                self.waiting.append(entry)
            elif not self._try_again(part):
                entry.next_try = now + _BETWEEN_TRIES
                self.waiting.append(entry)

    def _try_again(self, part: Part) -> bool:
        """False: it has to wait on."""
        part.tried.clear()
        try:
            self._send(part)
        except OverloadedError:
            return False
        except PenstockError as refusal:
            self._fail(part, part.samples, RequestError.of(refusal))
        else:
            self._count_moved(part)
        return True

    def replica_lost(self, replica: Replica) -> None:
        """All that it held is gone, its prefix cache included."""
        replica.lost()
        self.forget_prefixes(replica)

    def forget_prefixes(self, replica: Replica) -> None:
        if self._router is not None:
            self._router.emptied(replica.number)

    def num_known_blocks(self, replica: Replica) -> int:
        """Blocks of prompts that it has been sent and probably holds."""
        return 0 if self._router is None else self._router.num_known_blocks(replica.number)

    def _fail(self, part: Part, samples: Sequence[Sample], error: RequestError) -> None:
        for sample in list(samples):
            if sample in part.samples:
                part.forget(sample)
            if self._parts.pop(sample.id, None) is not None:
                self.moves.given_up += error.code == EngineDeadError.code
                part.client.put(RequestOutput(sample.id, [], FinishReason.ERROR, error=error))


def _nobody() -> NotReadyError:
    return NotReadyError("No replica of the model is ready.", retry_after=_RETRY_AFTER)


def _in_order(samples: Iterable[Sample]) -> list[Sample]:
    """By which an engine gives them their seeds."""
    return sorted(samples, key=lambda sample: sample.index)


def _messages(part: Part, ids: Sequence[int]) -> list[AddRequest]:
    """What a replica is sent. Samples stay together: as one request, or where they have put out tokens as several that
    share what is cached."""
    samples, message = part.samples, part.samples[0].message
    if is_untouched(samples):
        params = message.params
        if part.hands_over and isinstance(params, SamplingParams):
            params = msgspec.structs.replace(params, max_tokens=1)
        return [msgspec.structs.replace(message, ids=tuple(ids), params=params, session="")]
    return [sample.rest(request_id) for sample, request_id in zip(samples, ids, strict=True)]


class Roles:
    """The first `num_prefill` replicas compute prompts, the others go on with them. That is a preference: where none of
    its kind can take a request, one of the other kind does all of it."""

    def __init__(self, num_prefill: int, min_tokens: int) -> None:
        """`min_tokens`: a prompt of which less has to be computed goes to a decode replica at once. Without prefill
        replicas nothing is handed over."""
        self.num_prefill = num_prefill
        self._min_tokens = min_tokens

    def is_prefill(self, replica: int) -> bool:
        return replica < self.num_prefill

    def name(self, replica: int) -> str:
        if not self.num_prefill:
            return "any"
        return "prefill" if self.is_prefill(replica) else "decode"

    def sorted(
        self, ranked: Sequence[int], samples: Sequence[Sample], routed: RoutedRequest, router: Router
    ) -> list[int]:
        """These replicas, the best one first: those of the kind that it needs now in their order, then the others."""
        if not self.num_prefill:
            return list(ranked)
        begins = not any(sample.tokens for sample in samples) and self._is_long(ranked, routed, router)
        return sorted(ranked, key=lambda replica: self.is_prefill(replica) != begins)

    def _is_long(self, ranked: Sequence[int], routed: RoutedRequest, router: Router) -> bool:
        decode = [replica for replica in ranked if not self.is_prefill(replica)]
        to_compute = (router.to_compute(routed, replica) for replica in decode)
        return min(to_compute, default=routed.num_tokens) >= self._min_tokens

    def hands_over(self, replica: int, able: Sequence[int], samples: Sequence[Sample]) -> bool:
        """The replica gives these samples their first token, and another one of those that are able goes on. Not where
        nothing comes behind the first token."""
        params = samples[0].message.params
        return (
            self.is_prefill(replica)
            and not all(self.is_prefill(other) for other in able)
            and is_untouched(samples)
            and isinstance(params, SamplingParams)
            and params.max_tokens > 1
        )
