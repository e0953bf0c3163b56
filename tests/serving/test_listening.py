"""Several addresses of one server, and UNIX sockets."""

from __future__ import annotations

import socket
from http.client import HTTPConnection
from pathlib import Path

import pytest

from edgeh2o.cli.main import main
from edgeh2o.errors import ResourceError
from edgeh2o.serving.listening import address_of, open_sockets
from edgeh2o.serving.loading_notice import LoadingNotice
from tests.serving.conftest import SMALL_CALLS, StartServer


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(str(self._path))


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _ask(connection: HTTPConnection, path: str = "/health", host: str | None = None) -> int:
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    reply = connection.getresponse()
    reply.read()
    connection.close()
    return reply.status


def test_one_server_has_several_addresses(start_server: StartServer, tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    hosts = "127.0.0.1, ::1" if _has_ipv6() else "127.0.0.1"
    server = start_server(*SMALL_CALLS, "--host", hosts, "--host", str(path))
    for name in ("127.0.0.1", *(["::1"] if _has_ipv6() else ())):
        assert _ask(HTTPConnection(name, server.port, timeout=60)) == 200
        # A page of the web that has a name lead here.
        assert _ask(HTTPConnection(name, server.port, timeout=60), host="evil.example") == 400
    assert _ask(_UnixConnection(path), "/v1/models") == 200
    assert f" and {path} (Ctrl-C ends)" in server.log and "warning" not in server.log
    assert server.stop() == 0
    assert not path.exists()


def test_a_unix_socket_says_not_yet_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    with open_sockets([str(path)], 0) as (listening,):
        assert address_of(str(path), listening) == str(path)
        with LoadingNotice([listening]):
            assert _ask(_UnixConnection(path)) == 503
    assert not path.exists()


def test_a_dead_socket_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    assert path.is_socket()
    with open_sockets([str(path)], 0):
        with (
            pytest.raises(ResourceError, match=r"cannot listen on .*a\.sock: .*in use"),
            open_sockets([str(path)], 0),
        ):
            pass
        assert path.is_socket()
        path.unlink()
        path.touch()  # another's
    assert path.is_file()
    with pytest.raises(ResourceError, match="cannot listen"), open_sockets([str(path)], 0):
        pass
    assert path.is_file()
    for wrong in (tmp_path / "none" / "a.sock", tmp_path / ("x" * 200 + ".sock")):
        with pytest.raises(ResourceError, match="choose another"), open_sockets([str(wrong)], 0):
            pass


def test_an_address_twice_is_an_error(capfd: pytest.CaptureFixture[str]) -> None:
    with (
        pytest.raises(ResourceError, match=r"cannot listen on 127\.0\.0\.1 port"),
        open_sockets(["127.0.0.1", "127.0.0.1"], 0),
    ):
        pass
    assert main(["serve", "model.gguf", "--host", " ,"]) == 2
    assert "--host is empty" in capfd.readouterr().err


@pytest.mark.skipif(not _has_ipv6(), reason="no IPv6")
def test_all_addresses_of_both_kinds() -> None:
    with open_sockets(["0.0.0.0", "::"], 0) as (four, six):
        assert four.getsockname()[1] == six.getsockname()[1]
