"""Our quality figures beside llama.cpp's perplexity."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from bench.quality import Quality, _row, parse_attention
from edgeh2o import H2OConfig, HeadwiseConfig
from edgeh2o.evaluation.comparison import TokenScores
from edgeh2o.evaluation.perplexity import PerplexityReport, summarise_ranges

N = 64


def make_report() -> PerplexityReport:
    """Dense NLL 2 in the first half of a window and 3 in the second; sparse loses 0.1 there."""
    late = (np.arange(N - 1) >= N // 2).astype(float)
    noise = np.resize([0.01, -0.01], N - 1)
    scores = TokenScores(2 + late + noise, 2 + 1.1 * late + noise, 0.5 * late, 1 - late)
    return PerplexityReport(
        model="model.gguf",
        attention={"algorithm": "h2o", "local": 4},
        chunk_size=16,
        context=N,
        n_windows=1,
        pairs_computed=20 * N,
        pairs_dense=N * (N + 1) // 2,
        ranges=summarise_ranges([scores], N, 16),
        windows=(),
    )


def test_attention_with_its_settings() -> None:
    assert parse_attention("headwise:budget=384,local=128") == HeadwiseConfig(budget=384, local=128)
    assert parse_attention("h2o:score=mean,decay=0.5") == H2OConfig(score="mean", decay=0.5)
    for text, message in (("x", "not known"), ("h2o:loc=1", "no setting"), ("h2o:local=x", "int")):
        with pytest.raises(argparse.ArgumentTypeError, match=message):
            parse_attention(text)


def test_the_second_half_is_compared_with_llama_cpp() -> None:
    report = make_report()
    ours = report.find("second half").dense_perplexity
    assert ours == pytest.approx(np.exp(3), rel=1e-2)
    quality = Quality(report, ours / 1.02)
    assert quality.difference_percent == pytest.approx(2)
    assert quality.to_dict()["difference_percent"] == pytest.approx(2)
    assert Quality(report, None).difference_percent is None


def test_a_row_shows_the_tokens_after_the_first_ones() -> None:
    report = make_report()
    row = _row(Quality(report, 20.0), 16)
    assert row[:4] == ["model.gguf", "h2o local 4", "1 x 64", "20"]
    assert row[4] == f"{report.find('after 16').dense_perplexity:.3f}"
    assert row[8:10] == [f"{report.find('second half').dense_perplexity:.3f}", "20.000"]
    assert _row(Quality(report, None), 16)[9:] == ["-", "-"]
