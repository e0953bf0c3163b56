"""Asks about a long file. What was read is kept, so that the next question begins at once.

    python examples/ask_document.py examples/long_prompt.txt "Where does the station stand?"

--model takes a GGUF file, a folder of safetensors or a known name (default: smollm2-135m). The
cache lies beside the document, in FILE.session: delete it when the model changes.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from edgeh2o import LLM, EdgeH2OError, SamplingParams


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    parser = argparse.ArgumentParser(description="Ask about a long file.")
    parser.add_argument("document", type=Path, metavar="FILE")
    parser.add_argument("question", metavar="QUESTION")
    parser.add_argument("--model", default="smollm2-135m", metavar="MODEL")
    options = parser.parse_args(arguments)
    session = Path(f"{options.document}.session")
    try:
        document = options.document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        parser.error(f"{options.document} cannot be read: {error}")
    # The document comes first and the question last: what stands before it is read once.
    messages = [{"role": "user", "content": f"{document}\n\n{options.question}"}]
    sampling = SamplingParams(temperature=0, repeat_penalty=1.1, max_tokens=200)
    try:
        with LLM(options.model) as llm:
            if session.exists():
                llm.load_session(session)
            with llm.stream_chat(messages, sampling) as stream:
                for chunk in stream:
                    print(chunk.text, end="", flush=True)
            print()
            llm.save_session(session)
    except EdgeH2OError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    stats = stream.result().stats
    n_read = stats.prompt_tokens - stats.cached_tokens
    print(f"{n_read} of {stats.prompt_tokens} tokens read in {stats.ttft_s:.1f} s", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
