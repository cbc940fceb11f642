from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.bento.traced_server import call, new_trace, request_span, traced_server
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.servers import Server

METHODS = ["batched", "batched_async"]


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        yield receiver


@pytest.fixture(scope="module")
def server(receiver: OtlpReceiver, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    # Rate 0: a request is sampled if, and only if, its traceparent says so.
    config = {"tracing": receiver.tracing_config(0.0)}
    env = {"OTEL_BSP_SCHEDULE_DELAY": "100"}  # milliseconds until spans are exported, 5,000 by default
    with traced_server(tmp_path_factory.mktemp("home"), config, env) as server:
        yield server


@pytest.mark.parametrize("method", METHODS)
def test_a_lone_batched_request_has_its_inference_under_its_own_request(
    server: Server, receiver: OtlpReceiver, method: str
) -> None:
    for _ in range(3):  # the second and third show whose context the dispatcher runs in
        trace_id = new_trace()
        assert call(server, method, [1.0], trace_id) == [2.0]
        [inference] = inferences(receiver, {trace_id})
        assert inference.parent_id == request_span(receiver, trace_id).span_id
        assert not {link.trace_id for link in inference.links} & {trace_id}  # only its boot: a batch of one is no batch


@pytest.mark.parametrize("method", METHODS)
def test_every_concurrent_request_finds_the_batch_that_answered_it(
    server: Server, receiver: OtlpReceiver, method: str
) -> None:
    traces, spans = burst(server, receiver, method, sampled=lambda _: True)
    requests = {request_span(receiver, trace_id).span_id for trace_id in traces}
    answered: list[str] = []
    for span in spans:
        batch = requests_of(span, traces)
        assert span.parent_id == batch[0]
        assert span.attributes["torch_compile.batch_size"] == len(batch)
        answered += batch
    assert sorted(answered) == sorted(requests)


def test_a_batch_runs_in_the_context_of_its_first_sampled_request(server: Server, receiver: OtlpReceiver) -> None:
    traces, spans = burst(server, receiver, "batched", sampled=lambda index: index % 2 == 1)
    sampled = set(traces[1::2])
    assert {span.trace_id for span in spans} <= sampled
    linked = [[link.trace_id for link in span.links if link.trace_id in traces] for span in spans]
    assert sampled == {span.trace_id for span in spans} | {
        trace for batch in linked for trace in batch if trace in sampled
    }
    assert any(set(batch) - sampled for batch in linked), "no batch mixed sampled and unsampled requests"
    for span, batch in zip(spans, linked, strict=True):
        assert span.trace_id == next((trace for trace in batch if trace in sampled), span.trace_id)


def test_a_request_larger_than_a_batch_is_traced_in_all_its_parts(server: Server, receiver: OtlpReceiver) -> None:
    trace_id = new_trace()
    assert call(server, "batched", [1, 2, 3, 4, 5, 6], trace_id) == [2, 4, 6, 8, 10, 12]
    parts = inferences(receiver, {trace_id}, count=2)
    assert sorted(span.attributes["torch_compile.batch_size"] for span in parts) == [2, 4]
    assert {span.parent_id for span in parts} == {request_span(receiver, trace_id).span_id}


def test_unsampled_batches_export_nothing(server: Server, receiver: OtlpReceiver) -> None:
    unsampled, sampled = new_trace(), new_trace()
    assert call(server, "batched", [1.0], unsampled, sampled=False) == [2.0]
    call(server, "batched", [1.0], sampled)
    inferences(receiver, {sampled})  # exported after the unsampled one, had there been any
    assert [span for span in receiver.spans() if span.trace_id == unsampled] == []


def inferences(receiver: OtlpReceiver, traces: set[str], count: int = 1) -> list[ReceivedSpan]:
    def select(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.name == "torch_compile.inference" and span.trace_id in traces]

    return receiver.wait_until(select, count, "inference spans of these traces")


def requests_of(span: ReceivedSpan, traces: list[str]) -> list[str]:
    """The ids of the request spans that a batch answered; one without links is a batch of one."""
    return [link.span_id for link in span.links if link.trace_id in traces] or [span.parent_id]


def burst(
    server: Server, receiver: OtlpReceiver, method: str, sampled: Callable[[int], bool]
) -> tuple[list[str], list[ReceivedSpan]]:
    """Concurrent requests, again until some shared a batch: their traces, in order, and their inference spans.

    BentoML first measures batches of one to three, so early bursts may not be batched.
    """
    ends = time.monotonic() + 60
    while time.monotonic() < ends:
        traces = [new_trace() for _ in range(16)]
        flags = [sampled(index) for index in range(16)]
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda x, t=traces, f=flags: call(server, method, [x], t[x], f[x]), range(16))
            assert list(answers) == [[2 * x] for x in range(16)]
        for trace_id, flag in zip(traces, flags, strict=True):
            if flag:
                request_span(receiver, trace_id)  # a request's span ends, and is exported, after its inference
        spans = inferences(receiver, set(traces))
        if any(len(requests_of(span, traces)) > 1 for span in spans):
            return traces, spans
    raise AssertionError("no two requests shared a batch")
