"""Reads tokens with edgeh2o, and with onnxruntime's own run of a whole model file: the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray

from edgeh2o import LLM, DenseConfig, PrefillConfig

Array = NDArray[Any]

BATCH_SIZE = 64
RUNTIME = tuple(map(int, onnxruntime.__version__.split(".")[:2]))


def make_tokens(n: int, seed: int = 0) -> NDArray[np.int32]:
    """Tokens of the tiny vocabulary, no control tokens."""
    return np.random.default_rng(seed).integers(3, 300, n).astype(np.int32)


def open_llm(path: Path, **options: Any) -> LLM:
    """Dense attention and float32 throughout unless ``options`` say otherwise."""
    settings: dict[str, Any] = {
        "attention": DenseConfig(),
        "prefill": PrefillConfig(batch_size=BATCH_SIZE, chunk_size=16),
        "cache_type": "f32",
        "attention_precision": "f32",
        "threads": 1,
    }
    return LLM(path, **{**settings, **options})


def read_all(llm: LLM, tokens: NDArray[np.int32], n_prompt: int) -> Array:
    """Logits [n, vocab_size]: of a prompt in batches, then of decoding the rest."""
    runner = llm.start_runner(len(tokens), all_rows=True)
    rows = []
    for first in range(0, n_prompt, BATCH_SIZE):
        part = tokens[first : min(first + BATCH_SIZE, n_prompt)]
        runner.prefill(part, is_last=first + BATCH_SIZE >= n_prompt)
        rows.append(runner.row_logits(0, len(part)))
    rows += [runner.decode(int(token))[None] for token in tokens[n_prompt:]]
    return np.concatenate(rows)


def _with_wider_windows(path: Path) -> Path:
    """GroupQueryAttention of onnxruntime 1.23 sees one position more than the window has."""
    model = onnx.load(path, load_external_data=False)
    windows = [
        attribute
        for node in model.graph.node
        for attribute in node.attribute
        if attribute.name == "local_window_size" and attribute.i > 0
    ]
    if not windows:
        return path
    for attribute in windows:
        attribute.i -= 1
    copy = path.with_name("uncut.onnx")
    copy.write_bytes(model.SerializeToString())
    return copy


class Uncut:
    """One session over the whole graph. ``read`` appends tokens and returns their logits."""

    def __init__(self, path: Path) -> None:
        if RUNTIME < (1, 24):
            path = _with_wider_windows(path)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        # Else its sums of signed 8-bit products saturate on machines without VNNI.
        options.add_session_config_entry("session.x64quantprecision", "1")
        self._session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        self._past: dict[str, Array] = {}
        for item in self._session.get_inputs():
            if item.name.startswith("past"):
                dtype = np.float16 if item.type == "tensor(float16)" else np.float32
                self._past[item.name] = np.zeros((1, item.shape[1], 0, item.shape[3]), dtype)
        self._names = {item.name for item in self._session.get_inputs()}

    def read(self, tokens: Array) -> Array:
        """Logits [n, vocab_size] in float32."""
        n_past = next(iter(self._past.values())).shape[2]
        total = n_past + len(tokens)
        feed = {
            "input_ids": tokens[None].astype(np.int64),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(n_past, total)[None],
            **self._past,
        }
        given = {name: value for name, value in feed.items() if name in self._names}
        logits, *present = self._session.run(None, given)
        self._past = dict(zip(self._past, present, strict=True))
        return logits[0].astype(np.float32)
