"""Local HTTP servers with scripted responses."""

import contextlib
import io
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from PIL import Image


class Server:
    """Serve scripted responses by path; a response is bytes or a function of the handler."""

    def __init__(self) -> None:
        self.answers, self.first, self.asked = {}, {}, Counter()
        # HTTP/1.1 keeps connections open, which forked processes must not share.
        answer = {"do_GET": lambda it: self._get(it), "log_message": lambda *_: None, "protocol_version": "HTTP/1.1"}
        handler = type("Handler", (BaseHTTPRequestHandler,), answer)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()

    def _get(self, handler) -> None:
        path = handler.path.partition("?")[0]
        self.asked[path] += 1
        before = self.first.get(path)
        answer = before.pop(0) if before else self.answers.get(path, 404)
        with contextlib.suppress(ConnectionError):
            if callable(answer):
                answer(handler)
            elif isinstance(answer, bytes):
                send(handler, 200, answer)
            else:
                send(handler, answer)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def send(handler, status: int, body: bytes = b"", **headers) -> None:
    handler.send_response(status)
    for name, value in ({"Content_Length": len(body)} | headers).items():
        if value is not None:
            handler.send_header(name.replace("_", "-"), str(value))
    handler.end_headers()
    handler.wfile.write(body)


def redirect(to: str):
    return lambda handler: send(handler, 302, Location=to)


def raw(answer: bytes):
    """Raw responses that break the rules of HTTP."""

    def send_raw(handler) -> None:
        handler.wfile.write(answer)
        handler.close_connection = True

    return send_raw


def png(colour: str = "red") -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (64, 32), colour).save(file, "PNG")
    return file.getvalue()


def files(folder: Path) -> list[str]:
    """Return the files of a cache, without those that store URLs."""
    return sorted(path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".address")
