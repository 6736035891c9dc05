"""Errors on the border: they come out on the other side as what they were."""

from __future__ import annotations

import logging

from penstock.engines.errors import PenstockError, from_code
from penstock.gateway.errors import INTERNAL_MESSAGE
from penstock.gateway.model_host.messages import ErrorFields

logger = logging.getLogger(__name__)


def to_fields(error: Exception) -> ErrorFields:
    """Of an error outside the tree nothing but that it happened: it is logged here."""
    if not isinstance(error, PenstockError):
        logger.error("Unexpected error", exc_info=error)
        return PenstockError.code, INTERNAL_MESSAGE, None, None
    return error.code, error.message, error.param, error.retry_after


def to_error(fields: ErrorFields) -> PenstockError:
    code, message, param, retry_after = fields
    error = from_code(code, message)
    error.param, error.retry_after = param, retry_after
    return error
