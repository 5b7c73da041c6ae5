"""Models to begin with, built here: no weights are downloaded. The papers' architectures with seeded weights, small
models trained on data that scikit-learn carries, and a sentence embedder whose weights a package holds.

What builds them needs the extra `zoo`, and is imported when something is built.
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

    slo: a latency target that suits the model on shares of a few processor cores, in seconds. weight: how often it is
    asked, relative to the others.
    """

    summary: str
    module: str
    slo: float
    weight: float
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

DEMO = tuple(name for name, recipe in ZOO.items() if recipe.demo)

Progress = Callable[[str, int, int], None]


class Built(msgspec.Struct, frozen=True, kw_only=True):
    """fresh: built just now, not found. notes: by word, such as how well a trained model does ("score")."""

    name: str
    path: Path
    fresh: bool
    notes: dict[str, str]


def build(
    root: Path, names: Iterable[str] | None = None, seed: int = 0, progress: Progress = lambda name, done, total: None
) -> list[Built]:
    """Models of the zoo in a repository, the demo's where none are named. What stands there from the same source and
    seed stays as it is; each model appears whole or not at all.

    progress: told the name of the model that is next, how many are done, and of how many.
    Raises ConfigError: an unknown name, a missing package, a folder that cannot be written or holds another's model.
    """
    wanted = DEMO if names is None else tuple(dict.fromkeys(names))
    for name in wanted:
        recipe(name)
    built = []
    with _only_builder(root):
        for done, name in enumerate(wanted):
            progress(name, done, len(wanted))
            built.append(_stand(root, name, seed) or _make(root, name, seed))
    return built


def recipe(name: str) -> Recipe:
    """Raises ConfigError for a name that is not in ZOO."""
    if name not in ZOO:
        near = difflib.get_close_matches(name, ZOO, 1)
        raise ConfigError(
            f"no model {name!r} in the zoo{f'; did you mean {near[0]!r}?' if near else ''}; it has {', '.join(ZOO)}"
        )
    return ZOO[name]


@contextmanager
def extra() -> Iterator[None]:
    """Imports within need the packages of the extra `zoo`."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError(f"the zoo needs {error.name!r}; run `pip install 'cotenant[zoo]'`") from None


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


def _key(name: str, seed: int) -> str:
    """Of what a model is made from, so that what was built by other code, or from another seed, is built anew."""
    here = Path(__file__).parent
    sources = [(here / f"{module}.py").read_bytes() for module in ("graph", ZOO[name].module)]
    return hashlib.blake2b(b"\0".join([*sources, b"%d" % seed]), digest_size=8).hexdigest()


def _stand(root: Path, name: str, seed: int) -> Built | None:
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
    entry = repository.find(root, name)
    if notes["zoo"] != _key(name, seed) or entry.reason:
        return None
    return Built(name=name, path=entry.path, fresh=False, notes=notes)


def _make(root: Path, name: str, seed: int) -> Built:
    with extra():
        import numpy as np

        graphs = importlib.import_module("cotenant.zoo.graph")
        draw = getattr(importlib.import_module(f"cotenant.zoo.{ZOO[name].module}"), name)
    # A stream of its own for each model: what is built beside it changes nothing.
    graph = graphs.Graph(name, np.random.default_rng([seed, *name.encode()]))
    draw(graph)
    graph.notes["zoo"] = _key(name, seed)

    model = graph.model()

    target, new, old = root / name, root / f".{name}.new", root / f".{name}.old"
    with _writing(root):
        for leftover in (new, old):
            shutil.rmtree(leftover, ignore_errors=True)
        (new / "1").mkdir(parents=True)
        (new / "1" / "model.onnx").write_bytes(model)
        (new / repository.CONFIG).write_text(graph.config(), encoding="utf-8")
        for output, labels in graph.labels.items():
            (new / f"{output}.labels").write_text("".join(f"{label}\n" for label in labels), encoding="utf-8")
        if target.exists():
            target.rename(old)
        new.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    return Built(name=name, path=target / "1" / "model.onnx", fresh=True, notes=graph.notes)
