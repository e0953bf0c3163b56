"""Several questions about one document, to ``edgeh2o serve`` by openai-python.

    edgeh2o serve smollm2-135m &
    python examples/server_client.py examples/long_prompt.txt "Who wrote it?" "Where is it?"

The document is read with the first question and kept by the server for the others.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from openai import APIConnectionError, APIStatusError, OpenAI

URL = "http://127.0.0.1:8080/v1"


def ask(client: OpenAI, document: str, question: str) -> None:
    """Prints the answer as it comes, and what was read for it."""
    started_at = time.perf_counter()
    stream = client.chat.completions.create(
        model="any",  # a server has one
        messages=[{"role": "user", "content": f"{document}\n\n{question}"}],
        max_tokens=100,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    first_s = None
    for chunk in stream:
        for choice in chunk.choices:
            if first_s is None and choice.delta.content:
                first_s = time.perf_counter() - started_at
            print(choice.delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            details = chunk.usage.prompt_tokens_details
            n_kept = (details and details.cached_tokens) or 0
            print(f"\n[{n_kept} of {chunk.usage.prompt_tokens} tokens were there;", end="")
            print(f" first text after {first_s or 0.0:.2f} s]")


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask a server about a document.")
    parser.add_argument("document", type=Path, metavar="FILE")
    parser.add_argument("questions", nargs="+", metavar="QUESTION")
    parser.add_argument("--url", default=URL, help=f"(default: {URL})")
    options = parser.parse_args(arguments)
    client = OpenAI(base_url=options.url, api_key=os.environ.get("EDGEH2O_API_KEY", "none"))
    try:
        document = options.document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{options.document} cannot be read: {error}")
    try:
        for question in options.questions:
            ask(client, document, question)
    except APIConnectionError:
        print(f"nobody answers at {options.url}; start 'edgeh2o serve'", file=sys.stderr)
        return 1
    except APIStatusError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
