"""Flags made from dataclasses, and dataclasses made from flags."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from edgeh2o.attention.h2o import H2OConfig
from edgeh2o.cli.options import add_config_options, read_config
from edgeh2o.config import PrefillConfig, RuntimeConfig
from edgeh2o.option_fields import option
from edgeh2o.sampling_config import SamplingParams


@dataclass(frozen=True)
class Example:
    amount: int = option(3, "-a", "--amount", help="how many, 100% of them")
    name: str | None = option(None, "--name", help="what to call it")
    words: Sequence[str] = option((), "--word", help="a word", metavar="WORD")
    is_loud: bool = option(False, "--loud", help="raise the voice")
    hidden: int = 5


@dataclass(frozen=True)
class Prefixed:
    window_size: int = 7
    share: float = field(default=0.5, metadata={"help": "part of the budget"})


def _parse(config: type[object], *arguments: str, prefix: str = "") -> object:
    parser = argparse.ArgumentParser()
    add_config_options(parser, config, title="options", prefix=prefix)
    return read_config(parser.parse_args(arguments), config, prefix=prefix)


def test_defaults() -> None:
    assert _parse(Example) == Example()
    for config in (SamplingParams, PrefillConfig, RuntimeConfig):
        assert _parse(config) == config()


def test_values() -> None:
    parsed = _parse(Example, "-a", "4", "--name", "x", "--word", "b", "--word", "c", "--loud")
    assert parsed == Example(amount=4, name="x", words=("b", "c"), is_loud=True)


def test_fields_without_flags_get_prefixed_ones() -> None:
    parsed = _parse(Prefixed, "--pre-window-size", "9", "--pre-share", "0.25", prefix="pre")
    assert parsed == Prefixed(window_size=9, share=0.25)
    assert _parse(H2OConfig, "--h2o-local", "64", prefix="h2o") == H2OConfig(local=64)


def test_help_tells_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(Example, "--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "--amount N how many, 100% of them (default: 3)" in text
    assert "--name NAME what to call it --word WORD a word --loud raise the voice" in text
    assert "hidden" not in text
