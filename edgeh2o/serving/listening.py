"""Addresses on which a server listens: of the network, and UNIX sockets."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

from ..errors import ResourceError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
UNIX_SUFFIX = ".sock"  # as llama-server tells them apart
# Of a client that neither takes what it is sent nor answers the kernel's probes.
SILENCE_S = 60
_BACKLOG = 128


@contextmanager
def open_sockets(hosts: Sequence[str], port: int) -> Iterator[list[socket.socket]]:
    """Sockets that listen on all of ``hosts``, one of which may be a path that ends in ".sock".

    Port 0 takes a free one, the same for all. Of several addresses "::" is IPv6 alone. Raises
    ResourceError if one cannot be had.
    """
    opened: list[socket.socket] = []
    with ExitStack() as stack:
        for host in hosts:
            if is_path(host):
                opened.append(stack.enter_context(_open_path(host)))
            else:
                one = _open_address(host, port, is_alone=len(hosts) == 1)
                opened.append(stack.enter_context(one))
                port = int(one.getsockname()[1])
        yield opened


def is_path(host: str) -> bool:
    """Whether a host is the path of a UNIX socket."""
    return host.endswith(UNIX_SUFFIX)


def is_reachable(host: str) -> bool:
    """Whether other machines reach it."""
    return host not in LOOPBACK and not is_path(host)


def address_of(host: str, listening: socket.socket) -> str:
    """What to tell clients of a socket of ``open_sockets``: a path, or the base of OpenAI's."""
    if is_path(host):
        return host
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listening.getsockname()[1]}/v1"


def _open_address(host: str, port: int, *, is_alone: bool) -> socket.socket:
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = infos[0]
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6 and not is_alone:
                opened.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            _end_dead_connections(opened)
            opened.bind(address)
            opened.listen(_BACKLOG)
        except BaseException:
            opened.close()
            raise
    except OSError as error:
        raise ResourceError(
            f"cannot listen on {host} port {port}: {error.strerror or error}; choose another "
            "one by --host and --port"
        ) from None
    return opened


@contextmanager
def _open_path(path: str) -> Iterator[socket.socket]:
    """A UNIX socket, removed at the end; one that a dead server has left is replaced."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
        try:
            _remove_dead(path)
            opened.bind(path)
            own = os.stat(path)
            opened.listen(_BACKLOG)
        except OSError as error:
            raise ResourceError(
                f"cannot listen on {path}: {error.strerror or error}; choose another one by --host"
            ) from None
        try:
            yield opened
        finally:
            with suppress(OSError):
                if os.path.samestat(os.stat(path), own):
                    os.unlink(path)


def _remove_dead(path: str) -> None:
    """Leaves what is no socket, and one on which somebody listens: binding then fails."""
    with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            try:
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)


def _end_dead_connections(listening: socket.socket) -> None:
    """Connections that it accepts end if the client is gone without a word, or reads nothing."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", SILENCE_S),
        ("TCP_KEEPALIVE", SILENCE_S),  # the same on macOS
        ("TCP_KEEPINTVL", SILENCE_S // 4),
        ("TCP_USER_TIMEOUT", SILENCE_S * 1000),
    ):
        if hasattr(socket, name):  # Linux has them all
            listening.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
