"""What scripts need to watch the memory of a run.

with MemoryProfile() as profile:
    with LLM("smollm2-135m", on_progress=profile.on_progress) as llm:
        result = llm.generate("Once upon a time")
profile.write("memory.json", result.stats.memory_bytes)
draw_memory_profile(profile, result.stats.memory_bytes, Path("memory.png"))
"""

from __future__ import annotations

from .evaluation.figures import draw_memory_profile
from .host.memory import available_bytes, format_bytes, peak_rss_bytes
from .host.memory_profile import MemoryPhase, MemoryProfile, MemorySample

__all__ = [
    "MemoryPhase",
    "MemoryProfile",
    "MemorySample",
    "available_bytes",
    "draw_memory_profile",
    "format_bytes",
    "peak_rss_bytes",
]
