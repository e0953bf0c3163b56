"""Runs language models on edge CPUs with chunked H2O sparse prefill.

``LLM`` is the way in; ``ChunkedAttention`` and ``KvCache`` are the attention core on its own, for
other runtimes. Names are imported when they are first used, so that importing the package, and
``edgeh2o --help``, stay cheap.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ._version import __version__

# A thread of libgomp that waits spins for milliseconds, and where other programs want the cores it
# takes them from the thread it waits for: with two other busy processes on two cores this bound
# makes prefill and decode 1.5 times as fast, alone it changes nothing. Read when libgomp is loaded.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}:
    os.environ["GOMP_SPINCOUNT"] = "10000"

if TYPE_CHECKING:
    from . import isa as isa
    from ._core import ChunkedAttention as ChunkedAttention
    from ._core import KvCache as KvCache
    from ._core import dense_policy as dense_policy
    from ._core import h2o_policy as h2o_policy
    from ._core import headwise_policy as headwise_policy
    from ._core import python_policy as python_policy
    from .attention.base import SparseAttentionConfig as SparseAttentionConfig
    from .attention.dense import DenseConfig as DenseConfig
    from .attention.h2o import H2OConfig as H2OConfig
    from .attention.headwise import HeadwiseConfig as HeadwiseConfig
    from .attention.quest import QuestConfig as QuestConfig
    from .attention.rocketkv import RocketKvConfig as RocketKvConfig
    from .attention.ruvllm import RuvllmConfig as RuvllmConfig
    from .config import PrefillConfig as PrefillConfig
    from .engine.access import GenerationStream as GenerationStream
    from .engine.generate import GenerationChunk as GenerationChunk
    from .engine.grammar import Grammar as Grammar
    from .engine.results import GenerationResult as GenerationResult
    from .engine.stats import GenerationStats as GenerationStats
    from .errors import BusyError as BusyError
    from .errors import ContextLengthError as ContextLengthError
    from .errors import EdgeH2OError as EdgeH2OError
    from .errors import FormatError as FormatError
    from .errors import ResourceError as ResourceError
    from .errors import UsageError as UsageError
    from .evaluation.attention_patterns import (
        visualize_attention_patterns as visualize_attention_patterns,
    )
    from .evaluation.perplexity import evaluate_perplexity as evaluate_perplexity
    from .evaluation.throughput import Workload as Workload
    from .evaluation.throughput import benchmark_throughput as benchmark_throughput
    from .formats.model_cache import pull as pull
    from .llm import LLM as LLM
    from .rope_config import RopeConfig as RopeConfig
    from .sampling_config import SamplingParams as SamplingParams
    from .tokenizer.chat_template import Message as Message

_HOMES = {
    "BusyError": "errors",
    "ChunkedAttention": "_core",
    "ContextLengthError": "errors",
    "DenseConfig": "attention.dense",
    "EdgeH2OError": "errors",
    "FormatError": "errors",
    "GenerationChunk": "engine.generate",
    "GenerationResult": "engine.results",
    "GenerationStats": "engine.stats",
    "GenerationStream": "engine.access",
    "Grammar": "engine.grammar",
    "H2OConfig": "attention.h2o",
    "HeadwiseConfig": "attention.headwise",
    "KvCache": "_core",
    "LLM": "llm",
    "Message": "tokenizer.chat_template",
    "PrefillConfig": "config",
    "QuestConfig": "attention.quest",
    "ResourceError": "errors",
    "RopeConfig": "rope_config",
    "RocketKvConfig": "attention.rocketkv",
    "RuvllmConfig": "attention.ruvllm",
    "SamplingParams": "sampling_config",
    "SparseAttentionConfig": "attention.base",
    "UsageError": "errors",
    "Workload": "evaluation.throughput",
    "benchmark_throughput": "evaluation.throughput",
    "dense_policy": "_core",
    "evaluate_perplexity": "evaluation.perplexity",
    "h2o_policy": "_core",
    "headwise_policy": "_core",
    "pull": "formats.model_cache",
    "python_policy": "_core",
    "visualize_attention_patterns": "evaluation.attention_patterns",
}

__all__ = [*_HOMES, "__version__", "isa"]


def __getattr__(name: str) -> Any:
    if name == "isa":
        return import_module(".isa", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{home}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
