"""Starts ``edgeh2o serve`` as it is installed and drives it with openai-python.

    python -m tools.check_server [MODEL]

Sync and async clients, a stream, structured output, a required call of a tool, a document asked
about twice, and a server that ends in good order and starts again from what it kept on the disk.
Prints a line for each, and ends with 1 at the first that is wrong.
"""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai

START_S = 60.0
DOCUMENT = "Paris is the capital of France. Berlin is the capital of Germany. " * 40
SCHEMA = {
    "type": "object",
    "properties": {"capital": {"type": "string", "maxLength": 20}},
    "required": ["capital"],
}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": SCHEMA}}


@contextmanager
def started(model: str, folder: str) -> Iterator[str]:
    """The address of a server, which must end well."""
    command = [sys.executable, "-m", "edgeh2o", "serve", model, "--port", "0", "--temp", "0"]
    command += ["--prefix-cache-disk", f"{folder}/kept,1G"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stderr=log, cwd=folder)
        try:
            yield _find_address(process, log)
            process.terminate()
            check(process.wait(START_S) == 0, "the server ends in good order")
        finally:
            process.kill()
            process.wait()


def _find_address(process: subprocess.Popen[bytes], log: Any) -> str:
    end = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < end:
        log.seek(0)
        if found := re.search(r" at (http://\S+/v1)", log.read()):
            return found[1]
        time.sleep(0.05)
    log.seek(0)
    raise SystemExit(f"the server did not start: {log.read()}")


def check(is_right: bool, what: str) -> None:
    """Prints what was looked at; ends the program if it is wrong."""
    print(f"{'ok' if is_right else 'WRONG'}: {what}", flush=True)
    if not is_right:
        raise SystemExit(1)


def drive(url: str) -> None:
    """All that the first server is asked."""
    client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)

    def ask(text: str, **options: Any) -> Any:
        messages: Any = [{"role": "user", "content": text}]
        options = {"max_tokens": 24, "temperature": 0} | options
        return client.chat.completions.create(model="any", messages=messages, **options)

    question = f"{DOCUMENT}\n\nWhat is the capital of"
    whole = ask(f"{question} France?")
    check("Paris" in whole.choices[0].message.content, "an answer")
    chunks = list(ask(f"{question} France?", stream=True))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(text == whole.choices[0].message.content, "a stream says the same")
    other = ask(f"{question} Germany?")
    usage = other.usage
    n_read = usage.prompt_tokens - usage.prompt_tokens_details.cached_tokens
    check(n_read < 40, f"another question on the document: {n_read} tokens read")
    form = {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}
    made = ask("The capital of France, as JSON.", response_format=form, max_tokens=60)
    check("capital" in json.loads(made.choices[0].message.content), "JSON of a schema")
    called = ask("Look it up.", tools=[TOOL], tool_choice="required", max_tokens=80)
    (call,) = called.choices[0].message.tool_calls
    check("capital" in json.loads(call.function.arguments), "a call of a tool")
    check(asyncio.run(_ask_at_once(url)) == 4, "asynchronous clients")
    try:
        ask("the hen " * 20000)
    except openai.BadRequestError as error:
        check(error.code == "context_length_exceeded", "a prompt that is too long")


async def _ask_at_once(url: str) -> int:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        made = await asyncio.gather(
            *(
                client.completions.create(model="any", prompt=f"{n} hens", max_tokens=8)
                for n in range(4)
            )
        )
    return sum(bool(each.choices[0].text) for each in made)


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    model = given[0] if given else "smollm2-135m"
    with tempfile.TemporaryDirectory() as folder:
        with started(model, folder) as url:
            drive(url)
        with started(model, folder) as url:
            client = openai.OpenAI(base_url=url, api_key="none", max_retries=0)
            text = f"{DOCUMENT}\n\nWhat is the capital of Italy?"
            messages: Any = [{"role": "user", "content": text}]
            usage = client.chat.completions.create(
                model="any", messages=messages, max_tokens=2
            ).usage
            details = usage and usage.prompt_tokens_details
            n_cached = details.cached_tokens if details else 0
            check((n_cached or 0) > 400, f"{n_cached} tokens from the disk after a restart")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
