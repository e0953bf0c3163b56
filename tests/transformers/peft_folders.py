"""Adapters as PEFT saves them: their files, seeded weights, and what they were recorded to give."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .published import seeded_weights
from .safetensors_files import write_safetensors

FOLDER = Path(__file__).parent.parent / "golden" / "adapters"
PREFIX = "base_model.model."
Modules = Mapping[str, tuple[NDArray[np.float32], NDArray[np.float32]]]

# As PEFT 0.21 writes it for LoraConfig(r=5, lora_alpha=12).
CONFIG: Mapping[str, Any] = {
    "alora_invocation_tokens": None,
    "alpha_pattern": {},
    "arrow_config": None,
    "auto_mapping": None,
    "base_model_name_or_path": "tiny/base",
    "bias": "none",
    "corda_config": None,
    "ensure_weight_tying": False,
    "eva_config": None,
    "exclude_modules": None,
    "fan_in_fan_out": False,
    "inference_mode": True,
    "init_lora_weights": True,
    "kasa_config": None,
    "layer_replication": None,
    "layers_pattern": None,
    "layers_to_transform": None,
    "loftq_config": {},
    "lora_alpha": 12,
    "lora_bias": False,
    "lora_dropout": 0.1,
    "lora_ga_config": None,
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "modules_to_save": None,
    "monteclora_config": None,
    "peft_type": "LORA",
    "peft_version": "0.21.2",
    "qalora_group_size": 16,
    "r": 5,
    "rank_pattern": {},
    "revision": None,
    "target_modules": ["q_proj", "v_proj"],
    "target_parameters": None,
    "task_type": "CAUSAL_LM",
    "trainable_token_indices": None,
    "use_bdlora": None,
    "use_dora": False,
    "use_qalora": False,
    "use_rslora": False,
    "velora_config": None,
}


def write_adapter(
    folder: Path,
    modules: Modules,
    *,
    prefix: str = PREFIX,
    suffix: str = ".weight",
    more: Mapping[str, NDArray[np.float32]] | None = None,
    dtype: str = "F32",
    **changes: Any,
) -> Path:
    """``modules`` are A and B by their names, ``more`` further tensors by their whole names."""
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({**CONFIG, **changes}))
    tensors = dict(more or {})
    for name, (a, b) in modules.items():
        tensors |= {f"{prefix}{name}.lora_A{suffix}": a, f"{prefix}{name}.lora_B{suffix}": b}
    write_safetensors(folder / "adapter_model.safetensors", tensors, dtype)
    return folder


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAdapter:
    """One that PEFT has saved for the published folder ``base``.

    ``log_probabilities`` are float32 [positions, vocabulary], of its weights by
    ``write_recorded``.
    """

    base: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    positions: NDArray[np.int32]
    log_probabilities: NDArray[np.float32]


def read_recorded(case: str) -> RecordedAdapter:
    with np.load(FOLDER / f"{case}.npz") as golden:
        return RecordedAdapter(
            base=str(golden["base"]),
            config=json.loads(str(golden["config"])),
            shapes={name: tuple(each) for name, each in json.loads(str(golden["shapes"])).items()},
            positions=golden["positions"],
            log_probabilities=golden["log_probabilities"],
        )


def write_recorded(
    folder: Path, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """Both files, into an empty folder. Matrices of the model are those of its published folder."""
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for name, shape in shapes.items():
        module, is_frozen, half = name.removeprefix(PREFIX).partition(".base_layer.")
        if is_frozen and not half.startswith("lora_"):
            tensors[name] = seeded_weights(f"{module}.{half}", shape)
        else:
            tensors[name] = seeded(name, shape)
    write_safetensors(folder / "adapter_model.safetensors", tensors, "F32")


def random_modules(shapes: Mapping[str, tuple[int, ...]], rank: int = 5) -> Modules:
    """A and B for matrices of ``shapes``, rows and columns, by the names of their modules."""
    return {
        name: (
            seeded(f"{name}.lora_A", (rank, columns)),
            seeded(f"{name}.lora_B", (rows, rank)),
        )
        for name, (rows, columns) in shapes.items()
    }


def seeded(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Weights that follow from a name."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return (0.12 * rng.standard_normal(shape)).astype(np.float32)
