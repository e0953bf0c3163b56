"""The modules that declare the families, imported where one is asked for."""

from __future__ import annotations

from importlib import import_module

# Each of these registers its architectures, one of its own name in most cases.
MODULES = (
    "afmoe",
    "apertus",
    "arcee",
    "baichuan",
    "bailingmoe",
    "bailingmoe2",
    "bailingmoe3",
    "bert",
    "bitnet",
    "bloom",
    "chatglm",
    "codeshell",
    "cohere2",
    "deci",
    "deepseek",
    "deepseek2",
    "dots3note",
    "ernie4_5",
    "eurobert",
    "exaone",
    "exaone_moe",
    "falcon",
    "falcon_h1",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3n",
    "gemma4",
    "gemma_embedding",
    "glm4",
    "glm4moe",
    "gpt2",
    "gpt_oss",
    "gptneox",
    "granite",
    "granite_swa",
    "granitehybrid",
    "graniteswitch",
    "grovemoe",
    "hrm_text",
    "hunyuan",
    "internlm2",
    "jais",
    "jamba",
    "kimi_linear",
    "lfm2",
    "llama",
    "llama4",
    "llama_embed",
    "maincoder",
    "mamba",
    "mamba2",
    "maple",
    "mellum",
    "minicpm",
    "minicpm3",
    "mimo2",
    "minimax_m2",
    "minimax_m3",
    "mistral3",
    "modern_bert",
    "mpt",
    "muse_glimmer",
    "nanbeige",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmoe",
    "openelm",
    "pangu_embedded",
    "phi2",
    "phi3",
    "phimoe",
    "plamo",
    "plamo2",
    "plamo3",
    "plm",
    "qwen",
    "qwen2",
    "qwen3",
    "qwen35",
    "qwen4exp",
    "refact",
    "rwkv6",
    "rwkv7",
    "seed_oss",
    "smallthinker",
    "smollm3",
    "stablelm",
    "step35",
    "talkie",
)


def import_family(architecture: str) -> None:
    """Imports the module that has the architecture's name, or else all of them.

    All take 5 ms, a fiftieth of the time from the start of the program to the first token of a
    small model.
    """
    name = architecture.replace("-", "_")
    if name in MODULES:
        import_module(f".{name}", __package__)
    else:
        import_families()


def import_families() -> None:
    """Imports all of them."""
    for name in MODULES:
        import_module(f".{name}", __package__)
