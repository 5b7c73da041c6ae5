"""The architectures in PyTorch: their counts of weights, as torchvision gives them, and that they run as served."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cotenant import zoo
from cotenant.core.tensor import Tensor
from cotenant.errors import ConfigError
from cotenant.worker import repository, runners
from cotenant.worker.runners.arrays import Array
from cotenant.worker.wire import WorkerModel
from cotenant.zoo import networks

PARAMETERS = {
    "lenet": 61_706,
    "googlenet": 6_624_904,  # without the classifiers that only training needs
    "resnet50": 25_557_032,
    "vgg16": 138_357_544,
    "mnasnet": 4_383_312,
    "mobilenet_v2": 3_504_872,
    "densenet161": 28_681_000,
    "alexnet": 61_100_840,
    "efficientnet_b0": 5_288_548,
    "resnet18": 11_689_512,
    "vgg19": 143_667_240,
    "bert": 109_482_240,
    "albert": 11_683_584,
    "vit": 86_567_656,
    "wav2vec2": 94_396_320,
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """Several would wait for each other where other processes are at work."""
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", networks.NETWORKS)
def test_network_has_the_documented_size_and_output_shapes(name: str) -> None:
    """On no device: nothing is computed. A step of training needs real weights."""
    network = networks.NETWORKS[name]
    with torch.device("meta"), torch.no_grad():
        module = network.make().eval()
        if name in PARAMETERS:
            assert sum(weight.numel() for weight in module.parameters()) == PARAMETERS[name]
        if network.trains:
            return
        given = module(*(tensor.to("meta") for tensor in network.example(3)))
    outputs = given if isinstance(given, tuple) else (given,)
    assert [tuple(it.shape) for it in outputs] == [(3, *shape) for _, shape in network.outputs.values()]


def test_ssd_mobilenet_equals_the_onnx_network() -> None:
    """6.8 million weights, as in MobileNet's table 13."""
    module = networks.NETWORKS["ssd_mobilenet"].make()
    assert round(sum(weight.numel() for weight in module.parameters()) / 1e6, 1) == 6.8


def built(root: Path, name: str, seed: int = 0) -> tuple[WorkerModel, dict[str, Array]]:
    """What a worker loads, and two rows of input."""
    zoo.build_models(root, [name], seed, torch=True)
    entry = repository.find_model(root, name)
    assert not entry.reason
    info = repository.describe(entry)
    tensors: tuple[Tensor, ...] = repository.sample_inputs(entry, info, 2, np.random.default_rng(0))
    return repository.worker_model(entry, info), {tensor.name: tensor.array() for tensor in tensors}


@pytest.mark.parametrize(
    "name",
    [
        "lenet",
        "resnet18",
        "mobilenet_v2",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in networks.NETWORKS
            if name not in ("lenet", "resnet18", "mobilenet_v2")
        ),
    ],
)
def test_network_served_from_its_files_equals_the_drawn_one(tmp_path: Path, name: str) -> None:
    """From its files, in batches of one and two rows, which tracing had not seen; rows do not touch each other."""
    model, inputs = built(tmp_path, name)
    small = WorkerModel(**{it: getattr(model, it) for it in model.__struct_fields__} | {"max_batch": 2})
    runner, _ = runners.load_runner(small, threads=1, fake=False)
    both = {output: array.copy() for output, array in runner.run(inputs)}
    edges = networks.NETWORKS[name].outputs
    assert {output: array.shape for output, array in both.items()} == {it: (2, *edges[it][1]) for it in edges}
    assert all(np.isfinite(array).all() for array in both.values())
    if model.gradients:
        before = [array.copy() for _, array in runner.run(inputs)]
        for _ in range(5):
            after = runner.run(inputs)
        assert all(array.mean() < loss.mean() for (_, array), loss in zip(after, before, strict=True))  # it learns
        return
    alone = runner.run({key: array[1:] for key, array in inputs.items()})
    for output, array in alone:
        np.testing.assert_allclose(array[0], both[output][1], rtol=1e-3, atol=1e-3 * np.abs(array).max())
    with torch.inference_mode():
        drawn = networks.seeded_network(name, 0)(*(torch.from_numpy(it.copy()) for it in inputs.values()))
    first = drawn[0] if isinstance(drawn, tuple) else drawn
    np.testing.assert_allclose(
        next(iter(both.values())), first.numpy(), rtol=1e-4, atol=1e-4 * float(first.abs().max())
    )


def test_seeded_network_weights_depend_only_on_the_seed() -> None:
    def weight(seed: int) -> torch.Tensor:
        torch.rand(3)
        return next(networks.seeded_network("lenet", seed).parameters())

    state = torch.random.get_rng_state()
    assert torch.equal(weight(0), weight(0)) and not torch.equal(weight(0), weight(1))
    torch.random.set_rng_state(state)


def test_build_other_format_replaces_the_model(tmp_path: Path) -> None:
    kinds = []
    for as_torch in (False, True, True, False):
        (model,) = zoo.build_models(tmp_path, ["lenet"], torch=as_torch)
        kinds.append((model.path.name, model.fresh))
    assert kinds == [("model.onnx", True), ("model.pt", True), ("model.pt", False), ("model.onnx", True)]
    assert [path.name for path in (tmp_path / "lenet" / "1").iterdir()] == ["model.onnx"]


def test_training_step_is_written_as_a_python_module(tmp_path: Path) -> None:
    model, _ = built(tmp_path, "bert_train")
    assert model.gradients and model.platform == "pytorch_module" and model.path.endswith("/1/model.py")
    assert Path(model.path).read_text() == (
        '"""bert_train: a training step, 109 M weights, from seed 0. Written by `cotenant examples --torch`."""\n\n'
        "from cotenant.zoo import networks\n\n\ndef model():\n"
        '    return networks.seeded_network("bert_train", 0)\n'
    )


def test_recipes_all_have_a_network() -> None:
    assert list(zoo.TORCH) == list(networks.NETWORKS)
    assert len(zoo.GPULET) == 9 and set(zoo.GPULET) | set(zoo.KACE) < set(zoo.TORCH)
    for recipe in zoo.TORCH.values():
        assert recipe.slo > 0 and recipe.summary


@pytest.mark.parametrize(
    ("name", "as_torch", "error"),
    [
        ("vit", False, "no model 'vit' in the zoo; it is a PyTorch model: add --torch; it has digits, "),
        ("kace", False, "no model 'kace' in the zoo; it is a PyTorch model: add --torch; it has digits, "),
        ("digits", True, "no model 'digits' in the zoo; it has lenet, "),
        ("vit_trains", True, "no model 'vit_trains' in the zoo; did you mean 'vit_train'?; it has lenet, "),
    ],
)
def test_network_of_an_unknown_name_raises(tmp_path: Path, name: str, as_torch: bool, error: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(error)}"):
        zoo.build_models(tmp_path, [name], torch=as_torch)
