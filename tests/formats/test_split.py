"""Models split over several files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgeh2o.errors import FormatError
from edgeh2o.formats.split import open_model_file
from tests.formats import raw_gguf as raw


def write_shard(
    folder: Path,
    index: int,
    n_files: int,
    tensors: Sequence[str],
    *,
    n_tensors: int,
    keys: Sequence[bytes] = (),
    **false: int,
) -> Path:
    """One of ``n_files`` files; ``false`` overrides ``no`` and ``count`` of the metadata."""
    entries = [
        raw.key("split.no", raw.UINT16, raw.scalar(raw.UINT16, false.get("no", index))),
        raw.key("split.count", raw.UINT16, raw.scalar(raw.UINT16, false.get("count", n_files))),
        raw.key("split.tensors.count", raw.INT32, raw.scalar(raw.INT32, n_tensors)),
        *keys,
    ]
    path = folder / f"m-{index + 1:05}-of-{n_files:05}.gguf"
    content = {name: raw.f32_tensor(2, values=[index, ord(name[0])]) for name in tensors}
    path.write_bytes(raw.gguf_of(entries, content))
    return path


def write_model(folder: Path, **false: int) -> list[Path]:
    """Three files with the tensors a, b, c, the last of them with ``false`` metadata."""
    return [
        write_shard(folder, 0, 3, "a", n_tensors=3),
        write_shard(folder, 1, 3, "b", n_tensors=3),
        write_shard(folder, 2, 3, "c", n_tensors=3, **false),
    ]


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_file_opens_all(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    folder = tmp_path_factory.mktemp("x-00001-of-00009.gguf")  # only the file's own name counts
    shares = data.draw(st.lists(st.integers(0, 3), min_size=2, max_size=5))
    names = iter("abcdefghijklmno")
    shards = [[next(names) for _ in range(n)] for n in shares]
    paths = [
        write_shard(folder, i, len(shards), tensors, n_tensors=sum(shares))
        for i, tensors in enumerate(shards)
    ]
    with open_model_file(data.draw(st.sampled_from(paths))) as file:
        assert file.path == paths[0]
        assert list(file.tensors) == [name for tensors in shards for name in tensors]
        for index, tensors in enumerate(shards):
            for name in tensors:
                values = np.frombuffer(file.tensor_bytes(file.tensors[name]), np.float32)
                assert values.tolist() == [index, ord(name)]


def test_closing_closes_every_file(tmp_path: Path) -> None:
    file = open_model_file(write_model(tmp_path)[0])
    file.close()
    for info in file.tensors.values():
        with pytest.raises(ValueError, match="is closed"):
            file.tensor_bytes(info)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    paths = write_model(tmp_path)
    paths[1].unlink()
    with pytest.raises(FormatError, match=r"m-00002-of-00003\.gguf: .* is missing; put all 3"):
        open_model_file(paths[0])


@pytest.mark.parametrize("name", ["model.gguf", "m-00001-of-00004.gguf", "m-00000-of-00003.gguf"])
def test_a_name_that_does_not_fit_is_refused(tmp_path: Path, name: str) -> None:
    renamed = write_model(tmp_path)[0].rename(tmp_path / name)
    with pytest.raises(FormatError, match=r"named like 'model-00001-of-00003\.gguf'"):
        open_model_file(renamed)


@pytest.mark.parametrize("false", [{"no": 1}, {"no": 65535}, {"count": 2}, {"count": 0}])
def test_wrong_numbers_are_refused(tmp_path: Path, false: dict[str, int]) -> None:
    paths = write_model(tmp_path, **false)
    with pytest.raises(FormatError, match=r"m-00003-of-00003\.gguf: .*belongs to another model"):
        open_model_file(paths[0])


def test_a_wrong_number_of_tensors_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 0, 2, "a", n_tensors=3)
    write_shard(tmp_path, 1, 2, "b", n_tensors=3)
    with pytest.raises(FormatError, match=r"'split.tensors.count' is 3, .* hold 2 tensors"):
        open_model_file(path)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 0, 2, "a", n_tensors=2)
    write_shard(tmp_path, 1, 2, "a", n_tensors=2)
    with pytest.raises(FormatError, match=r"m-00002-of-00002\.gguf: tensor 'a' is in another"):
        open_model_file(path)


@pytest.mark.parametrize("shared", [raw.scalar(raw.UINT32, 2), raw.scalar(raw.UINT32, 1)])
def test_metadata_must_agree(tmp_path: Path, shared: bytes) -> None:
    own = raw.key("x.y", raw.UINT32, raw.scalar(raw.UINT32, 1))
    path = write_shard(tmp_path, 0, 2, "a", n_tensors=2, keys=[own])
    write_shard(tmp_path, 1, 2, "b", n_tensors=2, keys=[raw.key("x.y", raw.UINT32, shared)])
    if shared == raw.scalar(raw.UINT32, 1):
        open_model_file(path).close()
        return
    with pytest.raises(FormatError, match=r"key 'x.y' differs from that of m-00001"):
        open_model_file(path)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    paths = write_model(tmp_path)
    paths[2].write_bytes(paths[2].read_bytes()[:-40])
    with pytest.raises(FormatError, match=r"m-00003-of-00003\.gguf: .*end of the file"):
        open_model_file(paths[1])


def test_a_count_that_is_no_count_is_refused(tmp_path: Path) -> None:
    path = write_shard(tmp_path, 0, 1, "a", n_tensors=1, count=0)
    with pytest.raises(FormatError, match=r"m-00001-of-00001\.gguf: .*'split.count' is 0"):
        open_model_file(path)
