"""The page: what may run is what is written in it."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

from tests.serving.conftest import RunningServer, StartServer
from tests.serving.fetching import fetch


def test_only_its_own_script_and_style_run(server: RunningServer) -> None:
    reply = fetch(server, "/")
    assert reply.status_code == 200
    assert reply.headers["content-type"].startswith("text/html")
    policy = dict(
        part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";")
    )
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    for tag in ("script", "style"):
        (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", reply.text, re.DOTALL)
        digest = b64encode(sha256(inner.encode()).digest()).decode()
        assert policy[f"{tag}-src"] == f"'sha256-{digest}'"


def test_it_asks_nobody_else_and_writes_no_html(server: RunningServer) -> None:
    text = fetch(server, "/").text
    assert not re.search(r"https?://|\bsrc=|@import|url\(", text)
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|style=|\bon\w+=\""
    assert not re.search(forbidden, text)


def test_it_is_shown_without_a_key(start_server: StartServer) -> None:
    server = start_server("--api-key", "secret")
    assert fetch(server, "/").status_code == 200
    assert fetch(server, "/v1/models").status_code == 401
    assert (
        fetch(server, "/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200
    )
