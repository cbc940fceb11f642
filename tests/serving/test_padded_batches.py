"""Adaptive batching makes batches of every size; padding runs them on the prepared ones, without a compile."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch

from tests.models import WORDS, classifier
from tests.servers import Server
from tests.serving.padded_service import BATCHES
from tests.serving.test_boots import CHECKOUT

pytestmark = pytest.mark.slow

REQUESTS = 300


def test_batches_of_any_size_run_on_the_prepared_ones(tmp_path: Path) -> None:
    rows = torch.randint(0, WORDS, (REQUESTS, 3, 5), generator=torch.Generator().manual_seed(0))
    expected = classifier()(rows.reshape(-1, 5))["logits"].reshape(REQUESTS, 3, -1)
    server = Server(CHECKOUT, tmp_path, target="tests.serving.padded_service:Batched")
    # the server may close a connection that is kept alive just as the next request goes out
    limits = httpx.Limits(max_keepalive_connections=0)
    with server.start(), httpx.Client(base_url=server.base_url, timeout=120, limits=limits) as client:

        def ask(number: int) -> list[list[float]]:
            sizes = 1 + number % 3  # rows of one request
            answer = client.post("/classify", json={"rows": rows[number, :sizes].tolist()})
            assert answer.status_code == 200, answer.text
            return answer.json()

        with ThreadPoolExecutor(48) as clients:
            answers = list(clients.map(ask, range(REQUESTS)))
        metrics = server.metrics()
    for number, answer in enumerate(answers):
        torch.testing.assert_close(torch.tensor(answer), expected[number, : 1 + number % 3])
    served = {m.labels["shape"] for m in metrics if m.name == "torch_compile_inference_seconds_count"}
    assert served <= {f"ids: int64[{batch}, 5]" for batch in BATCHES}
    assert len(served) > 1, "there were no batches"
    engines = {m.labels["engine"] for m in metrics if m.name == "torch_compile_inference_seconds_count"}
    assert engines == {"jit"}
    padded = sum(m.value for m in metrics if m.name == "torch_compile_padding_ratio_count")
    assert padded > 0
    assert not [m for m in metrics if m.name == "torch_compile_recompiles_total" and m.value]
    assert not [m for m in metrics if m.name == "torch_compile_unprepared_total" and m.value]
