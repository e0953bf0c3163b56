"""Writes tiny decoders as others export them to ONNX: the fixtures of tests/onnx/exported.

    python -m tools.make_onnx_exports builder dynamo   # needs onnxruntime-genai, transformers
    python -m tools.make_onnx_exports optimum          # needs optimum-onnx and its transformers
    python -m tools.make_onnx_exports builder_lfm2_fp32   # one of them alone

The models are random ones of transformers. Every export becomes NAME.zip: the files of its folder
but the tokenizer, which all share, and ``expected.npy``, the logits [n, vocabulary] that
onnxruntime gives for a prompt in one piece (none of what it refuses).

The builder leaves the window of Mistral out of the graph and names it in genai_config.json alone,
with which onnxruntime-genai 0.18 does not run. It is put into the nodes before the logits are
computed; those of float32 must then be the logits of transformers.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgeh2o.onnx.packages import onnxruntime  # first: what is started sends nothing
from tests.onnx.exported import N_TOKENS, ROOT, VOCABULARY, WINDOW, read_tokens

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# By model type: the settings that make it take its special ways.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "mistral": {"sliding_window": WINDOW},
    "gemma2": {"sliding_window": WINDOW, "query_pre_attn_scalar": 16},
    "lfm2": {
        "num_hidden_layers": 5,
        "layer_types": ["conv", "full_attention", "conv", "full_attention", "conv"],
        "block_multiple_of": 32,
    },
    "gpt_oss": {"sliding_window": WINDOW, "num_local_experts": 4, "num_experts_per_tok": 2},
}
# Names of exports, their model types and what the exporter is told.
BUILDER: dict[str, tuple[str, str, list[str]]] = {
    "builder_gemma2_int4": ("gemma2", "int4", []),
    "builder_gpt_oss_fp32": ("gpt_oss", "fp32", []),
    "builder_lfm2_fp32": ("lfm2", "fp32", []),
    "builder_lfm2_int4": ("lfm2", "int4", []),
    "builder_llama_fp16": ("llama", "fp16", []),
    "builder_llama_int8": ("llama", "int8", []),
    "builder_mistral_fp32": ("mistral", "fp32", []),
    "builder_mistral_int4": ("mistral", "int4", []),
    "builder_llama_int4_tied": ("llama", "int4", ["is_symmetric=false"]),
}
DYNAMO: dict[str, tuple[str, str, int]] = {
    "dynamo_llama_23": ("llama", "sdpa", 23),
    "dynamo_gemma2_18": ("gemma2", "eager", 18),
}
OPTIMUM = {"optimum_qwen2_14": ("qwen2", 14), "optimum_mistral_18": ("mistral", 18)}


def make_source(model_type: str, folder: Path, tokenizer: Path) -> None:
    """A model of random weights as transformers saves it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    settings = SIZES | MODELS[model_type] | {"tie_word_embeddings": model_type != "gpt_oss"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **settings)).float()
    with torch.no_grad():
        for weight in model.parameters():  # half of the bits are zeros, which zip well
            weight.copy_(weight.bfloat16())
    model.save_pretrained(folder)
    for path in tokenizer.iterdir():
        shutil.copy(path, folder)


def export_builder(name: str, source: Path, target: Path) -> None:
    """By the model builder of onnxruntime-genai."""
    _, precision, options = BUILDER[name]
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", source, "-o", target]
    command += ["-p", precision, "-e", "cpu", "-c", target.parent / "cache"]
    extra = ["--extra_options", *options] if options else []
    subprocess.run([*map(str, command), *extra], check=True)


def export_dynamo(name: str, source: Path, target: Path) -> None:
    """By torch.onnx with dynamo=True."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    _, attention, opset = DYNAMO[name]
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation=attention).eval()

    class Decoder(torch.nn.Module):
        """Caches as plain tensors."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Any, mask: Any, positions: Any, *past: Any) -> Any:
            cache = DynamicCache(list(zip(past[0::2], past[1::2], strict=True)))
            result = self.model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache
            )
            rows = [
                x for layer in result.past_key_values.layers for x in (layer.keys, layer.values)
            ]
            return result.logits, *rows

    names = [f"{i}.{kind}" for i in range(SIZES["num_hidden_layers"]) for kind in ("key", "value")]
    past = [torch.zeros(1, SIZES["num_key_value_heads"], 5, SIZES["head_dim"]) for _ in names]
    tokens = torch.ones(1, 3, dtype=torch.long)
    any_size = torch.export.Dim.AUTO
    target.mkdir()
    torch.onnx.export(
        Decoder(),
        (tokens, torch.ones(1, 8, dtype=torch.long), torch.arange(5, 8)[None], *past),
        str(target / "model.onnx"),
        input_names=["input_ids", "attention_mask", "position_ids"]
        + [f"past_key_values.{each}" for each in names],
        output_names=["logits", *(f"present.{each}" for each in names)],
        opset_version=opset,
        dynamo=True,
        dynamic_shapes=(*({1: any_size} for _ in range(3)), tuple({2: any_size} for _ in past)),
        external_data=False,
    )
    shutil.copy(source / "config.json", target)


def export_optimum(name: str, source: Path, target: Path) -> None:
    """By optimum-cli."""
    command = [Path(sys.executable).with_name("optimum-cli"), "export", "onnx", "--model", source]
    command += ["--task", "text-generation-with-past", "--opset", OPTIMUM[name][1], target]
    subprocess.run([*map(str, command)], check=True)


EXPORTERS: dict[str, tuple[Any, Callable[[str, Path, Path], None]]] = {
    "builder": (BUILDER, export_builder),
    "dynamo": (DYNAMO, export_dynamo),
    "optimum": (OPTIMUM, export_optimum),
}


def expected_logits(path: Path) -> Any:
    """[n, vocabulary] of onnxruntime's run of the whole file; None if it refuses the file.

    Caches of a window are told to hold everything, which onnxruntime otherwise wants allocated.
    Where genai_config.json names a window and no node does, all nodes get it.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    for node in model.graph.node:
        kept = [each for each in node.attribute if each.name != "sliding_window_cache"]
        del node.attribute[:]
        node.attribute.extend(kept)
    _add_window(model, path.with_name("genai_config.json"))
    path = path.with_name("whole_cache")
    path.write_bytes(model.SerializeToString())

    types = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    try:
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    except Exception as error:
        print(f"{path.parent.name}: {error}", file=sys.stderr)
        return None
    feed: dict[str, Any] = {
        "input_ids": read_tokens()[None].astype(np.int64),
        "attention_mask": np.ones((1, N_TOKENS), np.int64),
        "position_ids": np.arange(N_TOKENS)[None],
    }
    names = [item.name for item in session.get_inputs()]
    for item in session.get_inputs():
        if item.name not in feed:
            shape = [1, SIZES["num_key_value_heads"], 0, SIZES["head_dim"]]
            if item.name.endswith(".conv"):
                shape = [1, *item.shape[1:]]
            feed[item.name] = np.zeros(shape, types[item.type])
    logits = session.run(["logits"], {name: feed[name] for name in names})[0][0]
    return np.asarray(logits, np.float32)


def _add_window(model: onnx.ModelProto, config: Path) -> None:
    decoder = json.loads(config.read_text())["model"]["decoder"] if config.exists() else {}
    width = decoder.get("sliding_window", {}).get("window_size")
    windows = [a for node in model.graph.node for a in node.attribute if "local_window" in a.name]
    if width is not None and all(each.i < 0 for each in windows):
        for each in windows:
            each.i = width


def check_source(source: Path, logits: Any) -> None:
    """Raises AssertionError if transformers' own run of the model gives other logits."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="eager").eval()
    with torch.no_grad():
        expected = model(torch.tensor(read_tokens()[None].astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4 * expected.std())


def without_traces(path: Path) -> bytes:
    """The file, where it is torch's without the lines of Python that made each node."""
    model = onnx.load(path, load_external_data=False)
    if model.producer_name != "pytorch":
        return path.read_bytes()
    graphs = [model.graph, *model.functions]
    for item in (item for graph in graphs for item in (graph, *graph.node)):
        del item.metadata_props[:]
        item.ClearField("doc_string")
    for value in (*model.graph.value_info, *model.graph.input, *model.graph.output):
        del value.metadata_props[:]
    return model.SerializeToString()


def write_zip(folder: Path, name: str, source: Path) -> None:
    """The files that the tests need."""
    model = next(folder.glob("model.onnx"))
    logits = expected_logits(model)
    if name == "builder_mistral_fp32":
        check_source(source, logits)
    with zipfile.ZipFile(ROOT / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:

        def add(file: str, data: bytes) -> None:
            out.writestr(zipfile.ZipInfo(file), data, zipfile.ZIP_DEFLATED, 9)

        for path in sorted(folder.iterdir()):
            if path.suffix == ".onnx":
                add(path.name, without_traces(path))
            elif path.name in ("config.json", "genai_config.json") or ".onnx" in path.name:
                add(path.name, path.read_bytes())
        if logits is not None:
            buffer = io.BytesIO()
            np.save(buffer, logits)
            add("expected.npy", buffer.getvalue())


def main(names: list[str]) -> int:
    """Makes the exports that are named, and those of the exporters that are."""
    for exporter, (exports, export) in EXPORTERS.items():
        for name, (model_type, *_) in exports.items():
            if exporter not in names and name not in names:
                continue
            with tempfile.TemporaryDirectory() as work:
                source, target = Path(work) / "source", Path(work) / name
                make_source(model_type, source, ROOT / "tokenizer")
                export(name, source, target)
                write_zip(target, name, source)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
