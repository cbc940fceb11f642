"""A compiled library that is opened, called, and closed. What may end the process runs in one of its own."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from bentoml_compile.engines.aot import handles
from bentoml_compile.engines.aot.library import BoundLibrary, Layout, Library, LibraryError, open_library
from tests.engines.aot import libraries
from tests.engines.aot.libraries import Words, growth_in_child, in_child, weights_of, word_inputs, words

CPU = torch.device("cpu")
MB = 1 << 20
Kind = type[Library] | type[BoundLibrary]
both_kinds = pytest.mark.parametrize("kind", [Library, BoundLibrary])


@pytest.fixture(scope="session")
def long_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = (torch.ones(libraries.LONG, libraries.LONG),)
    return libraries.compile_library(libraries.Long(), inputs, tmp_path_factory.mktemp("long"), "long")


@pytest.fixture(scope="session")
def drawn_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    inputs = (torch.ones(3, 5),)
    return libraries.compile_library(libraries.Drawn(), inputs, tmp_path_factory.mktemp("drawn"), "drawn")


@pytest.fixture
def library(words_library: Path, model: Words) -> Iterator[Library]:
    opened = Library(words_library, device=CPU, weights=weights_of(model))
    yield opened
    opened.close()


def assert_as_eager(outputs: list[torch.Tensor | None], model: Words) -> None:
    torch.testing.assert_close(tuple(outputs), model(*word_inputs()))


# results


@both_kinds
def test_a_call_gives_what_eager_gives_and_none_where_it_gives_none(
    words_library: Path, model: Words, kind: Kind
) -> None:
    library = kind(words_library, device=CPU, weights=weights_of(model))
    outputs = library.run(word_inputs())
    assert_as_eager(outputs, model)
    assert outputs[1] is None
    assert (library.inputs, library.outputs) == (2, 3)
    library.close()


def test_outputs_are_not_overwritten_by_the_next_call(library: Library, model: Words) -> None:
    ids, mask = word_inputs()
    first = library.run([ids, mask])
    library.run([ids.flip(0), mask])
    assert_as_eager(first, model)


@both_kinds
def test_names_are_the_models_and_cover_small_and_non_persistent_tensors(
    words_library: Path, model: Words, kind: Kind
) -> None:
    library = kind(words_library, device=CPU, weights=weights_of(model))
    assert set(library.names) == {"embedding.weight", "head.weight", "head.bias", "scale", "offset"}
    library.close()


# weights


@both_kinds
def test_weights_are_read_in_place(words_library: Path, model: Words, kind: Kind) -> None:
    library = kind(words_library, device=CPU, weights=weights_of(model))
    before = library.run(word_inputs())[0]
    for tensor in weights_of(model).values():
        tensor.mul_(3)
    assert_as_eager(library.run(word_inputs()), model)
    after = library.run(word_inputs())[0]
    assert before is not None
    assert after is not None
    assert not torch.allclose(before, after)
    library.close()


def test_a_model_that_moves_its_weights_does_not_take_their_memory_away(library: Library, model: Words) -> None:
    before = library.run(word_inputs())
    model.double()  # gives each Parameter other memory; the old would be freed
    filler = [torch.full((4096,), torch.nan) for _ in range(64)]
    torch.testing.assert_close(library.run(word_inputs()), before)
    del filler


def test_two_libraries_on_one_file_have_weights_of_their_own(words_library: Path) -> None:
    models = [words(seed=0), words(seed=1)]
    opened = [Library(words_library, device=CPU, weights=weights_of(model)) for model in models]
    for _ in range(2):
        for library, model in zip(opened, models, strict=True):
            assert_as_eager(library.run(word_inputs()), model)
    opened[0].close()
    assert_as_eager(opened[1].run(word_inputs()), models[1])
    opened[1].close()


@both_kinds
def test_a_missing_weight_is_refused_by_name(words_library: Path, model: Words, kind: Kind) -> None:
    weights = weights_of(model)
    del weights["head.bias"], weights["offset"]
    with pytest.raises(LibraryError, match=r"(?s)(?=.*head\.bias is missing)(?=.*offset is missing)"):
        kind(words_library, device=CPU, weights=weights)


@both_kinds
def test_other_weights_are_another_container_and_may_outlive_the_first(
    words_library: Path, model: Words, kind: Kind
) -> None:
    first, other = kind(words_library, device=CPU, weights=weights_of(model)), words(seed=1)
    second = first.with_weights(weights_of(other))
    assert_as_eager(second.run(word_inputs()), other)
    assert_as_eager(first.run(word_inputs()), model)
    first.close()
    other.scale.mul_(3)
    assert_as_eager(second.run(word_inputs()), other)
    second.close()


def test_other_weights_need_no_file(words_library: Path, tmp_path: Path, model: Words) -> None:
    path = Path(shutil.copy(words_library, tmp_path / "deleted.so"))
    library = Library(path, device=CPU, weights=weights_of(model))
    path.unlink()
    other = words(seed=1)
    second = library.with_weights(weights_of(other))
    assert_as_eager(second.run(word_inputs()), other)
    library.close()
    second.close()


def test_the_binding_needs_the_file_for_other_weights_and_says_so(
    words_library: Path, tmp_path: Path, model: Words
) -> None:
    path = Path(shutil.copy(words_library, tmp_path / "bound.so"))
    library = BoundLibrary(path, device=CPU, weights=weights_of(model))
    path.unlink()
    with pytest.raises(LibraryError, match=r"bound\.so is gone, and torch's binding opens the file again"):
        library.with_weights(weights_of(model))
    assert_as_eager(library.run(word_inputs()), model)
    library.close()


WRONG: list[tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = [
    (r"is torch\.float64, not torch\.float32", torch.Tensor.double),
    (r"is float32\[32, 64\] with strides \[64, 1\], not float32\[64, 64\]", lambda weight: weight[:32]),
    (r"with strides \[1, 64\], not .* with strides \[64, 1\]", torch.Tensor.t),
    (r"is not a plain strided tensor", torch.Tensor.to_sparse),
    (r"is on meta, not on cpu", lambda weight: weight.to("meta")),
]


@both_kinds
@pytest.mark.parametrize(("message", "wrong"), WRONG)
def test_a_weight_that_is_not_as_it_was_compiled_for_is_refused(
    words_library: Path, model: Words, kind: Kind, message: str, wrong: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    weights = weights_of(model)
    expected = {name: Layout.of(weight) for name, weight in weights.items()}
    weights["head.weight"] = wrong(weights["head.weight"])
    with pytest.raises(LibraryError, match=rf"head\.weight .*{message}"):
        kind(words_library, device=CPU, weights=weights, expected=expected)
    library = kind(words_library, device=CPU, weights=weights_of(model), expected=expected)
    with pytest.raises(LibraryError, match=rf"head\.weight .*{message}"):
        library.with_weights(weights)
    assert_as_eager(library.run(word_inputs()), model)
    library.close()


def test_strides_of_dimensions_of_one_element_are_not_compared() -> None:
    weight = torch.ones(1, 4)
    assert Layout.of(weight).fits(Layout.of(weight.as_strided((1, 4), (99, 1))))
    assert not Layout.of(weight).fits(Layout.of(weight.as_strided((1, 4), (4, 0))))


# one call at a time


def test_a_single_threaded_library_runs_calls_of_several_threads_one_after_the_other(
    words_library: Path, model: Words
) -> None:
    library = Library(words_library, device=CPU, weights=weights_of(model), num_models=4, single_threaded=True)
    expected, right = model(*word_inputs())[0], []

    def call() -> None:
        for _ in range(100):
            [got, *_] = library.run(word_inputs())
            right.append(got is not None and torch.allclose(got, expected, atol=1e-5))

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    ids, mask = word_inputs()
    with pytest.raises(LibraryError, match="index out of bounds"):
        library.run([ids + libraries.WORDS, mask])
    assert_as_eager(library.run(word_inputs()), model)
    library.close()
    assert right == [True] * 400


# errors


WRONG_NUMBER = """
    import json, sys, torch
    from pathlib import Path
    from bentoml_compile.engines.aot import library
    from tests.engines.aot.libraries import weights_of, word_inputs, words

    ids, mask = word_inputs()

    def refusals(kind):
        opened = kind(Path(sys.argv[1]), device=torch.device("cpu"), weights=weights_of(words()))
        for inputs in ([ids], [ids, mask, mask], []):
            try:
                opened.run(inputs)
            except ValueError as error:
                yield str(error)
        yield len(opened.run([ids, mask]))

    print(json.dumps([list(refusals(kind)) for kind in (library.Library, library.BoundLibrary)]))
"""


def test_another_number_of_inputs_is_refused_before_the_call(words_library: Path) -> None:
    child = in_child(WRONG_NUMBER, words_library)
    assert child.code == 0, child.errors
    assert child.said == [[*(f"the compiled library takes 2 tensors, not {number}" for number in (1, 3, 0)), 3]] * 2


@both_kinds
def test_a_failed_call_says_why_in_one_line_and_leaves_the_library_usable(
    words_library: Path, model: Words, kind: Kind
) -> None:
    library = kind(words_library, device=CPU, weights=weights_of(model))
    ids, mask = word_inputs()
    for _ in range(3):
        with pytest.raises(LibraryError, match=r"^index out of bounds: 0 <= \w+ < 11L$"):
            library.run([ids + libraries.WORDS, mask])
        assert_as_eager(library.run([ids, mask]), model)
    library.close()


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("not a library")
    with pytest.raises(LibraryError, match=r"text\.so is not a shared library"):
        Library(tmp_path / "text.so", device=CPU, weights={})
    with pytest.raises(LibraryError, match=r"missing\.so is not a shared library"):
        Library(tmp_path / "missing.so", device=CPU, weights={})


def test_another_file_under_an_opened_path_is_refused_instead_of_answering_with_the_old_code(
    words_library: Path, long_library: Path, tmp_path: Path, model: Words
) -> None:
    path = Path(shutil.copy(words_library, tmp_path / "model.so"))
    Library(path, device=CPU, weights=weights_of(model)).close()
    Library(path, device=CPU, weights=weights_of(model)).close()
    os.replace(shutil.copy(long_library, tmp_path / "new.so"), path)
    with pytest.raises(LibraryError, match=r"model\.so was replaced"):
        Library(path, device=CPU, weights=weights_of(model))


# closing


@both_kinds
def test_a_closed_library_refuses_calls_and_may_be_closed_again(words_library: Path, model: Words, kind: Kind) -> None:
    library = kind(words_library, device=CPU, weights=weights_of(model))
    library.close()
    library.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"words\.so was closed"):
            library.run(word_inputs())


CLOSE_UNDER_LOAD = """
    import json, sys, torch
    from pathlib import Path
    from bentoml_compile.engines.aot.library import Library
    from tests.engines.aot.libraries import close_under_load, weights_of

    path = Path(sys.argv[1])
    opened = lambda model: Library(path, device=torch.device("cpu"), weights=weights_of(model))
    print(json.dumps(close_under_load(opened, threads=8)))
"""


def test_closing_waits_for_the_calls_under_way_and_turns_the_waiting_away(words_library: Path) -> None:
    child = in_child(CLOSE_UNDER_LOAD, words_library)
    assert child.code == 0, child.errors
    assert child.said == [True, 20 * 8, ["words.so was closed"], []]


# threads

EIGHT_CALLERS = """
    import json, sys, threading, torch
    from pathlib import Path
    from bentoml_compile.engines.aot.library import Library, LibraryError
    from tests.engines.aot.libraries import WORDS, weights_of, word_inputs, words

    model, (ids, mask) = words(), word_inputs()
    library = Library(
        Path(sys.argv[1]), device=torch.device("cpu"), weights=weights_of(model), num_models=int(sys.argv[2])
    )
    expected, counts, lock = model(ids, mask)[0], {"right": 0, "wrong": 0, "failed": 0}, threading.Lock()

    def call(number):
        for turn in range(200):
            try:
                good = turn < 150 and (turn + number) % 3  # at the end all fail: nobody wakes who was forgotten
                [got, _, _] = library.run([ids if good else ids + WORDS, mask])
                outcome = "right" if good and torch.allclose(got, expected, atol=1e-5) else "wrong"
            except LibraryError:
                outcome = "wrong" if good else "failed"
            with lock:
                counts[outcome] += 1

    threads = [threading.Thread(target=call, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    library.close()
    print(json.dumps(counts))
"""


@pytest.mark.parametrize("num_models", [1, 2])
def test_eight_callers_of_whom_some_fail_do_not_wait_for_each_other_for_ever(
    words_library: Path, num_models: int
) -> None:
    child = in_child(EIGHT_CALLERS, words_library, num_models, deadline=300)
    assert child.code == 0, child.errors
    assert child.said["wrong"] == 0
    assert child.said["right"] + child.said["failed"] == 8 * 200
    assert child.said["failed"] >= 8 * 50


def test_other_threads_go_on_while_a_call_runs(long_library: Path) -> None:
    inputs = (torch.ones(libraries.LONG, libraries.LONG),)
    off_the_lock = Library(long_library, device=CPU, weights={})
    on_the_lock = BoundLibrary(long_library, device=CPU, weights={})
    steps, stop = [0], threading.Event()

    def count() -> None:
        while not stop.is_set():
            steps[0] += 1

    def steps_a_second(work: Callable[[], object]) -> list[float]:
        found = []
        for _ in range(3):
            before, began = steps[0], time.perf_counter()
            work()
            found.append((steps[0] - before) / (time.perf_counter() - began))
        return found

    thread = threading.Thread(target=count)
    thread.start()
    try:
        undisturbed = statistics.median(steps_a_second(lambda: time.sleep(0.2)))
        off = max(steps_a_second(lambda: off_the_lock.run(inputs)))  # any of them may be paused, or the count beside it
        on = min(steps_a_second(lambda: on_the_lock.run(inputs)))
    finally:
        stop.set()
        thread.join()
    off_the_lock.close()
    on_the_lock.close()
    assert off > undisturbed / 10
    assert on < undisturbed / 10  # or the test shows nothing


# memory

GROWTH = """
    import json, sys, torch
    from pathlib import Path
    from bentoml_compile.engines.aot.library import Library, LibraryError
    from tests.engines.aot.libraries import WORDS, growth, weights_of, word_inputs, words

    path, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    cpu, model = torch.device("cpu"), words()

    def pinning(tensor, kilobytes):
        "A copy in memory of its own, so large that a reference which is left over shows."
        memory = torch.ones(kilobytes * 1024, dtype=torch.uint8).view(tensor.dtype)
        return memory[: tensor.numel()].view(tensor.shape).copy_(tensor)

    def open_and_close():
        weights = {name: pinning(weight, 64) for name, weight in weights_of(model).items()}
        library = Library(path, device=cpu, weights=weights)
        library.run(word_inputs())
        library.close()

    def refused_open():
        weights = {name: pinning(weight, 64) for name, weight in weights_of(model).items()}
        weights["scale"] = weights["scale"].double()
        try:
            Library(path, device=cpu, weights=weights)
        except LibraryError:
            return
        raise SystemExit("was not refused")

    library = Library(path, device=cpu, weights=weights_of(model))

    def other_weights():
        other = library.with_weights({name: pinning(weight, 64) for name, weight in weights_of(model).items()})
        other.run(word_inputs())
        other.close()

    def call():
        library.run([pinning(tensor, 64) for tensor in word_inputs()])

    def failed_call():
        ids, mask = [pinning(tensor, 64) for tensor in word_inputs()]
        ids += WORDS
        try:
            library.run([ids, mask])
        except LibraryError:
            return
        raise SystemExit("did not fail")

    def refused_call():
        ids, mask = [pinning(tensor, 64) for tensor in word_inputs()]
        try:
            library.run([ids, mask.t()])
        except LibraryError as error:
            assert "unmatched" in str(error), error
            return
        raise SystemExit("was not refused")

    print(json.dumps(growth(globals(), plan)))
"""


def growth(library: Path, **times: int) -> dict[str, int]:
    """Bytes that a process grew by in each step; one leaves at least 64 KB behind if it leaves anything."""
    env = {**os.environ, "AOTI_RUNTIME_CHECK_INPUTS": "1"}
    return growth_in_child(GROWTH, library, times, env)


def test_nothing_is_left_behind_by_calls_and_weights_that_succeed_fail_or_are_refused(words_library: Path) -> None:
    grown = growth(
        words_library,
        call=5000,
        failed_call=300,
        refused_call=300,
        open_and_close=100,
        refused_open=100,
        other_weights=100,
    )
    assert {step: size for step, size in grown.items() if size >= 4 * MB} == {}


@pytest.mark.soak
def test_nothing_is_left_behind_in_the_long_run(words_library: Path) -> None:
    grown = growth(words_library, call=100_000, failed_call=10_000, open_and_close=1000, other_weights=1000)
    assert {step: size for step, size in grown.items() if size >= 8 * MB} == {}


# which of the two


def test_operators_without_a_c_function_run_by_the_binding(
    drawn_library: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, logger="bentoml_compile"):
        library = open_library(drawn_library, device=CPU, weights={})
    assert isinstance(library, BoundLibrary)
    assert "drawn.so runs by torch's binding: it has operators" in caplog.text
    [drawn] = library.run([torch.eye(5)[[1, 2, 3]] + torch.eye(5)[0]])
    assert drawn is not None
    assert [sorted(row) for row in drawn.tolist()] == [[0, 1], [0, 2], [0, 3]]
    library.close()


def test_operators_without_a_c_function_are_an_error_off_the_lock(drawn_library: Path) -> None:
    library = Library(drawn_library, device=CPU, weights={})
    with pytest.raises(LibraryError, match="proxy_executor"):
        library.run([torch.ones(3, 5)])
    library.close()


def test_a_torch_without_its_private_functions_is_served_by_the_binding(
    words_library: Path, model: Words, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(handles, "_take_over", None)
    with caplog.at_level(logging.DEBUG, logger="bentoml_compile"):
        library = open_library(words_library, device=CPU, weights=weights_of(model))
    assert isinstance(library, BoundLibrary)
    assert "no functions for tensor handles" in caplog.text
    assert_as_eager(library.run(word_inputs()), model)
    library.close()


def test_everything_else_runs_off_the_lock(words_library: Path, model: Words) -> None:
    library = open_library(words_library, device=CPU, weights=weights_of(model))
    assert isinstance(library, Library)
    library.close()


# what opening needs

OPEN_AND_RUN = """
    import json, os, sys, torch
    from pathlib import Path
    from bentoml_compile.engines.aot.library import open_library
    from tests.engines.aot.libraries import weights_of, word_inputs, words

    model = words()
    library = open_library(Path(sys.argv[1]), device=torch.device("cpu"), weights=weights_of(model))
    right = torch.allclose(library.run(word_inputs())[0], model(*word_inputs())[0], atol=1e-5)
    heavy = [name for name in sys.modules if name.startswith(("torch._dynamo", "torch._inductor"))]
    print(json.dumps([type(library).__name__, right, heavy]), flush=True)
    if sys.argv[2:] == ["killed"]:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("end", [pytest.param("by itself", marks=pytest.mark.soak), "killed"])
def test_opening_needs_no_compiler_imports_none_and_leaves_no_file(
    words_library: Path, tmp_path: Path, end: str
) -> None:
    kept = sorted(words_library.parent.iterdir())
    env = {**os.environ, "PATH": "", "TMPDIR": str(tmp_path)}
    env.pop("TORCHINDUCTOR_CACHE_DIR", None)
    child = in_child(OPEN_AND_RUN, words_library, end, env=env)
    assert child.said == ["Library", True, []], child.errors
    assert child.code == (-signal.SIGKILL if end == "killed" else 0)
    assert list(tmp_path.iterdir()) == []
    assert sorted(words_library.parent.iterdir()) == kept


def test_a_library_can_be_deleted_after_it_was_opened(words_library: Path, tmp_path: Path, model: Words) -> None:
    path = Path(shutil.copy(words_library, tmp_path / "deleted.so"))
    library = Library(path, device=CPU, weights=weights_of(model))
    path.unlink()
    assert_as_eager(library.run(word_inputs()), model)
    library.close()
