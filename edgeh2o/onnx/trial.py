"""Tries out what a graph computes between a cache and the values after it: is it attention?

The nodes between queries, new keys and values, the past and the output run in onnxruntime on
made-up values. Their scale, soft cap and window are found so, and with these they must give what
causal attention gives, computed in float64. Nothing is taken from the pattern of the nodes.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import FormatError
from .cut import MASK, POSITIONS, TOKENS
from .encoding import encode_model
from .graph import OnnxGraph, attributes, describe_node
from .messages import Tensor, ValueInfo
from .packages import onnxruntime
from .regions import Region, collect_region, refusal, region_signature
from .segment_sessions import FLOAT, FLOAT16, INT64, numpy_type, reason_of, session_options
from .sites import MAX_MASK_CONTEXT, AttentionSite

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

# Of the output, whose values have a standard deviation of about 1, and of scales that are fitted.
_TOLERANCE = {FLOAT: 2e-4, FLOAT16: 3e-2}
_FIT_TOLERANCE = {FLOAT: 1e-3, FLOAT16: 3e-2}


@dataclass(frozen=True, slots=True)
class _Found:
    """What a region turned out to compute."""

    scale: float
    soft_cap: float
    window: int
    gives_half: bool


def prove_composed(
    graph: OnnxGraph, sites: Sequence[AttentionSite], sizes: Mapping[str, int], default_context: int
) -> list[AttentionSite]:
    """The sites, those that are composed with heads, scale, soft cap and window.

    ``sizes`` are those of the configuration. Regions of the same nodes are tried out once. Raises
    FormatError, naming a node, for one that does not compute causal attention.
    """
    known: dict[Hashable, _Found] = {}
    proved = []
    for site in sites:
        if site.is_composed:
            site = _with_heads(graph, site, sizes)
            region = collect_region(graph, site)
            key = region_signature(graph, region, site)
            if key not in known:
                longest = max(
                    16, min(sizes.get("context_length", default_context), MAX_MASK_CONTEXT)
                )
                known[key] = _Trial(graph, region, site, sizes, longest).find()
            found = known[key]
            site = replace(
                site,
                scale=found.scale,
                soft_cap=found.soft_cap,
                window=found.window,
                gives_half=found.gives_half,
            )
        proved.append(site)
    return proved


def _with_heads(graph: OnnxGraph, site: AttentionSite, sizes: Mapping[str, int]) -> AttentionSite:
    values = attributes(site.node)
    dims = graph.inputs[site.past_key].dims or ()
    n_kv_heads = dims[1] if len(dims) == 4 and dims[1] > 0 else sizes.get("n_kv_heads", 0)
    n_heads = values.get("q_num_heads") or values.get("num_heads") or sizes.get("n_heads", 0)
    if not 1 <= n_kv_heads <= n_heads <= 2**16 or n_heads % n_kv_heads:
        raise FormatError(
            f"{describe_node(site.node)}: neither the graph nor a configuration says how many "
            f"query heads its {n_kv_heads} KV heads have; put config.json of the model beside it"
        )
    return replace(site, n_heads=int(n_heads), n_kv_heads=n_kv_heads)


class _Trial:
    """One region in a session of its own."""

    def __init__(
        self,
        graph: OnnxGraph,
        region: Region,
        site: AttentionSite,
        sizes: Mapping[str, int],
        longest: int,
    ) -> None:
        assert site.n_heads is not None and site.n_kv_heads is not None, "they were found"
        self._site, self._longest = site, longest
        self._n_heads, self._n_kv_heads = site.n_heads, site.n_kv_heads
        info = graph.inputs[site.past_key]
        self._kind = info.elem_type
        if self._kind not in (FLOAT, FLOAT16):
            raise refusal(site, f"its cache is of element type {self._kind}")
        dims = info.dims or ()
        self._dim = dims[3] if len(dims) == 4 and dims[3] > 0 else sizes.get("head_dim", 0)
        if not 1 <= self._dim <= 2**12:
            raise refusal(site, "the size of its heads is not known")
        self._rng = np.random.default_rng(0)
        self._region = region
        self._session = self._start(graph)
        (output,) = self._session.get_outputs()
        self._gives_half = numpy_type(output) == np.float16
        self._numbers = sorted(_numbers(graph, region))
        self._has_cap = any(node.op_type == "Tanh" for node in region.nodes) or bool(
            attributes(site.node).get("softcap")
        )

    def find(self) -> _Found:
        """What the region computes. Raises FormatError if it is no causal attention."""
        window = self._find_window()
        fitted = self._fit_scale(window)
        tolerance = _FIT_TOLERANCE[self._kind]
        near = [c for c in self._scales() if abs(c - fitted) <= tolerance * abs(fitted)]
        scale = min(near, key=lambda c: abs(c - fitted), default=fitted)
        caps = [c for c in self._numbers if c > 1] if self._has_cap else [0.0]
        for cap in caps:
            found = _Found(float(scale), float(cap), window, self._gives_half)
            if self._agrees(found):
                return found
        raise refusal(self._site, "it does not give what attention gives")

    def _agrees(self, found: _Found) -> bool:
        cases = [(self._longest - 1, 1), (0, 1), (0, 7), (5, 4)]
        if found.window and found.window + 8 <= self._longest:
            cases.append((found.window + 2, 5))
        # Logits of a standard deviation of 2, larger where a soft cap is to be seen.
        size = max(2.0, found.soft_cap) / (abs(found.scale) * self._dim**0.5)
        for n_past, n_new in cases:
            q, k, v = self._draw(n_past, n_new)
            q = self._round(q * size)
            try:
                rows = self._run(q, k, v, n_past)
            except FormatError:
                if n_past and n_new > 1:
                    continue  # exported for a prompt in one piece, and for single tokens after it
                raise
            error = np.abs(rows - _attend(q, k, v, n_past, found)).max()
            if not error <= _TOLERANCE[self._kind]:
                return False
        return True

    def _find_window(self) -> int:
        """Positions that the last row of the longest context sees, 0 for all.

        Without queries all weights are equal, and with values of 1 before a position and 0 from it
        on the output is 0 if all that is seen lies behind.
        """
        total = self._longest
        first, end = 0, total  # the first that is seen lies in [first, end)
        while end - first > 1:
            step = -(-(end - first) // (self._dim + 1))
            limits = np.minimum(first + step * np.arange(1, self._dim + 1), end)
            v = (np.arange(total)[:, None] < limits).astype(np.float64)
            v = np.broadcast_to(v, (self._n_kv_heads, total, self._dim))
            q = np.zeros((self._n_heads, 1, self._dim))
            k = np.zeros((self._n_kv_heads, total, self._dim))
            seen = self._run(q, k, v, total - 1)[:, 0] > 0
            if not (seen == seen[0]).all():
                raise refusal(self._site, "its heads see different positions")
            n_hidden = int(np.argmax(seen[0])) if seen[0].any() else self._dim
            first, end = first + step * n_hidden, min(end, first + step * (n_hidden + 1))
        return 0 if first == 0 else total - first

    def _fit_scale(self, window: int) -> float:
        """The scale of logits, from the weights that a row has for a few keys."""
        total = min(9, self._dim, window or self._longest)
        q, k, _ = self._draw(total - 1, 1)
        q = self._round(q * (0.1 if self._has_cap else 1.0))
        v = np.zeros((self._n_kv_heads, total, self._dim))
        v[:, np.arange(total), np.arange(total)] = 1.0
        weights = self._run(q, k, v, total - 1)[:, 0, :total]
        if not (weights > 0).all():
            raise refusal(self._site, "some weights of its keys are not positive")
        logits = np.log(weights)
        keys = np.repeat(k, self._n_heads // self._n_kv_heads, axis=0)
        products = np.einsum("hd,htd->ht", q[:, 0], keys)
        logits -= logits.mean(axis=1, keepdims=True)
        products -= products.mean(axis=1, keepdims=True)
        scale = float((logits * products).sum() / (products**2).sum()) if total > 1 else 0.0
        if not scale > 0:
            raise refusal(self._site, "its weights do not grow with the products of its keys")
        return scale

    def _scales(self) -> list[float]:
        """What a scale may be exactly."""
        numbers = [n for n in self._numbers if 0 < n < 2**15]
        plain = [self._dim**-0.5, 1.0, *numbers, *(1 / n for n in numbers)]
        return [*plain, *(n * n for n in plain)]

    def _draw(self, n_past: int, n_new: int) -> tuple[Floats, Floats, Floats]:
        total = n_past + n_new
        shapes = ((self._n_heads, n_new), (self._n_kv_heads, total), (self._n_kv_heads, total))
        q, k, v = (self._rng.standard_normal((*shape, self._dim)) for shape in shapes)
        return self._round(q), self._round(k), self._round(v)

    def _round(self, values: Floats) -> Floats:
        """To what the graph computes with."""
        return values.astype(self._dtype).astype(np.float64)

    @property
    def _dtype(self) -> type[np.float16 | np.float32]:
        return np.float16 if self._kind == FLOAT16 else np.float32

    def _run(self, q: Floats, k: Floats, v: Floats, n_past: int) -> Floats:
        """Rows [heads, n, head_dim] of queries [heads, n, head_dim]; keys and values of all."""
        site, n_new = self._site, q.shape[1]
        values: dict[str, NDArray[Any]] = {
            TOKENS: np.zeros((1, n_new)),
            POSITIONS: np.arange(n_past, n_past + n_new)[None],
            MASK: np.ones((1, n_past + n_new)),
            site.past_key: k[None, :, :n_past],
            site.past_value: v[None, :, :n_past],
        }
        for name, rows, what in (
            (site.q, q, "q"),
            (site.k, k[:, n_past:], "k"),
            (site.v, v[:, n_past:], "v"),
        ):
            values[name] = rows[None] if what in site.head_major else _join_heads(rows)
        values |= {
            name: np.zeros((1, n_new, width)) for name, width in self._region.embedded.items()
        }
        past = np.zeros((1, self._n_kv_heads, n_past, self._dim))
        feed = {}
        for item in self._session.get_inputs():
            value = values.get(item.name, past)
            feed[item.name] = np.ascontiguousarray(value.astype(numpy_type(item)))
        try:
            (out,) = self._session.run(None, feed)
        except Exception as error:
            raise refusal(site, f"does not run on a few rows ({reason_of(error)})") from None
        shape = [1, self._n_heads, n_new, self._dim]
        if "o" not in site.head_major:
            shape = [1, n_new, self._n_heads * self._dim]
        if list(out.shape) != shape:
            raise refusal(site, f"gives {list(out.shape)} instead of {shape}")
        found: Floats = out.astype(np.float64)[0]
        if "o" in site.head_major:
            return found
        split: Floats = found.reshape(n_new, self._n_heads, self._dim).transpose(1, 0, 2)
        return split

    def _start(self, graph: OnnxGraph) -> onnxruntime.InferenceSession:
        """Where onnxruntime has optimised a graph in float16, queries are left in float32."""
        try:
            return self._load(graph, self._kind)
        except FormatError:
            if self._kind == FLOAT:
                raise
        return self._load(graph, FLOAT)

    def _load(self, graph: OnnxGraph, kind_of_queries: int) -> onnxruntime.InferenceSession:
        site, region = self._site, self._region
        kinds = {site.q: kind_of_queries} | dict.fromkeys((site.k, site.v), self._kind)
        kinds |= dict.fromkeys(region.embedded, FLOAT)
        for name in region.inputs:
            info = graph.inputs.get(name)
            kinds[name] = INT64 if info is None else info.elem_type
        tensors = [graph.tensors[name] for name in region.constants]
        model = encode_model(
            "trial",
            region.nodes,
            inputs=[ValueInfo(name, kind) for name, kind in kinds.items()],
            outputs=[site.output],
            initializers=[Tensor(t.name, t.elem_type, t.shape, bytes(t.data)) for t in tensors],
            opsets=graph.opsets,
            ir_version=graph.ir_version,
        )
        try:
            return onnxruntime.InferenceSession(
                model, session_options(1), providers=["CPUExecutionProvider"]
            )
        except Exception as error:
            raise refusal(site, f"onnxruntime refuses it ({reason_of(error)})") from None


def _numbers(graph: OnnxGraph, region: Region) -> set[float]:
    """Positive single numbers that a region reads, among them its scale and its soft cap."""
    found = set()
    names = {name for node in region.nodes for name in node.input if name}
    for name in names:
        tensor = graph.constant(name)
        if tensor is not None and tensor.elem_type in (FLOAT, FLOAT16) and len(tensor.data) <= 4:
            found.add(float(tensor.array().reshape(-1)[0]))
    for node in region.nodes:
        found |= {value for value in attributes(node).values() if isinstance(value, float)}
    return {number for number in found if 0 < number < np.inf}


def _join_heads(rows: Floats) -> Floats:
    """[1, n, heads * head_dim] of [heads, n, head_dim]."""
    return rows.transpose(1, 0, 2).reshape(1, rows.shape[1], -1)


def _attend(q: Floats, k: Floats, v: Floats, n_past: int, found: _Found) -> Floats:
    """Causal attention in float64: rows [heads, n, head_dim] of keys and values [KV heads, ..]."""
    n_new, total = q.shape[1], k.shape[1]
    distance = np.arange(n_past, total)[:, None] - np.arange(total)
    hidden = (distance < 0) | (distance >= (found.window or total))
    n_shared = len(q) // len(k)
    out = np.empty((len(q), n_new, v.shape[2]))
    for head in range(len(q)):
        logits = found.scale * (q[head] @ k[head // n_shared].T)
        if found.soft_cap:
            logits = found.soft_cap * np.tanh(logits / found.soft_cap)
        logits[hidden] = -np.inf
        weights = np.exp(logits - logits.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        out[head] = weights @ v[head // n_shared]
    return out
