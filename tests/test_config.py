"""Settings check themselves; every message names the field, its flag and a cure."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

from edgeh2o import H2OConfig, HeadwiseConfig, RuvllmConfig
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.errors import UsageError
from edgeh2o.rope_config import RopeConfig
from edgeh2o.sampling_config import SamplingParams


@pytest.mark.parametrize("schema", [{"type": "object"}, None, '{"type": "object"}', dict])
def test_equal_settings_have_equal_hashes(schema: object) -> None:
    """A mapping has none, and is a part of settings that are to be keys all the same."""
    first, second = (
        SamplingParams(stop=["a"], schema=copy.deepcopy(schema), seed=1) for _ in range(2)
    )
    assert first == second
    assert {first: 1}[second] == 1
    assert hash(first) != hash(SamplingParams(stop=["b"], schema=schema, seed=1))
    assert first != SamplingParams(stop=["a"], schema={"type": "array"}, seed=1)


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (SamplingParams, {"temperature": math.nan}, r"temperature \(--temp\) .*got nan; use 0"),
        (SamplingParams, {"temperature": math.inf}, r"--temp.*got inf"),
        (SamplingParams, {"temperature": -0.1}, r"--temp.*got -0.1"),
        (SamplingParams, {"temperature": "hot"}, r"--temp.*got 'hot'"),
        (SamplingParams, {"top_k": -1}, r"--top-k.*got -1; use 0"),
        (SamplingParams, {"top_k": 1.5}, r"--top-k.*integer.*got 1.5"),
        (SamplingParams, {"top_p": 0}, r"--top-p.*in \(0, 1\], got 0; use 1"),
        (SamplingParams, {"top_p": 2}, r"--top-p.*got 2"),
        (SamplingParams, {"min_p": -0.1}, r"--min-p.*got -0.1; use 0"),
        (SamplingParams, {"min_p": 1.1}, r"--min-p.*got 1.1"),
        (SamplingParams, {"repeat_penalty": 0}, r"--repeat-penalty.*got 0; use 1"),
        (SamplingParams, {"repeat_last_n": -2}, r"--repeat-last-n.*got -2; use -1"),
        (SamplingParams, {"presence_penalty": 2.1}, r"--presence-penalty.*to 2, got 2.1; use 0"),
        (SamplingParams, {"frequency_penalty": "1"}, r"--frequency-penalty.*got '1'"),
        (SamplingParams, {"logit_bias": {"5": 1}}, r"--logit-bias.*map token ids.*got {'5': 1}"),
        (SamplingParams, {"logit_bias": {5: 101}}, r"--logit-bias.*from -100 to 100"),
        (SamplingParams, {"logit_bias": {5: math.nan}}, r"--logit-bias.*got {5: nan}"),
        (SamplingParams, {"logit_bias": {-1: 1}}, r"--logit-bias.*got {-1: 1}"),
        (SamplingParams, {"logit_bias": [(5, 1)]}, r"--logit-bias.*got \[\(5, 1\)\]"),
        (SamplingParams, {"seed": -2}, r"--seed.*got -2; leave it out"),
        (SamplingParams, {"seed": 2**64}, r"--seed"),
        (SamplingParams, {"max_tokens": -2}, r"--max-tokens.*got -2; use -1"),
        (SamplingParams, {"ignore_eos": "no"}, r"--ignore-eos\) must be true or false, got 'no'"),
        (RuntimeConfig, {"check_tensors": 1}, r"--check-tensors\) must be true or false, got 1"),
        (RuvllmConfig, {"dense_decode": "false"}, r"dense_decode .*must be true or false"),
        (SamplingParams, {"max_tokens": True}, r"--max-tokens.*got True"),
        (SamplingParams, {"stop": ("a", "")}, r"--stop.*non-empty"),
        (SamplingParams, {"stop": ""}, r"--stop.*non-empty"),
        (SamplingParams, {"stop": (1,)}, r"--stop.*got \(1,\)"),
        (SamplingParams, {"stop": None}, r"--stop.*got None"),
        (SamplingParams, {"stop": 5}, r"--stop.*got 5"),
        (PrefillConfig, {"chunk_size": 0}, r"--chunk-size.*got 0"),
        (PrefillConfig, {"chunk_size": -5}, r"--chunk-size.*got -5"),
        (PrefillConfig, {"batch_size": 0}, r"--batch-size.*got 0"),
        (
            PrefillConfig,
            {"batch_size": 512, "chunk_size": 1024},
            r"1024 is larger than .* 512; use -ub 512 or less",
        ),
        (
            PrefillConfig,
            {"batch_size": 5000, "chunk_size": 1024},
            r"multiple .* 5000 and 1024; .* -b 4096",
        ),
        (RuntimeConfig, {"threads": 0}, r"--threads.*from 1 to 256, got 0; leave it out"),
        (RuntimeConfig, {"threads": 10**6}, r"--threads.*got 1000000"),
        (RuntimeConfig, {"context_size": -1}, r"--ctx-size.*got -1; use 0"),
        (RuntimeConfig, {"context_size": 2**31}, r"--ctx-size.*from 0 to 2147483647, got 2"),
        (RuntimeConfig, {"isa": ""}, r"--isa.*empty"),
        (RuntimeConfig, {"cache_type": "q3"}, r"--cache-type.*one of f16, .*got 'q3'"),
        (RuntimeConfig, {"cache_type_v": "q3"}, r"--cache-type-v.*one of f16, .*got 'q3'"),
        (RopeConfig, {"scaling": "ntk"}, r"--rope-scaling.*one of none, linear, yarn, got 'ntk'"),
        (RopeConfig, {"scale": 0}, r"--rope-scale.*above 0.001 and below 1e\+06, got 0; leave"),
        (RopeConfig, {"freq_base": float("nan")}, r"--rope-freq-base.*got nan"),
        (RopeConfig, {"original_context": 0}, r"--yarn-orig-ctx.*got 0"),
        (RopeConfig, {"scale": 2, "freq_scale": 0.5}, r"inverse of --rope-scale; give one"),
        (RopeConfig, {"scaling": "none", "scale": 2}, r"none stretches nothing; leave"),
        (
            RopeConfig,
            {"scaling": "linear", "scale": 2, "original_context": 64, "beta_slow": 2},
            r"--yarn-orig-ctx.*--yarn-beta-slow.* nothing with --rope-scaling linear; leave",
        ),
        (
            RuntimeConfig,
            {"attention_precision": "f8"},
            r"--attention-precision.*one of auto, f32, bf16, f16, int8, int16, got 'f8'",
        ),
    ],
)
def test_bad_values_are_refused(config: type[Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        config(**values)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (SamplingParams, {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 1}),
        (SamplingParams, {"temperature": np.float32(0.5), "top_k": np.int64(3)}),
        (SamplingParams, {"presence_penalty": -2, "logit_bias": {np.int32(5): np.float32(-100)}}),
        (SamplingParams, {"seed": 2**64 - 1, "max_tokens": 0, "repeat_last_n": -1}),
        (PrefillConfig, {"batch_size": 512, "chunk_size": 512}),
        (PrefillConfig, {"batch_size": 1, "chunk_size": 1}),
        (RuntimeConfig, {"context_size": 0, "threads": 256}),
    ],
)
def test_values_at_the_limits_are_taken(config: type[Any], values: dict[str, Any]) -> None:
    made = config(**values)
    assert {name: getattr(made, name) for name in values} == values


@pytest.mark.parametrize(
    ("config", "values"),
    [
        (SamplingParams, {"max_tokens": np.int64(3), "seed": np.uint64(2**64 - 1)}),
        (SamplingParams, {"temperature": np.float32(0.5), "top_k": np.int16(5), "min_p": 0}),
        (SamplingParams, {"lookup": np.int64(5), "draft_tokens": np.int8(2)}),
        (PrefillConfig, {"batch_size": np.int64(64), "chunk_size": np.int32(32)}),
        (PrefillConfig, {"max_error": np.float32(2)}),
        (RuntimeConfig, {"context_size": np.int64(512), "threads": np.int8(1)}),
        (HeadwiseConfig, {"budget": np.int64(640), "decay": np.float32(0.5)}),
        (H2OConfig, {"local": np.int64(8), "heavy": np.int64(8), "decay": np.float16(0.5)}),
        (RopeConfig, {"freq_base": np.float32(5e5), "original_context": np.int64(4096)}),
    ],
)
def test_numbers_of_numpy_become_those_of_python(config: type[Any], values: dict[str, Any]) -> None:
    """Statistics and session files are JSON, which has no others."""
    settings = config(**values)
    found = {name: getattr(settings, name) for name in values}
    assert all(type(value) in (int, float, str) for value in found.values())
    plain = {n: v.item() if isinstance(v, np.generic) else v for n, v in values.items()}
    assert settings == config(**plain)


def test_stop_may_be_one_text_or_a_list() -> None:
    assert SamplingParams(stop="END").stop == ("END",)  # type: ignore[arg-type]
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")  # type: ignore[arg-type]


def test_defaults_are_those_that_users_of_llama_cpp_know() -> None:
    sampling = SamplingParams()
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.8, 40, 0.95)
    assert (sampling.min_p, sampling.repeat_penalty, sampling.repeat_last_n) == (0.05, 1.0, 64)
    assert (PrefillConfig().batch_size, PrefillConfig().chunk_size) == (4096, None)


def test_the_chunk_size_is_the_one_asked_for_or_the_preferred_one() -> None:
    assert PrefillConfig().with_chunk_size(256) == (PrefillConfig(chunk_size=256), 256)
    assert PrefillConfig(chunk_size=64).with_chunk_size(256)[1] == 64
    assert PrefillConfig(batch_size=100).with_chunk_size(256)[1] == 100
    with pytest.raises(UsageError, match="multiple"):
        PrefillConfig(batch_size=1000).with_chunk_size(256)
