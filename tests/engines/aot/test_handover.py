"""What arrives in another process of a program and of this process's settings. Nothing is compiled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bentoml_compile.engines.aot import handover
from tests.engines.aot.libraries import in_child
from tests.engines.aot.programs import CPU, IDS, Tied, exported, small


def test_tensors_have_their_layout_and_share_their_memory(tmp_path: Path) -> None:
    program = exported(Tied(), IDS)
    before = {name: tensor.data_ptr() for name, tensor in program.state_dict.items()}
    handover.write(handover.Job(program, CPU, "default", {"max_fusion_size": 32}), tmp_path)
    with torch.no_grad(), handover.reading(tmp_path) as job:
        read = {**job.program.state_dict, **job.program.constants}
    assert job.options == {"max_fusion_size": 32}
    assert read["head.weight"].data_ptr() == read["embedding.weight"].data_ptr()
    assert read["norm.weight"].data_ptr() != read["norm.bias"].data_ptr()
    for name, tensor in {**program.state_dict, **program.constants}.items():
        assert isinstance(tensor, torch.Tensor)
        assert (read[name].dtype, read[name].shape, read[name].stride()) == (
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
        )
        assert isinstance(read[name], nn.Parameter) == isinstance(tensor, nn.Parameter)
    assert read["scale"].item() == 2.0
    assert torch.equal(read["expanded"], program.state_dict["expanded"])
    assert {name: tensor.data_ptr() for name, tensor in program.state_dict.items()} == before


def test_weights_are_not_written(tmp_path: Path) -> None:
    program = exported(nn.Linear(4096, 4096), torch.rand(2, 4096))
    handover.write(handover.Job(program, CPU, "default", {}), tmp_path)
    assert sum(file.stat().st_size for file in tmp_path.iterdir() if file.is_file()) < 1 << 20


def test_the_other_process_has_this_ones_settings_and_needs_none_of_its_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A module that is found by sys.path alone, and that is not to be imported there."""
    (tmp_path / "only_here.py").write_text(
        "import dataclasses, torch\n"
        "from torch.utils import _pytree\n"
        "@dataclasses.dataclass\n"
        "class Output:\n    x: torch.Tensor\n"
        "torch.export.register_dataclass(Output, serialized_type_name='only_here.Output')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    class Model(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return only_here.Output(x + 1)

    job = handover.Job(exported(Model(), torch.rand(2)), CPU, "default", {})
    threads, dtype, precision = torch.get_num_threads(), torch.get_default_dtype(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(3)
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("medium")
        torch.use_deterministic_algorithms(True, warn_only=True)
        monkeypatch.setattr(torch.backends.mkldnn, "deterministic", True)
        with torch._inductor.config.patch({"max_fusion_size": 17, "cpp.min_chunk_size": 99}):
            handover.write(job, tmp_path)
    finally:
        torch.set_num_threads(threads)
        torch.set_default_dtype(dtype)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(False)
    said = in_child(
        """
        import json, pathlib, sys, torch
        from bentoml_compile.engines.aot import handover
        with handover.reading(pathlib.Path(sys.argv[1])) as job:
            config = torch._inductor.config
            print(json.dumps([
                torch.get_num_threads(), str(torch.get_default_dtype()), torch.get_float32_matmul_precision(),
                torch.is_deterministic_algorithms_warn_only_enabled(), torch.backends.mkldnn.deterministic,
                config.max_fusion_size, config.cpp.min_chunk_size, "only_here" in sys.modules,
            ]))
        """,
        tmp_path,
    )
    assert said.said == [3, "torch.float64", "medium", True, True, 17, 99, False], said.errors


def test_a_setting_that_does_not_arrive_is_an_error(tmp_path: Path) -> None:
    handover.write(handover.Job(small(), CPU, "default", {}), tmp_path)
    said = in_child(
        """
        import os, pathlib, sys
        os.environ["TORCHINDUCTOR_FREEZING"] = "1"
        from bentoml_compile.engines.aot import handover
        with handover.reading(pathlib.Path(sys.argv[1])): pass
        """,
        tmp_path,
    )
    assert said.code == 1
    assert "compiler environment is" in said.errors
