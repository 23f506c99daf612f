"""The body of a request: a JSON object within limits of size, depth and time. What comes from a sandbox may be anything."""

import asyncio
from collections.abc import Iterator
from typing import Any, Final

from starlette.requests import Request

from proxy.canonical import loads
from proxy.errors import BadRequestError, TooLargeError

MAX_BYTES: Final = 64 * 2**20
MAX_DEPTH: Final = 100
MAX_SECONDS: Final = 60.0  # to send it


async def read_object(request: Request) -> dict[str, Any]:
    """The JSON object in the body. Raises BadRequestError."""
    data = bytearray()
    try:
        async with asyncio.timeout(MAX_SECONDS):
            async for part in request.stream():
                data += part
                if len(data) > MAX_BYTES:
                    raise TooLargeError(f"the body is larger than {MAX_BYTES // 2**20} MiB")
    except TimeoutError:
        raise BadRequestError(f"the body did not come within {MAX_SECONDS:.0f} seconds") from None
    return parse_object(bytes(data))


def parse_object(data: bytes) -> dict[str, Any]:
    """The JSON object in `data`. Raises BadRequestError."""
    try:
        body = loads(data)
    except RecursionError:
        raise _too_deep() from None
    except ValueError as error:
        raise BadRequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    if _is_deep(body):
        raise _too_deep()
    return body


def _too_deep() -> BadRequestError:
    return BadRequestError(f"the body is nested deeper than {MAX_DEPTH} levels")


def _is_deep(body: object) -> bool:
    level, depth = [body], 0
    while level and depth <= MAX_DEPTH:
        level, depth = [inner for outer in level for inner in _inner(outer)], depth + 1
    return depth > MAX_DEPTH


def _inner(value: object) -> Iterator[object]:
    yield from value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
