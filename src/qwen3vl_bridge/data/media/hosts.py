"""Keeps track of unavailable servers, so that not every URL of one waits for a timeout.

A server is down if it does not respond, or responds with an error of its own (5xx). If all attempts failed in this way
for a few of its URLs in a row, this `Hosts` sends it no more requests, until the download is run again. Any other
response means that it is up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from qwen3vl_bridge.data.errors import Unreachable

import httpx

MOST_DOWN = 3  # URLs in a row
ANSWER = 60.0  # seconds for a response up to its body
_BROKEN = 500
# Not for a server that responds with something other than HTTP.
_NO_ANSWER = (httpx.TimeoutException, httpx.NetworkError, httpx.ProxyError)


class Down(Exception):
    """A server is down.

    Attributes:
        server: its name.
    """

    def __init__(self, server: str, problem: str) -> None:
        """Create the message from the server and the evidence."""
        super().__init__(problem)
        self.server = server


class Hosts:
    """Sends requests, and keeps track of servers that are down; thread-safe."""

    def __init__(self, make_client: Callable[[], httpx.Client]) -> None:
        """Send with one HTTP client per thread.

        The library's timeout restarts with each byte, so that a server which sends a header byte by byte would block a
        thread forever. Closing the client ends its thread's wait, and a new client replaces it.

        Args:
            make_client: creates a client.
        """
        self._make_client, self._own, self._lock = make_client, threading.local(), threading.Lock()
        self._missed = dict[str, int]()  # URLs in a row, by server

    def send(self, url: httpx.URL | str, place: str) -> httpx.Response:
        """A response, whose body is still to be read.

        Args:
            url: the URL.
            place: position of the URL in the data, for messages.

        Raises:
            Down: the server is down.
            Unreachable: it was down too often, and gets no more requests.
            httpx.TransportError: it responds with something other than HTTP.
        """
        client = self._client()
        request = client.build_request("GET", url)
        server = request.url.netloc.decode("ascii")
        if self._missed.get(server, 0) >= MOST_DOWN:
            raise Unreachable(
                place,
                f"found {str(request.url)!r} not requested, because {MOST_DOWN} URLs of {server} in "
                "a row failed, expected a server that responds",
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
        """Count a URL whose server was down in all attempts."""
        with self._lock:
            self._missed[server] = self._missed.get(server, 0) + 1
