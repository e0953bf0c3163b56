"""Session files go on exactly, are replaced as one step, and are refused where they do not fit."""

from __future__ import annotations

import errno
import json
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeh2o.attention.budget_table import table_path, write_table
from edgeh2o.attention.dense import DenseConfig
from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.attention.headwise import HeadwiseConfig
from edgeh2o.config import PrefillConfig
from edgeh2o.engine import context_size, session, session_file
from edgeh2o.engine.transcript import Transcript
from edgeh2o.errors import EdgeH2OError, FormatError, ResourceError, UsageError
from edgeh2o.llm import LLM
from edgeh2o.sampling_config import SamplingParams
from tests.budget_tables import table_of_model
from tests.tiny_models import TinyModelFactory

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
PREFILL = PrefillConfig(batch_size=16, chunk_size=8)
H2O = H2OConfig(local=2, heavy=3)
TEXT = "the art of the thing is that it is there"
MORE = " and for all that it was in the end"


@pytest.fixture(scope="module")
def model(tiny_model: TinyModelFactory) -> Path:
    return tiny_model(tensor_type="Q4_0")


def _load(model: Path, **options: Any) -> LLM:
    return LLM(model, **({"prefill": PREFILL, "attention": H2O, "context_size": 128} | options))


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with _load(model) as llm:
        yield llm


@pytest.mark.parametrize("lookup", ["off", "5"])
def test_a_stream_goes_on_after_its_session_was_saved(
    model: Path, tmp_path: Path, lookup: str
) -> None:
    sampling = replace(GREEDY, max_tokens=24, lookup=lookup)
    with _load(model) as llm:
        whole = llm.generate(TEXT, sampling, keep_cache=True)
        stream = llm.stream(TEXT, sampling, keep_cache=True)
        for _ in stream:
            llm.save_session(tmp_path / "s")
        assert stream.result().token_ids == whole.token_ids


def test_saving_without_a_cache_ends_a_stream(model: Path, tmp_path: Path) -> None:
    with _load(model) as llm:
        stream = llm.stream(TEXT, GREEDY)
        next(stream)
        llm.save_session(tmp_path / "s", extra={"a": 1})
        with pytest.raises(UsageError, match="ended by a newer prompt, a session file"):
            next(stream)


@pytest.fixture(scope="module")
def saved(model: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("session") / "s"
    with _load(model) as llm:
        llm.generate(TEXT, GREEDY, keep_cache=True)
        llm.save_session(path, extra={"messages": ["a"]})
    return path.read_bytes()


@pytest.fixture
def file(saved: bytes, tmp_path: Path) -> Path:
    path = tmp_path / "s"
    path.write_bytes(saved)
    return path


@pytest.mark.parametrize("extra", [{"a": object()}, {"a": {1, 2}}, {(1, 2): "a"}, [1], 5])
def test_extra_that_json_cannot_hold_is_refused(llm: LLM, tmp_path: Path, extra: Any) -> None:
    llm.generate(TEXT, GREEDY, keep_cache=True)
    with pytest.raises(UsageError, match=r"\(extra\) must be plain values by name"):
        llm.save_session(tmp_path / "s", extra=extra)
    assert not list(tmp_path.iterdir())


def test_a_loaded_session_goes_on_as_the_one_that_was_saved(
    model: Path, llm: LLM, file: Path
) -> None:
    assert llm.load_session(file) == {"messages": ["a"]}
    same = llm.generate(TEXT, GREEDY, keep_cache=True, logprobs=True)
    assert same.stats.cached_tokens == same.stats.prompt_tokens
    llm.load_session(file)
    with _load(model) as whole:
        first = whole.generate(TEXT, GREEDY, keep_cache=True, logprobs=True)
        assert (same.token_ids, same.logprobs) == (first.token_ids, first.logprobs)
        longer = TEXT + first.text + MORE
        expected = whole.generate(longer, GREEDY, keep_cache=True, logprobs=True)
    result = llm.generate(longer, GREEDY, keep_cache=True, logprobs=True)
    assert result.stats.cached_tokens == expected.stats.cached_tokens > first.stats.prompt_tokens
    assert (result.token_ids, result.logprobs) == (expected.token_ids, expected.logprobs)


KINDS = [
    {"tensor_type": "Q4_0"},
    {"architecture": "lfm2", "n_kv_heads": (0, 2, 0, 2)},
    {"architecture": "qwen35"},
]


@pytest.mark.parametrize("shape", KINDS, ids=["llama", "lfm2", "qwen35"])
@pytest.mark.parametrize("n_more", [0, 3])
def test_a_loaded_session_goes_back_to_its_marks(
    tiny_model: TinyModelFactory, tmp_path: Path, shape: dict[str, Any], n_more: int
) -> None:
    """Behind the prompt are tokens of an answer, which a recurrent state cannot take back."""
    tokens = [1 + i % 300 for i in range(100)]
    prompts = [tokens, [*tokens[:60], 5, 6, 7]]
    path = tiny_model(n_layers=4, **shape)
    answer = replace(GREEDY, max_tokens=n_more)
    with _load(path, attention=DenseConfig(), context_size=256) as llm:
        llm.generate(tokens, answer, keep_cache=True)
        llm.save_session(tmp_path / "s")
        expected = [llm.generate(p, GREEDY, keep_cache=True, logprobs=True) for p in prompts]
    assert [each.stats.cached_tokens for each in expected] == [100, 48]
    with _load(path, attention=DenseConfig(), context_size=256) as llm:
        llm.load_session(tmp_path / "s")
        results = [llm.generate(p, GREEDY, keep_cache=True, logprobs=True) for p in prompts]
    for result, same in zip(results, expected, strict=True):
        assert result.stats.cached_tokens == same.stats.cached_tokens
        assert (result.token_ids, result.logprobs) == (same.token_ids, same.logprobs)


def test_a_file_without_marks_as_older_ones_are(llm: LLM, file: Path, saved: bytes) -> None:
    header_bytes = struct.unpack_from("<I", saved, 12)[0]
    header = json.loads(saved[16 : 16 + header_bytes])
    sizes, n_marks = header["sizes"], sum(header.pop("mark_bytes"))
    assert n_marks > 0
    marks = len(saved) - 32 - sizes["row_bytes"] - n_marks
    text = json.dumps(header).encode()
    parts = saved[16 + header_bytes : marks] + saved[marks + n_marks :]
    file.write_bytes(_sign(saved[:12] + struct.pack("<I", len(text)) + text + parts))
    llm.load_session(file)
    same = llm.generate(TEXT, GREEDY, keep_cache=True)
    assert same.stats.cached_tokens == same.stats.prompt_tokens


def test_a_longer_cache_keeps_its_marks(
    tiny_model: TinyModelFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context_size, "MIN_DEFAULT_CONTEXT", 64)
    monkeypatch.setattr(context_size, "CONTEXT_STEP", 16)
    tokens = [1 + i % 300 for i in range(100)]
    with LLM(tiny_model(), prefill=PREFILL, attention=DenseConfig()) as llm:
        llm.generate(tokens, GREEDY, keep_cache=True)
        context = llm._session.runner.max_context
        longer = llm.generate([*tokens, *tokens], GREEDY, keep_cache=True)
        assert longer.stats.cached_tokens == 100
        assert llm._session.runner.max_context > context
        departing = llm.generate([*tokens[:60], 5, 6, 7], GREEDY, keep_cache=True)
    assert departing.stats.cached_tokens == 48


def test_nothing_to_save(model: Path, tmp_path: Path) -> None:
    with _load(model) as llm:
        with pytest.raises(UsageError, match="no prompt to save"):
            llm.save_session(tmp_path / "s")
        llm.generate(TEXT, GREEDY)
        with pytest.raises(UsageError, match="no prompt to save"):
            llm.save_session(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"attention": H2OConfig(local=3, heavy=3)}, "with attention local 2; this run has 3"),
        ({"attention": DenseConfig()}, 'with attention algorithm "h2o"'),
        ({"prefill": PrefillConfig(batch_size=32, chunk_size=16)}, "chunk_size 8; this run has 16"),
        ({"cache_type": "f32"}, 'cache_type "f16"; this run has "f32"'),
        ({"cache_type_k": "f32"}, 'cache_type "f16"; this run has "f32/f16"'),
    ],
)
def test_other_options_are_refused(
    model: Path, file: Path, options: dict[str, Any], cause: str
) -> None:
    with _load(model, **options) as llm, pytest.raises(UsageError, match=cause):
        llm.load_session(file)


def test_a_session_keeps_its_budgets_through_a_calibration(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEH2O_CACHE", str(tmp_path))
    attention = HeadwiseConfig(budget=8, local=2, sinks=1)
    path = tmp_path / "s"
    with _load(model, attention=attention) as llm:
        before = llm.generate(TEXT, GREEDY, keep_cache=True).token_ids
        llm.save_session(path)
        config = llm.config
    n_heads = config.n_layers * config.n_kv_heads
    table = table_of_model(
        config,
        ((1.0, 1.0, 1.0), *((9.0, 5.0, 1.0),) * (n_heads - 1)),
        chunk_size=8,
        length=32,
        mean_past=16.0,
        levels=(4, 8, 12),
    )
    write_table(table, table_path(config.fingerprint))
    with _load(model, attention=attention) as llm:
        assert llm.attention.resolved(llm.config).budgets != (8,) * n_heads
        llm.load_session(path)
        assert llm.generate(TEXT, GREEDY, keep_cache=True).token_ids == before
        # What begins anew goes by the table.
        assert llm.generate("x" + TEXT, GREEDY).stats.attention["table"] == "cache"
    by_hand = replace(attention, budgets=(4,) * n_heads)
    with (
        _load(model, attention=by_hand) as llm,
        pytest.raises(UsageError, match=r"made with attention budgets\[0\] 8; this run has 4"),
    ):
        llm.load_session(path)


def test_another_model_is_refused(tiny_model: TinyModelFactory, file: Path) -> None:
    with (
        _load(tiny_model(tensor_type="Q4_0", seed=3)) as llm,
        pytest.raises(UsageError, match="made with another model file"),
    ):
        llm.load_session(file)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3"])  # of biases, of norms
def test_keys_that_were_not_evened_out_are_refused(
    architecture: str, tiny_model: TinyModelFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of versions before, and of a GPU: this one's queries would not fit them."""
    path, uneven = tmp_path / "s.session", tiny_model(architecture=architecture)
    full = session.fingerprint_of
    with monkeypatch.context() as patch, _load(uneven) as llm:
        patch.setattr(
            session,
            "fingerprint_of",
            lambda *args: {k: v for k, v in full(*args).items() if k != "keys"},
        )
        llm.generate(TEXT, GREEDY, keep_cache=True)
        llm.save_session(path)
    with (
        _load(uneven) as llm,
        pytest.raises(UsageError, match='made with keys null; this run has "balanced"'),
    ):
        llm.load_session(path)


def test_another_context_serves_if_the_tokens_fit(model: Path, file: Path) -> None:
    with _load(model, context_size=64) as llm:
        llm.load_session(file)
        result = llm.generate(TEXT, GREEDY, keep_cache=True)
        assert result.stats.cached_tokens == result.stats.prompt_tokens
    n_tokens = result.stats.prompt_tokens + len(result.token_ids) - 1  # the last one is not read
    cause = rf"session file .* holds {n_tokens} tokens and the context 8; use -c {n_tokens + 1} or"
    with _load(model, context_size=8) as llm, pytest.raises(UsageError, match=cause):
        llm.load_session(file)


def _sign(data: bytes) -> bytes:
    """The file with a checksum that fits."""
    body = data[: -session_file.DIGEST_BYTES]
    return body + blake2b(body, digest_size=session_file.DIGEST_BYTES).digest()


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        length = struct.unpack_from("<I", data, 12)[0]
        header = json.loads(data[16 : 16 + length])
        change(header)
        text = json.dumps(header).encode()
        return _sign(data[:12] + struct.pack("<I", len(text)) + text + data[16 + length :])

    return apply


def _token(index: int, value: int) -> Callable[[bytes], bytes]:
    def apply(data: bytes) -> bytes:
        offset = 16 + struct.unpack_from("<I", data, 12)[0] + 4 * index
        return _sign(data[:offset] + struct.pack("<i", value) + data[offset + 4 :])

    return apply


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda data: b"", "not a session file"),
        (lambda data: b"GGUF" + data[4:], "not a session file"),
        (lambda data: _sign(data[:8] + struct.pack("<I", 9) + data[12:]), "version is 9"),
        (lambda data: data[:12] + b"\xff" * 4 + data[16:], "header has 4294967295 bytes"),
        (lambda data: data[:16] + b"x" + data[17:], "not JSON"),
        (lambda data: data[:16] + b"[" * 9 + data[25:], "not JSON"),
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum is wrong|cannot be used"),
        (lambda data: data + b"\0", "has 1 bytes too many"),
        (_header(lambda header: header.pop("fingerprint")), "lacks the fingerprint"),
        (_header(lambda header: header.pop("sizes")), "lacks the sizes"),
        (_header(lambda header: header["sizes"].update(row_bytes=2**63)), "bytes too few"),
        (_header(lambda header: header["sizes"].update(token_bytes=-4)), "lacks the sizes"),
        (_header(lambda header: header["sizes"].update(row_bytes=1.5)), "lacks the sizes"),
        (_header(lambda header: header.update(mark_bytes=7)), "lacks the sizes"),
        (_header(lambda header: header.update(mark_bytes=[-1])), "lacks the sizes"),
        (_header(lambda header: header["mark_bytes"].append(2**63)), "bytes too few"),
        (_token(0, -1), "token id is outside"),
        (_token(3, 10**6), "token id is outside"),
    ],
)
def test_damaged_files(
    llm: LLM, file: Path, saved: bytes, change: Callable[[bytes], bytes], cause: str
) -> None:
    file.write_bytes(change(saved))
    with pytest.raises(FormatError, match=cause) as caught:
        llm.load_session(file)
    assert ("delete it" in str(caught.value)) == (cause != "not a session file")
    assert "name another file with --session" in str(caught.value)
    assert llm.generate("in", GREEDY).token_ids


def test_a_file_cut_anywhere_is_refused(llm: LLM, file: Path, saved: bytes) -> None:
    header_end = 16 + struct.unpack_from("<I", saved, 12)[0]
    for length in (*range(header_end + 40), *range(header_end + 40, len(saved), 997)):
        file.write_bytes(saved[:length])
        with pytest.raises(FormatError):
            llm.load_session(file)


@pytest.mark.parametrize("seed", range(30))
def test_a_changed_byte_is_noticed(llm: LLM, file: Path, saved: bytes, seed: int) -> None:
    rng = np.random.default_rng(seed)
    offset = int(rng.integers(len(saved) if seed % 2 else 400))
    changed = bytes([saved[offset] ^ (1 << int(rng.integers(8)))])
    file.write_bytes(saved[:offset] + changed + saved[offset + 1 :])
    with pytest.raises(EdgeH2OError):
        llm.load_session(file)


def test_a_signed_file_with_a_state_that_cannot_be(llm: LLM, file: Path, saved: bytes) -> None:
    """A checksum is no promise: what it covers is checked all the same."""
    header_bytes = struct.unpack_from("<I", saved, 12)[0]
    sizes = json.loads(saved[16 : 16 + header_bytes])["sizes"]
    core = 16 + header_bytes + sizes["token_bytes"] + sizes["document_bytes"]
    for offset, value in ((core, 10**9), (core + 32, 2**60)):
        file.write_bytes(_sign(saved[:offset] + struct.pack("<Q", value) + saved[offset + 8 :]))
        with pytest.raises(FormatError, match="saved state does not fit"):
            llm.load_session(file)


@pytest.mark.parametrize("value", [[], "", 0, ["a"], {"prompt": 1}])
def test_a_signed_file_with_a_transcript_that_cannot_be(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: object
) -> None:
    monkeypatch.setattr(Transcript, "to_dict", lambda _: value)
    with _load(model) as llm:
        llm.generate(TEXT, GREEDY, keep_cache=True)
        llm.save_session(tmp_path / "s")
        with pytest.raises(FormatError, match="delete it"):
            llm.load_session(tmp_path / "s")


def test_files_that_cannot_be_read(llm: LLM, tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="No such file"):
        llm.load_session(tmp_path / "none")
    with pytest.raises(EdgeH2OError, match=r"not a regular file|Is a directory"):
        llm.load_session(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a regular file"):
        llm.load_session(tmp_path / "pipe")


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_a_failed_save_leaves_the_old_file(
    model: Path, file: Path, saved: bytes, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with _load(model) as llm:
        llm.generate("in all", GREEDY, keep_cache=True)
        monkeypatch.setattr(os, name, fail)
        with pytest.raises(ResourceError, match="No space left on device; what was saved"):
            llm.save_session(file)
    assert file.read_bytes() == saved
    assert list(file.parent.iterdir()) == [file]
