"""Build example models locally, without downloading weights.

Building them needs the extra `zoo`, or `torch` for PyTorch models; imports happen only then.
"""

from __future__ import annotations

import difflib
import fcntl
import hashlib
import importlib
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from cotenant.errors import ConfigError, ModelError
from cotenant.worker import repository


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """Describe how to build a model of the zoo.

    module: of this package; its function named like the model builds the graph. slo: latency target in seconds that
    suits
    the model on shares of a few CPU cores or, for PyTorch, of a GPU. weight: relative request rate. demo: part of the
    demo.
    """

    summary: str
    module: str = "networks"
    slo: float
    weight: float = 1.0
    demo: bool = False


ZOO = {
    "digits": Recipe(summary="reads an 8x8 digit", module="trained", slo=0.05, weight=20, demo=True),
    "cancer": Recipe(summary="300 trees, cell measurements", module="trained", slo=0.05, weight=10, demo=True),
    "wine": Recipe(summary="nearest neighbours, wines", module="trained", slo=0.05, weight=10),
    "minilm": Recipe(summary="sentence to vector", module="minilm", slo=0.25, weight=4, demo=True),
    "mobilenet_v2": Recipe(summary="image classes, 3.5 M weights", module="vision", slo=0.25, weight=4, demo=True),
    "mnasnet": Recipe(summary="image classes, 4.4 M weights", module="vision", slo=0.25, weight=4),
    "ssd_mobilenet": Recipe(summary="boxes in an image, 6.8 M weights", module="vision", slo=0.6, weight=2, demo=True),
    "googlenet": Recipe(summary="image classes, 7.0 M weights", module="vision", slo=0.8, weight=1, demo=True),
    "densenet121": Recipe(summary="image classes, 8.0 M weights", module="vision", slo=1.2, weight=1),
    "resnet18": Recipe(summary="image classes, 11.7 M weights", module="vision", slo=0.8, weight=1, demo=True),
    "resnet50": Recipe(summary="image classes, 25.6 M weights", module="vision", slo=1.2, weight=0.5, demo=True),
    "vgg16": Recipe(summary="image classes, 138 M weights", module="vision", slo=4.0, weight=0.1),
    "lenet": Recipe(summary="digit classes, 62 k weights", module="vision", slo=0.05, weight=10),
}

# PyTorch models, for GPUs. Targets of the first nine are gpulet's (table 3), those of AlexNet and EfficientNet InSS's;
# the papers give none for the others.
TORCH = {
    "lenet": Recipe(summary="digit classes, 62 k weights", slo=0.005),
    "googlenet": Recipe(summary="image classes, 6.6 M weights", slo=0.066),
    "resnet50": Recipe(summary="image classes, 25.6 M weights", slo=0.108),
    "ssd_mobilenet": Recipe(summary="boxes in an image, 6.8 M weights", slo=0.202),
    "vgg16": Recipe(summary="image classes, 138 M weights", slo=0.142),
    "mnasnet": Recipe(summary="image classes, 4.4 M weights", slo=0.062),
    "mobilenet_v2": Recipe(summary="image classes, 3.5 M weights", slo=0.064),
    "densenet161": Recipe(summary="image classes, 28.7 M weights", slo=0.202),
    "bert": Recipe(summary="14 tokens to a vector, 109 M weights", slo=0.022),
    "alexnet": Recipe(summary="image classes, 61.1 M weights", slo=0.025),
    "efficientnet_b0": Recipe(summary="image classes, 5.3 M weights", slo=0.04),
    "resnet18": Recipe(summary="image classes, 11.7 M weights", slo=0.05),
    "vgg19": Recipe(summary="image classes, 144 M weights", slo=0.15),
    "bert_128": Recipe(summary="128 tokens to a vector, 109 M weights", slo=0.1),
    "albert": Recipe(summary="128 tokens to a vector, 11.7 M weights", slo=0.1),
    "vit": Recipe(summary="image classes, 86.6 M weights", slo=0.1),
    "whisper": Recipe(summary="classes of 30 s of speech, 88.4 M weights", slo=0.5),
    "wav2vec2": Recipe(summary="letters in 5 s of speech, 94.4 M weights", slo=0.2),
    "bert_train": Recipe(summary="a training step, 109 M weights", slo=1.0),
    "albert_train": Recipe(summary="a training step, 11.7 M weights", slo=1.0),
    "vit_train": Recipe(summary="a training step, 86.6 M weights", slo=1.0),
    "lenet_train": Recipe(summary="a training step, 62,000 weights", slo=1.0),
    "resnet18_train": Recipe(summary="a training step on 64x64 images, 11.7 M weights", slo=1.0),
    "mobilenet_v2_train": Recipe(summary="a training step on 64x64 images, 3.5 M weights", slo=1.0),
    "alexnet_train": Recipe(summary="a training step on 64x64 images, 61.1 M weights", slo=1.0),
}

DEMO = tuple(name for name, recipe in ZOO.items() if recipe.demo)
GPULET = tuple(TORCH)[:9]
KACE = ("bert_train", "vit_train", "albert_train", "bert_128", "vit", "whisper", "wav2vec2")
PAPERS = {"gpulet": GPULET, "kace": KACE}

Progress = Callable[[str, int, int], None]


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """Describe a model in the repository. fresh: built now rather than found. notes: by key, such as a trained model's
    "score"."""

    name: str
    path: Path
    fresh: bool
    notes: dict[str, str]


def build_models(
    root: Path,
    names: Iterable[str] | None = None,
    seed: int = 0,
    progress: Progress = lambda name, done, total: None,
    *,
    torch: bool = False,
) -> list[Built]:
    """Build models in a repository, by default those of the demo; a model built from the same code and seed is kept.

    progress: called with the name of the next model, the number done and the total. torch: PyTorch models, by default
    gpulet's; a name of PAPERS stands for all its models. Each model is written atomically. Raises ConfigError for an
    unknown name, a missing package, and a folder that cannot be written or holds a foreign model.
    """
    requested = (("gpulet",) if torch else DEMO) if names is None else names
    expanded = [name for each in requested for name in (PAPERS.get(each, (each,)) if torch else (each,))]
    recipes = {name: recipe_of(name, torch=torch) for name in expanded}
    built = []
    with _build_lock(root):
        for done, (name, recipe) in enumerate(recipes.items()):
            progress(name, done, len(recipes))
            built.append(_existing(root, name, recipe, seed) or _build(root, name, recipe, seed))
    return built


def recipe_of(name: str, *, torch: bool = False) -> Recipe:
    """Return the recipe of a model. Raises ConfigError for an unknown name."""
    recipes = TORCH if torch else ZOO
    if name not in recipes:
        near = difflib.get_close_matches(name, recipes, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        others = "; it is a PyTorch model: add --torch" if not torch and name in TORCH | PAPERS else ""
        raise ConfigError(f"no model {name!r} in the zoo{others or meant}; it has {', '.join(recipes)}")
    return recipes[name]


@contextmanager
def missing_extra(name: str = "zoo") -> Iterator[None]:
    """Turn a failed import in the block into a ConfigError that names the extra to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"the zoo needs {error.name!r}; run `pip install 'cotenant[{name}]'`") from None


@contextmanager
def _writing(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write models into {str(root)!r}: {error.strerror}; name another folder") from None


@contextmanager
def _build_lock(root: Path) -> Iterator[None]:
    with ExitStack() as stack:
        with _writing(root):
            root.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((root / ".zoo.lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another process is building models in {str(root)!r}; wait until it is done"
                ) from None
        yield


def _fingerprint(module: str, seed: int) -> str:
    """Hash the code and seed of a model, so that one built from others is built again."""
    here = Path(__file__).parent
    modules = ("networks",) if module == "networks" else ("graph", module)
    sources = [(here / f"{name}.py").read_bytes() for name in modules]
    return hashlib.blake2b(b"\0".join([*sources, b"%d" % seed]), digest_size=8).hexdigest()


def _existing(root: Path, name: str, recipe: Recipe, seed: int) -> Built | None:
    """Return the model if it is there and was built by this code from `seed`."""
    folder = root / name
    if not folder.exists():
        return None
    try:
        parameters = repository.read_config(folder).parameters
    except ModelError:
        parameters = {}
    notes = {key: value.string_value for key, value in parameters.items()}
    if "zoo" not in notes:
        raise ConfigError(f"{folder} was not built by Cotenant and is left alone; move it, or leave {name!r} out")
    entry = repository.find_model(root, name)
    if notes["zoo"] != _fingerprint(recipe.module, seed) or entry.reason:
        return None
    return Built(name=name, path=entry.path, fresh=False, notes=notes)


class _ModelFiles(msgspec.Struct, frozen=True):
    """Hold the files of a model. version: files of the version folder. model: files of the model folder, config.pbtxt
    among them."""

    version: dict[str, bytes]
    model: dict[str, str]
    notes: dict[str, str]


def _onnx(name: str, recipe: Recipe, seed: int) -> _ModelFiles:
    with missing_extra():
        import numpy as np

        graphs = importlib.import_module("cotenant.zoo.graph")
        draw = getattr(importlib.import_module(f"cotenant.zoo.{recipe.module}"), name)
    # Each model has its own random stream, whatever else is built.
    graph = graphs.Graph(name, np.random.default_rng([seed, *name.encode()]))
    draw(graph)
    graph.notes["zoo"] = _fingerprint(recipe.module, seed)
    labels = {f"{output}.labels": "".join(f"{label}\n" for label in names) for output, names in graph.labels.items()}
    return _ModelFiles({"model.onnx": graph.model()}, {repository.CONFIG: graph.config(), **labels}, graph.notes)


def _torch(name: str, recipe: Recipe, seed: int) -> _ModelFiles:
    with missing_extra("torch"):
        networks = importlib.import_module("cotenant.zoo.networks")
        files = networks.model_files(name, seed, f"{name}: {recipe.summary}")
    notes = {"zoo": _fingerprint(recipe.module, seed)}
    return _ModelFiles(files, {repository.CONFIG: networks.model_config(name, notes)}, notes)


def _build(root: Path, name: str, recipe: Recipe, seed: int) -> Built:
    files = _torch(name, recipe, seed) if recipe.module == "networks" else _onnx(name, recipe, seed)
    target, new, old = root / name, root / f".{name}.new", root / f".{name}.old"
    with _writing(root):
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        (new / "1").mkdir(parents=True)
        for file, data in files.version.items():
            (new / "1" / file).write_bytes(data)
        for file, text in files.model.items():
            (new / file).write_text(text, encoding="utf-8")
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    return Built(name=name, path=target / "1" / next(iter(files.version)), fresh=True, notes=files.notes)
