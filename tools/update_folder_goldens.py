"""Records what transformers makes of tiny folders of safetensors, for tests/transformers.

    python -m tools.update_folder_goldens [CASE ...]

For a Python that has torch and transformers, which this project does without. Every file holds
config.json, the names and shapes of tensors as transformers saves them, tokens, some positions,
and the log-probabilities of the whole vocabulary at them; weights follow from the names.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy as np

from tests.transformers.published import FOLDER, write_published
from tools.folder_cases import ABSENT, CASES, SHAPE

CONTEXT = 128
POSITION_STEP = 7


def record(case: str) -> None:
    """Writes the file of a case. Raises ValueError where transformers would not load a tensor."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    from tools import plm_reference

    plm_reference.register()
    name, options = CASES[case]
    is_of_images = "vision_config" in options
    make = AutoModelForImageTextToText if is_of_images else AutoModelForCausalLM
    shape = (
        {}
        if is_of_images
        else {key: value for key, value in SHAPE.items() if key not in ABSENT.get(name, ())}
    )
    config = AutoConfig.for_model(name, **{**shape, **options})
    with tempfile.TemporaryDirectory(prefix="edgeh2o-golden-") as scratch:
        saved, folder = Path(scratch) / "saved", Path(scratch) / "folder"
        make.from_config(config).float().save_pretrained(saved)
        settings = json.loads((saved / "config.json").read_text())
        shapes = read_shapes(saved / "model.safetensors")
        folder.mkdir()
        write_published(folder, settings, shapes)
        model, loading = make.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if loading["missing_keys"] or loading["unexpected_keys"]:
            raise ValueError(f"{case}: transformers does not read what it wrote: {loading}")
        tokens = np.random.default_rng(0).integers(3, 320, CONTEXT).astype(np.int32)
        with torch.no_grad():
            logits = model.eval()(torch.tensor(tokens[None].astype(np.int64))).logits[0]
        rows = torch.log_softmax(logits.double(), dim=-1).numpy()
    positions = np.arange(POSITION_STEP, CONTEXT, POSITION_STEP, dtype=np.int32)
    FOLDER.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(
        FOLDER / f"{case}.npz",
        config=json.dumps(settings),
        shapes=json.dumps(shapes),
        tokens=tokens,
        positions=positions,
        log_probabilities=rows[positions].astype(np.float32),
    )


def read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Of a file of safetensors, sorted."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in sorted(file.keys())}


def record_cases(
    program: str,
    description: str,
    cases: Collection[str],
    record: Callable[[str], None],
    arguments: Sequence[str] | None,
) -> int:
    """The command line of a program that records some of ``cases``; returns the exit code."""
    parser = argparse.ArgumentParser(prog=program, description=description)
    parser.add_argument("cases", nargs="*", help="default: all", metavar="CASE")
    options = parser.parse_args(arguments)
    unknown = set(options.cases) - set(cases)
    if unknown:
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(cases)}")
    try:
        for case in options.cases or cases:
            record(case)
    except (ImportError, OSError, ValueError) as error:
        print(f"{program}: error: {error}", file=sys.stderr)
        return 1
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry; returns the exit code."""
    description = __doc__.split("\n")[0]
    return record_cases("update_folder_goldens", description, CASES, record, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
