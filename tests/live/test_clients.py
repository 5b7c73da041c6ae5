"""Every call of the stock clients works: tritonclient over HTTP and gRPC, and both in their asyncio variants."""

from __future__ import annotations

import asyncio
import queue
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as rpc
import tritonclient.grpc.aio as rpc_aio
import tritonclient.http as http
import tritonclient.http.aio as http_aio
from tritonclient.utils import InferenceServerException

from cotenant.core.tensor import Tensor
from cotenant.live import oip
from cotenant.live.elements import classify
from tests.live.stub import Running

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def given(client: Any, name: str, array: np.ndarray[Any, Any], datatype: str, **options: Any) -> Any:
    tensor = client.InferInput(name, list(array.shape), datatype)
    tensor.set_data_from_numpy(array, **options)
    return tensor


def test_http_client_manages_the_server_and_its_models(front: Running) -> None:
    with http.InferenceServerClient(front.http, concurrency=4) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("identity")
        assert not client.is_model_ready("nope")
        assert client.get_server_metadata()["name"] == "cotenant"
        assert client.get_model_metadata("identity", "1")["inputs"] == [
            {"name": "x", "datatype": "FP32", "shape": [-1, -1]}
        ]
        assert client.get_model_config("identity")["max_batch_size"] == 64
        assert client.get_inference_statistics("identity")["model_stats"][0]["name"] == "identity"
        assert len(client.get_inference_statistics()["model_stats"]) > 1
        assert {"name": "identity", "version": "1", "state": "READY"} in client.get_model_repository_index()
        client.unload_model("flat")
        assert not client.is_model_ready("flat")
        client.load_model("flat")
        client.load_model("flat", config='{"max_batch_size": 0}')
        assert client.is_model_ready("flat")
        client.unload_model("nope")
        with pytest.raises(InferenceServerException, match="failed to load 'nope'"):
            client.load_model("nope")
        assert client.update_trace_settings(settings={"trace_rate": "10"})["trace_rate"] == "10"
        assert client.get_trace_settings("identity")["trace_level"] == ["OFF"]
        assert client.update_log_settings({"log_verbose_level": 1})["log_verbose_level"] == 1
        assert client.get_log_settings()["log_info"] is True
        assert client.get_system_shared_memory_status() == client.get_cuda_shared_memory_status() == []
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory("region")
        with pytest.raises(InferenceServerException, match="no shared memory"):
            client.register_system_shared_memory("region", "/key", 16)


@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False, None])
def test_http_client_infers_with_and_without_binary(front: Running, binary_in: bool, binary_out: bool | None) -> None:
    with http.InferenceServerClient(front.http) as client:
        inputs = [given(http, "x", ROWS, "FP32", binary_data=binary_in)]
        outputs = None if binary_out is None else [http.InferRequestedOutput("y", binary_data=binary_out)]
        result = client.infer("identity", inputs, outputs=outputs, request_id="7", priority=2, timeout=20_000)
        np.testing.assert_array_equal(result.as_numpy("y"), ROWS)
        assert result.get_response()["id"] == "7"
        assert (front.core.requests[-1].timeout, front.core.requests[-1].priority) == (0.02, 1)
        waiting = client.async_infer("identity", inputs)
        np.testing.assert_array_equal(waiting.get_result().as_numpy("y"), ROWS)


@pytest.mark.parametrize("packed", [None, "gzip", "deflate"])
@pytest.mark.parametrize("size", [3, 150_000])
def test_http_client_compresses_requests_and_responses(front: Running, packed: str | None, size: int) -> None:
    array = np.arange(size, dtype=np.float32)[np.newaxis]
    with http.InferenceServerClient(front.http) as client:
        result = client.infer(
            "identity",
            [given(http, "x", array, "FP32")],
            request_compression_algorithm=packed,
            response_compression_algorithm=packed,
        )
        np.testing.assert_array_equal(result.as_numpy("y"), array)


DATATYPES = [
    ("bool", np.array([[True, False]])),
    ("int8", np.array([[-1, 127]], np.int8)),
    ("uint64", np.array([[0, 2**64 - 1]], np.uint64)),
    ("fp16", np.array([[0.5, -2]], np.float16)),
    ("bytes", np.array([[b"a", "ß".encode(), b""]], np.object_)),
    ("bf16", np.array([[0.5, -2]], ml_dtypes.bfloat16)),
]


@pytest.mark.parametrize(("name", "array"), DATATYPES)
def test_clients_send_and_receive_every_datatype(front: Running, name: str, array: np.ndarray[Any, Any]) -> None:
    with http.InferenceServerClient(front.http) as client:
        for binary in (True,) if name in ("fp16", "bf16") else (True, False):
            result = client.infer(name, [given(http, "x", array, name.upper(), binary_data=binary)])
            np.testing.assert_array_equal(result.as_numpy("y"), array)
    with rpc.InferenceServerClient(front.rpc) as client:
        np.testing.assert_array_equal(client.infer(name, [given(rpc, "x", array, name.upper())]).as_numpy("y"), array)


def test_clients_ask_for_classification(front: Running) -> None:
    scores = np.array([[0.1, 0.7, 0.2], [3, 1, 2]], np.float32)
    wanted = [[b"0.700000:1", b"0.200000:2"], [b"3.000000:0", b"2.000000:2"]]
    with http.InferenceServerClient(front.http) as client:
        for binary in (True, False):
            asked = [http.InferRequestedOutput("y", binary_data=binary, class_count=2)]
            labels = client.infer("identity", [given(http, "x", scores, "FP32")], outputs=asked).as_numpy("y")
            assert [[item if isinstance(item, bytes) else item.encode() for item in row] for row in labels] == wanted
    with rpc.InferenceServerClient(front.rpc) as client:
        asked = [rpc.InferRequestedOutput("y", class_count=2)]
        assert (
            client.infer("identity", [given(rpc, "x", scores, "FP32")], outputs=asked).as_numpy("y").tolist() == wanted
        )


def test_large_output_is_classified_beside_the_event_loop(front: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def spy(*args: Any, **more: Any) -> Tensor:
        threads.append(threading.get_ident())
        return classify(*args, **more)

    monkeypatch.setattr(oip, "classify", spy)
    for size in (10, 100_000):
        scores = np.arange(size, dtype=np.float32)[np.newaxis]
        wanted = [[b"%d.000000:%d" % (size - 1, size - 1)]]
        with http.InferenceServerClient(front.http) as client:
            asked = [http.InferRequestedOutput("y", class_count=1)]
            labels = client.infer("identity", [given(http, "x", scores, "FP32")], outputs=asked).as_numpy("y")
            assert labels.tolist() == wanted
        with rpc.InferenceServerClient(front.rpc) as client:
            asked = [rpc.InferRequestedOutput("y", class_count=1)]
            labels = client.infer("identity", [given(rpc, "x", scores, "FP32")], outputs=asked).as_numpy("y")
            assert labels.tolist() == wanted
    assert threads[0] == threads[1] and threads[0] not in threads[2:]


def test_http_aio_client_infers(front: Running) -> None:
    async def run() -> None:
        async with http_aio.InferenceServerClient(front.http) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("identity")
            assert (await client.get_server_metadata())["name"] == "cotenant"
            assert (await client.get_model_metadata("identity"))["versions"] == ["1"]
            assert (await client.get_model_config("identity"))["name"] == "identity"
            assert (await client.get_inference_statistics("identity"))["model_stats"]
            assert await client.get_model_repository_index()
            await client.unload_model("flat")
            await client.load_model("flat")
            assert await client.update_trace_settings(settings={"trace_rate": "10"})
            assert await client.get_trace_settings()
            assert await client.update_log_settings({"log_info": True})
            assert await client.get_log_settings()
            assert await client.get_system_shared_memory_status() == []
            assert await client.get_cuda_shared_memory_status() == []
            array = np.arange(4000, dtype=np.float32)[np.newaxis]
            for binary in (True, False):
                inputs = [given(http_aio, "x", array, "FP32", binary_data=binary)]
                outputs = [http_aio.InferRequestedOutput("y", binary_data=binary)]
                result = await client.infer("identity", inputs, outputs=outputs)
                np.testing.assert_array_equal(result.as_numpy("y"), array)

    asyncio.run(run())


def test_grpc_client_manages_the_server_and_its_models(front: Running) -> None:
    with rpc.InferenceServerClient(front.rpc) as client:
        assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("identity")
        assert not client.is_model_ready("nope")
        assert client.get_server_metadata().name == "cotenant"
        metadata = client.get_model_metadata("identity")
        assert (metadata.platform, metadata.inputs[0].shape) == ("onnxruntime_onnx", [-1, -1])
        config = client.get_model_config("identity").config
        assert (config.max_batch_size, config.input[0].data_type) == (64, 11)
        assert (config.instance_group[0].kind, config.parameters["slo"].string_value) == (2, "50ms")
        np.testing.assert_array_equal(
            client.infer("identity", [given(rpc, "x", ROWS, "FP32")], request_id="7", priority=1, timeout=9).as_numpy(
                "y"
            ),
            ROWS,
        )
        assert front.core.requests[-1].timeout == pytest.approx(9e-6)
        statistics = client.get_inference_statistics("identity").model_stats[0]
        assert statistics.inference_stats.success.count == statistics.inference_count > 0
        assert statistics.batch_stats[0].compute_infer.ns > 0
        assert "identity" in [model.name for model in client.get_model_repository_index().models]
        client.unload_model("flat")
        assert not client.is_model_ready("flat")
        client.load_model("flat", config="{}", files={"file:1/model.onnx": b"bytes"})
        assert client.is_model_ready("flat")
        client.unload_model("nope")
        with pytest.raises(InferenceServerException, match=r"INTERNAL.*failed to load 'nope'"):
            client.load_model("nope")
        assert client.update_trace_settings(settings={"trace_rate": "10"}).settings["trace_rate"].value == ["10"]
        assert client.get_trace_settings("identity").settings["trace_level"].value == ["OFF"]
        assert client.update_log_settings({"log_verbose_level": 1}).settings["log_verbose_level"].uint32_param == 1
        assert client.get_log_settings().settings["log_info"].bool_param is True
        assert not client.get_system_shared_memory_status().regions
        assert not client.get_cuda_shared_memory_status().regions
        client.unregister_system_shared_memory()
        client.unregister_cuda_shared_memory()
        with pytest.raises(InferenceServerException, match="UNIMPLEMENTED"):
            client.register_cuda_shared_memory("region", b"", 0, 16)
        done: queue.Queue[Any] = queue.Queue()
        client.async_infer("identity", [given(rpc, "x", ROWS, "FP32")], lambda result, error: done.put((result, error)))
        result, error = done.get(timeout=5)
        assert error is None
        np.testing.assert_array_equal(result.as_numpy("y"), ROWS)


def test_grpc_client_streams(front: Running) -> None:
    """Answers come in the order of the requests, and an error leaves the stream open."""
    done: queue.Queue[Any] = queue.Queue()
    with rpc.InferenceServerClient(front.rpc) as client:
        client.start_stream(lambda result, error: done.put((result, error)))
        client.async_stream_infer("identity", [given(rpc, "x", ROWS, "FP32")], request_id="a")
        client.async_stream_infer("identity", [given(rpc, "zz", ROWS, "FP32")], request_id="b")
        client.async_stream_infer("identity", [given(rpc, "x", ROWS, "FP32")], request_id="c")
        first, error, last = done.get(timeout=5), done.get(timeout=5), done.get(timeout=5)
        client.stop_stream()
    assert (first[0].get_response().id, last[0].get_response().id) == ("a", "c")
    assert first[0].get_response().parameters["triton_final_response"].bool_param
    assert "unexpected input 'zz'" in str(error[1])


def test_grpc_aio_client_infers(front: Running) -> None:
    async def run() -> None:
        async with rpc_aio.InferenceServerClient(front.rpc) as client:
            assert await client.is_server_live() and await client.is_server_ready()
            assert await client.is_model_ready("identity")
            assert (await client.get_server_metadata()).name == "cotenant"
            assert (await client.get_model_metadata("identity")).name == "identity"
            assert (await client.get_model_config("identity")).config.name == "identity"
            assert (await client.get_inference_statistics()).model_stats
            assert (await client.get_model_repository_index()).models
            await client.unload_model("flat")
            await client.load_model("flat")
            assert (await client.get_trace_settings()).settings
            assert (await client.get_log_settings()).settings
            result = await client.infer("identity", [given(rpc, "x", ROWS, "FP32")], client_timeout=5)
            np.testing.assert_array_equal(result.as_numpy("y"), ROWS)

            async def asked() -> Any:
                for name in ("x", "zz", "x"):
                    yield {"model_name": "identity", "inputs": [given(rpc, name, ROWS, "FP32")], "request_id": name}

            errors = [error async for _, error in client.stream_infer(asked())]
            assert [error is None for error in errors] == [True, False, True]

    asyncio.run(run())
