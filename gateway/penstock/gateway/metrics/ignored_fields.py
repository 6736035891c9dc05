"""Fields of requests that were not used as they were sent, counted, and logged once each."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from penstock.gateway.front.context import RequestContext

logger = logging.getLogger(__name__)


class IgnoredFields:
    """A source of metrics, told of each request that has ended. What clients send cannot add labels: fields are noted
    in the schema's own words (`RequestContext.ignore`)."""

    def __init__(self) -> None:
        self._requests = Counter[str]()
        """By field."""

    def __call__(self, context: RequestContext) -> None:
        for field in context.record.ignored:
            if field not in self._requests:
                logger.info(
                    "requests to %s have the field %s, which is not used as they send it: their answers name it in "
                    "x-penstock-ignored, metrics count it, and the log does not mention it again "
                    "(--strict-requests refuses such requests)",
                    context.record.route,
                    field,
                )
            self._requests[field] += 1

    def collect(self) -> Iterator[Metric]:
        text = "Requests that have ended, by a field of theirs that was not used as it was sent."
        family = CounterMetricFamily("penstock_front_ignored_fields", text, labels=["field"])
        for field, count in self._requests.items():
            family.add_metric([field], count)
        yield family


def be_strict(context: RequestContext) -> None:
    """For requests that begin, where such fields are refused."""
    context.strict = True
