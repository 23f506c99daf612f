"""What comes from a sandbox may be anything: it is refused by name, never a 500, and the session goes on."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proxy.body import MAX_DEPTH, parse_object
from proxy.errors import BadRequestError
from tests.proxy.clients import FLAT_TOOL, TOOL, Client, user
from tests.support.proxy import Proxy
from tests.support.stub_engine import StubEngine

CALL = {"id": "call1", "type": "function", "function": {"name": "exec_command", "arguments": "{}"}}
USE = {"type": "tool_use", "id": "call1", "name": "exec_command", "input": {}}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "policy",
        "messages": [
            user("hi"),
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call1", "content": "x"},
        ],
        "tools": [TOOL],
        "tool_choice": "auto",
        "stop": ["x"],
        "max_tokens": 9,
    },
    "/v1/responses": {
        "model": "policy",
        "input": [user("hi"), {"type": "function_call", "call_id": "call1", "name": "exec_command", "arguments": "{}"}],
        "tools": [FLAT_TOOL],
        "text": {"format": {"type": "text"}},
        "max_output_tokens": 9,
    },
    "/v1/messages": {
        "model": "policy",
        "messages": [user("hi"), {"role": "assistant", "content": [USE]}, user("go on")],
        "tools": [{"name": "exec_command", "input_schema": {"type": "object"}}],
        "max_tokens": 9,
    },
    "/v1beta/models/policy:generateContent": {
        "contents": [{"role": "user", "parts": [{"text": "hi"}]}],
        "tools": [{"functionDeclarations": [{"name": "exec_command", "parameters": {"type": "OBJECT"}}]}],
        "generationConfig": {"maxOutputTokens": 9},
    },
}
ODD = st.sampled_from(
    [
        None,
        True,
        -1,
        0,
        10**30,
        1e308,
        "",
        "x" * 3000,
        "\ud83d",
        "<|im_end|>\n<|im_start|>",
        "\x00",
        [],
        {},
        [[]],
        {"type": []},
        {"type": "text"},
    ]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in inner for place in places(item, (*path, key)))]


def put(value: Any, path: tuple[Any, ...], odd: Any) -> Any:
    if not path:
        return odd
    copy = value.copy()
    copy[path[0]] = put(copy[path[0]], path[1:], odd)
    return copy


@pytest.mark.parametrize("path", BODIES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_an_odd_value_anywhere_is_answered_or_refused(proxy: Proxy, stub: StubEngine, member: int, path: str, data: st.DataObject) -> None:
    body = BODIES[path]
    for _ in range(data.draw(st.integers(1, 3))):
        body = put(body, data.draw(st.sampled_from(places(body))), data.draw(ODD))
    _, key = proxy.open(member)
    client = Client(proxy.url, key)
    reply = client.http.post(path, content=json.dumps(body).encode())
    assert reply.status_code < 500, (body, reply.text)
    assert client.chat([user("still there?")]).status_code == 200


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"3", b'"x"', b"\xff\xfe", b'{"a":' * 5000, b'{"a":' * 500 + b"1" + b"}" * 500, b"[" * 100_000], ids=repr
)
def test_what_is_no_object_is_refused(proxy: Proxy, stub: StubEngine, member: int, path: str, content: bytes) -> None:
    _, key = proxy.open(member)
    reply = Client(proxy.url, key).http.post(path, content=content)
    assert reply.status_code == 400
    assert "body" in reply.text


def test_depth_is_counted_exactly() -> None:
    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b"1" + b"]" * (depth - 1) + b"}"

    assert parse_object(nested(MAX_DEPTH - 1))
    with pytest.raises(BadRequestError, match="deeper than 100 levels"):
        parse_object(nested(MAX_DEPTH))


def test_half_a_surrogate_pair_becomes_a_character(proxy: Proxy, stub: StubEngine, member: int) -> None:
    assert parse_object(b'{"a": ["x\\ud83d", "\\ud83d\\ude00"]}') == {"a": ["x\N{REPLACEMENT CHARACTER}", "\N{GRINNING FACE}"]}
    session, key = proxy.open(member)
    reply = Client(proxy.url, key).http.post("/v1/responses", content=b'{"input": "cut \\ud83d"}')
    assert reply.status_code == 200
    assert proxy.calls(session).calls[0].messages == [user("cut \N{REPLACEMENT CHARACTER}")]


@pytest.mark.parametrize("sent", [b"", b'{"input": "h', b'{"input": "hi", "stream": true}'], ids=["nothing", "half", "all"])
def test_a_client_that_hangs_up_leaves_nothing_stuck(proxy: Proxy, stub: StubEngine, member: int, sent: bytes) -> None:
    session, key = proxy.open(member)
    address = urlsplit(proxy.url)
    with socket.create_connection((address.hostname, address.port)) as connection:
        head = f"POST /v1/responses HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-length: {len(sent) or 9}\r\n\r\n"
        connection.sendall(head.encode() + sent)
    assert Client(proxy.url, key).responses("again").status_code == 200
    proxy.close(session)
    assert "openforge_proxy_calls_in_flight 0.0" in proxy.admin.get("/metrics").text
