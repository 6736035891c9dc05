"""The options of `penstock tune`, besides the settings of a load test."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from penstock.loadtest.options import SECTIONS as LOADTEST_SECTIONS
from penstock.loadtest.options import Seconds


class TuneOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What to try, and the goal."""

    param: Annotated[
        tuple[str, ...],
        Meta(
            extra={"metavar": "NAME=VALUES"},
            description="values of a flag of the server, as max_num_seqs=16,32,64; of a model in a repository "
            "MODEL.instance_count, MODEL.max_batch_size or MODEL.max_queue_delay_microseconds; may be repeated",
        ),
    ] = ()
    objective: Annotated[
        str,
        Meta(
            description="figure to maximise (output_tokens_per_s, total_tokens_per_s, requests_per_s, goodput) or "
            "lowest (ttft_p99 and the like); default: output_tokens_per_s; of embeddings "
            "total_tokens_per_s, of tensors requests_per_s"
        ),
    ] = ""
    slo: Annotated[
        tuple[str, ...],
        Meta(
            description="bounds that the best must keep, as ttft_p99:500 (ms), goodput:0.95 (least share), errors:0.01 "
            "(largest share, the default); may be repeated"
        ),
    ] = ()
    strategy: Annotated[
        Literal["exhaustive", "quick"],
        Meta(
            description="exhaustive: all combinations; quick: one parameter after the other, from the first values on, "
            "until none helps any more"
        ),
    ] = "exhaustive"
    ready: Annotated[str, Meta(description="path that answers 200 once the server is ready")] = "/health/ready"
    start_timeout: Annotated[Seconds, Meta(description="seconds that a server gets to become ready")] = 600.0
    stop_timeout: Annotated[Seconds, Meta(description="seconds it gets after SIGTERM, before it is killed")] = 60.0


SECTIONS: dict[str, type[msgspec.Struct]] = {
    "tune": TuneOptions,
    **{name: section for name, section in LOADTEST_SECTIONS.items() if name != "search"},
}
