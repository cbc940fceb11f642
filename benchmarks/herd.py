"""Machines that boot one model at once against one remote: who compiles, how long it takes, what the remote is asked.

    python -m benchmarks.herd

20 processes stand for 20 machines: each has an empty store and temporary folder of its own, the signing key and the
same remote: moto's S3 server on the loopback interface, which counts requests, or --uri. First all boot at once with
nothing at the remote: one is to compile and the others to load its artifact. Then 20 others boot at once, with empty
stores again: all are to load. The clock starts for all alike, with the model in memory, and ends with the machine's
first compiled result. A machine that compiles although it need not, or answers wrongly, is an error.

The processes are forked from one that has imported torch, transformers and s3fs (20 at once do not fit into a small
machine otherwise): no boot's seconds have these imports in them. They share the cores: a boot takes longer here than on
a machine of its own, and could meet the default remote_timeout of 5 s, which is 60 s here for that reason. Prints a
table and writes benchmarks/results/herd.json. Decides nothing by a time.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import secrets
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks import machine, models
from benchmarks.herd_server import Asked, CountingServer
from bentoml_compile.artifacts.remote import uploads
from bentoml_compile.artifacts.signing import KEY, PrivateKey
from bentoml_compile.listener import Listener, Stage
from bentoml_compile.model import compile_model

RESULTS = Path(__file__).resolve().parent / "results"
MODELS = {"tiny": "two linear layers, 2 x 16", "minilm": models.MODELS["minilm"]}
IMPORTED = ("transformers.models.bert.modeling_bert", "s3fs", "bentoml_compile.sharing")
CONFIG = {"engine": "aot", "keep_eager_if_slower": False}
REMOTE_TIMEOUT = 60.0  # seconds; with the default of 5, machines that share cores give up for want of a core
PATIENCE = 900.0  # seconds until a machine counts as hung
LARGEST_ERROR = 1e-3  # of values of about 1

_fork = multiprocessing.get_context("fork")


@dataclass(frozen=True, slots=True)
class Boot:
    """One machine's; seconds from the common start."""

    outcome: str
    found: str  # where its artifact was
    waited: str  # how its wait for another machine ended, if it had to wait
    ready_seconds: float
    answer_seconds: float
    uploaded_seconds: float | None  # of the machine that compiled
    fallbacks: tuple[str, ...]
    rejected: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Remote:
    """`server` is None where the URI was given, and nothing is counted."""

    uri: str
    server: CountingServer | None


# in a process of its own


class _Heard(Listener):
    def __init__(self) -> None:
        self.found = self.waited = ""
        self.fallbacks: list[str] = []

    def stage_ended(self, stage: Stage) -> None:
        self.found = str(stage.attributes.get("place", self.found))
        if stage.name == "wait":
            self.waited = str(stage.attributes.get("outcome"))

    def fallback(self, model: str, reason: str) -> None:
        self.fallbacks.append(reason)


def _machine(
    number: int, key: str, remote: Remote, config: Mapping[str, Any], all_ready: Any, pipe: Connection
) -> None:
    with tempfile.TemporaryDirectory() as name:
        os.environ.update({"TMPDIR": name, "TORCHINDUCTOR_CACHE_DIR": f"{name}/cache"})
        tempfile.tempdir = None
        if remote.server is not None:
            import fsspec.config

            fsspec.config.conf["s3"] = remote.server.options(number)
        try:
            pipe.send(_boot(key, config, Path(name), all_ready))
        except BaseException as error:
            pipe.send(error if isinstance(error, Exception) else RuntimeError(repr(error)))
            raise


def _boot(key: str, config: Mapping[str, Any], directory: Path, all_ready: Barrier) -> Boot:
    model, inputs = _tiny() if key == "tiny" else models.make(key)
    heard = _Heard()
    all_ready.wait(PATIENCE)
    started = time.monotonic()
    compiled = compile_model(
        model, example_inputs=[inputs], config=config, listeners=[heard], default_store=directory / "store"
    )
    ready = time.monotonic()
    with torch.inference_mode():
        output = compiled(**inputs)
        answered = time.monotonic()
        error = float((_tensor(output) - _tensor(model(**inputs))).abs().max())
    if not error < LARGEST_ERROR:
        raise RuntimeError(f"the result differs from eager's by up to {error}")
    if not uploads.wait(PATIENCE):
        raise RuntimeError("the upload did not end")
    compiled_here = compiled.report.outcome == "compiled"
    return Boot(
        compiled.report.outcome,
        heard.found,
        heard.waited,
        ready - started,
        answered - started,
        time.monotonic() - started if compiled_here else None,
        tuple(heard.fallbacks),
        tuple(f"{item.artifact}: {item.reason}" for item in compiled.report.rejected),
    )


def _tiny() -> tuple[torch.nn.Module, models.Inputs]:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(16, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    return torch.nn.Sequential(*layers).eval(), {"input": torch.randn(2, 16)}


def _tensor(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else models.first_tensor(output)


# here: herds, results


def main() -> None:
    arguments = _arguments()
    for name in IMPORTED:
        importlib.import_module(name)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    gc.freeze()  # what is imported is neither searched for garbage by each machine nor copied for that
    with ExitStack() as stack:
        server = None if arguments.uri else stack.enter_context(CountingServer())
        remote = Remote(arguments.uri or server.uri, server)  # type: ignore[union-attr]
        herds = {MODELS[key]: measure(key, arguments.machines, remote) for key in arguments.model or list(MODELS)}
    print(table(herds))
    result = {
        "machine": machine.describe(),
        "remote": arguments.uri or "moto's S3 server on the loopback interface of the same machine",
        "imported_before_the_clock": ["torch", *IMPORTED],
        "config": {**CONFIG, "artifacts": {"remote_timeout": REMOTE_TIMEOUT}},
        "models": herds,
    }
    arguments.into.mkdir(parents=True, exist_ok=True)
    (arguments.into / "herd.json").write_text(json.dumps(result, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", type=int, default=20, help="that boot at once (default: %(default)s)")
    parser.add_argument("--model", action="append", choices=MODELS, help="this model; may be given more than once")
    parser.add_argument("--uri", help="of a remote that fsspec can reach, instead of moto's server")
    parser.add_argument("--into", type=Path, default=RESULTS, help="folder of herd.json (default: %(default)s)")
    return parser.parse_args()


def measure(key: str, machines: int, remote: Remote) -> dict[str, Any]:
    """Both herds of one model; what herd.json has under its name.

    Raises:
        RuntimeError: more or fewer machines compiled than should.
    """
    signing = PrivateKey.new()
    os.environ[KEY] = signing.to_pem().decode()
    uri = f"{remote.uri}/{secrets.token_hex(4)}"  # empty
    config = {
        **CONFIG,
        "artifacts": {"remote": uri, "remote_timeout": REMOTE_TIMEOUT, "public_keys": [str(signing.public)]},
    }
    herds = {}
    for herd, compiles in (("cold", 1), ("warm", 0)):
        boots = _boot_all(key, machines, remote, config)
        found = [boot.outcome for boot in boots]
        if found.count("compiled") != compiles or found.count("loaded") != machines - compiles:
            raise RuntimeError(f"{key}, {herd}: {compiles} should have compiled: {boots}")
        herds[herd] = summary(boots, remote.server.take() if remote.server is not None else None)
        print(f"{MODELS[key]}, {herd}: {compiles} compiled, the last answer after", end=" ")
        print(f"{herds[herd]['last_seconds']:.2f} s", flush=True)
    return herds


def _boot_all(key: str, machines: int, remote: Remote, config: Mapping[str, Any]) -> list[Boot]:
    all_ready = _fork.Barrier(machines)
    started = []
    for number in range(machines):
        ours, theirs = _fork.Pipe(duplex=False)
        process = _fork.Process(target=_machine, args=(number, key, remote, config, all_ready, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    boots = []
    try:
        for number, (_, pipe) in enumerate(started):
            answer = pipe.recv() if pipe.poll(PATIENCE) else RuntimeError(f"machine {number} hangs")
            if isinstance(answer, Exception):
                raise answer
            boots.append(answer)
    finally:
        for process, _ in started:
            process.join(5.0 if len(boots) == machines else 0.0)
            process.kill()
    return boots


def summary(boots: Sequence[Boot], asked: Mapping[int, Asked] | None) -> dict[str, Any]:
    """What became of a herd. Requests are given for the machines that compiled and for those that loaded."""
    seconds = sorted(boot.answer_seconds for boot in boots)
    compiled = [number for number, boot in enumerate(boots) if boot.outcome == "compiled"]
    loaded = [number for number, boot in enumerate(boots) if boot.outcome == "loaded"]
    return {
        "machines": len(boots),
        "compiles": len(compiled),
        "first_seconds": seconds[0],
        "median_seconds": statistics.median(seconds),
        "last_seconds": seconds[-1],
        "waited_for_another_machine": sum(bool(boot.waited) for boot in boots),
        "asked_by_the_one_that_compiled": _asked_by(compiled, asked),
        "asked_by_those_that_loaded": _asked_by(loaded, asked),
        "boots": [asdict(boot) for boot in boots],
    }


def _asked_by(numbers: Sequence[int], asked: Mapping[int, Asked] | None) -> dict[str, Any] | None:
    if asked is None or not numbers:
        return None
    total = Asked()
    for number in numbers:
        total.add(asked.get(number, Asked()))
    each = {kind: round(count / len(numbers), 2) for kind, count in sorted(total.requests.items())}
    return {
        "machines": len(numbers),
        "requests_each": each,
        "requests": dict(sorted(total.requests.items())),
        "errors": dict(sorted(total.errors.items())),  # a lease that is not there, or is another's, is none of a fault
        "received_bytes": total.received_bytes,
        "sent_bytes": total.sent_bytes,
    }


def table(herds: Mapping[str, Mapping[str, Any]]) -> str:
    """Markdown: seconds from the common start to the first compiled answer, and requests of a machine that loaded."""
    lines = [
        "| model | boots | compiles | first, s | median | last | requests of one that loaded | MB sent to it |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for model, by_herd in herds.items():
        for herd, row in by_herd.items():
            seconds = " | ".join(f"{row[f'{name}_seconds']:.2f}" for name in ("first", "median", "last"))
            cells = f"{row['machines']} {herd} | {row['compiles']} | {seconds} | {_cells(row)}"
            lines.append(f"| {model} | {cells} |")
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> str:
    asked = row["asked_by_those_that_loaded"]
    if asked is None:
        return "not counted | not counted"
    each = ", ".join(f"{count:g} {kind}" for kind, count in asked["requests_each"].items())
    return f"{each} | {asked['sent_bytes'] / asked['machines'] / 1e6:.2f}"


if __name__ == "__main__":
    main()
