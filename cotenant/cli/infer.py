"""Send one inference request to a running server: `cotenant infer`."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
import typer
from rich.markup import escape

from cotenant.cli.loading import read_bytes
from cotenant.cli.options import LOCAL, CaFile, Json, Seed, ServerAddress, TokenFile
from cotenant.cli.output import console, show_json
from cotenant.core.tensor import DTYPES, ModelInfo, Tensor, TensorSpec
from cotenant.core.units import show_seconds
from cotenant.errors import ConfigError
from cotenant.render.table import table

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cotenant.cli.client import ServerEndpoint

SHOWN = 8  # values of an output in the table


def infer(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Name of the model.")],
    inputs: Annotated[
        list[str] | None,
        typer.Option(
            "--input",
            "-i",
            metavar="FILE",
            help="Request as JSON (Open Inference Protocol), or one input as [NAME=]FILE.npy; repeat for several.",
        ),
    ] = None,
    random: Annotated[bool, typer.Option("--random", help="Send one row of random inputs.")] = False,
    address: ServerAddress = LOCAL,
    seed: Seed = 0,
    json: Json = False,
    token_file: TokenFile = None,
    ca_file: CaFile = None,
) -> None:
    """Send one inference request and print the outputs."""
    from cotenant.cli.client import endpoint, fetch_model, random_inputs
    from cotenant.cli.client import infer as send_inputs

    if bool(inputs) == random:
        raise ConfigError(f"nothing to send to {model!r}; give either --input FILE or --random")
    server = endpoint(address, token_file, ca_file)
    if inputs and inputs[0].endswith(".json"):
        if len(inputs) > 1:
            raise ConfigError(f"{inputs[0]}: a JSON request holds all inputs; leave out the other --input")
        begun = time.perf_counter()
        outputs = _send_json(server, model, read_bytes(Path(inputs[0])))
    else:
        if inputs:
            tensors = read_arrays(inputs, fetch_model(server, model)[0])
        else:
            tensors = list(random_inputs(server, model, np.random.default_rng(seed)))
        begun = time.perf_counter()
        outputs = [_described(tensor) for tensor in send_inputs(server, model, tensors)]
    seconds = time.perf_counter() - begun
    if json:
        show_json({"model_name": model, "outputs": outputs})
        return
    rows = table(f"{model}, {show_seconds(seconds)}", "output", "datatype", "shape", "values")
    for output in outputs:
        shape = " x ".join(map(str, output["shape"]))
        rows.add_row(escape(output["name"]), output["datatype"], shape, escape(_shortened(output["data"])))
    console.print(rows)


def read_arrays(files: Sequence[str], info: ModelInfo) -> list[Tensor]:
    """Read ``[NAME=]FILE.npy`` as inputs of a model. The name may be left out for a model with one input.

    Raises ConfigError for a file that is no array, an unknown name, and values that the input's datatype cannot hold.
    """
    specs = {spec.name: spec for spec in info.inputs}
    tensors = []
    for text in files:
        name, _, file = text.rpartition("=")
        if not name and len(specs) == 1:
            (name,) = specs
        if name not in specs:
            raise ConfigError(f"--input {text}: write NAME=FILE.npy; inputs of {info.name!r} are {', '.join(specs)}")
        tensors.append(_read_array(Path(file), specs[name]))
    return tensors


def _read_array(path: Path, spec: TensorSpec) -> Tensor:
    from cotenant.live.elements import pack_strings

    content = read_bytes(path)
    try:
        array: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise ConfigError(f"{path}: is not a NumPy array (.npy) or a JSON request (.json): {error}") from None
    if spec.datatype == "BYTES":
        data = pack_strings(str(item).encode() for item in array.ravel())
    elif spec.datatype in DTYPES and np.can_cast(array.dtype, DTYPES[spec.datatype], "same_kind"):
        data = np.ascontiguousarray(array, DTYPES[spec.datatype]).tobytes()
    else:
        raise ConfigError(f"{path}: input {spec.name!r} takes {spec.datatype}, which cannot hold {array.dtype}")
    return Tensor(spec.name, spec.datatype, array.shape, data)


def _send_json(address: ServerEndpoint, model: str, request: bytes) -> list[dict[str, Any]]:
    from cotenant.cli.client import model_path, post

    response: dict[str, Any] = msgspec.json.decode(post(address, f"{model_path(model)}/infer", request, timeout=None))
    outputs: list[dict[str, Any]] = response["outputs"]
    return outputs


def _described(tensor: Tensor) -> dict[str, Any]:
    """Describe an output as the protocol's JSON does."""
    from cotenant.live.elements import unpack_strings

    if tensor.datatype == "BYTES":
        data = [item.decode(errors="replace") for item in map(bytes, unpack_strings(tensor))]
    else:
        data = tensor.array().ravel().tolist()
    return {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape, "data": data}


def _shortened(values: Sequence[Any]) -> str:
    shown = ", ".join(f"{value:.4g}" if isinstance(value, float) else str(value) for value in values[:SHOWN])
    return f"{shown}, … ({len(values)} values)" if len(values) > SHOWN else shown
