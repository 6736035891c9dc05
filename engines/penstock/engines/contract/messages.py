"""The messages between the gateway and an engine.

Requests are sent to the engine as `AddRequest` and `AbortRequests`; at most once per step it answers with a
`StepOutputs`. The structs are the same whether the engine runs in this process or in another one; msgspec encodes them
for the wire.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, ClassVar, Literal

import msgspec

from penstock.engines.contract.engine_stats import EngineStats
from penstock.engines.contract.engine_view import EngineView
from penstock.engines.contract.loading import Loading
from penstock.engines.contract.model_info import ModelInfo
from penstock.engines.errors import PenstockError, from_code

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing by them leaves nothing but the largest logit."""


class FinishReason(StrEnum):
    """Why a request ended. Exactly one of these ends each accepted request."""

    STOP = "stop"
    """The model ended it: end-of-sequence token, a stop token id, or a stop string."""
    LENGTH = "length"
    """`max_tokens`, or the model's context is full."""
    ABORT = "abort"
    """The client left, or the gateway gave the request up."""
    ERROR = "error"
    """`RequestOutput.error` says which: a refusal, a deadline, a failure of the engine."""


GRAMMAR = "grammar"
"""The `param` of errors that are about `SamplingParams.grammar`, which callers have other names for."""


class Thought(msgspec.Struct, frozen=True, array_like=True):
    """The text between two markers that an output may have before its answer. Markers may be special tokens."""

    begin: str
    """Empty: the output begins inside the thought."""
    end: str


class ThoughtBudget(msgspec.Struct, frozen=True, array_like=True):
    """How many tokens the thoughts of an output may have together. Then `closing` is written for the model."""

    tokens: int
    openings: tuple[str, ...]
    """Each of these begins a thought; they may be special tokens."""
    endings: tuple[str, ...]
    """Each of these ends it."""
    closing: str
    inside: bool
    """The output begins inside a thought."""
    again: bool
    """A thought may begin anywhere. If false, only at the beginning of the output."""


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output has to be: a thought, if there is to be one, then `preface`, then what `kind` and `text` say."""

    kind: Literal["json_schema", "regex", "choice", "grammar", "text"]
    text: str
    """The schema as JSON; a regular expression that the whole output matches; a JSON list of texts; a context-free
    grammar, in llguidance's dialect of Lark or in GBNF; nothing for `text`, which is any text."""
    thought: Thought | None = None
    preface: str = ""
    """What the model's format has right before the answer."""
    budget: ThoughtBudget | None = None


class ProcessorCall(msgspec.Struct, frozen=True, array_like=True):
    """A logits processor of another package (`kit.sampling.processors`), with its parameters from the request."""

    name: str
    parameters: dict[str, Any]


class SamplingParams(msgspec.Struct, tag="sampling", frozen=True, omit_defaults=True, kw_only=True):
    """How tokens are chosen and when a request ends. Validated by the gateway; engines trust it."""

    max_tokens: int
    """Most tokens to generate, >= 1."""
    min_tokens: int = 0
    """Neither EOS nor a stop token may be sampled before this many tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0: all of the vocabulary."""
    min_p: float = 0.0
    seed: int | None = None
    """The n-th parallel sample uses seed + n; None lets the engine draw one."""
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    allowed_token_ids: tuple[int, ...] | None = None
    """Only these are sampled; not empty."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens, none empty, that the output must not have: the last token of one is not sampled where the
    others stand right before it."""
    processors: tuple[ProcessorCall, ...] = ()
    """They change the logits, in this order, before anything else does. Only where `ModelInfo.supports_processors`."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: no logprobs. k >= 0: that of each sampled token, and those of the k likeliest tokens in its place."""
    prompt_logprobs: int | None = None
    """The same for each prompt token but the first. They come once for all samples (`PromptInfo.logprobs`). Such a
    request reads nothing from the prefix cache."""
    prediction: tuple[int, ...] = ()
    """The tokens that the output is expected to have: guesses are taken from it. It changes nothing but the speed. Only
    where `ModelInfo.supports_drafts`."""
    grammar: Grammar | None = None
    """If it cannot be compiled, or followed, the request ends with an error. Only where
    `ModelInfo.supports_grammars`."""

    @property
    def is_random(self) -> bool:
        """Whether tokens are drawn at random. If not, the likeliest is taken."""
        return self.temperature >= GREEDY_BELOW


class PoolingParams(msgspec.Struct, tag="pooling", frozen=True, omit_defaults=True, kw_only=True):
    """Asks for one vector instead of tokens: the model's last hidden state at the prompt's last token, after the final
    norm. Only where `ModelInfo.supports_pooling`."""

    normalize: bool = True
    """Scaled to length 1."""


class ImageInput(msgspec.Struct, frozen=True, array_like=True):
    """An image of a prompt, prepared for the model's encoder. Only where `ModelInfo.image_grid` is set."""

    key: bytes
    """Equal only for equal `pixels` and `tiles`."""
    pixels: bytes
    """Of its tiles, one after the other, RGB in 8 bits: [height, width, 3]."""
    spans: tuple[tuple[int, int], ...]
    """(position in the prompt, how many): where the rows that the encoder gives stand, in their order."""
    tiles: tuple[tuple[int, int], ...]
    """(height, width) of each in pixels, as `ModelInfo.image_grid` allows them."""

    def moved(self, by: int) -> ImageInput:
        """In a prompt that has so many more tokens before it."""
        return msgspec.structs.replace(self, spans=tuple((start + by, count) for start, count in self.spans))


class AddRequest(msgspec.Struct, tag="add", frozen=True, omit_defaults=True):
    """One prompt and its n parallel samples."""

    ids: tuple[int, ...]
    """One engine-wide unique id for each sample. The samples share the prompt's blocks."""
    prompt_token_ids: list[int]
    params: SamplingParams | PoolingParams
    """A pooling request has one id."""
    arrival_time: float
    """time.monotonic() of the server; comparable between processes of one machine."""
    deadline: float | None = None
    """time.monotonic() at which the request ends with DeadlineExceededError, queued or running."""
    priority: int = 0
    """Lower runs earlier (policy `priority`)."""
    background: bool = False
    """It computes only while no other request does, whatever the policy. In an engine that schedules by itself it only
    waits behind all others."""
    tenant: str = ""
    """Whose share of the engine it uses (policy `fair`)."""
    cache_salt: str = ""
    """Prefix-cache entries are shared only among equal salts."""
    cache_retention: int = 0
    """For so many seconds after its end, the prompt's cached blocks are evicted later than others. 0: no later. Ignored
    by an engine that schedules by itself."""
    adapter: str = ""
    """Key of a LoRA adapter (`AdapterHost`), empty for the base model; part of the prefix-cache key."""
    traced: bool = False
    """The steps of its prompt are wanted (`PromptInfo.chunks`), which an engine that schedules by itself does not
    tell."""
    session: str = ""
    """Requests with the same session are best served by the same replica. A single engine ignores it."""
    output_token_ids: list[int] = []
    """What another engine put out for this request before it died. The request, which has one id, continues behind
    these tokens, as after a preemption: `params` are those of the whole request. Only where
    `ModelInfo.supports_resume`."""
    label: str = ""
    """The id of the client's call, by which operators know it."""
    images: tuple[ImageInput, ...] = ()
    """In the order of their positions."""


class AbortRequests(msgspec.Struct, tag="abort", frozen=True):
    """The only other verb for requests. Unknown and finished ids are ignored."""

    ids: list[int]


class LoadAdapter(msgspec.Struct, tag="load_adapter", frozen=True):
    """Answered by a CallReply with the same `call` when the adapter can be used, or cannot be loaded. Requests that
    come later and name the adapter wait until then; they end with an error if it cannot be loaded."""

    call: int
    key: str
    folder: str


class UnloadAdapter(msgspec.Struct, tag="unload_adapter", frozen=True):
    """Answered by a CallReply with the same `call`. If the adapter is still being loaded, that is given up."""

    call: int
    key: str


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """Empties the prefix cache: later requests find nothing in it. Requests under way keep their blocks. Answered by a
    CallReply with the same `call`."""

    call: int


class Inspect(msgspec.Struct, tag="inspect", frozen=True):
    """Asks what the engine has at this moment. Answered by a CallReply with the same `call` and a view."""

    call: int
    since_step: int = 0
    """Steps with a higher number are shown."""


class CloseDoor(msgspec.Struct, tag="close_door", frozen=True):
    """To an engine process with a door (`penstock.engines.door`), which then takes in no new requests of its clients.
    Those under way go on. Answered by a CallReply with this `call`, which no other message has."""

    call: ClassVar[int] = 0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural-log probabilities at one position, of the unscaled distribution (before temperature and truncation)."""

    token_id: int
    logprob: float
    rank: int
    """1 for the likeliest token of the vocabulary."""
    top: list[tuple[int, float]]
    """The k likeliest (token id, logprob), best first."""


class RequestError(msgspec.Struct, frozen=True, array_like=True):
    """`code` is a code of `penstock.engines.errors`."""

    code: str
    message: str
    retry_after: float | None = None
    param: str | None = None
    """The field at fault; `GRAMMAR` for the field, whichever it was, that asked for a grammar."""

    @classmethod
    def of(cls, error: PenstockError) -> RequestError:
        return cls(error.code, error.message, error.retry_after, error.param)

    def raised(self, grammar_field: str | None = None) -> PenstockError:
        """This as an exception. `grammar_field`: the caller's name for the field with the grammar."""
        error = from_code(self.code, self.message)
        error.retry_after = self.retry_after
        error.param = grammar_field if self.param == GRAMMAR else self.param
        return error


class RequestOutput(msgspec.Struct, array_like=True):
    """What is new of one request since the last message: tokens, and at its end a finish reason."""

    id: int
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The stop token that ended it, if that is one of `stop_token_ids` and not EOS."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, when asked for."""
    error: RequestError | None = None
    prompt: PromptInfo | None = None
    """Comes once, with the first output after the prompt was computed."""
    pooled: list[float] | None = None
    """The vector of a pooling request, with its finish reason STOP."""
    guessed: tuple[int, int] | None = None
    """Of a request with a `prediction`: how many guesses from it have been right so far, and how many wrong."""


class PromptChunk(msgspec.Struct, array_like=True, frozen=True):
    """What one step computed of a prompt. Times are of time.monotonic()."""

    scheduled: float
    done: float
    num_tokens: int


class PromptInfo(msgspec.Struct, array_like=True, frozen=True):
    """Facts about the prompt that are known once it is computed."""

    num_cached_tokens: int
    """Prompt tokens whose keys and values came from the prefix cache."""
    queue_seconds: float
    """From arrival to the first step that scheduled it."""
    logprobs: list[TokenLogprobs] | None = None
    """For prompt tokens 1.. (the first has no condition), when asked for. Only the first of a request's samples has
    them."""
    chunks: list[PromptChunk] | None = None
    """The prompt's first steps, for traced requests."""


class StepRecord(msgspec.Struct, array_like=True, frozen=True):
    """How long one step took, and how large it was."""

    seconds: float
    """From the end of the step before or from its own scheduling, whichever was later, to its result."""
    num_requests: int
    num_tokens: int


class CallReply(msgspec.Struct, array_like=True, frozen=True):
    """A message with this `call` has been carried out, or not."""

    call: int
    error: RequestError | None = None
    view: EngineView | None = None
    """To `Inspect`."""


class StepOutputs(msgspec.Struct, array_like=True, tag="step"):
    """One message: a step's outputs, or those of a few short steps, or newer stats alone."""

    outputs: list[RequestOutput]
    """Of several steps, an id may occur more than once, in order."""
    stats: EngineStats
    """After the newest of the steps."""
    steps: list[StepRecord] = []
    replies: list[CallReply] = []


class Ready(msgspec.Struct, array_like=True, tag="ready"):
    """The engine process has loaded its model."""

    info: ModelInfo


class LoadFailed(msgspec.Struct, array_like=True, tag="load_failed"):
    """The engine process could not load its model. `message` is for the operator."""

    message: str


class Heartbeat(msgspec.Struct, array_like=True, frozen=True):
    """The engine process is alive. Comes through a pipe of its own, also while a step computes."""

    step_seconds: float
    """How long the step under way has taken; 0 while there is none."""
    expected_seconds: float | None
    """What it was expected to take; None: not known."""


DownMessage = AddRequest | AbortRequests | LoadAdapter | UnloadAdapter | ResetPrefixCache | Inspect
OwnerMessage = DownMessage | CloseDoor
"""What an engine process with a door may be told by its owner."""
UpMessage = Loading | Ready | LoadFailed | StepOutputs
