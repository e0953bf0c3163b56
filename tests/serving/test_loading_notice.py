"""A server that is not ready yet says so, whoever asks and however."""

from __future__ import annotations

import json
import socket
import time
from http.client import HTTPConnection

import pytest

from edgeh2o.serving.listening import open_sockets
from edgeh2o.serving.loading_notice import LoadingNotice


@pytest.mark.parametrize(("method", "body"), [("GET", None), ("POST", b'{"messages": []}' * 9)])
def test_requests_get_a_503_until_the_end(method: str, body: bytes | None) -> None:
    with open_sockets(["127.0.0.1"], 0) as (listening,):
        port = listening.getsockname()[1]
        with LoadingNotice([listening]):
            for _ in range(3):
                connection = HTTPConnection("127.0.0.1", port, timeout=10)
                connection.request(method, "/health", body)
                reply = connection.getresponse()
                assert (reply.status, reply.headers["Retry-After"]) == (503, "2")
                assert json.loads(reply.read())["error"]["code"] == "loading"
                connection.close()
        # Whoever comes now waits for the server.
        with socket.create_connection(("127.0.0.1", port), timeout=10) as waiting:
            waiting.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            waiting.settimeout(0.1)
            with pytest.raises(TimeoutError):
                waiting.recv(1)


def test_a_503_has_the_form_of_the_interface() -> None:
    with open_sockets(["127.0.0.1"], 0) as (listening,):
        port = listening.getsockname()[1]
        with LoadingNotice([listening]):
            connection = HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request("POST", "/v1/messages?beta=true", b"{}")
            told = json.loads(connection.getresponse().read())
            connection.close()
    assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")


def test_clients_that_say_nothing_or_go_hold_nobody_up() -> None:
    with open_sockets(["127.0.0.1"], 0) as (listening,):
        address = listening.getsockname()
        with LoadingNotice([listening]):
            silent = socket.create_connection(address)
            with socket.create_connection(address) as gone:
                gone.sendall(b"GET / HT")
            with socket.create_connection(address) as endless:
                endless.sendall(b"x" * 70_000)
            connection = HTTPConnection(*address, timeout=10)
            connection.request("GET", "/health")
            assert connection.getresponse().status == 503
            connection.close()
            silent.close()


def test_it_ends_while_a_client_is_silent() -> None:
    with open_sockets(["127.0.0.1"], 0) as (listening,):
        with LoadingNotice([listening]), socket.create_connection(listening.getsockname()):
            time.sleep(0.05)
        assert listening.fileno() >= 0
