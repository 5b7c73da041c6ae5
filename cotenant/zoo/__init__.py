"""Models to begin with, built here: no weights are downloaded. The papers' architectures with seeded weights, small
models trained on data that scikit-learn carries, and a sentence embedder whose weights a package holds.

What builds them needs the extra `zoo`, or `torch` for those of PyTorch, and is imported when something is built.
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
    """module: of this package; its function of the model's name draws the graph. demo: built where nobody chooses.

    slo: a latency target that suits the model on shares of a few processor cores, or for PyTorch of a GPU, in seconds.
    weight: how often it is asked, relative to the others.
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

# The same and more in PyTorch, for GPUs. Targets of the first nine are gpulet's (table 3), of AlexNet and EfficientNet
# InSS's; no paper has one for the others.
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
}

DEMO = tuple(name for name, recipe in ZOO.items() if recipe.demo)
GPULET = tuple(TORCH)[:9]
KACE = ("bert_train", "vit_train", "albert_train", "bert_128", "vit", "whisper", "wav2vec2")
PAPERS = {"gpulet": GPULET, "kace": KACE}

Progress = Callable[[str, int, int], None]


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """fresh: built just now, not found. notes: by word, such as how well a trained model does ("score")."""

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
    """Models of the zoo in a repository, the demo's where none are named. What stands there from the same source and
    seed stays as it is; each model appears whole or not at all.

    progress: told the name of the model that is next, how many are done, and of how many. torch: in PyTorch, gpulet's
    where none are named; a name of PAPERS is all of its models.
    Raises ConfigError: an unknown name, a missing package, a folder that cannot be written or holds another's model.
    """
    asked = (("gpulet",) if torch else DEMO) if names is None else names
    wanted = [name for it in asked for name in (PAPERS.get(it, (it,)) if torch else (it,))]
    recipes = {name: recipe_of(name, torch=torch) for name in wanted}
    built = []
    with _only_builder(root):
        for done, (name, it) in enumerate(recipes.items()):
            progress(name, done, len(recipes))
            built.append(_stand(root, name, it, seed) or _make(root, name, it, seed))
    return built


def recipe_of(name: str, *, torch: bool = False) -> Recipe:
    """Raises ConfigError for a name that is not in ZOO, or not in TORCH."""
    known = TORCH if torch else ZOO
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        meant = f"; did you mean {near[0]!r}?" if near else ""
        others = "; there is one of PyTorch: add --torch" if not torch and name in TORCH | PAPERS else ""
        raise ConfigError(f"no model {name!r} in the zoo{others or meant}; it has {', '.join(known)}")
    return known[name]


@contextmanager
def missing_extra(name: str = "zoo") -> Iterator[None]:
    """Imports within need the packages of that extra."""
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
def _only_builder(root: Path) -> Iterator[None]:
    with ExitStack() as stack:
        with _writing(root):
            root.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((root / ".zoo.lock").open("w"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another process builds models in {str(root)!r}; wait until it is done") from None
        yield


def _key(module: str, seed: int) -> str:
    """Of what a model is made from, so that what was built by other code, or from another seed, is built anew."""
    here = Path(__file__).parent
    modules = ("networks",) if module == "networks" else ("graph", module)
    sources = [(here / f"{name}.py").read_bytes() for name in modules]
    return hashlib.blake2b(b"\0".join([*sources, b"%d" % seed]), digest_size=8).hexdigest()


def _stand(root: Path, name: str, it: Recipe, seed: int) -> Built | None:
    """The model, if it is there and what `seed` and this code would build."""
    folder = root / name
    if not folder.exists():
        return None
    try:
        parameters = repository.read_config(folder).parameters
    except ModelError:
        parameters = {}
    notes = {key: value.string_value for key, value in parameters.items()}
    if "zoo" not in notes:
        raise ConfigError(f"{folder} is not of the zoo, and stays as it is; move it, or leave {name!r} out")
    entry = repository.find_model(root, name)
    if notes["zoo"] != _key(it.module, seed) or entry.reason:
        return None
    return Built(name=name, path=entry.path, fresh=False, notes=notes)


class _Drawn(msgspec.Struct, frozen=True):
    """files: of its version. beside: the others, config.pbtxt among them."""

    files: dict[str, bytes]
    beside: dict[str, str]
    notes: dict[str, str]


def _onnx(name: str, it: Recipe, seed: int) -> _Drawn:
    with missing_extra():
        import numpy as np

        graphs = importlib.import_module("cotenant.zoo.graph")
        draw = getattr(importlib.import_module(f"cotenant.zoo.{it.module}"), name)
    # A stream of its own for each model: what is built beside it changes nothing.
    graph = graphs.Graph(name, np.random.default_rng([seed, *name.encode()]))
    draw(graph)
    graph.notes["zoo"] = _key(it.module, seed)
    labels = {f"{output}.labels": "".join(f"{it}\n" for it in names) for output, names in graph.labels.items()}
    return _Drawn({"model.onnx": graph.model()}, {repository.CONFIG: graph.config(), **labels}, graph.notes)


def _torch(name: str, it: Recipe, seed: int) -> _Drawn:
    with missing_extra("torch"):
        networks = importlib.import_module("cotenant.zoo.networks")
        files = networks.model_files(name, seed, f"{name}: {it.summary}")
    notes = {"zoo": _key(it.module, seed)}
    return _Drawn(files, {repository.CONFIG: networks.model_config(name, notes)}, notes)


def _make(root: Path, name: str, it: Recipe, seed: int) -> Built:
    drawn = _torch(name, it, seed) if it.module == "networks" else _onnx(name, it, seed)
    target, new, old = root / name, root / f".{name}.new", root / f".{name}.old"
    with _writing(root):
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        (new / "1").mkdir(parents=True)
        for file, data in drawn.files.items():
            (new / "1" / file).write_bytes(data)
        for file, text in drawn.beside.items():
            (new / file).write_text(text, encoding="utf-8")
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    return Built(name=name, path=target / "1" / next(iter(drawn.files)), fresh=True, notes=drawn.notes)
