"""Split models, from their files to their answers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import gguf
import pytest

from edgeh2o import LLM, SamplingParams
from edgeh2o.cli.main import main
from edgeh2o.errors import UsageError
from edgeh2o.export.gguf import quantize_model
from tests.formats import raw_gguf as raw
from tests.runners.kept_weights import load, made_files
from tests.tiny_models import TinyModelFactory

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


def split(path: Path, folder: Path, counts: Sequence[int]) -> list[Path]:
    """Cuts a file into files of so many tensors each, as llama-gguf-split does: only the first has
    the model's metadata."""
    reader = gguf.GGUFReader(path)
    fields = [f for name, f in reader.fields.items() if not name.startswith("GGUF.")]
    metadata = [b"".join(part.tobytes() for part in field.parts) for field in fields]
    tensors = {
        t.name: raw.RawTensor(tuple(map(int, t.shape)), int(t.tensor_type), t.data.tobytes())
        for t in reader.tensors
    }
    assert sum(counts) == len(tensors)
    names = iter(tensors)
    paths = []
    for index, count in enumerate(counts):
        keys = [
            raw.key("split.no", raw.UINT16, raw.scalar(raw.UINT16, index)),
            raw.key("split.count", raw.UINT16, raw.scalar(raw.UINT16, len(counts))),
            raw.key("split.tensors.count", raw.INT32, raw.scalar(raw.INT32, len(tensors))),
        ]
        content = {name: tensors[name] for name in islice(names, count)}
        paths.append(folder / f"m-{index + 1:05}-of-{len(counts):05}.gguf")
        paths[-1].write_bytes(raw.gguf_of([*metadata, *keys] if index == 0 else keys, content))
    return paths


@pytest.mark.parametrize("given", [0, 2])
def test_a_split_model_answers_as_the_whole_one(
    tmp_path: Path, tiny_model: TinyModelFactory, given: int
) -> None:
    whole = tiny_model(tensor_type="Q4_0")
    n_tensors = len(gguf.GGUFReader(whole).tensors)
    paths = split(whole, tmp_path, [0, 5, n_tensors - 5])
    with LLM(whole) as llm:
        expected = llm.generate("the thing is", GREEDY).token_ids
        weight_bytes = llm.weight_bytes
    with LLM(paths[given]) as llm:
        assert llm.generate("the thing is", GREEDY).token_ids == expected
        assert llm.weight_bytes == weight_bytes


def test_its_packed_weights_are_kept_until_one_of_its_files_changes(
    tmp_path: Path, tiny_model: TinyModelFactory
) -> None:
    whole = tiny_model(tensor_type="Q4_0")
    n_tensors = len(gguf.GGUFReader(whole).tensors)
    parts = split(whole, tmp_path, [5, n_tensors - 5])
    made = []
    for change in (False, False, True, False):
        if change:
            os.utime(parts[1], ns=(1, 1))
        before = made_files(tmp_path / "kept")
        load(parts[0], tmp_path / "kept")
        made.append(made_files(tmp_path / "kept") != before)
    assert made == [True, False, True, False]


def test_none_of_its_files_is_written_over(tmp_path: Path, tiny_model: TinyModelFactory) -> None:
    whole = tiny_model(tensor_type="F16")
    paths = split(whole, tmp_path, [0, 5, len(gguf.GGUFReader(whole).tensors) - 5])
    for target in paths:
        with pytest.raises(UsageError, match="over itself"):
            quantize_model(paths[1], target, "q8_0")


def test_the_command_line_runs_it(
    tmp_path: Path, tiny_model: TinyModelFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = tiny_model(tensor_type="Q4_0")
    paths = split(whole, tmp_path, [7, len(gguf.GGUFReader(whole).tensors) - 7])
    options = ["-p", "the thing is", "-n", "4", "--temp", "0", "--ignore-eos", "--quiet"]
    assert main(["run", str(whole), *options]) == 0
    expected = capsys.readouterr()
    assert main(["run", str(paths[0]), *options]) == 0
    assert capsys.readouterr() == expected
