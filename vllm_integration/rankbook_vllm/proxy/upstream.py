"""Requests to engines, and what goes wrong with them, named by engine."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import httpx

from rankbook_vllm.proxy.refusal import Refusal
from rankbook_vllm.proxy.routing import Target

__all__ = ["Unreachable", "Upstream", "named"]

_CONNECT_S = 5.0


class Unreachable(Refusal):
    """Nobody took the connection, so nothing was begun."""


@contextlib.contextmanager
def named(target: Target, timeout_s: float) -> Iterator[None]:
    """Turns httpx's errors into answers that name the engine.

    Raises:
        Unreachable: Nobody took the connection.
        Refusal: The engine was silent for too long, or broke off.
    """
    who = f"{target.engine_id} at {target.url}"
    details = {"engine_id": target.engine_id}
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        why = str(error) or "no connection in time"
        raise Unreachable(
            502, "ENGINE_UNREACHABLE", f"{who} is not reached: {why}", details
        ) from None
    except httpx.TimeoutException:
        raise Refusal(
            504, "ENGINE_SILENT", f"{who} said nothing for {timeout_s:g} s (--timeout)", details
        ) from None
    except httpx.HTTPError as error:
        raise Refusal(
            502, "ENGINE_BROKE_OFF", f"{who} broke off: {type(error).__name__}", details
        ) from None


class Upstream:
    """Asks engines. For one event loop; cancelling a call ends its connection."""

    def __init__(self, timeout_s: float) -> None:
        """Opens nothing.

        Args:
            timeout_s: Longest silence of an engine, in seconds; a connection is
                waited for no longer than 5 s.
        """
        self.timeout_s = timeout_s
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_S)),
            # One connection a request: a kept one may be closed by a restarted
            # engine in the moment in which it is used.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            headers={"accept-encoding": "identity"},
            trust_env=False,
        )

    @contextlib.asynccontextmanager
    async def post(
        self, target: Target, path: str, body: Mapping[str, Any], headers: Mapping[str, str]
    ) -> AsyncIterator[httpx.Response]:
        """Posts JSON; the reply's body is still to be read.

        Raises:
            Refusal: There was no reply, also while the body is read in the block.
        """
        with named(target, self.timeout_s):
            async with self._client.stream(
                "POST",
                target.url + path,
                content=json.dumps(body).encode(),
                headers={"content-type": "application/json", **headers},
            ) as reply:
                yield reply

    async def close(self) -> None:
        """Ends what is open."""
        await self._client.aclose()
