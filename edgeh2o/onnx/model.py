"""ONNX models: edgeh2o runs attention and quantised products, onnxruntime what lies between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import _core
from ..errors import FormatError, ResourceError, UsageError
from ..host.memory import return_freed_memory
from ..runners.base import SessionShape
from ..tokenizer.tokenizer_json import JsonTokenizer, TokenizerSettings
from .checks import check_blocks, check_caches, check_embeddings
from .composed import find_composed
from .config import (
    DEFAULT_CONTEXT,
    OnnxConfig,
    attention_args,
    check_finite,
    make_layers,
    read_config,
    read_rotary,
    read_sinks,
    read_taps,
)
from .convolutions import find_convolutions
from .cut import Site, attention_of, cut_decoder
from .folder import OnnxFolder, find_onnx_model
from .graph import OnnxGraph
from .masks import add_windows, check_masks
from .packages import require_runtime
from .plan import LoadedDecoder, check_shapes
from .probes import probe_stages
from .products import pack_products
from .runner import OnnxRunner
from .sessions import SegmentFactory
from .shown import find_outputs
from .sites import find_attention
from .trial import prove_composed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..attention.base import SparseAttentionConfig
    from ..tokenizer import Tokenizer

OnBytes = Callable[[int, int], None]
# Weights of a segment for which memory is worth to be given back first, which takes time.
_TRIM_BYTES = 2**25


class OnnxModelFile:
    """A model folder whose graph was cut and found good; no session of onnxruntime yet.

    Raises FormatError for a file that cannot be run, UsageError if onnxruntime is too old,
    ResourceError for what cannot be read.
    """

    def __init__(self, path: Path) -> None:
        require_runtime()
        self.path = path
        self._folder = find_onnx_model(path)
        self._graph = OnnxGraph(self._folder.model_path)
        try:
            self._cut = cut_decoder(self._graph, _find_sites(self._folder, self._graph))
            check_blocks(self._graph)
            check_embeddings(self._graph)
            self.config = read_config(self._folder, self._graph, self._cut)
            self.tokenizer = _read_tokenizer(self._folder, self.config.vocab_size)
        except FormatError as error:
            raise _in_file(self._folder.model_path, error) from None
        self.n_weight_bytes = self.n_mapped_bytes = self._graph.n_weight_bytes

    def __enter__(self) -> OnnxModelFile:
        return self

    def __exit__(self, *exception: object) -> None:
        pass  # the mapped files close with the last array over them

    @property
    def chat_template(self) -> object:
        """As in the files, unchecked."""
        return self._folder.chat_template

    @property
    def tool_template(self) -> object:
        """As in the files, unchecked."""
        return self._folder.tool_template

    @property
    def fingerprint(self) -> str:
        """As that of the loaded model."""
        return self._graph.digest

    def describe(self) -> dict[str, Any]:
        """What is in the files, for people."""
        graph, config = self._graph, self.config
        operators = Counter(node.op_type for node in graph.nodes)
        attention = self._cut.attention
        n_convolutions = config.n_layers - len(attention)
        return {
            "file": str(self._folder.model_path),
            "bytes": graph.n_file_bytes,
            "weights": {"tensors": len(graph.tensors), "bytes": graph.n_weight_bytes},
            "architecture": config.architecture,
            "layers": config.n_layers,
            **({"short_convolutions": n_convolutions} if n_convolutions else {}),
            "query_heads": config.n_heads,
            "kv_heads": config.n_kv_heads,
            "head_dim": config.head_dim,
            "vocabulary": config.vocab_size,
            "context_length": config.context_length,
            "attention_operator": attention[0].node.op_type,
            "rotary_by_attention": attention[0].rotary is not None,
            "operators": dict(operators.most_common()),
        }

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        """Bytes by purpose that a session of ``shape`` would allocate; nothing is allocated."""
        return _estimate_session_bytes(self.config, attention, shape)

    def check(self) -> None:
        """Tries the model on a few tokens. Raises FormatError for what ``load`` would refuse."""
        try:
            parts = (self._folder, self._graph, self._cut.sites, self.config, self.tokenizer)
            OnnxModel(*parts, None, is_check=True)
        except FormatError as error:
            raise _in_file(self._folder.model_path, error) from None

    def load(
        self,
        *,
        check_tensors: bool = False,
        on_bytes: OnBytes | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> OnnxModel:
        """Makes the sessions. ``on_bytes(done, total)`` counts bytes of weights, by segments.

        ``meanwhile()`` is called before.
        """
        if meanwhile is not None:
            meanwhile()
        if check_tensors:
            check_finite(self._graph)
        try:
            return OnnxModel(
                self._folder, self._graph, self._cut.sites, self.config, self.tokenizer, on_bytes
            )
        except FormatError as error:
            raise _in_file(self._folder.model_path, error) from None


class OnnxModel:
    """The sessions of one model, and the tokenizer of the same folder.

    With ``is_check`` weights are not packed: enough to try the model on a few tokens.
    """

    def __init__(
        self,
        folder: OnnxFolder,
        graph: OnnxGraph,
        sites: Sequence[Site],
        config: OnnxConfig,
        tokenizer: Tokenizer,
        on_bytes: OnBytes | None,
        *,
        is_check: bool = False,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.chat_template = folder.chat_template
        self.tool_template = folder.tool_template
        self.weight_bytes = graph.n_weight_bytes
        self.n_threads = _core.num_threads()
        progress = _Progress(on_bytes, graph.n_weight_bytes)
        products = [] if is_check else pack_products(graph, progress.add)
        cut = cut_decoder(graph, sites, products)
        factory = SegmentFactory(cut, self.n_threads, config, packs=not is_check)
        sites = check_masks(cut, factory.make_masks(), config)
        sites = add_windows(sites, folder.window, config.context_length)
        stages = []
        for stage in cut.stages:
            tensors = [graph.tensors[name] for name in stage.segment.constants]
            n_bytes = sum(len(tensor.data) for tensor in tensors)
            if n_bytes >= _TRIM_BYTES:  # what the stages before have copied makes room
                return_freed_memory()
            stages.append(factory.make(stage))
            for tensor in tensors:  # which onnxruntime has packed
                tensor.release()
            progress.add(n_bytes)
        return_freed_memory()
        progress.end()
        operators = {node.op_type for node in graph.nodes}
        shapes = probe_stages(stages, config, operators)
        layers = [stage.mixer for stage in stages if stage.mixer is not None]
        check_shapes(shapes, layers, config)
        rotary = [read_rotary(graph, site, config) for site in sites]
        sinks = [read_sinks(graph, site, config) for site in sites]
        taps = [read_taps(graph, site) for site in sites]
        self._graph = graph
        self._outputs = find_outputs(graph, sites, config.n_heads * config.head_dim, shapes)
        self.config = replace(
            config,
            model_dim=self._outputs[0].n_outputs if self._outputs else 0,
            layers=make_layers(sites, config.n_heads, config.n_kv_heads),
        )
        self.decoder = LoadedDecoder(
            config=self.config,
            stages=stages,
            shapes=shapes,
            sites=sites,
            taps=taps,
            rotary=rotary,
            sinks=sinks,
            residuals=[output.residual for output in self._outputs],
        )

    @property
    def fingerprint(self) -> str:
        """Tells model files apart: that of nodes and constants."""
        return self._graph.digest

    @property
    def shows_attention(self) -> bool:
        """Whether its heads' errors can be measured: for layers whose output goes where it does in
        other decoders."""
        return bool(self._outputs)

    def output_weights(self, layer: int) -> NDArray[np.float32]:
        """What projects the heads of a layer, [model_dim, n_heads * head_dim]."""
        return self._outputs[layer].weights(self._graph)

    def estimate_session_bytes(
        self, attention: SparseAttentionConfig, shape: SessionShape
    ) -> Mapping[str, int]:
        return _estimate_session_bytes(self.config, attention, shape)

    def start_session(self, attention: SparseAttentionConfig, shape: SessionShape) -> OnnxRunner:
        decoder = self.decoder
        limits = [len(tables[0]) for tables in decoder.rotary if tables]
        sites = attention_of(decoder.sites)
        limits += [site.max_context for site in sites if site.max_context is not None]
        if shape.max_context > min(limits, default=2**31):
            raise UsageError(
                f"a context of {shape.max_context} is longer than the {min(limits)} positions for "
                f"which this graph has rotary tables or masks; use -c {min(limits)} or less"
            )
        policy = attention.make_policy(self.config)
        try:
            return OnnxRunner(decoder, policy, shape)
        except MemoryError:
            raise ResourceError(
                f"the session for {shape.max_context} positions could not be allocated; "
                "use a smaller context (--ctx-size)"
            ) from None


def _find_sites(folder: OnnxFolder, graph: OnnxGraph) -> list[Site]:
    """What mixes the tokens of all layers; attention of several nodes is proved.

    Raises FormatError.
    """
    sites = find_attention(graph, find_composed(graph))
    check_caches(graph, sites)
    proved = prove_composed(graph, sites, folder.sizes, DEFAULT_CONTEXT)
    return [*proved, *find_convolutions(graph)]


def _in_file(path: Path, error: FormatError) -> FormatError:
    """The error with the path before it, unless it names it already."""
    return error if str(error).startswith(str(path)) else FormatError(f"{path}: {error}")


class _Progress:
    """Bytes of weights that are in place; a tensor that two stages read counts once at most."""

    def __init__(self, on_bytes: OnBytes | None, total: int) -> None:
        self._on_bytes, self._total, self._done = on_bytes, total, 0

    def add(self, n_bytes: int) -> None:
        if self._on_bytes is not None:
            self._done = min(self._total, self._done + n_bytes)
            self._on_bytes(self._done, self._total)

    def end(self) -> None:
        self.add(self._total)


def _read_tokenizer(folder: OnnxFolder, vocab_size: int) -> Tokenizer:
    if folder.tokenizer_json is None:
        raise FormatError(
            "there is no tokenizer.json beside the model; fetch it from where the model came from"
        )
    settings = TokenizerSettings(
        vocab_size=vocab_size, bos=folder.bos, eos=folder.eos, more_eos=folder.more_eos
    )
    return JsonTokenizer(folder.tokenizer_json, settings)


def _estimate_session_bytes(
    config: OnnxConfig, attention: SparseAttentionConfig, shape: SessionShape
) -> Mapping[str, int]:
    try:
        parts = _core.ChunkedAttention.estimate_bytes(
            attention.make_policy(config), **attention_args(config, shape)
        )
    except ValueError as error:
        raise UsageError(f"the model cannot be run with these options: {error}") from None
    # Queries, keys, values and output of a layer, and two residual streams, as wide as queries.
    row = 2 * (2 * config.n_heads + config.n_kv_heads) * config.head_dim
    return {**parts, "activations": 4 * row * shape.batch_size}
