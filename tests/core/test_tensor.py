from __future__ import annotations

import numpy as np
import pytest

from cotenant.core.tensor import DTYPES, Tensor, nbytes


@pytest.mark.parametrize("datatype", sorted(DTYPES))
def test_tensor_array_is_a_view_of_its_data(datatype: str) -> None:
    data = bytearray(np.arange(6).astype(DTYPES[datatype]).tobytes())
    assert len(data) == nbytes(datatype, (2, 3))
    array = Tensor("x", datatype, (2, 3), data).array()
    assert array.tolist() == np.arange(6).astype(DTYPES[datatype]).reshape(2, 3).tolist()
    data[:] = bytes(len(data))
    assert not array.any()
