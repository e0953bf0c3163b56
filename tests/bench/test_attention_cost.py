"""The profiler's report is summed by part of the attention; other functions do not count."""

from __future__ import annotations

import pytest

from bench.attention_cost import PARTS, shares, sum_parts
from edgeh2o.errors import EdgeH2OError

REPORT = """\
# Samples: 5K of event 'cycles'
#
    29.95%  [.] edgeh2o::avx512vnni::gemm_q8<(edgeh2o::PackedFormat)4>                -      -
    14.00%  [.] edgeh2o::avx512vnni::multiply_panel<false>                            -      -
    15.00%  [.] edgeh2o::avx512vnni::multiply_panel<true>
     3.00%  [.] edgeh2o::avx512vnni::attention_softmax
     1.00%  [.] edgeh2o::avx512vnni::merge_softmax_f32
     0.50%  [.] edgeh2o::avx512vnni::column_sums_f32
     0.40%  [.] edgeh2o::avx512vnni::add_rows<(edgeh2o::CacheType)0>
     0.30%  [.] edgeh2o::avx512vnni::pack_keys<(edgeh2o::CacheType)0>(float*, void const*)
     0.20%  [.] void std::__introselect<unsigned long*, long, __gnu_cxx::__ops::_Iter
     0.10%  [.] edgeh2o::Landmarks::summarise
     5.25%  [k] clear_page_erms
"""


def test_functions_belong_to_parts() -> None:
    sums = sum_parts(REPORT)
    assert sums == pytest.approx(
        {
            "scores and values": 29,
            "softmax and merge": 4,
            "column sums": 0.5,
            "gather": 0.3,
            "landmarks": 0.5,
            "selection": 0.2,
        }
    )
    parts = shares(sums)
    assert parts.keys() == PARTS.keys()
    assert sum(parts.values()) == pytest.approx(100)
    assert parts["landmarks"] == pytest.approx(100 * 0.5 / 34.5)


def test_a_report_without_attention_is_an_error() -> None:
    with pytest.raises(EdgeH2OError, match="no sample lies in the attention"):
        shares(sum_parts("    29.95%  [.] main\n"))
