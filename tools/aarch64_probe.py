"""Greedy tokens and logits of a model after a sparse prefill, for tools/run_wheel_aarch64.py.

    python tools/aarch64_probe.py MODEL PROMPT_FILE ATTENTION PRECISION OUT.npz [LIKE.npz]

Runs in any Python that has edgeh2o, and prints the instruction set in use. With the output of
another run as LIKE it decodes the tokens of that run, so that the logits can be compared row by
row.
"""

from __future__ import annotations

import sys

import numpy as np

from edgeh2o import LLM, H2OConfig, HeadwiseConfig, PrefillConfig, isa

ATTENTION = {"h2o": H2OConfig(local=24, heavy=24), "headwise": HeadwiseConfig(budget=96)}
BATCH_SIZE, CHUNK_SIZE = 256, 64
N_DECODED = 16


def main() -> None:
    model, prompt_file, attention, precision, out, *like = sys.argv[1:]
    followed = np.load(like[0])["logits"].argmax(axis=1) if like else None
    prefill = PrefillConfig(batch_size=BATCH_SIZE, chunk_size=CHUNK_SIZE)
    settings = ATTENTION[attention]
    with LLM(model, attention=settings, prefill=prefill, attention_precision=precision) as llm:
        with open(prompt_file, encoding="utf-8") as file:
            tokens = np.array(llm.tokenize(file.read()), dtype=np.int32)
        runner = llm.start_runner(len(tokens) + N_DECODED)
        for first in range(0, len(tokens), BATCH_SIZE):
            is_last = first + BATCH_SIZE >= len(tokens)
            logits = runner.prefill(tokens[first : first + BATCH_SIZE], is_last=is_last)
        assert logits is not None and runner.pairs_computed < runner.pairs_dense
        rows = [np.array(logits)]
        for i in range(N_DECODED):
            token = rows[-1].argmax() if followed is None else followed[i]
            rows.append(np.array(runner.decode(int(token))))
    np.savez(out, logits=np.stack(rows), n_tokens=len(tokens))
    print(isa.active())


if __name__ == "__main__":
    main()
