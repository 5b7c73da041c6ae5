"""Serve a model with MLServer: `python -m benchmarks.peers.mlserver_server MODEL PORT`."""

from __future__ import annotations

import asyncio
import sys
import tempfile

from mlserver import MLModel, MLServer, ModelSettings, Settings
from mlserver.codecs import NumpyCodec
from mlserver.types import InferenceRequest, InferenceResponse

from benchmarks.peers.model import BATCH, DELAY, run


class Model(MLModel):  # type: ignore[misc]
    """Run a model on what MLServer has joined to a batch."""

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        rows = run(self.name, NumpyCodec.decode_input(payload.inputs[0]))
        return InferenceResponse(model_name=self.name, outputs=[NumpyCodec.encode_output("y", rows)])


async def main(model: str, port: int) -> None:
    ports = {"http_port": port, "grpc_port": port + 1, "metrics_port": port + 2}
    settings = ModelSettings(name=model, implementation=Model, max_batch_size=BATCH, max_batch_time=DELAY)
    folder = tempfile.mkdtemp()  # for its metrics, which would be in the working directory
    server = MLServer(Settings(debug=False, host="127.0.0.1", metrics_dir=folder, **ports))
    await server.start([settings])


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
