"""How much every KV head needs to remember: a table measured once per model.

For every layer and KV head the table holds the error that a memory set of each size makes. From it
follow the budgets for any mean: the keys go where they remove most error. The file is JSON and
belongs to the weights that have its fingerprint, whatever their quantisation.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import takewhile
from pathlib import Path
from typing import Any

from ..errors import FormatError
from ..formats.atomic_file import make_folder, write_file
from ..option_fields import MAX_CONTEXT
from .decode_quality import DecodeQuality
from .prefill_quality import PrefillQuality, read_qualities
from .rounding_quality import ERROR_LIMIT, RoundingQuality

TABLE_FORMAT = 1
TABLE_SUFFIX = ".budgets.json"
MAX_TABLE_BYTES = 16 * 2**20
# A head's budget: keys of a full memory set, None for the whole past.
Budget = int | None

_CURE = "make it again with `edgeh2o calibrate`"
_PACKAGED_TABLES = Path(__file__).parent / "tables"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetTable:
    """Errors of memory sizes per head, and what was measured with the budgets they lead to.

    ``errors[head][level]`` is the error of head ``layer * n_layer_heads + head`` with
    ``levels[level]`` keys: the squared norm of what it adds wrongly to the residual stream,
    relative to that of the stream. ``mean_past`` is the mean number of earlier keys in the text
    of the measurement, which is what a head without a limit reads. ``losses`` gives perplexity
    losses in percent by mean budget, measured on ``length`` tokens. The heads are ``n_heads`` query
    heads of every layer, or its ``n_kv_heads`` if that is 0.

    Where it is from: ``texts`` says what was read, ``version`` is that of edgeh2o. A profile, which
    was made while prompts were answered, is the mean over ``prompts`` of them; 0: no profile.
    ``prefill`` and ``decode`` are what prompts, by ascending length, and generated tokens lose by
    the budgets, and ``rounding`` what products of attention in 8 bits lose, where that was
    measured. Of a profile ``rounding_error`` says how much outputs are off by them, in percent.
    """

    model: str
    fingerprint: str
    n_layers: int
    n_kv_heads: int
    n_heads: int = 0
    chunk_size: int
    length: int
    mean_past: float
    levels: tuple[int, ...]
    errors: tuple[tuple[float, ...], ...]
    losses: Mapping[int, float] = field(default_factory=dict)
    texts: tuple[str, ...] = ()
    version: str = ""
    prompts: int = 0
    prefill: tuple[PrefillQuality, ...] = ()
    decode: DecodeQuality | None = None
    rounding: RoundingQuality | None = None
    rounding_error: float | None = None

    @property
    def may_round_products(self) -> bool:
        """Whether attention in 8 bits is harmless by what is known of the model."""
        if self.rounding is not None:
            return self.rounding.is_harmless
        return self.rounding_error is not None and self.rounding_error <= ERROR_LIMIT

    @property
    def n_layer_heads(self) -> int:
        """Rows of ``errors`` of a layer."""
        return self.n_heads or self.n_kv_heads

    @property
    def shown(self) -> tuple[PrefillQuality, ...]:
        """What was measured of prompts up to the longest that lose nothing."""
        return tuple(takewhile(lambda each: each.is_harmless, self.prefill))

    def of_kv_heads(self) -> BudgetTable:
        """The table for memory sets that all query heads of a KV head share.

        Its errors are the sums of theirs, as if they were independent.
        """
        if not self.n_heads:
            return self
        size = self.n_heads // self.n_kv_heads
        groups = (self.errors[i : i + size] for i in range(0, len(self.errors), size))
        errors = tuple(tuple(map(sum, zip(*rows, strict=True))) for rows in groups)
        return replace(self, n_heads=0, errors=errors, losses={}, prefill=())

    def smoothed(self, share: float) -> BudgetTable:
        """The table with errors of query heads that have ``share`` of the mean of their KV head."""
        if not self.n_heads:
            return self
        size = self.n_heads // self.n_kv_heads
        errors: list[tuple[float, ...]] = []
        for i in range(0, len(self.errors), size):
            rows = self.errors[i : i + size]
            means = [sum(column) / size for column in zip(*rows, strict=True)]
            errors += [
                tuple(
                    (1 - share) * own + share * mean for own, mean in zip(row, means, strict=True)
                )
                for row in rows
            ]
        return replace(self, errors=tuple(errors))

    def budgets(self, mean: float) -> tuple[Budget, ...]:
        """Budgets per head whose mean cost is at most ``mean`` keys, or all at the lowest level.

        Greedy: of all steps of a head to a higher level, the one that removes most error per key,
        again and again. A head without a limit costs ``mean_past``.
        """
        costs = [*map(float, self.levels), self.mean_past]
        curves = [[*_running_minimum(row), 0.0] for row in self.errors]
        chosen = [0] * len(curves)
        room = (mean - costs[0]) * len(curves)

        def best_step(head: int) -> tuple[float, int, int] | None:
            """(minus gain per key, head, level) of the best step that there is room for."""
            curve, now = curves[head], chosen[head]
            steps = [
                ((curve[level] - curve[now]) / (costs[level] - costs[now]), head, level)
                for level in range(now + 1, len(costs))
                if costs[now] < costs[level] <= costs[now] + room and curve[level] < curve[now]
            ]
            return min(steps, default=None)

        steps = [step for step in map(best_step, range(len(curves))) if step]
        heapify(steps)
        while steps:
            _, head, level = heappop(steps)
            extra = costs[level] - costs[chosen[head]]
            if extra <= room:
                room -= extra
                chosen[head] = level
            if step := best_step(head):
                heappush(steps, step)
        levels: tuple[Budget, ...] = (*self.levels, None)
        return tuple(levels[level] for level in chosen)

    def smallest_budget(self, max_loss: float) -> int | None:
        """The smallest measured mean budget from which on no loss exceeds ``max_loss`` percent.

        None when there is none.
        """
        found = None
        for budget in sorted(self.losses, reverse=True):
            if self.losses[budget] > max_loss:
                break
            found = budget
        return found

    def to_json(self) -> str:
        """The text of the table's file."""
        data = {
            "format": TABLE_FORMAT,
            "model": self.model,
            "fingerprint": self.fingerprint,
            "n_layers": self.n_layers,
            "n_kv_heads": self.n_kv_heads,
            **({"n_heads": self.n_heads} if self.n_heads else {}),
            "chunk_size": self.chunk_size,
            "length": self.length,
            "mean_past": self.mean_past,
            "levels": list(self.levels),
            "losses": {str(budget): loss for budget, loss in sorted(self.losses.items())},
            "texts": list(self.texts),
            "version": self.version,
            "prompts": self.prompts,
            **({"prefill": [each.to_dict() for each in self.prefill]} if self.prefill else {}),
            **({"decode": self.decode.to_dict()} if self.decode else {}),
            **({"rounding": self.rounding.to_dict()} if self.rounding else {}),
            **(
                {}
                if self.rounding_error is None
                else {"rounding_error": round(self.rounding_error, 3)}
            ),
        }
        head = json.dumps(data, indent=1)[:-2]
        rows = ",\n".join(
            "  " + json.dumps([float(f"{error:.3g}") for error in row]) for row in self.errors
        )
        return f'{head},\n "errors": [\n{rows}\n ]\n}}\n'


_KEYS = {"format", *(each.name for each in fields(BudgetTable))}


def _running_minimum(row: tuple[float, ...]) -> list[float]:
    """More keys never hurt by more than the measurement's noise."""
    result: list[float] = []
    for error in row:
        result.append(min(error, result[-1]) if result else error)
    return result


def parse_table(text: str, source: str) -> BudgetTable:
    """The table in a file's text. Raises FormatError that names ``source`` and what is wrong."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"{source} is not a budget table: {error}; {_CURE}") from None
    try:
        return _read_table(data)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else error
        said = f"{source} is not a usable budget table: {reason}"
        raise FormatError(f"{said}{' ' if said.endswith(', or') else '; '}{_CURE}") from None


def is_newer(data: Any) -> bool:
    """Whether a later version made the values of a file: this one would drop some of them."""
    if not isinstance(data, dict):
        return False
    version = data.get("format")
    if type(version) is not int or version < TABLE_FORMAT:
        return False
    return version > TABLE_FORMAT or not data.keys() <= _KEYS


def is_newer_file(path: Path) -> bool:
    """The same of a file; false of one that cannot be read."""
    try:
        with path.open("rb") as file:
            return is_newer(json.loads(file.read(MAX_TABLE_BYTES)))
    except (OSError, ValueError, RecursionError):
        return False


def _read_table(data: Any) -> BudgetTable:
    if not isinstance(data, dict):
        raise TypeError("it does not hold a JSON object")
    if data["format"] != TABLE_FORMAT:
        said = f"its format is {data['format']!r}, this version reads {TABLE_FORMAT}"
        raise ValueError(f"{said}; update edgeh2o, or" if is_newer(data) else said)
    table = BudgetTable(
        model=str(data["model"]),
        fingerprint=str(data["fingerprint"]),
        n_layers=int(data["n_layers"]),
        n_kv_heads=int(data["n_kv_heads"]),
        n_heads=int(data.get("n_heads", 0)),
        chunk_size=int(data["chunk_size"]),
        length=int(data["length"]),
        mean_past=float(data["mean_past"]),
        levels=tuple(int(level) for level in data["levels"]),
        errors=tuple(tuple(float(error) for error in row) for row in data["errors"]),
        losses={int(budget): float(loss) for budget, loss in dict(data["losses"]).items()},
        # Tables of the first version lack these.
        texts=tuple(str(text) for text in data.get("texts", ())),
        version=str(data.get("version", "")),
        prompts=int(data.get("prompts", 0)),
        prefill=read_qualities(data.get("prefill"), int(data["length"])),
        decode=DecodeQuality.from_dict(data.get("decode")),
        rounding=RoundingQuality.from_dict(data.get("rounding")),
        rounding_error=None if (error := data.get("rounding_error")) is None else float(error),
    )
    levels = table.levels
    if not levels or list(levels) != sorted(set(levels)) or not 0 < levels[0] <= MAX_CONTEXT:
        raise ValueError("levels must be positive and ascend")
    if levels[-1] > MAX_CONTEXT or not levels[-1] <= table.mean_past < math.inf:
        raise ValueError("mean_past must be at least the highest level")
    if table.n_heads and (
        table.n_heads < 0 or table.n_kv_heads < 1 or table.n_heads % table.n_kv_heads
    ):
        raise ValueError(f"{table.n_heads} query heads cannot share {table.n_kv_heads} KV heads")
    if len(table.errors) != table.n_layers * table.n_layer_heads or not table.errors:
        raise ValueError(f"{len(table.errors)} rows of errors do not fit its layers and heads")
    if any(len(row) != len(levels) for row in table.errors):
        raise ValueError("a row of errors does not have one entry per level")
    if not all(0 <= error < math.inf for row in table.errors for error in row):
        raise ValueError("errors must be finite and not negative")
    if not all(map(math.isfinite, table.losses.values())):
        raise ValueError("losses must be finite")
    if table.rounding_error is not None and not 0 <= table.rounding_error < math.inf:
        raise ValueError("rounding_error must be finite and not negative")
    heads = table.decode.heads if table.decode else None
    if heads is not None and len(heads) != table.n_layers * table.n_kv_heads:
        raise ValueError(f"{len(heads)} budgets of decode do not fit its layers and KV heads")
    if table.prompts < 0:
        raise ValueError("the number of prompts must not be negative")
    return table


def read_table(path: Path) -> BudgetTable:
    """The table in a file. Raises FormatError if it cannot be read or used."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_TABLE_BYTES + 1)
    except OSError as error:
        raise FormatError(f"cannot read the budget table {path}: {error.strerror}") from None
    if len(data) > MAX_TABLE_BYTES:
        raise FormatError(f"{path} is too large for a budget table")
    return parse_table(data.decode("utf-8", errors="replace"), str(path))


def find_table(fingerprint: str) -> tuple[BudgetTable, str] | None:
    """The table of the weights and where it is from, "cache" or "package"; None if there is none.

    Raises FormatError if the one in the cache folder cannot be used.
    """
    path = table_path(fingerprint)
    if fingerprint and os.path.isfile(path):  # not in a folder that may not be looked into
        return _require_fingerprint(read_table(path), fingerprint, path), "cache"
    packaged = _packaged_tables().get(fingerprint)
    return (packaged, "package") if packaged else None


def _require_fingerprint(table: BudgetTable, fingerprint: str, path: Path) -> BudgetTable:
    if table.fingerprint != fingerprint:
        raise FormatError(f"{path} is the budget table of other weights; remove it, or {_CURE}")
    return table


@cache
def _packaged_tables() -> dict[str, BudgetTable]:
    tables = [read_table(path) for path in sorted(_PACKAGED_TABLES.glob(f"*{TABLE_SUFFIX}"))]
    return {table.fingerprint: table for table in tables}


def table_path(fingerprint: str) -> Path:
    """Where `edgeh2o calibrate` puts the table of the weights: a file of the cache folder."""
    from ..formats.known_models import cache_folder

    return cache_folder() / f"{fingerprint}{TABLE_SUFFIX}"


def write_table(table: BudgetTable, path: Path) -> None:
    """Writes the file as a whole or not at all. Raises ResourceError if it cannot be written."""
    make_folder(path.parent)
    write_file(path, table.to_json(), what="the budget table")
