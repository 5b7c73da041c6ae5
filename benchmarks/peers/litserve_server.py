"""Serve a model with LitServe: `python -m benchmarks.peers.litserve_server MODEL PORT`."""

# No annotations as text: LitServe looks at that of `decode_request`, and passes the JSON of a `Request`.
import sys
from typing import Any

import litserve
import numpy as np
from fastapi import Request

from benchmarks.peers.model import BATCH, DELAY, run


class Api(litserve.LitAPI):  # type: ignore[misc]
    """Read and write the tensors of the Open Inference Protocol, as far as the benchmark sends them."""

    def setup(self, device: str) -> None:
        self.model = sys.argv[1]

    def decode_request(self, request: Request) -> Any:
        (given,) = request["inputs"]
        return np.array(given["data"], np.float32)

    def predict(self, rows: Any) -> Any:
        return run(self.model, rows)

    def encode_response(self, row: Any) -> Any:
        return {"outputs": [{"name": "y", "datatype": "FP32", "shape": [1, len(row)], "data": row.tolist()}]}


if __name__ == "__main__":
    server = litserve.LitServer(Api(max_batch_size=BATCH, batch_timeout=DELAY), accelerator="cpu")
    server.run(host="127.0.0.1", port=int(sys.argv[2]), generate_client_file=False, log_level="error")
