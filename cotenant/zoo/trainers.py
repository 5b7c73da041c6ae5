"""Train networks as best-effort jobs: a reader of digits, and the training steps of the zoo's networks.

Each trainer is a generator function of a `JobContext`, one optimiser step a `yield`. It saves a checkpoint now and then
and when it is told to stop, and goes on from there. PyTorch is imported by the job's process alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from cotenant.errors import ConfigError
from cotenant.worker.jobs.context import JobContext, Steps, step

if TYPE_CHECKING:
    import torch

SAVED_EVERY: Final = 200  # steps
SEED: Final = 0
_LEARNING_RATE: Final = 2e-3


class Trainer(msgspec.Struct, frozen=True):
    """Describe a source of training. function: ``module:name`` of its generator function. batch, steps: where the job
    asks for none. profile: the model of the zoo whose batches are its steps, for predictions; empty: none."""

    about: str
    function: str
    batch: int
    steps: int
    profile: str = ""


_HERE = "cotenant.zoo.trainers"
TRAINERS: Final = {
    "digits": Trainer("train a convolutional network to read scikit-learn's digits", f"{_HERE}:digits", 64, 3000),
    **{
        name: Trainer(f"train {title} on the same made-up input, as KACE does", f"{_HERE}:{function}", 4, 1000, name)
        for name, function, title in (
            ("bert_train", "bert", "BERT"),
            ("albert_train", "albert", "ALBERT"),
            ("vit_train", "vit", "a vision transformer"),
        )
    },
}


def trainer(source: str) -> Trainer:
    """Return a trainer of the zoo. Raises ConfigError."""
    if source not in TRAINERS:
        raise ConfigError(
            f"source: the zoo trains no {source!r}; it trains {', '.join(TRAINERS)}; FILE.py:FUNCTION names your own"
        )
    return TRAINERS[source]


def digits(job: JobContext) -> Steps:
    """Train a small convolutional network on digits of 8 × 8 points; report loss, and accuracy on held-out digits."""
    import torch
    from torch import nn

    from cotenant.zoo.trained import load_dataset

    torch.set_num_threads(job.threads)
    device = torch.device("cuda" if job.cuda else "cpu")
    known = load_dataset("digits")
    images, labels, held_out, answers = (
        torch.from_numpy(array).to(device) for array in (known.x, known.y, known.held_out_x, known.held_out_y)
    )
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        network = nn.Sequential(
            *(nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()),
            *(nn.MaxPool2d(2), nn.Flatten(), nn.Dropout(0.25), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)),
        ).to(device)
    optimizer = torch.optim.Adam(network.parameters(), lr=_LEARNING_RATE)
    batch, total = job.batch or TRAINERS["digits"].batch, job.steps or TRAINERS["digits"].steps
    epoch = -(-len(images) // batch)

    def advance(number: int) -> dict[str, float]:
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(number // epoch))
        rows = order[number % epoch * batch :][:batch].to(device)
        network.train()
        loss = nn.functional.cross_entropy(network(images[rows]), labels[rows])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        metrics = {"loss": float(loss.detach())}
        if (number + 1) % epoch == 0 or number + 1 == total:
            network.eval()
            with torch.inference_mode():
                metrics["accuracy"] = float((network(held_out).argmax(1) == answers).float().mean())
        return metrics

    yield from _trained(job, network, optimizer, advance, total)


def bert(job: JobContext) -> Steps:
    """Train BERT on random tokens."""
    yield from _train_network(job, "bert_train")


def albert(job: JobContext) -> Steps:
    """Train ALBERT on random tokens."""
    yield from _train_network(job, "albert_train")


def vit(job: JobContext) -> Steps:
    """Train a vision transformer on random images."""
    yield from _train_network(job, "vit_train")


def _train_network(job: JobContext, name: str) -> Steps:
    import torch

    from cotenant.zoo.networks import NETWORKS, seeded_network

    torch.set_num_threads(job.threads)
    device = torch.device("cuda" if job.cuda else "cpu")
    network = seeded_network(name, SEED).to(device)
    inputs = [value.to(device) for value in NETWORKS[name].example(job.batch or TRAINERS[name].batch)]
    total = job.steps or TRAINERS[name].steps

    def advance(number: int) -> dict[str, float]:
        return {"loss": float(network(*inputs).mean())}  # a call is a step, its optimiser included

    yield from _trained(job, network, None, advance, total)


def _trained(
    job: JobContext,
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    advance: Callable[[int], dict[str, float]],
    total: int,
) -> Steps:
    """Take steps from the last checkpoint on, and keep checkpoints. advance: takes the step of that number, from 0."""
    path = job.directory / "checkpoint.pt"
    done, metrics = _restored(path, network, optimizer)
    saved = done
    try:
        while done < total:
            metrics |= advance(done)
            done += 1
            if done - saved >= SAVED_EVERY:
                _save(path, network, optimizer, done, metrics)
                saved = done
            yield step(done, total, **metrics)
    finally:
        if done > saved:
            _save(path, network, optimizer, done, metrics)


def _save(
    path: Path,
    network: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    done: int,
    metrics: dict[str, float],
) -> None:
    """Replace the checkpoint in one step, so that a crash leaves the old one."""
    import torch

    beside = path.with_suffix(".new")
    state: dict[str, Any] = {"network": network.state_dict(), "done": done, "metrics": metrics}
    torch.save(state | ({} if optimizer is None else {"optimizer": optimizer.state_dict()}), beside)
    beside.replace(path)


def _restored(
    path: Path, network: torch.nn.Module, optimizer: torch.optim.Optimizer | None
) -> tuple[int, dict[str, float]]:
    """Load the checkpoint; return its steps and metrics. One that is damaged, or of another network, is left out."""
    import torch

    if not path.exists():
        return 0, {}
    try:
        state = torch.load(path, weights_only=True)
        network.load_state_dict(state["network"])
        if optimizer is not None:
            optimizer.load_state_dict(state["optimizer"])
        return int(state["done"]), dict(state["metrics"])
    except (RuntimeError, KeyError, ValueError, EOFError, OSError) as error:
        print(f"{path}: the checkpoint is not used: {error}")  # noqa: T201  # into the job's output
        return 0, {}
