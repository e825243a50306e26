"""A proxy on this machine that forwards HTTP requests, counts what passes, and loses replies on demand."""

import http.client
import threading
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

# What a client signs must arrive unchanged; these belong to the connection.
_OF_THE_CONNECTION = ("connection", "keep-alive", "transfer-encoding")


class Proxy:
    """Forwards requests to a server.

    Attributes:
        url: Where it listens.
        methods: How many requests of each method it got.
        bytes_sent: Size of the bodies of all requests.
        bytes_received: Size of the bodies of all replies.
        num_dropped: How many replies it lost.
    """

    def __init__(self, target: str, port: int) -> None:
        self.target = urllib.parse.urlsplit(target).netloc
        self.url = f"http://127.0.0.1:{port}"
        self.num_dropped = 0
        self.reset()
        self._lock = threading.Lock()
        self._to_drop = 0
        self._method: str | None = None
        self._part = ""

    def reset(self) -> None:
        """Count from zero."""
        self.methods: Counter[str] = Counter()
        self.bytes_sent = 0
        self.bytes_received = 0

    @property
    def num_requests(self) -> int:
        """How many requests it got."""
        return self.methods.total()

    def drop_replies(self, number: int, method: str | None = None, part: str = "") -> None:
        """Close the connection instead of sending the next replies: to a method, and to URLs that contain a text."""
        with self._lock:
            self._to_drop = number
            self._method = method
            self._part = part

    def count(self, method: str, path: str, num_sent: int, num_received: int) -> bool:
        """Count a request; return whether its reply is lost."""
        with self._lock:
            self.methods[method] += 1
            self.bytes_sent += num_sent
            self.bytes_received += num_received
            if not self._to_drop or self._method not in (None, method) or self._part not in path:
                return False
            self._to_drop -= 1
            self.num_dropped += 1
            return True


@contextmanager
def serving_proxy(target: str) -> Iterator[Proxy]:
    """Run a proxy in front of a server."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            connection = http.client.HTTPConnection(proxy.target)
            headers = {name: value for name, value in self.headers.items() if name.lower() not in _OF_THE_CONNECTION}
            connection.request(self.command, self.path, body, headers)
            reply = connection.getresponse()
            content = reply.read()
            connection.close()
            if proxy.count(self.command, self.path, len(body), len(content)):
                self.close_connection = True
                return
            self.send_response_only(reply.status, reply.reason)
            for name, value in reply.getheaders():
                # The reply to HEAD has the length of a body that it does not have.
                is_length = name.lower() == "content-length" and self.command != "HEAD"
                if name.lower() not in _OF_THE_CONNECTION and not is_length:
                    self.send_header(name, value)
            if self.command != "HEAD":
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = forward  # noqa: N815

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    proxy = Proxy(target, server.server_address[1])
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
