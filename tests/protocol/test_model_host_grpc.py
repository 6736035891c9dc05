"""KServe over gRPC from a front process's half of the model host's border: what holds for a server of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from protocol.test_kserve_grpc import (  # noqa: F401
    test_an_unexpected_exception_tells_nothing,
    test_classification,
    test_errors_of_models_as_statuses,
    test_infer_with_tritonclient,
    test_many_strings,
    test_metadata_and_configuration,
    test_model_ready,
    test_only_the_requested_outputs_in_the_requested_order,
    test_parameters_reach_the_model_and_come_back,
    test_repository,
    test_repository_refusals,
    test_shared_memory_rpcs,
    test_statistics,
    test_tensors_in_shared_memory,
    test_trace_and_log_settings,
    test_traces_of_both_ways_to_infer,
    test_what_model_infer_refuses,
)
from protocol.test_kserve_grpc_edges import (  # noqa: F401
    test_a_caller_that_leaves_cancels_its_request,
    test_messages_of_many_megabytes,
    test_the_deadline_reaches_the_model_and_cancels_it,
    test_what_runs_longer_than_the_drain_is_ended,
)
from protocol.test_kserve_grpc_stream import (  # noqa: F401
    test_a_caller_that_leaves_ends_all_requests_of_the_stream,
    test_a_model_with_one_response_is_final_with_it,
    test_a_reader_that_does_not_read_holds_the_model_back,
    test_an_error_leaves_the_stream_open,
    test_callbacks_of_the_synchronous_client,
    test_later_requests_overtake_waiting_ones,
    test_many_requests_at_once_each_in_order,
    test_no_more_requests_at_once_than_allowed,
    test_requests_that_never_began_have_no_final_flag,
    test_responses_of_a_decoupled_model,
    test_strict_streams_end_with_the_first_error,
)
from support.grpc import FROM_A_FRONT


@pytest.fixture(autouse=True)
def from_a_front() -> Iterator[None]:
    token = FROM_A_FRONT.set(True)
    yield
    FROM_A_FRONT.reset(token)
