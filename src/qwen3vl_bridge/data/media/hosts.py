"""Servers that are down, so that one is not waited for once for each of its addresses.

What lives here: sending a request, and which servers are still asked. What may not: what an answer is worth, attempts
(`downloads.py`).

A server is down if it does not answer, or answers that it is broken (5xx). If a few of its addresses in a row were out
of reach for that in all attempts, no other is asked for by the same `Hosts`, which is until the download is run again.
Any other answer says that it is up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from qwen3vl_bridge.data.errors import Unreachable

import httpx

MOST_DOWN = 3  # addresses in a row
ANSWER = 60.0  # seconds for an answer up to its body
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

    def __init__(self, make_client: Callable[[], httpx.Client]) -> None:
        """Send by clients, each thread by its own.

        The library's timeout begins anew with each byte, so that a server which sends a header byte by byte would hold
        a thread without end. A client that is closed ends what its thread waits for, and a new one takes its place.

        Args:
            make_client: makes one.
        """
        self._make_client, self._own, self._lock = make_client, threading.local(), threading.Lock()
        self._missed = dict[str, int]()  # addresses in a row, by server

    def send(self, url: httpx.URL | str, place: str) -> httpx.Response:
        """An answer, whose body is still to be read.

        Args:
            url: what is asked for.
            place: where its address stands, for messages.

        Raises:
            Down: the server is.
            Unreachable: it has been too often, and is not asked.
            httpx.TransportError: it answers, but not as HTTP has it.
        """
        client = self._client()
        request = client.build_request("GET", url)
        server = request.url.netloc.decode("ascii")
        if self._missed.get(server, 0) >= MOST_DOWN:
            raise Unreachable(
                place,
                f"found {str(request.url)!r} out of reach: not asked for, because {MOST_DOWN} addresses of {server} in "
                "a row were, expected a server that answers",
            )
        patience = threading.Timer(ANSWER, client.close)
        patience.daemon = True
        patience.start()
        try:
            response = client.send(request, stream=True)
        except _NO_ANSWER as error:
            problem = f"no whole answer in {ANSWER:g} s" if client.is_closed else f"{type(error).__name__}: {error}"
            raise Down(server, problem) from error
        finally:
            patience.cancel()
        if response.status_code >= _BROKEN:
            response.close()
            raise Down(server, f"status {response.status_code}")
        with self._lock:
            self._missed.pop(server, None)
        return response

    def _client(self) -> httpx.Client:
        client = getattr(self._own, "client", None)
        if client is None or client.is_closed:
            client = self._own.client = self._make_client()
        return client

    def missed(self, server: str) -> None:
        """Note an address for which a server was down in all attempts."""
        with self._lock:
            self._missed[server] = self._missed.get(server, 0) + 1
