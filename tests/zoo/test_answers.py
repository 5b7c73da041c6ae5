from __future__ import annotations

import re

import numpy as np
import pytest
from sklearn.datasets import load_sample_image

from cotenant.errors import ConfigError
from cotenant.zoo import ZOO, answers
from tests.zoo.conftest import Run


def answer(run: Run, model: str, seed: int = 0) -> tuple[str, str]:
    question = answers.example_request(model, np.random.default_rng(seed))
    return question.what, question.read([run(model, inputs) for inputs in question.requests])


def test_digits_example_is_classified(run: Run) -> None:
    for seed in range(5):
        what, said = answer(run, "digits", seed)
        match = re.fullmatch(r"read a (\d) \((\d+)% sure\): it is a (\d)", said)
        assert re.fullmatch(r"held-out row \d+ of digits", what) and match and match[1] == match[3]


def test_minilm_example_finds_the_nearest_sentence(run: Run) -> None:
    what, said = answer(run, "minilm")
    assert what == "'How do I get my money back?'"
    assert re.fullmatch(r"nearest is 'Refunds are paid out within a week\.' \(0\.\d\d; the next 0\.\d\d\)", said)


@pytest.mark.parametrize(
    ("model", "pattern"),
    [
        ("cancer", r"read (malignant|benign) \(\d+% sure\): it is \1"),
        ("wine", r"read class_[012] \(\d+% sure\): it is class_[012]"),
        ("mobilenet_v2", r"class \d+, \d+% sure \(random weights\)"),
        ("lenet", r"class \d+, \d+% sure \(random weights\)"),
        ("ssd_mobilenet", r"1,917 boxes, the surest number \d+ of class \d+ \(random weights\)"),
    ],
)
def test_example_of_every_kind_has_an_answer(run: Run, model: str, pattern: str) -> None:
    _, said = answer(run, model)
    assert re.fullmatch(pattern, said), said


@pytest.mark.parametrize("model", ZOO)
def test_example_requests_have_one_row(model: str) -> None:
    question = answers.example_request(model, np.random.default_rng(0))
    assert question.requests and all(tensor.shape[0] == 1 for inputs in question.requests for tensor in inputs)


def test_example_of_an_unknown_model_raises() -> None:
    with pytest.raises(ConfigError, match=r"^no model 'vgg17' in the zoo; did you mean 'vgg16'\?"):
        answers.example_request("vgg17", np.random.default_rng(0))


def test_photo_example_is_upright_with_channels_first() -> None:
    question = answers.example_request("mobilenet_v2", np.random.default_rng(0))
    photo = load_sample_image(question.what)
    edge = min(photo.shape[:2])
    top, left = ((length - edge) // 2 for length in photo.shape[:2])
    square = photo[top : top + edge, left : left + edge] / 255
    pixels = question.requests[0][0].array()[0]
    half, middle = edge // 2, pixels.shape[1] // 2
    for rows, places in ((slice(half), slice(middle)), (slice(half, None), slice(middle, None))):
        for columns, across in ((slice(half), slice(middle)), (slice(half, None), slice(middle, None))):
            expected = (square[rows, columns].mean(axis=(0, 1)) - answers.MEAN) / answers.SPREAD
            np.testing.assert_allclose(pixels[:, places, across].mean(axis=(1, 2)), expected, atol=0.02)
