"""Servers that are down, so that one is not waited for once for each of its addresses.

What lives here: sending a request, and which servers are still asked. What may not: what an answer is worth, attempts
(`downloads.py`).

A server is down if it does not answer, or answers that it is broken (5xx). If a few of its addresses in a row were out
of reach for that in all attempts, no other is asked for by the same `Hosts`, which is until the download is run again.
Any other answer says that it is up.
"""

from __future__ import annotations

import threading

from qwen3vl_bridge.data.errors import Unreachable

import httpx

MOST_DOWN = 3  # addresses in a row
_BROKEN = 500
# Not of one that answers what is no HTTP.
_NO_ANSWER = (httpx.TimeoutException, httpx.NetworkError, httpx.ProxyError)


class Down(Exception):
    """A server is down.

    Attributes:
        server: which.
    """

    def __init__(self, server: str, problem: str) -> None:
        """Say which, and how it is known."""
        super().__init__(problem)
        self.server = server


class Hosts:
    """Sends requests, and knows which servers are down; any number of threads may use one."""

    def __init__(self, client: httpx.Client) -> None:
        """Send by a client."""
        self._client, self._lock = client, threading.Lock()
        self._missed = dict[str, int]()  # addresses in a row, by server

    def send(self, request: httpx.Request, place: str) -> httpx.Response:
        """An answer, whose body is still to be read.

        Args:
            request: what is asked.
            place: where its address stands, for messages.

        Raises:
            Down: the server is.
            Unreachable: it has been too often, and is not asked.
            httpx.TransportError: it answers, but not as HTTP has it.
        """
        server = request.url.netloc.decode("ascii")
        if self._missed.get(server, 0) >= MOST_DOWN:
            raise Unreachable(
                place,
                f"found {str(request.url)!r} out of reach: not asked for, because {MOST_DOWN} addresses of {server} in "
                "a row were, expected a server that answers",
            )
        try:
            response = self._client.send(request, stream=True)
        except _NO_ANSWER as error:
            raise Down(server, f"{type(error).__name__}: {error}") from error
        if response.status_code >= _BROKEN:
            response.close()
            raise Down(server, f"status {response.status_code}")
        with self._lock:
            self._missed.pop(server, None)
        return response

    def missed(self, server: str) -> None:
        """Note an address for which a server was down in all attempts."""
        with self._lock:
            self._missed[server] = self._missed.get(server, 0) + 1
