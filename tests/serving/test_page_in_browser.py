"""The page in a headless Chromium, where one is installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving.browser import Browser, find_browser
from tests.serving.conftest import RunningServer

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium")
ANSWERS = "document.querySelectorAll('article.assistant').length"
IS_IDLE = "document.getElementById('stop').disabled && status_text().includes('written')"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    browser = Browser(str(PROGRAM), tmp_path_factory.mktemp("browser"))
    yield browser
    browser.close()


@pytest.fixture
def page(browser: Browser, server: RunningServer) -> Browser:
    """The page as it is when it was opened."""
    browser.open(server.url)
    browser.problems.clear()
    browser.run("status_text = () => document.getElementById('status').textContent, 0")
    return browser


def answer_without_end(page: Browser) -> None:
    """Answers go on to the end of the context: one of random weights may end at any token."""
    more = "{...more, body: JSON.stringify({...JSON.parse(more.body), ignore_eos: true})}"
    page.run("real_fetch = window.fetch, 0")
    page.run(f"fetch = (url, more) => real_fetch(url, more.method ? {more} : more), 0")


def test_a_document_is_asked_about(page: Browser, tmp_path: Path) -> None:
    assert page.run("document.activeElement.id") == "text"
    page.wait_for("document.getElementById('model').textContent")
    # A small model of random weights ends nowhere; the settings are set as a user would.
    page.run("document.getElementById('toggle').click()")
    assert page.run("document.getElementById('toggle').getAttribute('aria-expanded')") == "true"
    page.run("document.getElementById('most').value = 12, document.getElementById('seed').value=3")
    lines = "".join(f"{n}. the hen is in the pen\n" for n in range(60))
    page.run(f"take(new File([{json.dumps(lines)}], 'hens.txt'))")
    page.wait_for("document.getElementById('name').textContent.startsWith('hens.txt')")
    for number, question in enumerate(("what is <b>7</b>?", "how does it end?")):
        page.run("document.getElementById('text').focus()")
        page.write(question)
        page.press("Enter", 13)
        page.wait_for(f"{ANSWERS} === {number + 1}")
        page.wait_for(IS_IDLE)
        assert page.run("document.activeElement.id") == "text"
    assert int(page.run("status_text().match(/(\\d+) cached/)[1]")) > 300
    asked = page.run("document.querySelector('article.user').innerText")
    assert "[hens.txt]" in asked and "<b>7</b>" in asked  # text, never HTML
    assert page.run("document.querySelectorAll('article b').length") == 0
    page.run("document.getElementById('again').click()")
    page.wait_for(f"{ANSWERS} === 2 && {IS_IDLE}")
    for scheme in ("light", "dark"):
        feature = [{"name": "prefers-color-scheme", "value": scheme}]
        page.call("Emulation.setEmulatedMedia", features=feature)
        assert page.screenshot(tmp_path / f"{scheme}.png").startswith(b"\x89PNG")
    assert page.problems == []


def test_an_answer_is_stopped_by_a_key_and_an_error_is_shown(page: Browser) -> None:
    answer_without_end(page)
    page.write("the hen")
    page.press("Enter", 13)
    page.wait_for("!document.getElementById('stop').disabled")
    page.wait_for("status_text() === 'answering'")
    page.press("Escape", 27)
    page.wait_for("status_text() === 'stopped' && document.getElementById('stop').disabled")
    page.run("document.getElementById('new').click()")
    page.run("document.getElementById('temperature').value = 9")
    page.write("the hen")
    page.press("Enter", 13)
    page.wait_for("document.querySelector('article.error')")
    assert "temperature" in page.run("document.querySelector('article.error').innerText")
    assert not page.run("document.getElementById('again').disabled")  # it may be tried again
    assert [text for text in page.problems if "status of 400" not in text] == []


def test_a_new_chat_has_nothing_of_the_one_before(page: Browser) -> None:
    answer_without_end(page)
    for _ in range(2):
        page.run("document.getElementById('new').click()")
        page.write("the hen")
        page.press("Enter", 13)
        page.wait_for("status_text() === 'answering'")
    page.press("Escape", 27)
    page.wait_for("status_text() === 'stopped'")
    assert page.run("messages.map((each) => each.role).join()") == "user,assistant"
    assert page.run("document.querySelectorAll('article').length") == 2
    assert page.run("document.getElementById('log').getAttribute('aria-busy')") == "false"
    assert page.problems == []


def test_what_a_model_writes_is_shown_as_nodes(page: Browser) -> None:
    text = "# Head\n\n- **one**\n- `two`\n\n1. three\n\n"
    text += "```py\n<script>alert(1)</script>\n```\n<img src=x>"
    shown = f"show('assistant', {json.dumps(text)}).innerHTML"
    html = page.run(shown)
    for part in ("<h3>Head</h3>", "<strong>one</strong>", "<code>two</code>", "<ol", "&lt;script"):
        assert part in html
    assert page.run("document.querySelectorAll('article img, article script').length") == 0
    # A script that came in all the same would not run, nor reach another host.
    page.run("s = document.createElement('script'), s.text = 'bad = 1', document.body.append(s)")
    assert page.run("typeof bad") == "undefined"
    assert page.run("fetch('http://192.0.2.1/').then(() => 1, () => 0)") == 0
