"""Children of a process whose model has run with several threads, of which they have none."""

from __future__ import annotations

import subprocess
import sys

from tests.tiny_models import TinyModelFactory

FORK = """
import os, sys
from edgeh2o import LLM, SamplingParams

def answer(llm):
    return llm.generate("the art", SamplingParams(temperature=0, max_tokens=4)).token_ids

with LLM(sys.argv[1], threads=2) as llm:
    before = answer(llm)
    child = os.fork()
    if child == 0:
        with LLM(sys.argv[1], threads=2) as own:  # a model of the child's, and the parent's
            os._exit(0 if answer(own) == answer(llm) == before else 3)
    assert answer(llm) == before
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_child_answers_as_its_parent_does(tiny_model: TinyModelFactory) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, tiny_model()], timeout=60, check=False)
    assert done.returncode == 0
