"""The page at ``/``: one file, which may run its own script and style and call this server only."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import lru_cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response


async def page_response(_: Request) -> Response:
    """The page with a policy that lets nothing else run."""
    content, policy = _read_page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(content, media_type="text/html", headers=headers)


@lru_cache(maxsize=1)
def _read_page() -> tuple[str, str]:
    content = files(__package__).joinpath("page.html").read_text("utf-8")
    script, style = (_hash(content, tag) for tag in ("script", "style"))
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return content, policy


def _hash(content: str, tag: str) -> str:
    """The source expression of the one inline element of this name."""
    (inner,) = re.findall(f"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
    return f"'sha256-{b64encode(sha256(inner.encode('utf-8')).digest()).decode()}'"
