"""Which attention the flags choose."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from edgeh2o.attention.base import SparseAttentionConfig
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.cli.attention_options import add_attention_options, read_attention
from edgeh2o.errors import UsageError


def read(*flags: str) -> SparseAttentionConfig:
    parser = argparse.ArgumentParser()
    add_attention_options(parser)
    return read_attention(parser.parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], HeadwiseConfig()),
        (["--attention", "dense"], DenseConfig()),
        (["--attention", "h2o"], H2OConfig()),
        (["--h2o-local", "64"], H2OConfig(local=64)),
        (["--h2o-local", "0", "--h2o-heavy", "0"], DenseConfig()),
        (["--h2o-score", "lift", "--h2o-by-values"], H2OConfig(score="lift", by_values=True)),
        (["--budget", "640"], HeadwiseConfig(budget=640)),
        (["--max-loss", "0.5"], HeadwiseConfig(max_loss=0.5)),
        (["--attention", "headwise", "--landmark-size", "0"], HeadwiseConfig(landmark_size=0)),
    ],
)
def test_flags_choose_the_algorithm(flags: list[str], expected: SparseAttentionConfig) -> None:
    assert read(*flags) == expected


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--attention", "headwise", "--h2o-local", "4"], "--h2o-local is a setting of h2o"),
        (["--attention", "dense", "--budget", "640"], "--budget is a setting of headwise"),
        (["--h2o-local", "4", "--budget", "640"], "--budget is a setting of headwise.*is h2o"),
        (["--budget", "0"], "--budget"),
    ],
)
def test_flags_that_do_not_fit_together(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(*flags)


def test_settings_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("sparse_attention_config: {algorithm: h2o, local: 8, score: mean}\n")
    assert read("--attention-config", str(path)) == H2OConfig(local=8, score="mean")
    flags = ["--attention-config", str(path), "--h2o-local", "9"]
    assert read(*flags) == H2OConfig(local=9, score="mean")
    with pytest.warns(UserWarning, match="--attention dense takes the place of .* h2o in"):
        assert read("--attention-config", str(path), "--attention", "dense") == DenseConfig()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no section sparse_attention_config"),
        (b"sparse_attention_config: 5", "has no section"),
        (b"sparse_attention_config: {local: 5}", "has no section"),
        (b"sparse_attention_config: {algorithm: h2o, colour: 5}", "no setting 'colour'"),
        (b"sparse_attention_config: {algorithm: h2o, local: many}", "--h2o-local"),
        (b"a: [", "is not YAML"),
        (b"a: !!python/object/apply:os.getcwd []", "is not YAML"),
        (b"a: \x01", "is not YAML"),
        (b"a: !!int ''", "is not YAML"),
        (b"a: !!bool x", "is not YAML"),
        (b"a: !!timestamp x", "is not YAML"),
        (b"sparse_attention_config: {algorithm: h2o, by_values: 'no'}", "must be true or false"),
        (b"\xff\xfe\x00", "is UTF-16 text"),
        (b"[" * 50_000, "is not YAML"),
    ],
)
def test_bad_files_of_settings(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read("--attention-config", str(path))
    with pytest.raises(UsageError, match="is a directory; give a text file to --attention-config"):
        read("--attention-config", str(tmp_path))


def test_a_file_that_is_too_large_is_named_once(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"#" * (2**20 + 1))
    with pytest.raises(UsageError, match=f"^{path} is too large for a file of settings"):
        read("--attention-config", str(path))
