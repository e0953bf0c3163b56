"""Records what PEFT makes of adapters for tiny folders of safetensors, for tests/transformers.

    python -m tools.update_adapter_goldens [CASE ...]

For a Python that has torch, transformers and peft, which this project does without. Every file
holds adapter_config.json, the names and shapes of tensors as PEFT saves them, some positions, and
the log-probabilities of the whole vocabulary at them; weights follow from the names, tokens and the
model are those of tests/golden/transformers.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.transformers.peft_folders import FOLDER, write_recorded
from tests.transformers.published import read_published, write_published
from tools.update_folder_goldens import read_shapes, record_cases

_EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
# By the folder of the model, and what LoraConfig has beside linear layers, rank and alpha.
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("llama_yarn", {"use_rslora": True}),
    "gpt_neox": (
        "gpt_neox",
        {
            "exclude_modules": ["lm_head"],  # which the folder calls otherwise
            "rank_pattern": {"gpt_neox.layers.0.attention.dense": 3, ".*layers\\.2\\..*": 7},
            "alpha_pattern": {"layers.1.*dense": 31, "dense": 5.5},
        },
    ),
    "bloom": ("bloom_untied", {}),
    "gemma3": ("gemma3", {"alpha_pattern": {"vision": 3, "layers\\.[0-2]\\..*_proj": 20}}),
    "falcon_h1": ("falcon_h1", {}),
    "qwen3_5_text": ("qwen3_5_text", {"use_rslora": True, "rank_pattern": {"in_proj_qkv": 9}}),
    # The names of single experts become those of parameters.
    "deepseek_v3": ("deepseek_v3", {"target_modules": ["gate_proj", "up_proj", "down_proj"]}),
    "deepseek_v2": ("deepseek_v2", {"target_modules": ["kv_b_proj", "kv_a_proj_with_mqa", "gate"]}),
    "gpt_oss": ("gpt_oss", {"target_parameters": _EXPERTS, "alpha_pattern": {".*down_proj": 20}}),
    "granitemoe": ("granitemoe", {"target_parameters": _EXPERTS[1:], "target_modules": ["q_proj"]}),
}


def record(case: str) -> None:
    """Writes the file of a case."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    base, options = CASES[case]
    published = read_published(base)
    is_of_images = "vision_config" in published.config
    make = AutoModelForImageTextToText if is_of_images else AutoModelForCausalLM

    def load(folder: Path) -> torch.nn.Module:
        model = make.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        return model.eval()

    with tempfile.TemporaryDirectory(prefix="edgeh2o-golden-") as scratch:
        folder, saved, seeded = (Path(scratch) / name for name in ("base", "saved", "seeded"))
        for each in (folder, seeded):
            each.mkdir()
        write_published(folder, published.config, published.shapes)
        model = load(folder)
        is_tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
        linear = [
            name
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear)
            and not (is_tied and module is model.get_output_embeddings())
            # PEFT refuses it, as kernels of Mamba take its weight past the module.
            and not name.endswith("mamba.out_proj")
        ]
        config = LoraConfig(**{"r": 5, "lora_alpha": 12, "target_modules": linear, **options})
        get_peft_model(model, config).save_pretrained(saved)
        settings = json.loads((saved / "adapter_config.json").read_text())
        settings["base_model_name_or_path"] = "tiny/base"
        shapes = read_shapes(saved / "adapter_model.safetensors")
        write_recorded(seeded, settings, shapes)
        adapted = PeftModel.from_pretrained(load(folder), seeded).eval()
        with torch.no_grad():
            logits = adapted(torch.tensor(published.tokens[None].astype(np.int64))).logits[0]
        rows = torch.log_softmax(logits.double(), dim=-1).numpy()
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        FOLDER / f"{case}.npz",
        base=base,
        config=json.dumps(settings),
        shapes=json.dumps(shapes),
        positions=published.positions,
        log_probabilities=rows[published.positions].astype(np.float32),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    description = __doc__.split("\n")[0]
    return record_cases("update_adapter_goldens", description, CASES, record, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
