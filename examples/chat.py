"""A conversation. The cache stays between turns: each of them reads its new message alone.

    python examples/chat.py [MODEL]

An empty line ends it; Ctrl-C ends an answer, of which what was written stays.
"""

from __future__ import annotations

import sys

from edgeh2o import LLM, EdgeH2OError, Message, SamplingParams


def answer(llm: LLM, messages: list[Message], sampling: SamplingParams) -> str:
    """Prints the next answer as it is written; returns it."""
    with llm.stream_chat(messages, sampling) as stream:
        try:
            for chunk in stream:
                print(chunk.text, end="", flush=True)
        except KeyboardInterrupt:
            pass
    print()
    result = stream.result()
    n_read = result.stats.prompt_tokens - result.stats.cached_tokens
    print(f"[{n_read} tokens read, {result.stats.cached_tokens} were there]", file=sys.stderr)
    return result.text


def main(arguments: list[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    messages: list[Message] = [{"role": "system", "content": "Answer in one sentence."}]
    sampling = SamplingParams(temperature=0.7, max_tokens=100)
    try:
        with LLM(given[0] if given else "smollm2-135m", context_size=8192) as llm:
            for line in iter(lambda: sys.stdin.readline().strip(), ""):
                messages.append({"role": "user", "content": line})
                text = answer(llm, messages, sampling)
                messages.append({"role": "assistant", "content": text})
    except EdgeH2OError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
