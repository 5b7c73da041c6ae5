"""Build the papers' architectures in PyTorch, with random weights from a seed, for serving on GPUs.

torchvision and transformers have nearly all of them; nothing is downloaded. What only infers is kept as TorchScript: it
loads without either library, and runs outside of Python's interpreter lock, which all lanes of a process share. A
training step is a Python module. Weights of networks that see are He et al.'s (2015), as in `graph`; those of others
are what their library draws.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import msgspec
import torch
from torch import nn

from cotenant.worker.repository import DEFAULT_MAX_BATCH, write_config

CLASSES = 1000
TOKENS = 128  # of language models in KACE, which does not say; those of gpulet have 14 (table 3)
SAMPLES = 5 * 16_000  # of speech for Wav2Vec2: five seconds

Edge = tuple[str, tuple[int, ...]]  # datatype and shape, rows apart
_TYPES = {"FP32": torch.float32, "INT64": torch.int64}


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """Describe an architecture. make: builds the module. inputs, outputs: in order. trains: a call is a training step
    that returns each row's loss."""

    make: Callable[[], nn.Module]
    inputs: dict[str, Edge]
    outputs: dict[str, Edge]
    trains: bool = False

    def example(self, rows: int) -> tuple[torch.Tensor, ...]:
        return tuple(torch.ones((rows, *shape), dtype=_TYPES[kind]) for kind, shape in self.inputs.values())


def seeded_network(name: str, seed: int) -> nn.Module:
    """Build a network with weights from a seed, independent of other random draws in this process."""
    network = NETWORKS[name]
    with torch.random.fork_rng(devices=()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the libraries will call by another name one day
        torch.manual_seed(seed)
        module = network.make()
        for part in () if isinstance(module, _Answer | _Step) else module.modules():
            if isinstance(part, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(part.weight, nonlinearity="relu")
    return module.train(network.trains)


def model_files(name: str, seed: int, title: str) -> dict[str, bytes]:
    """Return the files of a version of the model."""
    if NETWORKS[name].trains:
        source = _SOURCE.format(title=title, name=name, seed=seed)
        return {"model.py": source.encode()}
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore"
        )  # of what tracing holds fixed, which is the same for all rows; of TorchScript's end
        module = seeded_network(name, seed).requires_grad_(False)
        script = torch.jit.trace(module, NETWORKS[name].example(2), check_trace=False)
        buffer = io.BytesIO()
        torch.jit.save(script, buffer)
    return {"model.pt": buffer.getvalue()}


_SOURCE = '''"""{title}, from seed {seed}. Written by `cotenant examples --torch`."""

from cotenant.zoo import networks


def model():
    return networks.seeded_network("{name}", {seed})
'''


def model_config(name: str, notes: dict[str, str]) -> str:
    """Return the config.pbtxt of a network."""

    def tensors(edges: dict[str, Edge]) -> list[dict[str, Any]]:
        return [
            {"name": key, "data_type": f"TYPE_{kind}", "dims": shape or (1,)} for key, (kind, shape) in edges.items()
        ]

    network = NETWORKS[name]
    said = notes | ({"INFERENCE_MODE": "false"} if network.trains else {})
    return write_config(
        {
            "name": name,
            "platform": "pytorch_module" if network.trains else "pytorch_libtorch",
            "max_batch_size": DEFAULT_MAX_BATCH,
            "input": tensors(network.inputs),
            "output": tensors(network.outputs),
            "parameters": {key: {"string_value": value} for key, value in said.items()},
        }
    )


# Images


@cache
def _torchvision() -> Any:
    """Import torchvision. If it was built for another PyTorch, its operators do not load and the import fails; no
    network here uses them, so declaring two of them is enough."""
    try:
        import torchvision
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
        for operator in ("nms", "qnms"):
            _OPERATORS.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        import torchvision
    return torchvision.models


_OPERATORS = torch.library.Library("torchvision", "FRAGMENT")


def _image(make: Callable[[], nn.Module]) -> Network:
    return Network(make=make, inputs={"image": ("FP32", (3, 224, 224))}, outputs={"logits": ("FP32", (CLASSES,))})


def _vision(name: str, **options: Any) -> Network:
    return _image(lambda: getattr(_torchvision(), name)(weights=None, **options))


def _lenet() -> nn.Module:
    """Build LeNet: LeCun et al., Gradient-based learning applied to document recognition (1998), figure 2; see
    `vision.lenet`."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(6, 16, 5), nn.Tanh(), nn.AvgPool2d(2),
        nn.Conv2d(16, 120, 5), nn.Tanh(), nn.Flatten(),
        nn.Linear(120, 84), nn.Tanh(), nn.Linear(84, 10),
    )  # fmt: skip


def _conv(inside: int, outside: int, kernel: int = 1, stride: int = 1, groups: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inside, outside, kernel, stride, kernel // 2, groups=groups, bias=False),
        nn.BatchNorm2d(outside),
        nn.ReLU6(inplace=True),
    )


class _SsdMobilenet(nn.Module):
    """MobileNetV1 under SSD at 300x300, as in `vision.ssd_mobilenet`: six maps, 1,917 default boxes, 91 classes."""

    def __init__(self) -> None:
        super().__init__()
        plan = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
        parts: list[nn.Module] = [_conv(3, 32, 3, 2)]
        depth = 32
        for channels, stride in plan:
            parts.append(nn.Sequential(_conv(depth, depth, 3, stride, depth), _conv(depth, channels)))
            depth = channels
        # The last map of 19 cells a side, and the last of 10; then four smaller ones.
        maps = [nn.Sequential(*parts[:12]), nn.Sequential(*parts[12:])]
        depths = [512, 1024]
        for channels in (512, 256, 256, 128):
            maps.append(nn.Sequential(_conv(depths[-1], channels // 2), _conv(channels // 2, channels, 3, 2)))
            depths.append(channels)
        self.maps = nn.ModuleList(maps)
        anchors = [3, 6, 6, 6, 6, 6]
        self.boxes, self.scores = (
            nn.ModuleList(nn.Conv2d(depth, count * width, 1) for depth, count in zip(depths, anchors, strict=True))
            for width in (4, 91)
        )

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, boxes, scores = image, [], []
        for part, box, score in zip(self.maps, self.boxes, self.scores, strict=True):
            x = part(x)
            boxes.append(box(x).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 4)))
            scores.append(score(x).permute(0, 2, 3, 1).flatten(1).unflatten(1, (-1, 91)))
        return torch.cat(boxes, 1), torch.cat(scores, 1).sigmoid()


# Language, speech, and images by transformers


class _Answer(nn.Module):
    """Return one field of the output of a transformers model."""

    def __init__(self, network: nn.Module, field: str) -> None:
        super().__init__()
        self.network = network
        self.field = field
        self.argument: str = network.main_input_name  # type: ignore[assignment]

    def forward(self, value: torch.Tensor) -> Any:
        return self.network(**{self.argument: value})[self.field]


class _Step(nn.Module):
    """Run one training step of a classifier with AdamW."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self._optimizer: torch.optim.Optimizer | None = None

    def forward(self, value: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        # Not before the first step: until then the weights may move to another device.
        self._optimizer = self._optimizer or torch.optim.AdamW(self.parameters(), lr=1e-5)
        loss = nn.functional.cross_entropy(self.network(value), label.squeeze(1), reduction="none")
        loss.mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach().unsqueeze(1)


def _model(kind: str, model: str, field: str, **options: Any) -> nn.Module:
    _torchvision()
    import transformers

    settings = getattr(transformers, f"{kind}Config")(**options)
    return _Answer(getattr(transformers, f"{kind}{model}")(settings), field)


# The sizes that their papers call base: 12 layers of 768; Whisper's is its small one, whose encoder is as large.
_BASE: dict[str, dict[str, int]] = {
    "Albert": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12, "num_hidden_layers": 12},
    "Whisper": {
        "d_model": 768, "encoder_layers": 12, "encoder_attention_heads": 12, "encoder_ffn_dim": 3072,
        "decoder_layers": 1, "decoder_attention_heads": 12, "decoder_ffn_dim": 3072,
    },
}  # fmt: skip


def _base(kind: str, model: str, field: str = "logits", **options: Any) -> Callable[[], nn.Module]:
    return partial(_model, kind, model, field, **_BASE.get(kind, {}), **options)


def _text(kind: str, length: int) -> Network:
    return Network(
        make=_base(kind, "Model", "pooler_output"),
        inputs={"input_ids": ("INT64", (length,))},
        outputs={"pooled": ("FP32", (768,))},
    )


def _step(make: Callable[[], nn.Module], inputs: dict[str, Edge]) -> Network:
    return Network(
        make=lambda: _Step(make()),
        inputs=inputs | {"label": ("INT64", (1,))},
        outputs={"loss": ("FP32", (1,))},
        trains=True,
    )


_PIXELS: dict[str, Edge] = {"image": ("FP32", (3, 224, 224))}
# Small enough that a step takes a fraction of a second on one processor.
_SMALL_PIXELS: dict[str, Edge] = {"image": ("FP32", (3, 64, 64))}
_IDS: dict[str, Edge] = {"input_ids": ("INT64", (TOKENS,))}


def _small_step(name: str, **options: Any) -> Network:
    return _step(lambda: getattr(_torchvision(), name)(weights=None, **options), _SMALL_PIXELS)


NETWORKS = {
    "lenet": Network(make=_lenet, inputs={"image": ("FP32", (1, 28, 28))}, outputs={"logits": ("FP32", (10,))}),
    "googlenet": _vision("googlenet", aux_logits=False, init_weights=False),
    "resnet50": _vision("resnet50"),
    "ssd_mobilenet": Network(
        make=_SsdMobilenet,
        inputs={"image": ("FP32", (3, 300, 300))},
        outputs={"boxes": ("FP32", (1917, 4)), "scores": ("FP32", (1917, 91))},
    ),
    "vgg16": _vision("vgg16", init_weights=False),
    "mnasnet": _vision("mnasnet1_0"),
    "mobilenet_v2": _vision("mobilenet_v2"),
    "densenet161": _vision("densenet161"),
    "bert": _text("Bert", 14),
    "alexnet": _vision("alexnet"),
    "efficientnet_b0": _vision("efficientnet_b0"),
    "resnet18": _vision("resnet18"),
    "vgg19": _vision("vgg19", init_weights=False),
    "bert_128": _text("Bert", TOKENS),
    "albert": _text("Albert", TOKENS),
    "vit": _image(_base("ViT", "ForImageClassification", num_labels=CLASSES)),
    "whisper": Network(
        make=_base("Whisper", "ForAudioClassification"),
        inputs={"features": ("FP32", (80, 3000))},
        outputs={"logits": ("FP32", (2,))},
    ),
    "wav2vec2": Network(
        make=_base("Wav2Vec2", "ForCTC"),
        inputs={"audio": ("FP32", (SAMPLES,))},
        outputs={"logits": ("FP32", (249, 32))},
    ),
    "bert_train": _step(_base("Bert", "ForSequenceClassification"), _IDS),
    "albert_train": _step(_base("Albert", "ForSequenceClassification"), _IDS),
    "vit_train": _step(_base("ViT", "ForImageClassification", num_labels=CLASSES), _PIXELS),
    "lenet_train": _step(_lenet, {"image": ("FP32", (1, 28, 28))}),
    "resnet18_train": _small_step("resnet18"),
    "mobilenet_v2_train": _small_step("mobilenet_v2", dropout=0.0),
    "alexnet_train": _small_step("alexnet", dropout=0.0),
}
