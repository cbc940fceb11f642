from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.bento.traced_server import call, new_trace, post, request_span, traced_server
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan
from tests.servers import Server, value
from tests.waiting import PATIENCE

METHODS = ["batched", "batched_async"]
THREADS = 4  # of the service


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
    traces, spans = burst(server, receiver, method)
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


def test_each_request_says_in_its_own_trace_what_its_batch_cost_it(server: Server, receiver: OtlpReceiver) -> None:
    inputs = [[x, 0.5] if x % 3 == 0 else [x] for x in map(float, range(16))]  # of one or two rows
    traces, spans = burst(server, receiver, "batched", inputs)
    shares = batch_spans(receiver, traces)
    for index, trace_id in enumerate(traces):
        request = request_span(receiver, trace_id)
        parts = [span for span in shares if span.trace_id == trace_id]  # several if it was split
        assert {span.parent_id for span in parts} == {request.span_id}
        rows = sum(number(span, "share") * number(span, "batch_size") for span in parts)
        assert rows == pytest.approx(len(inputs[index]))
    for span in shares:
        assert request_span(receiver, span.trace_id).start_ns <= span.start_ns
        assert number(span, "queue_seconds") + number(span, "batch_seconds") == pytest.approx(span.seconds, abs=1e-5)
        assert number(span, "share_seconds") == pytest.approx(number(span, "share") * number(span, "batch_seconds"))
        assert number(span, "compile_seconds") == 0
        assert not span.is_error
    for inference in spans:
        batch = [span for span in shares if span.links[0].span_id == inference.span_id]
        assert sum(number(span, "share") for span in batch) == pytest.approx(1)
        assert {number(span, "batch_requests") for span in batch} == {len(batch)}
        assert {number(span, "batch_size") for span in batch} == {number(inference, "batch_size")}
        assert all(span.start_ns <= inference.start_ns <= inference.end_ns <= span.end_ns for span in batch)


def test_a_batch_s_unsampled_requests_have_no_span_but_their_share(server: Server, receiver: OtlpReceiver) -> None:
    traces, spans = burst(server, receiver, "batched", sampled=lambda index: index % 2 == 1)
    shares = batch_spans(receiver, traces[1::2])
    assert {span.trace_id for span in shares} == set(traces[1::2])
    mixed = [span for span in spans if {link.trace_id for link in span.links} & set(traces[::2])]
    for inference in mixed:
        batch = [span for span in shares if span.links[0].span_id == inference.span_id]
        assert sum(number(span, "share") for span in batch) < 1
        assert {number(span, "share") for span in batch} == {1 / number(inference, "batch_size")}


def test_a_compile_in_a_batch_is_seen_in_each_of_its_requests(server: Server, receiver: OtlpReceiver) -> None:
    traces, spans = burst(server, receiver, "batched", [[2000.0] if x == 5 else [x] for x in map(float, range(16))])
    [compiled] = [span for span in spans if number(span, "compile_seconds") > 0]
    for span in batch_spans(receiver, traces):
        expected = number(compiled, "compile_seconds") if span.links[0].span_id == compiled.span_id else 0
        assert number(span, "compile_seconds") == expected


def test_every_model_call_of_a_batch_is_linked(server: Server, receiver: OtlpReceiver) -> None:
    traces, spans = burst(server, receiver, "batched_twice")
    shares = batch_spans(receiver, traces)
    assert len(shares) == 16
    assert {link.span_id for span in shares for link in span.links} == {span.span_id for span in spans}
    assert {len(span.links) for span in shares} == {2}


def test_a_batch_that_raises_fails_the_span_of_each_of_its_requests(server: Server, receiver: OtlpReceiver) -> None:
    traces = [new_trace() for _ in range(8)]
    with ThreadPoolExecutor(8) as pool:
        codes = list(pool.map(lambda index: post(server, "batched", [-1.0], traces[index]).status_code, range(8)))
    assert codes == [500] * 8
    shares = batch_spans(receiver, traces)
    assert len(shares) == 8
    assert {span.status_message for span in shares} == {"ValueError: a negative number"}
    assert {len(span.links) for span in shares} == {1}  # the model had answered
    assert call(server, "batched", [1.0]) == [2.0]


def test_a_request_without_rows_has_its_batch_too(server: Server, receiver: OtlpReceiver) -> None:
    trace_id = new_trace()
    assert call(server, "batched", [], trace_id) == []
    [span] = batch_spans(receiver, [trace_id])
    assert (number(span, "batch_size"), number(span, "share"), number(span, "batch_requests")) == (0, 1, 1)


def test_the_wait_for_a_thread_is_queueing(server: Server, receiver: OtlpReceiver) -> None:
    trace_id, batches = new_trace(), dispatched(server)
    with ThreadPoolExecutor(THREADS + 1) as pool:
        for _ in range(THREADS):
            pool.submit(httpx.post, f"{server.base_url}/hold", json={}, timeout=PATIENCE)
        httpx.post(f"{server.base_url}/holding", json={"threads": THREADS}, timeout=PATIENCE).raise_for_status()
        answer = pool.submit(call, server, "batched", [1.0], trace_id)
        ends = time.monotonic() + PATIENCE
        while dispatched(server) == batches:
            assert time.monotonic() < ends, "the batch was not dispatched"
            time.sleep(0.01)
        released = httpx.post(f"{server.base_url}/release", json={}, timeout=PATIENCE).json()
        assert answer.result() == [2.0]
    [span] = batch_spans(receiver, [trace_id])
    assert span.end_ns - number(span, "batch_seconds") * 1e9 >= released * 1e9 - 1e3


def inferences(receiver: OtlpReceiver, traces: set[str], count: int = 1) -> list[ReceivedSpan]:
    def select(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.name == "torch_compile.inference" and span.trace_id in traces]

    return receiver.wait_until(select, count, "inference spans of these traces")


def requests_of(span: ReceivedSpan, traces: list[str]) -> list[str]:
    """The ids of the request spans that a batch answered; one without links is a batch of one."""
    return [link.span_id for link in span.links if link.trace_id in traces] or [span.parent_id]


def batch_spans(receiver: OtlpReceiver, traces: list[str]) -> list[ReceivedSpan]:
    """Those of the traces, of which each has at least one."""

    def select(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        found = [span for span in spans if span.name == "torch_compile.batch" and span.trace_id in traces]
        return found if {span.trace_id for span in found} == set(traces) else []

    return receiver.wait_until(select, 1, "batch spans of each of these traces")


def number(span: ReceivedSpan, attribute: str) -> float:
    return float(span.attributes[f"torch_compile.{attribute}"])


def dispatched(server: Server) -> float:
    return value(server.metrics(), "bentoml_service_adaptive_batch_size_count", method_name="batched")


SIXTEEN = tuple([float(x)] for x in range(16))


def burst(
    server: Server,
    receiver: OtlpReceiver,
    method: str,
    inputs: Sequence[list[float]] = SIXTEEN,
    sampled: Callable[[int], bool] = lambda _: True,
) -> tuple[list[str], list[ReceivedSpan]]:
    """Concurrent requests, again until some shared a batch: their traces, in order, and their inference spans.

    Where some are sampled and some are not, two of both kinds have shared one.
    BentoML first measures batches of one to three, so early bursts may not be batched.
    """
    ends = time.monotonic() + PATIENCE
    while time.monotonic() < ends:
        traces = [new_trace() for _ in inputs]
        flags = [sampled(index) for index in range(len(inputs))]
        with ThreadPoolExecutor(len(inputs)) as pool:
            answers = pool.map(functools.partial(call, server, method), inputs, traces, flags)
            assert list(answers) == [[2 * x for x in xs] for xs in inputs]
        for trace_id, flag in zip(traces, flags, strict=True):
            if flag:
                request_span(receiver, trace_id)  # a request's span ends, and is exported, after its inference
        spans = inferences(receiver, set(traces))
        of_trace = dict(zip(traces, flags, strict=True))
        batches = [[of_trace[link.trace_id] for link in span.links if link.trace_id in of_trace] for span in spans]
        if any(len(batch) > 1 and set(batch) == set(flags) for batch in batches):
            return traces, spans
    raise AssertionError("no two requests shared a batch")
