"""The cold start of ONNX models: what the table says of samples, with a peer and without."""

from __future__ import annotations

import ast

from bench.load import MIB, ProcessCost
from bench.onnx_load import PEER_PROGRAM, OnnxLoadMeasurement, format_table


def measured(theirs: list[ProcessCost]) -> OnnxLoadMeasurement:
    ours = [ProcessCost(0.3, 100 * MIB), ProcessCost(0.4, 120 * MIB), ProcessCost(0.5, 110 * MIB)]
    return OnnxLoadMeasurement(folder="model", threads=1, ours=ours, theirs=theirs)


def test_medians_make_the_ratios() -> None:
    table = format_table([measured([ProcessCost(0.2, 220 * MIB)])])
    assert "0.40 (0.30 to 0.50)" in table and "2.00x" in table
    assert "110 (100 to 120)" in table and "0.50x" in table


def test_without_a_peer_there_are_no_ratios() -> None:
    assert "x" not in format_table([measured([])]).splitlines()[-1]


def test_the_program_of_the_peer_is_python() -> None:
    ast.parse(PEER_PROGRAM)
