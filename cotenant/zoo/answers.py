"""Provide real example inputs for the zoo's models, and a sentence that describes the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from cotenant.core.tensor import Tensor
from cotenant.zoo import missing_extra, recipe_of

with missing_extra():
    from PIL import Image
    from sklearn.datasets import load_sample_image

    from cotenant.zoo import trained
    from cotenant.zoo.text import Tokenizer

# A question, and the sentences of which one answers it.
SENTENCES = (
    "How do I get my money back?",
    "Refunds are paid out within a week.",
    "The cat sleeps on the warm sofa.",
    "Our trains leave every half hour.",
    "Add the flour to the butter and stir.",
)
PHOTOS = ("china.jpg", "flower.jpg")

# Of ImageNet's pixels, scaled to 0 to 1, red, green, blue.
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
SPREAD = np.array([0.229, 0.224, 0.225], np.float32)

Outputs = tuple[Tensor, ...]


class ExampleRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Describe an example request.

    requests: inputs of one row each, as a plan may allow no larger batch. read: describes the outputs of the requests,
    in order, in a sentence. what: describes the input.
    """

    requests: tuple[tuple[Tensor, ...], ...]
    read: Callable[[Sequence[Outputs]], str]
    what: str


def example_request(model: str, rng: np.random.Generator) -> ExampleRequest:
    """Return an example request for a model of the zoo. Raises ConfigError for any other model."""
    module = recipe_of(model).module
    if module == "trained":
        return _row(model, rng)
    return _sentences() if module == "minilm" else _photo(model, rng)


def _row(model: str, rng: np.random.Generator) -> ExampleRequest:
    known = trained.load_dataset(model)
    index = int(rng.integers(len(known.held_out_y)))
    truth = known.names[known.held_out_y[index]]
    kind = "a " if model == "digits" else ""

    def read(answers: Sequence[Outputs]) -> str:
        chances = answers[0][0].array()[0]
        best = int(chances.argmax())
        return f"read {kind}{known.names[best]} ({chances[best]:.0%} sure): it is {kind}{truth}"

    name = "image" if model == "digits" else "features"
    row = known.held_out_x[index : index + 1]
    return ExampleRequest(requests=((_fp32(name, row),),), read=read, what=f"held-out row {index} of {model}")


def _sentences() -> ExampleRequest:
    tokenizer = Tokenizer()

    def read(answers: Sequence[Outputs]) -> str:
        query, *others = (outputs[0].array()[0] for outputs in answers)
        closeness = [float(query @ other) for other in others]
        best = int(np.argmax(closeness))
        return f"nearest is {SENTENCES[1 + best]!r} ({closeness[best]:.2f}; the next {sorted(closeness)[-2]:.2f})"

    return ExampleRequest(
        requests=tuple(tokenizer([sentence]) for sentence in SENTENCES), read=read, what=repr(SENTENCES[0])
    )


def _photo(model: str, rng: np.random.Generator) -> ExampleRequest:
    photo = str(rng.choice(PHOTOS))
    side = {"ssd_mobilenet": 300, "lenet": 28}.get(model, 224)
    image = Image.fromarray(load_sample_image(photo))
    edge = min(image.size)
    left, top = ((length - edge) // 2 for length in image.size)
    square = image.crop((left, top, left + edge, top + edge)).resize((side, side), Image.Resampling.BILINEAR)
    if model == "lenet":
        pixels = np.asarray(square.convert("L"), np.float32)[None, None] / 255
    else:
        pixels = ((np.asarray(square, np.float32) / 255 - MEAN) / SPREAD).transpose(2, 0, 1)[None]

    def read(answers: Sequence[Outputs]) -> str:
        outputs = {tensor.name: tensor.array()[0] for tensor in answers[0]}
        if "scores" in outputs:
            box, label = np.unravel_index(outputs["scores"].argmax(), outputs["scores"].shape)
            return f"{len(outputs['boxes']):,} boxes, the surest number {box} of class {label} (random weights)"
        best = int(outputs["probabilities"].argmax())
        return f"class {best}, {outputs['probabilities'][best]:.0%} sure (random weights)"

    return ExampleRequest(requests=((_fp32("image", pixels),),), read=read, what=photo)


def _fp32(name: str, values: np.ndarray) -> Tensor:
    data = np.ascontiguousarray(values, np.float32)
    return Tensor(name, "FP32", data.shape, data.tobytes())
