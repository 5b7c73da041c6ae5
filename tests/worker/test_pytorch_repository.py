"""Models of PyTorch in a repository: what they take and give is known without PyTorch, or asked for."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from cotenant.core.tensor import ModelInfo, TensorSpec
from cotenant.errors import ModelError
from cotenant.worker import repository, runners
from tests.worker import modules

EDGES = """
input { name: "x" data_type: TYPE_FP32 dims: [2] }
output [ { name: "y" data_type: TYPE_FP32 dims: [2] }, { name: "total" data_type: TYPE_FP32 dims: [1] } ]
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for platform in modules.KINDS:
        modules.double(folder, platform)
    return folder


def put(root: Path, saved: Path, *files: str, config: str = "") -> Path:
    folder = root / "m"
    (folder / "1").mkdir(parents=True)
    for file in files:
        shutil.copy(saved / file, folder / "1" / file)
    (folder / "config.pbtxt").write_text(config)
    return folder


def describe(root: Path) -> ModelInfo:
    return repository.describe(repository.find_model(root, "m"))


@pytest.mark.parametrize(("platform", "file"), modules.KINDS.items())
def test_describe_pytorch_model_matches_what_the_runner_takes(
    tmp_path: Path, saved: Path, platform: str, file: str
) -> None:
    put(tmp_path, saved, file, config="" if file == "model.pt2" else f"max_batch_size: 8 {EDGES}")
    entry = repository.find_model(tmp_path, "m")
    info = repository.describe(entry)
    assert (info.platform, info.max_batch_size) == (platform, 32 if file == "model.pt2" else 8)
    assert info.inputs == (TensorSpec("x", "FP32", (-1, 2)),)
    assert [spec.shape for spec in info.outputs] == [(-1, 2), (-1, 1)]
    model = repository.worker_model(entry, info)
    assert (model.path, model.platform, model.batched, model.gradients) == (str(entry.path), platform, True, False)
    assert bool(model.graphs) == (platform != "pytorch_module")
    runner, _ = runners.load_runner(model, threads=1, fake=False)
    (tensor,) = repository.sample_inputs(entry, info, 3, np.random.default_rng(0))
    answers = runner.run({"x": tensor.array()})
    assert [(name, array.shape) for name, array in answers] == [
        (spec.name, (3, *spec.shape[1:])) for spec in info.outputs
    ]


def test_describe_pytorch_model_does_not_import_torch(tmp_path: Path, saved: Path) -> None:
    put(tmp_path, saved, "model.pt2")
    program = (
        "import sys; from pathlib import Path; from cotenant.worker.repository import describe, find_model; "
        f"describe(find_model(Path({str(tmp_path)!r}), 'm')); assert 'torch' not in sys.modules"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize(
    ("files", "config", "file", "platform"),
    [
        (("model.pt", "model.py"), "", "model.pt", "pytorch_libtorch"),
        (("model.pt", "model.py"), 'backend: "pytorch" runtime: "model.py"', "model.py", "pytorch_module"),
        (("model.pt2",), 'backend: "pytorch"', "model.pt2", "pytorch_export"),
        (("model.py",), 'platform: "pytorch_module"', "model.py", "pytorch_module"),
        (("model.py",), 'platform: "pytorch_libtorch"', "model.pt", "pytorch_libtorch"),
        (("model.pt",), 'backend: "pytorch" default_model_filename: "model.pt2"', "model.pt2", "pytorch_export"),
        (("model.pt",), 'platform: "pytorch_libtorch" default_model_filename: "w.bin"', "w.bin", "pytorch_libtorch"),
    ],
)
def test_find_model_several_files_config_selects_one(
    tmp_path: Path, saved: Path, files: tuple[str, ...], config: str, file: str, platform: str
) -> None:
    put(tmp_path, saved, *files, config=config)
    entry = repository.find_model(tmp_path, "m")
    assert (entry.path.name, entry.platform) == (file, platform)
    assert bool(entry.reason) == (file not in files)


def test_describe_indexed_names_are_sorted_by_index(tmp_path: Path, saved: Path) -> None:
    config = """
    input [ { name: "IN__1" data_type: TYPE_INT64 dims: [-1, 3] }, { name: "IN__0" data_type: TYPE_BF16 dims: [2] } ]
    output { name: "y" data_type: TYPE_BOOL dims: [4] }
    """
    put(tmp_path, saved, "model.pt", config=config)
    info = describe(tmp_path)
    assert info.max_batch_size == 0
    assert info.inputs == (TensorSpec("IN__0", "BF16", (2,)), TensorSpec("IN__1", "INT64", (-1, 3)))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            "max_batch_size: 8",
            "model.pt does not say what it takes; list it: "
            '`input { name: "INPUT__0" data_type: TYPE_FP32 dims: [3, 224, 224] }`',
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 dims: [2] }',
            "model.pt does not say what it gives; list it: "
            '`output { name: "OUTPUT__0" data_type: TYPE_FP32 dims: [3, 224, 224] }`',
        ),
        (
            'input { name: "x" data_type: TYPE_STRING dims: [2] }',
            "input 'x' has the data_type 'TYPE_STRING', PyTorch has no strings; give one such as TYPE_FP32",
        ),
        (
            'input { name: "x" dims: [2] }',
            "input 'x' has the data_type '', none of Triton's types; give one such as TYPE_FP32",
        ),
        (
            'input { name: "x" data_type: TYPE_FP32 }',
            "input 'x' needs a name and dims, without the batch dimension",
        ),
    ],
)
def test_describe_incomplete_config_raises_model_error(tmp_path: Path, saved: Path, config: str, reason: str) -> None:
    folder = put(tmp_path, saved, "model.pt", config=config)
    with pytest.raises(ModelError, match=f"^{re.escape(f'{folder}/config.pbtxt: {reason}')}$"):
        describe(tmp_path)


ALL = ((1, 1), (2, 2), (3, 3), (4, 4), (6, 5), (8, 7))


@pytest.mark.parametrize(
    ("config", "gradients", "graphs", "must"),
    [
        ("", False, ALL, False),
        ('parameters { key: "INFERENCE_MODE" value { string_value: "false" } }', True, (), False),
        ("optimization { cuda { graphs: true } }", False, ALL, True),
        ("optimization { cuda { graphs: false } }", False, (), False),
        (
            "optimization { cuda { graphs: true graph_spec [ { batch_size: 3 }, { batch_size: 0 } ] } }",
            False,
            ((3, 3), (1, 1)),
            True,
        ),
        ("optimization { cuda { graph_spec { batch_size: 3 } } }", False, (), False),
        (
            "optimization { cuda { graphs: true graph_spec { batch_size: 5 graph_lower_bound { batch_size: 2 } } } }",
            False,
            ((5, 2),),
            True,
        ),
    ],
)
def test_worker_model_config_sets_gradients_and_graphs(
    tmp_path: Path, saved: Path, config: str, gradients: bool, graphs: tuple[tuple[int, int], ...], must: bool
) -> None:
    put(tmp_path, saved, "model.pt", config=f"max_batch_size: 8 {EDGES} {config}")
    entry = repository.find_model(tmp_path, "m")
    model = repository.worker_model(entry, repository.describe(entry))
    assert (model.gradients, model.graphs, model.must_capture) == (gradients, graphs, must)


@pytest.mark.parametrize("largest", [1, 2, 5, 32, 100])
def test_worker_model_graphs_hold_every_batch_and_pad_it_by_a_half_at_most(
    tmp_path: Path, saved: Path, largest: int
) -> None:
    put(tmp_path, saved, "model.pt", config=f"max_batch_size: {largest} {EDGES}")
    entry = repository.find_model(tmp_path, "m")
    sizes = repository.worker_model(entry, repository.describe(entry)).graphs
    for rows in range(1, largest + 1):
        (size,) = [size for size, lowest in sizes if lowest <= rows <= size]
        assert size <= 1.5 * rows


class Named(torch.nn.Module):
    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        kept = ids * mask
        return {"kept": kept, "any": kept.bool().any(1, keepdim=True)}


def test_describe_exported_model_gives_names_and_types(tmp_path: Path) -> None:
    length = torch.export.Dim("length", max=512)
    shapes = {name: {0: torch.export.Dim.DYNAMIC, 1: length} for name in ("ids", "mask")}
    ones = torch.ones(2, 4, dtype=torch.int64)
    folder = tmp_path / "m" / "1"
    folder.mkdir(parents=True)
    torch.export.save(torch.export.export(Named(), (ones, ones), dynamic_shapes=shapes), folder / "model.pt2")
    info = describe(tmp_path)
    assert info.inputs == tuple(TensorSpec(name, "INT64", (-1, -1)) for name in ("ids", "mask"))
    assert info.outputs == (TensorSpec("kept", "INT64", (-1, -1)), TensorSpec("any", "BOOL", (-1, 1)))

    torch.export.save(torch.export.export(Named(), (ones,), {"mask": ones}), folder / "model.pt2")
    with pytest.raises(
        ModelError, match=r"exported with keyword arguments; export it with its inputs in `args` alone$"
    ):
        describe(tmp_path)


def test_describe_file_that_torch_export_did_not_save_raises_model_error(tmp_path: Path, saved: Path) -> None:
    file = put(tmp_path, saved, "model.pt2") / "1" / "model.pt2"
    whole = file.read_bytes()
    for broken in (b"no zip", whole[: len(whole) // 2]):
        file.write_bytes(broken)
        with pytest.raises(ModelError, match=rf"^{file}: not what torch.export.save of PyTorch 2.9 or later writes: "):
            describe(tmp_path)
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("m/models/model.json", '{"graph_module": 3}')
    with pytest.raises(ModelError, match=r"writes: Expected `object`, got `int` .*; export it again$"):
        describe(tmp_path)
