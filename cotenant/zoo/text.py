"""Tokenize sentences into the tensors that `minilm` takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tokenizers

from cotenant.core.tensor import Tensor
from cotenant.zoo import minilm


class Tokenizer:
    """Split sentences into WordPiece tokens. length: tokens to which each sentence is padded or truncated."""

    def __init__(self, length: int = minilm.LENGTH) -> None:
        self._tokenizer = tokenizers.Tokenizer.from_file(str(minilm.weights_folder() / "tokenizer.json"))
        self._tokenizer.enable_truncation(length)
        self._tokenizer.enable_padding(length=length)

    def __call__(self, sentences: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return `input_ids` and `attention_mask`, INT64 [sentences, length]."""
        found = self._tokenizer.encode_batch(list(sentences))
        ids = np.array([sentence.ids for sentence in found], np.int64)
        mask = np.array([sentence.attention_mask for sentence in found], np.int64)
        return (
            Tensor("input_ids", "INT64", ids.shape, ids.tobytes()),
            Tensor("attention_mask", "INT64", mask.shape, mask.tobytes()),
        )
