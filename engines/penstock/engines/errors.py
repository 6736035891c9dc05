"""The one tree of errors that a request can end with.

PenstockError
├── InvalidRequestError        the caller's fault: bad type, range, size or combination
│   ├── ContextLengthError     prompt and max_tokens do not fit the model's context or the KV cache
│   ├── NotFoundError          no such thing
│   │   └── ModelNotFoundError no such model
│   ├── AlreadyExistsError     the name is taken
│   ├── PayloadTooLargeError   a body or a part of it is over its limit
│   └── UnsupportedError       a known option that this server or model does not offer
├── AuthenticationError        missing or wrong API key
├── PermissionDeniedError      the key is right, but does not allow this
├── RateLimitedError           the key's limit of requests or tokens is used up: try again later
├── OverloadedError            full for now: try again later
│   ├── QueueFullError         the scheduler's queue bound, in requests or tokens
│   ├── QueueTimeoutError      waited longer than its model lets requests wait
│   ├── MemoryBudgetError      a model that would not fit into the memory that is left is not loaded
│   └── NotReadyError          starting, draining, or restarting its engine
├── DeadlineExceededError      the request's time is over, queued or running
├── CancelledError             given up by its caller, or by the model in its name
├── UnknownError               a model's own error without a kind
└── EngineError                the server's fault
    ├── EngineDeadError        the engine process died or hung; its requests end with this
    ├── StepFailedError        this request's step raised even when it ran alone (or its engine's own scheduler did)
    └── NumericalError         NaN or infinite logits in this request's row

Below the gateway nothing knows HTTP or gRPC; `penstock.gateway.errors` maps each class to its wire shapes.
Errors cross the process border as `RequestError`; `code` is the class's stable name on the wire.
"""

from __future__ import annotations

from typing import ClassVar


class PenstockError(Exception):
    """Base of the tree. `message` is safe to show to the caller; `param` names the offending field, if any."""

    code: ClassVar[str] = "internal_error"

    def __init__(self, message: str, *, param: str | None = None, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after = retry_after
        """Seconds after which another try makes sense (overload and limits only)."""


class InvalidRequestError(PenstockError):
    code = "invalid_request"


class ContextLengthError(InvalidRequestError):
    code = "context_length_exceeded"


class NotFoundError(InvalidRequestError):
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class AlreadyExistsError(InvalidRequestError):
    code = "already_exists"


class PayloadTooLargeError(InvalidRequestError):
    code = "payload_too_large"


class UnsupportedError(InvalidRequestError):
    code = "unsupported_parameter"


class AuthenticationError(PenstockError):
    code = "invalid_api_key"


class PermissionDeniedError(PenstockError):
    code = "permission_denied"


class RateLimitedError(PenstockError):
    code = "rate_limit_exceeded"


class OverloadedError(PenstockError):
    code = "overloaded"


class QueueFullError(OverloadedError):
    code = "queue_full"


class QueueTimeoutError(OverloadedError):
    code = "queue_timeout"


class MemoryBudgetError(OverloadedError):
    code = "memory_budget"


class NotReadyError(OverloadedError):
    code = "not_ready"


class DeadlineExceededError(PenstockError):
    code = "deadline_exceeded"


class CancelledError(PenstockError):
    code = "cancelled"


class UnknownError(PenstockError):
    code = "unknown"


class EngineError(PenstockError):
    code = "engine_error"


class NoResourcesError(EngineError):
    """The system lacks what a new engine process needs: descriptors, memory, room for processes."""


class EngineDeadError(EngineError):
    code = "engine_dead"


class StepFailedError(EngineError):
    code = "step_failed"


class NumericalError(EngineError):
    code = "numerical_error"


def _subclasses(cls: type[PenstockError]) -> list[type[PenstockError]]:
    return [cls, *(leaf for child in cls.__subclasses__() for leaf in _subclasses(child))]


_BY_CODE = {cls.code: cls for cls in reversed(_subclasses(PenstockError))}
"""A class that shares its base's code is known as its base on the wire."""


def from_code(code: str, message: str) -> PenstockError:
    """The error that crossed the process border as `(code, message)`."""
    return _BY_CODE.get(code, EngineError)(message)
