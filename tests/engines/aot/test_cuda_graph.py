"""GraphedLibrary with a real library on the CPU, and in the place of the CUDA graph one that runs the library again.

What touches torch.cuda (`cuda_graph.Graph`) is not tested here: it needs a GPU.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from bentoml_compile.engines.aot import cuda_graph
from bentoml_compile.engines.aot.cuda_graph import CaptureFailed, GraphedLibrary, captured
from bentoml_compile.engines.aot.library import BoundLibrary, Layout, Library, LibraryError
from tests.engines.aot import libraries
from tests.engines.aot.libraries import Words, growth_in_child, in_child, weights_of, word_inputs, words

CPU = torch.device("cpu")
MB = 1 << 20
Outputs = list[torch.Tensor | None]


class GraphOnCpu(cuda_graph.Graph):
    """Replays by running once more, into the memory of the run that was captured."""

    failing: str = ""

    def __init__(self, device: torch.device) -> None:
        self.freed = False

    def record(self, run: Callable[[], Outputs]) -> Outputs:
        if self.failing:
            raise RuntimeError(f"{self.failing}\nC++ trace")
        self.run, self.memory = run, run()
        return self.memory

    @contextmanager
    def turn(self) -> Iterator[None]:
        yield

    def replay(self) -> None:
        assert not self.freed
        for mine, new in zip(self.memory, self.run(), strict=True):
            if mine is not None and new is not None:  # bytes, since a graph knows nothing of views and inference mode
                mine.untyped_storage().copy_(new.untyped_storage())

    def free(self) -> None:
        self.freed, self.memory = True, []


class Aliases(nn.Module):
    """Outputs that are, or view, an input or each other, and one with strides that a clone does not keep."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return x, x[1:].t(), y, y[:, 1:], y, (x + 1)[:1].expand(3, 4)


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graph, "Graph", GraphOnCpu)


@pytest.fixture(scope="session")
def aliases_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return libraries.compile_library(Aliases(), (torch.ones(3, 4),), tmp_path_factory.mktemp("aliases"), "aliases")


@pytest.fixture
def graphed(words_library: Path, model: Words) -> Iterator[GraphedLibrary]:
    made = captured(opened(words_library, model), word_inputs())
    yield made
    made.close()


def opened(path: Path, model: nn.Module) -> Library:
    return Library(path, device=CPU, weights=weights_of(model), single_threaded=True)


def assert_as_eager(outputs: Outputs, model: Words, ids: torch.Tensor, mask: torch.Tensor) -> None:
    torch.testing.assert_close(tuple(outputs), model(ids, mask))


# results


def test_a_call_gives_what_eager_gives_for_other_inputs_than_the_captured_ones(
    graphed: GraphedLibrary, model: Words
) -> None:
    ids, mask = word_inputs()
    for inputs in ((ids, mask), (ids.flip(0), mask * 0.5)):
        assert_as_eager(graphed.run(inputs), model, *inputs)
    assert (graphed.inputs, graphed.outputs) == (2, 3)
    assert set(graphed.names) == {"embedding.weight", "head.weight", "head.bias", "scale", "offset"}


def test_the_captured_inputs_are_copies(graphed: GraphedLibrary, words_library: Path, model: Words) -> None:
    ids, mask = word_inputs()
    made = captured(opened(words_library, model), [ids, mask])
    made.run([ids.flip(0), mask * 0])
    torch.testing.assert_close((ids, mask), word_inputs())
    made.close()


def test_outputs_are_not_overwritten_by_later_calls(graphed: GraphedLibrary, model: Words) -> None:
    ids, mask = word_inputs()
    first = graphed.run([ids, mask])
    graphed.run([ids.flip(0), mask])
    assert_as_eager(first, model, ids, mask)


def test_outputs_alias_the_calls_own_inputs_and_each_other_as_without_a_graph(aliases_library: Path) -> None:
    library = Library(aliases_library, device=CPU, weights={})
    graphed = captured(opened(aliases_library, Aliases()), [torch.ones(3, 4)])
    x = torch.arange(24.0).reshape(2, 3, 4)[1]
    plain, found = library.run([x]), graphed.run([x])
    torch.testing.assert_close(found, plain)
    torch.testing.assert_close(tuple(found), Aliases()(x))
    assert [t.stride() for t in found if t is not None] == [t.stride() for t in plain if t is not None]
    assert _shared(found, x) == _shared(plain, x)
    library.close()
    graphed.close()


def _shared(outputs: Outputs, x: torch.Tensor) -> list[list[int]]:
    """For each tensor: which of the input and the outputs share its memory, and how far apart they begin."""
    tensors = [x, *(output for output in outputs if output is not None)]
    return [
        [(other.data_ptr() - one.data_ptr()) if _storage(other) == _storage(one) else -1 for other in tensors]
        for one in tensors
    ]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@pytest.mark.parametrize("capturing", [True, False])
@pytest.mark.parametrize("calling", [True, False])
def test_a_graph_may_be_captured_and_called_in_inference_mode_and_out_of_it(
    words_library: Path, model: Words, capturing: bool, calling: bool
) -> None:
    with torch.inference_mode(capturing):
        graphed = captured(opened(words_library, model), word_inputs())
    ids, mask = word_inputs()
    with torch.inference_mode(calling):
        assert_as_eager(graphed.run([ids.flip(0), mask.requires_grad_(not calling)]), model, ids.flip(0), mask.detach())
    graphed.close()


def test_another_number_of_inputs_is_refused(graphed: GraphedLibrary, words_library: Path, model: Words) -> None:
    with pytest.raises(ValueError, match="takes 2 tensors, not 1"):
        graphed.run(word_inputs()[:1])
    with pytest.raises(ValueError, match="takes 2 tensors, not 1"):
        captured(opened(words_library, model), word_inputs()[:1])


# weights


def test_weights_that_change_in_place_count_at_once(graphed: GraphedLibrary, model: Words) -> None:
    before = graphed.run(word_inputs())
    for tensor in weights_of(model).values():
        tensor.mul_(3)
    after = graphed.run(word_inputs())
    assert_as_eager(after, model, *word_inputs())
    assert not torch.allclose(before[0], after[0])  # type: ignore[arg-type]


def test_other_weights_are_captured_beside_the_first(graphed: GraphedLibrary, model: Words) -> None:
    other = words(seed=1)
    second = graphed.with_weights(weights_of(other))
    assert_as_eager(second.run(word_inputs()), other, *word_inputs())
    assert_as_eager(graphed.run(word_inputs()), model, *word_inputs())
    graphed.close()
    assert_as_eager(second.run(word_inputs()), other, *word_inputs())
    second.close()


def test_other_weights_that_do_not_fit_are_refused_by_name(words_library: Path, model: Words) -> None:
    weights = weights_of(model)
    library = Library(
        words_library,
        device=CPU,
        weights=weights,
        expected={name: Layout.of(weight) for name, weight in weights.items()},
        single_threaded=True,
    )
    graphed = captured(library, word_inputs())
    with pytest.raises(LibraryError, match=r"head\.weight is float32\[32, 64\]"):
        graphed.with_weights({**weights, "head.weight": weights["head.weight"][:32]})
    assert_as_eager(graphed.run(word_inputs()), model, *word_inputs())
    graphed.close()


# what cannot be captured


def test_a_failing_capture_says_why_in_one_line_and_closes_the_library(
    words_library: Path, model: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = opened(words_library, model)
    monkeypatch.setattr(GraphOnCpu, "failing", "operation not permitted when stream is capturing")
    with pytest.raises(CaptureFailed, match=r"^operation not permitted when stream is capturing$"):
        captured(library, word_inputs())
    with pytest.raises(RuntimeError, match=r"words\.so was closed"):
        library.run(word_inputs())


def test_inputs_that_the_library_refuses_fail_the_capture(words_library: Path, model: Words) -> None:
    ids, mask = word_inputs()
    with pytest.raises(CaptureFailed, match="index out of bounds"):
        captured(opened(words_library, model), [ids + libraries.WORDS, mask])


def test_inputs_on_another_device_are_refused(words_library: Path, model: Words) -> None:
    ids, mask = word_inputs()
    with pytest.raises(CaptureFailed, match="inputs are on meta: a graph on cpu would keep their values"):
        captured(opened(words_library, model), [ids, mask.to("meta")])


def test_weights_on_another_device_are_refused(words_library: Path, model: Words) -> None:
    library = opened(words_library, model)
    library.device = torch.device("meta")  # stands for a CUDA library with a weight on the CPU
    with pytest.raises(CaptureFailed, match="weights are on cpu"):
        captured(library, [tensor.to("meta") for tensor in word_inputs()])


def test_outputs_on_another_device_are_refused(
    words_library: Path, model: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphOnCpu, "record", lambda self, run: [*run(), torch.ones(1, device="meta")])
    with pytest.raises(CaptureFailed, match="outputs are on meta"):
        captured(opened(words_library, model), word_inputs())


def test_a_library_that_others_may_be_running_is_refused(words_library: Path, model: Words) -> None:
    with pytest.raises(CaptureFailed, match="not opened with single_threaded"):
        captured(Library(words_library, device=CPU, weights=weights_of(model)), word_inputs())


def test_a_library_of_the_binding_is_refused(words_library: Path, model: Words) -> None:
    with pytest.raises(CaptureFailed, match="torch's binding"):
        captured(BoundLibrary(words_library, device=CPU, weights=weights_of(model)), word_inputs())


def test_a_torch_without_cuda_makes_no_graph(
    words_library: Path, model: Words, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.cuda.is_available():
        pytest.skip("this torch has CUDA")
    monkeypatch.undo()
    with pytest.raises(CaptureFailed):
        captured(opened(words_library, model), word_inputs())


# threads and closing


def test_concurrent_calls_get_the_outputs_of_their_own_inputs(graphed: GraphedLibrary, model: Words) -> None:
    ids, mask = word_inputs()
    wrong: list[int] = []

    def call(number: int) -> None:
        mine = [(ids + number) % libraries.WORDS, mask * (1 + number)]
        expected = model(*mine)[0]
        for _ in range(100):
            if not torch.allclose(graphed.run(mine)[0], expected, atol=1e-5):  # type: ignore[arg-type]
                wrong.append(number)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_closed_graph_refuses_calls_and_may_be_closed_again(words_library: Path, model: Words) -> None:
    library = opened(words_library, model)
    graphed = captured(library, word_inputs())
    graphed.close()
    graphed.close()
    for call in (graphed.run, lambda _: graphed.with_weights(weights_of(model)), library.run):
        with pytest.raises(RuntimeError, match=r"words\.so was closed"):
            call(word_inputs())


CLOSE_UNDER_LOAD = """
    import json, sys
    from pathlib import Path
    from bentoml_compile.engines.aot import cuda_graph
    from tests.engines.aot.libraries import close_under_load, word_inputs
    from tests.engines.aot.test_cuda_graph import GraphOnCpu, opened

    cuda_graph.Graph = GraphOnCpu
    graphed = lambda model: cuda_graph.captured(opened(Path(sys.argv[1]), model), word_inputs())
    print(json.dumps(close_under_load(graphed, threads=4)))
"""


def test_closing_waits_for_the_call_under_way_and_turns_the_waiting_away(words_library: Path) -> None:
    child = in_child(CLOSE_UNDER_LOAD, words_library)
    assert child.code == 0, child.errors
    assert child.said == [True, 20 * 4, ["words.so was closed"], []]


# memory

GROWTH = """
    import json, sys, torch
    from pathlib import Path
    from bentoml_compile.engines.aot import cuda_graph
    from tests.engines.aot.libraries import growth, weights_of, word_inputs, words
    from tests.engines.aot.test_cuda_graph import GraphOnCpu, opened

    cuda_graph.Graph = GraphOnCpu
    torch.set_num_threads(1)
    path, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    model, inputs = words(), word_inputs()
    graphed = cuda_graph.captured(opened(path, model), inputs)

    def pinned():
        "Weights in memory of their own, so large that a reference which is left over shows."
        return {name: torch.empty(64 * 1024).as_strided(w.shape, w.stride()).copy_(w) if w.is_floating_point() else w
                for name, w in weights_of(model).items()}

    def call():
        graphed.run([tensor.clone() for tensor in inputs])

    def swap():
        global graphed
        other = graphed.with_weights(pinned())
        other.run(inputs)
        graphed.close()
        graphed = other

    def failed_capture():
        GraphOnCpu.failing = "no"
        try:
            graphed.with_weights(pinned())
        except cuda_graph.CaptureFailed:
            return
        raise SystemExit("did not fail")

    print(json.dumps(growth(globals(), plan)))
"""


def growth(library: Path, **times: int) -> dict[str, int]:
    """Bytes that a process grew by in each step; `swap` or `failed_capture` leaves 256 KB if it leaves its weights."""
    return growth_in_child(GROWTH, library, times)


def test_nothing_is_left_behind_by_calls_other_weights_and_failed_captures(words_library: Path) -> None:
    grown = growth(words_library, call=5000, swap=100, failed_capture=100)
    assert {step: size for step, size in grown.items() if size >= 4 * MB} == {}


@pytest.mark.soak
def test_nothing_is_left_behind_in_the_long_run(words_library: Path) -> None:
    grown = growth(words_library, call=100_000, swap=1000)
    assert {step: size for step, size in grown.items() if size >= 8 * MB} == {}
