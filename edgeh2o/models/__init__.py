"""Model families, declared: which keys and tensors a file of each architecture holds."""

from __future__ import annotations

# Each of these registers its architecture.
from . import (  # noqa: F401
    apertus,
    arcee,
    bailingmoe2,
    cohere2,
    deepseek2,
    ernie4_5,
    exaone,
    falcon,
    falcon_h1,
    gemma,
    gemma2,
    gemma3,
    gemma4,
    glm4,
    gpt_oss,
    gptneox,
    granite,
    granitehybrid,
    hunyuan,
    internlm2,
    lfm2,
    llama,
    maincoder,
    mellum,
    minicpm,
    minicpm3,
    mistral3,
    nanbeige,
    nemotron,
    nemotron_h,
    olmo,
    olmo2,
    olmoe,
    pangu_embedded,
    phi2,
    phi3,
    phimoe,
    qwen2,
    qwen3,
    qwen35,
    seed_oss,
    smollm3,
    stablelm,
)
from .spec import (
    ArchitectureSpec,
    read_model,
    register_architecture,
    registered_architectures,
)
from .tensors import TensorBinding, TensorPart, TensorRule, tensor

__all__ = [
    "ArchitectureSpec",
    "TensorBinding",
    "TensorPart",
    "TensorRule",
    "read_model",
    "register_architecture",
    "registered_architectures",
    "tensor",
]
