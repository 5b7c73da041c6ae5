"""Work in a thread: what it raises is gone with the callback, without help of the garbage collector."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import FrameType

import pytest
import tritonclient.grpc as triton_grpc
from tritonclient.utils import InferenceServerException

from cotenant.live.limits import MAX_AT_ONCE
from cotenant.live.threads import run_in_thread
from cotenant.worker.arena import KEPT
from tests.live.stub import Running
from tests.live.test_http import INFER, request
from tests.security.server import read_response


class Held:
    """What a request holds."""


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_result_of_work_comes_from_another_thread() -> None:
    async def scenario() -> None:
        over: asyncio.Future[tuple[int, str]] = asyncio.get_running_loop().create_future()

        def work(number: int) -> tuple[int, str]:
            return number + 1, threading.current_thread().name

        with ThreadPoolExecutor(1, "one") as executor:
            run_in_thread(lambda done: over.set_result(done.result()), work, 1, executor=executor)
            number, name = await over
            assert number == 2 and name.startswith("one")
            assert threading.current_thread() is threading.main_thread()

    asyncio.run(scenario())


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("handled", [True, False])
def test_what_work_raises_holds_nothing_once_it_was_handled(handled: bool) -> None:
    held: list[weakref.ref[Held]] = []

    async def scenario() -> None:
        loop, over, seen = asyncio.get_running_loop(), asyncio.Event(), list[str]()

        def work() -> None:
            body = Held()
            held.append(weakref.ref(body))
            raise ValueError("no number")

        def then(future: asyncio.Future[None]) -> None:
            over.set()
            try:
                future.result()
            except ValueError as error:
                seen.append(str(error))
                if not handled:
                    raise

        loop.set_exception_handler(lambda loop, context: None)
        run_in_thread(then, work)
        await over.wait()
        assert seen == ["no number"]

    asyncio.run(scenario())
    until(lambda: held[0]() is None)  # the thread lets go of it a moment after


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("shared", [False, True], ids=["malformed", "shared memory"])
def test_refused_json_read_in_a_thread_holds_no_body(front: Running, shared: bool) -> None:
    text = bytes(2 * MAX_AT_ONCE)
    if shared:  # which this server has none of
        region = {"shared_memory_region": "r", "shared_memory_byte_size": 4}
        given = {"name": "x", "shape": [1, 1], "datatype": "FP32", "parameters": region}
        text = json.dumps({"inputs": [given]}).encode() + b" " * 2 * MAX_AT_ONCE
    line = str(len(text))
    arena = front.core.arena
    whole = front.call(lambda: arena.free)
    for _ in range(3):
        with socket.create_connection(("127.0.0.1", front.port), timeout=30) as sock:
            sock.sendall(request("POST", INFER, text + bytes(1 << 16), Inference_Header_Content_Length=line))
            assert read_response(sock)[0] >= 400
    until(lambda: front.call(lambda: arena.free) == whole)
    assert whole < KEPT


@pytest.mark.usefixtures("uncollected")
def test_refused_messages_of_a_stream_hold_nothing(front: Running) -> None:
    answers: list[InferenceServerException | None] = []
    client = triton_grpc.InferenceServerClient(front.rpc)
    client.start_stream(lambda result, error: answers.append(error))
    given = triton_grpc.InferInput("x", [1, MAX_AT_ONCE], "FP32")
    given._raw_content = bytes(4 * MAX_AT_ONCE)
    for _ in range(3):
        client.async_stream_infer("nothing", [given])
    until(lambda: len(answers) == 3)
    client.stop_stream()
    client.close()
    assert all(isinstance(each, InferenceServerException) for each in answers)
    until(lambda: not front.call(messages_held))


def messages_held() -> list[int]:
    """The sizes of large messages that frames hold."""
    frames = [each for each in gc.get_objects() if type(each) is FrameType]  # `isinstance` would ask lazy objects
    held = [value for frame in frames for value in frame.f_locals.values() if isinstance(value, bytes)]
    return [len(each) for each in held if len(each) >= 4 * MAX_AT_ONCE]
