"""What Envoy is answered, message by message, in each mode for bodies."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc_pb2

from cotenant.k8s.picker import exchange as words
from cotenant.k8s.picker.exchange import BrokenMessageError, Exchange
from cotenant.k8s.picker.picker import Decision, Picked, Rejected, Unavailable
from tests.k8s.picker import envoy
from tests.k8s.picker.envoy import Mode
from tests.k8s.picker.test_request import wire

INFER = "/v2/models/m/infer"
CHAT = "/v1/chat/completions"
GRPC = "/inference.GRPCInferenceService/ModelInfer"


class Asked:
    """A picker that notes what it is asked, and always decides the same."""

    def __init__(self, decision: Decision = Picked(("10.0.0.1:8000", "10.0.0.2:8000"))) -> None:  # noqa: B008
        self.decision = decision
        self.calls: list[tuple[str | None, float | None, Collection[str] | None]] = []
        self.exchange = Exchange(self._pick)

    def _pick(self, model: str | None, timeout: float | None, subset: Collection[str] | None) -> Decision:
        self.calls.append((model, timeout, subset))
        return self.decision

    def __call__(self, message: Any) -> list[Any]:
        answers = self.exchange.handle(message.SerializeToString())
        return [ext_proc_pb2.ProcessingResponse.FromString(answer) for answer in answers]


def kinds(answers: list[Any]) -> list[str]:
    return [answer.WhichOneof("response") for answer in answers]


@pytest.mark.parametrize("mode", [*Mode.BodySendMode.values(), None])
def test_model_in_the_path_is_decided_at_once(mode: int | None) -> None:
    asked = Asked()
    [answer] = asked(envoy.headers(INFER, mode))
    assert envoy.destination(answer) == "10.0.0.1:8000,10.0.0.2:8000"
    assert answer.request_headers.response.clear_route_cache
    assert asked.calls == [("m", None, None)]


def test_full_duplex_chunks_are_sent_back_as_they_come() -> None:
    asked = Asked()
    asked(envoy.headers(INFER, Mode.FULL_DUPLEX_STREAMED))
    for chunk, last in ((b"abc", False), (b"", True)):
        answers = asked(envoy.body(chunk, last=last))
        assert envoy.streamed(answers) == [(chunk, last)]
    response = ext_proc_pb2.ProcessingRequest(response_body=ext_proc_pb2.HttpBody(body=b"xyz", end_of_stream=True))
    assert envoy.streamed(asked(response), "response_body") == [(b"xyz", True)]
    assert len(asked.calls) == 1


def test_full_duplex_headers_wait_for_the_body_that_names_the_model() -> None:
    asked = Asked()
    assert asked(envoy.headers(CHAT, Mode.FULL_DUPLEX_STREAMED)) == []
    assert asked(envoy.body(b'{"model": ')) == []
    head, *chunks = asked(envoy.body(b'"llama"}', last=True))
    assert envoy.destination(head).startswith("10.0.0.1:8000")
    assert envoy.streamed(chunks) == [(b'{"model": ', False), (b'"llama"}', True)]
    assert asked.calls == [("llama", None, None)]


def test_full_duplex_body_that_ends_with_trailers_is_decided_then() -> None:
    asked = Asked()
    asked(envoy.headers(CHAT, Mode.FULL_DUPLEX_STREAMED))
    asked(envoy.body(b'{"model": "llama"}'))
    answers = asked(envoy.trailers())
    assert kinds(answers) == ["request_headers", "request_body", "request_trailers"]
    assert asked.calls == [("llama", None, None)]
    asked = Asked()
    asked(envoy.headers(CHAT, Mode.FULL_DUPLEX_STREAMED))
    assert kinds(asked(envoy.trailers())) == ["request_headers", "request_trailers"]
    assert asked.calls == [(None, None, None)]


def test_full_duplex_grpc_is_decided_with_the_first_bytes_that_tell() -> None:
    asked, whole = Asked(), wire("resnet")
    headers = envoy.headers(GRPC, Mode.FULL_DUPLEX_STREAMED, content_type="application/grpc", grpc_timeout="80m")
    assert asked(headers) == []
    assert asked(envoy.body(whole[:3])) == []
    assert kinds(asked(envoy.body(whole[3:20]))) == ["request_headers", "request_body", "request_body"]
    assert envoy.streamed(asked(envoy.body(whole[20:]))) == [(whole[20:], False)]
    assert asked.calls == [("resnet", 0.08, None)]


def test_mode_of_grpc_has_messages_without_prefix() -> None:
    asked = Asked()
    assert asked(envoy.headers(GRPC, Mode.GRPC, content_type="application/grpc")) == []
    message = wire("resnet", prefixed=False)
    head, chunk = asked(envoy.body(message))
    assert envoy.destination(head) and envoy.streamed([chunk]) == [(message, False)]
    assert asked.calls == [("resnet", None, None)]


@pytest.mark.parametrize("mode", [Mode.BUFFERED, Mode.BUFFERED_PARTIAL])
@pytest.mark.parametrize("last", [True, False])
def test_buffered_destination_goes_with_the_answer_to_the_body(mode: int, last: bool) -> None:
    asked = Asked()
    [head] = asked(envoy.headers(CHAT, mode))
    assert head.request_headers == ext_proc_pb2.HeadersResponse()
    [answer] = asked(envoy.body(b'{"model": "llama"}', last=last))
    assert answer.WhichOneof("response") == "request_body"
    assert envoy.destination(answer).startswith("10.0.0.1:8000")
    assert asked.calls == [("llama", None, None)]


@pytest.mark.parametrize("mode", [Mode.NONE, Mode.STREAMED])
def test_without_a_body_that_counts_any_replica_is_taken(mode: int) -> None:
    asked = Asked()
    [head] = asked(envoy.headers(CHAT, mode))
    assert envoy.destination(head)
    [answer] = asked(envoy.body(b'{"model": "llama"}', last=True))
    assert answer.request_body == ext_proc_pb2.BodyResponse()
    assert asked.calls == [(None, None, None)]


def test_envoy_that_tells_no_mode_gets_a_destination_twice() -> None:
    asked = Asked()
    [head] = asked(envoy.headers(CHAT, None))
    [answer] = asked(envoy.body(b'{"model": "llama"}', last=True))
    assert envoy.destination(head) and envoy.destination(answer)
    assert asked.calls == [(None, None, None), ("llama", None, None)]


def test_head_without_a_body_does_not_wait_for_one() -> None:
    asked = Asked()
    [answer] = asked(envoy.headers(CHAT, Mode.FULL_DUPLEX_STREAMED, ended=True))
    assert envoy.destination(answer) and asked.calls == [(None, None, None)]


@pytest.mark.parametrize("subset", [["a:1", "b:2"], "a:1, b:2"])
def test_subset_of_the_gateway_is_passed_on(subset: Any) -> None:
    asked = Asked()
    asked(envoy.headers(INFER, Mode.NONE, subset=subset))
    assert asked.calls == [("m", None, frozenset(["a:1", "b:2"]))]


def test_rejected_is_429_with_retry_after() -> None:
    asked = Asked(Rejected("too late", 0.3))
    [answer] = asked(envoy.headers(INFER, Mode.FULL_DUPLEX_STREAMED))
    immediate = answer.immediate_response
    assert immediate.status.code == 429
    assert immediate.body == b'{"error":"too late"}'
    assert envoy.header_values(immediate.headers) == {"content-type": "application/json", "retry-after": "1"}
    assert not immediate.HasField("grpc_status")
    assert asked.exchange.done
    assert asked(envoy.body(b"abc", last=True)) == []


def test_unavailable_is_503_also_after_a_body() -> None:
    asked = Asked(Unavailable("no replica is ready"))
    asked(envoy.headers(CHAT, Mode.FULL_DUPLEX_STREAMED))
    [answer] = asked(envoy.body(b"{}", last=True))
    assert (answer.immediate_response.status.code, answer.immediate_response.body) == (
        503,
        b'{"error":"no replica is ready"}',
    )
    assert asked(envoy.trailers()) == []


@pytest.mark.parametrize(("decision", "status"), [(Rejected("late", 2.5), 8), (Unavailable("none"), 14)])
def test_calls_of_grpc_end_with_its_status(decision: Decision, status: int) -> None:
    asked = Asked(decision)
    asked(envoy.headers(GRPC, Mode.FULL_DUPLEX_STREAMED, content_type="application/grpc"))
    [answer] = asked(envoy.body(wire()))
    immediate = answer.immediate_response
    assert immediate.grpc_status.status == status
    assert immediate.body == decision.reason.encode()  # type: ignore[union-attr]
    assert "content-type" not in envoy.header_values(immediate.headers)


def test_body_that_is_too_long_to_hold_is_413(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "MAX_HELD", 10)
    asked = Asked()
    asked(envoy.headers(CHAT, Mode.FULL_DUPLEX_STREAMED))
    assert asked(envoy.body(b"0123456789")) == []
    [answer] = asked(envoy.body(b"x"))
    assert answer.immediate_response.status.code == 413 and asked.calls == []


def test_responses_pass_unchanged() -> None:
    asked = Asked()
    asked(envoy.headers(INFER, Mode.BUFFERED))
    for kind, message in (
        ("response_headers", ext_proc_pb2.HttpHeaders()),
        ("response_body", ext_proc_pb2.HttpBody(body=b"x", end_of_stream=True)),
        ("response_trailers", ext_proc_pb2.HttpTrailers()),
    ):
        [answer] = asked(ext_proc_pb2.ProcessingRequest(**{kind: message}))
        assert answer.WhichOneof("response") == kind
        assert not answer.ByteSize() > 2


def test_observability_is_not_answered() -> None:
    message = envoy.headers(INFER, Mode.NONE)
    message.observability_mode = True
    asked = Asked()
    assert asked(message) == [] and asked.calls == []


def test_broken_message_is_said_to_be_one() -> None:
    with pytest.raises(BrokenMessageError, match=r"^not the message envoy.service.ext_proc.v3.ProcessingRequest$"):
        Exchange(Asked()._pick).handle(b"\xff\xff")
