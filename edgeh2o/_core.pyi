import collections.abc as abc
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

def available_isas() -> list[str]: ...
def active_isa() -> str: ...
def attention_precisions() -> list[str]:
    """Those of "f32", "bf16", "f16", "int8" and "int16" that the kernels in use have."""

def best_attention_precision() -> str:
    """The one that is fastest with them, as far as is known."""

def use_isa(name: str) -> None: ...
def set_num_threads(n: int) -> None: ...
def num_threads() -> int: ...
def release_threads() -> None:
    """Ends the threads that wait for work, and spin meanwhile; the next call makes new ones."""

def supported_types() -> list[str]: ...
def find_bad_block(data: Buffer, type: str) -> int | None: ...
def widened_types() -> dict[str, tuple[int, int]]:
    """Tensor types that are held otherwise, exactly: a block's weights, and its bytes in memory."""

def written_types() -> list[str]:
    """Tensor types that ``convert_rows`` can write."""

def convert_rows(
    data: Buffer, source: str, target: str, rows: int, cols: int
) -> tuple[bytes, int | None]:
    """Weights of the type ``source`` as ``target``, and the first row that this cannot hold.

    That row has a weight that is NaN, infinite or too large. Raises ValueError for sizes that do
    not fit and for a type that cannot be written.
    """

def count_strings(data: bytes, position: int, count: int) -> tuple[int, int]:
    """How many strings ``read_strings`` would give, and the position behind them."""

def read_strings(data: bytes, position: int, count: int) -> tuple[list[str], int]:
    """Strings of a GGUF file from ``position`` on, and the position behind them.

    ``count`` of them, or those in front of the first that ``data`` does not hold or that is not
    UTF-8.
    """

class DecoderConfig:
    """``ropes`` and ``layers``: fields of ``RopeConfig`` and ``LayerSpec`` (cpp/model/)."""

    def __init__(
        self,
        *,
        model_dim: int,
        vocab_size: int,
        norm_eps: float,
        post_norm_eps: float = 0.0,
        centres_norms: bool = False,
        has_norm_weights: bool = True,
        has_norm_biases: bool = False,
        has_output_norm: bool = True,
        ropes: abc.Sequence[Mapping[str, Any]],
        layers: abc.Sequence[Mapping[str, Any]],
        embedding_scale: float = 1.0,
        norms_embeddings: bool = False,
        has_embedding_norm: bool = False,
        has_token_type: bool = False,
        logit_scale: float = 1.0,
        logit_soft_cap: float = 0.0,
        tied_embeddings: bool = False,
        has_output_bias: bool = False,
        update_rank: int = 0,
        adapter_scales: abc.Sequence[float] = ...,
        adapter_tokens: abc.Sequence[tuple[int, int]] = ...,
        adapter_gain: float = 0.0,
        token_input_rows: int = 0,
        has_streams: bool = False,
        n_streams: int = 0,
        stream_rank: int = 0,
        ngrams: Mapping[str, Any] = ...,
        reads_hidden: bool = False,
        n_guessed: int = 0,
        hidden_join: str = ...,
        hidden_dim: int = 0,
        features_dim: int = 0,
        norms_features: bool = False,
        residual_is_normed: bool = False,
        n_positions: int = 0,
        passes: abc.Sequence[int] = ...,
        norms_passes: bool = False,
        has_two_states: bool = False,
    ) -> None: ...

class Model:
    @property
    def config(self) -> DecoderConfig: ...
    @property
    def isa(self) -> str: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def mapped_bytes(self) -> int:
        """Of ``weight_bytes`` those that ``map_packed`` gave."""

    def __init__(self, config: DecoderConfig, main: Model | None = None) -> None:
        """``main`` is that of a layer that guesses tokens ahead (``reads_hidden``).

        Its embedding and output matrix serve where the layer has none of its own; they must be set
        before ``finish``.
        """
    def set_tensor(
        self,
        name: str,
        data: Buffer,
        type: str,
        rows: int,
        cols: int,
        row_order: Buffer | None = None,
    ) -> None: ...
    def set_ngram_rows(self, descriptor: int, type: str, offset: int, rows: int, cols: int) -> None:
        """The table of the n-grams: ``rows`` of a file, from byte ``offset`` on, which stay there.

        The descriptor may be closed afterwards. ValueError for a table of another shape than the
        configuration has, and for a type whose rows cannot be read one by one.
        """
    def add_update(
        self, name: str, adapter: int, rank: int, a: Buffer, a_type: str, b: Buffer, b_type: str
    ) -> None:
        """The matrix ``name``, which is set, acts as W + s B A from now on (LoRA).

        In sequences whose scale of the ``adapter`` is s. ``a`` is [rank, cols], ``b`` [rows, rank],
        in a float type of GGUF each, any other factor in ``b``. Those of a matrix come by ascending
        adapters. ValueError for a name that takes none, an adapter that the ``adapter_scales`` of
        the configuration do not have, other sizes, and more than ``update_rank`` together.
        """

    def finish(self) -> None:
        """Once every tensor is set. ValueError where one is missing."""

    @property
    def balances_keys(self) -> bool:
        """Whether caches hold keys in other sizes than the projections make them."""

    def dequantize(self, name: str) -> NDArray[np.float32]:
        """A weight tensor by its GGUF name, [rows, cols]. ValueError for one that is not set."""

def packed_layout(model: Model) -> tuple[int, int, int]:
    """What packed matrices depend on besides their weights: a version, then of the kernels in use
    the columns of a panel and a bit per format.
    """

def pack_matrix(
    data: Buffer, type: str, rows: int, cols: int, panel_cols: int, is_signed: bool
) -> bytes:
    """A tensor as kernels of such a layout read it, for tests. ValueError for wrong sizes."""

def matrix_names(model: Model) -> set[str]:
    """Names of the tensors that become packed matrices; all others become vectors."""

def describe_packed(model: Model, name: str) -> tuple[str, int, int, int]:
    """Type, rows, columns and bytes of a matrix as it is held. ValueError for one not set."""

def write_packed(model: Model, name: str, descriptor: int, offset: int) -> None:
    """Writes the bytes of a matrix into an open file. ValueError as above, OSError."""

def map_packed(
    model: Model,
    descriptor: int,
    tensors: abc.Sequence[tuple[str, str, str, int, int, int]],
    is_beyond_memory: bool,
) -> None:
    """Lets matrices lie in an open file, which must not become shorter as long as the model lives.

    Where it ``is_beyond_memory``, its pages may be gone when they are needed again.

    Each is (name, type of its tensor, type as it is held, rows, cols, byte of the file), a multiple
    of 64, as ``describe_packed`` said of another model of the same ``packed_layout``. ValueError,
    before anything is changed, for what is no place of a matrix, OSError.
    """

def hold_packed(model: Model, name: str, descriptor: int, offset: int) -> None:
    """Takes a matrix that was mapped into memory: its bytes begin at ``offset``. OSError."""

class WeightReader:
    """Reads tensors from the open file ``descriptor`` and packs them into ``model``.

    A tensor is (name, type, byte of the file, bytes, rows, cols, row_order or None). ``run`` leaves
    a core to other threads until ``take_all_threads``; it raises EOFError, OSError, MemoryError and
    ValueError for a tensor that ``model`` does not take. ``cancel`` ends it after the one at hand.
    """

    def __init__(
        self,
        model: Model | DeviceModel,
        descriptor: int,
        tensors: abc.Sequence[tuple[str, str, int, int, int, int, Buffer | None]],
    ) -> None: ...
    @property
    def n_bytes_done(self) -> int: ...
    def run(self) -> None: ...
    def take_all_threads(self) -> None: ...
    def cancel(self) -> None: ...

def join_nbits_blocks(
    quants: NDArray[np.uint8],
    scales: NDArray[np.float32],
    zero_points: NDArray[np.uint8] | None,
    bits: int,
    n_inputs: int,
    block_size: int,
) -> NDArray[np.uint8] | None:
    """Rows of a MatMulNBits in blocks of GGUF: Q4_0, Q4_1 (with zero points of 4 bits) or Q8_0.

    ``quants`` and ``zero_points`` are [rows, bytes], ``scales`` [rows, blocks]; ``n_inputs`` and
    ``block_size`` multiples of 32. None if a scale is out of the range of normal halves, with 15
    times as much. ValueError for sizes that do not fit.
    """

class Linear:
    """A weight in the layout of the kernels, for ``Matmul``.

    ``data`` are the bytes of a GGUF tensor of ``type``: ``rows`` outputs of ``cols`` inputs each;
    ``bias`` is [rows] or None. ValueError for an unknown type and sizes that do not fit.
    """

    def __init__(
        self,
        data: Buffer,
        type: str,
        rows: int,
        cols: int,
        bias: NDArray[np.float32] | None = None,
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def cols(self) -> int: ...
    @property
    def n_bytes(self) -> int: ...

class Matmul:
    """Matrix products, with all the memory that those of ``max_rows`` rows need.

    Made for the instruction set and, unless ``threads`` says another, the number of threads then.
    """

    def __init__(self, max_rows: int, max_depth: int, threads: int | None = None) -> None: ...
    @property
    def n_bytes(self) -> int: ...
    def run(
        self,
        x: NDArray[np.float32],
        weights: abc.Sequence[Linear],
        outs: abc.Sequence[NDArray[np.float32]],
    ) -> None:
        """``outs[i]`` [n, rows] = ``x`` [n, cols] times ``weights[i]`` transposed, plus its bias.

        Rows of ``x`` are rounded to 8 bits per 32 values for quantised weights. ValueError for
        shapes that do not fit.
        """

class SparsePolicy:
    """The rule of one session that names which earlier positions a chunk of the prompt reads."""

    @property
    def splits_groups(self) -> bool:
        """Whether query heads have memory sets of their own: what ``head`` names, else KV heads."""

    def memory_set(self, layer: int, head: int) -> NDArray[np.int32]:
        """Sorted positions that the latest chunk read besides itself."""

    def scores(self, layer: int, head: int, n: int | None = None) -> NDArray[np.float32]:
        """Accumulated scores of the first ``n`` positions. ValueError if the rule keeps none."""

    def set_budgets(
        self,
        budgets: abc.Sequence[int | None],
        decode_budgets: abc.Sequence[int | None] = (),
    ) -> None:
        """Other budgets per layer and head, None for the whole past, from the next call on.

        ``decode_budgets`` are those of generated tokens, per layer and KV head; without them they
        read everything. Between two calls, the first of which read all before it. ValueError for
        those that the policy has no room for, and for a rule without budgets.
        """

def make_policy(name: str, **options: Any) -> SparsePolicy:
    """The policy that a file of cpp/sparse/ registers as ``name``.

    ValueError for an unknown name or option and for bad values. Every one is also a function
    ``<name>_policy``.
    """

def dense_policy() -> SparsePolicy: ...
def h2o_policy(
    local: int,
    heavy: int,
    *,
    sinks: int = 0,
    score: str = "sum",
    window: int = 64,
    decay: float = 1.0,
    by_values: bool = False,
    tail: int = 0,
) -> SparsePolicy:
    """The last ``tail`` tokens of the prompt's last call read everything."""

def headwise_policy(
    budgets: abc.Sequence[int | None],
    *,
    by_query_head: bool = False,
    local: int = 256,
    sinks: int = 4,
    decay: float = 0.9,
    page_size: int = 64,
    spread: float = 0.0,
    max_past: int = 8192,
    tail: int = 0,
    decode_from: int = ...,
    decode_until: int = ...,
    decode_pages: int = 1024,
    decode_budgets: abc.Sequence[int | None] = (),
) -> SparsePolicy:
    """``budgets`` per layer and KV head, layer-major; None reads the whole past.

    ``by_query_head``: per layer and query head, each with a memory set of its own.

    Once that is longer than ``max_past`` (0: never), such a head reads about so many positions:
    the pages that the chunk's queries ask for, of 16 positions or more, at most twice as many as
    ``max_past`` has. Landmarks of a longer past stand for longer pages. The last ``tail`` tokens
    of the prompt's last call read everything. Tokens generated after a prompt of ``decode_from``
    (default: never) to ``decode_until`` tokens (default: any number) read, of it, by
    ``decode_budgets`` per layer and KV head (default: ``budgets``, if those are) and ``local``
    besides, the positions that the last queries of the prompt gave most, and landmarks; heads
    without a budget ``decode_pages`` pages of 4 positions, those that may hold the token's largest
    logits, once the prompt has twice as many (0: all).
    """

def ruvllm_policy(
    *,
    window: int = 128,
    block_size: int = 64,
    globals: int = 1,
    strides: bool = True,
    landmarks: bool = True,
    in_decode: bool = True,
) -> SparsePolicy:
    """See ``RuvllmConfig``; chunks of one token are the rule as published."""

def quest_policy(*, page_size: int = 16, tokens: int = 2048, dense_layers: int = 2) -> SparsePolicy:
    """A generated token reads ``tokens`` of the prompt, in pages, from layer ``dense_layers`` on.

    And all that was generated. The prompt is read dense.
    """

def rocketkv_policy(
    *,
    prompt_budget: int = 2048,
    window: int = 32,
    kernel: int = 63,
    page_size: int = 4,
    topk: int = 64,
    topr: int = 128,
) -> SparsePolicy:
    """Generated tokens read ``topk`` pages of the ``prompt_budget`` rows kept of the prompt.

    And all that was generated. The prompt is read dense; its last ``window`` tokens choose the
    rows, with a pooling over ``kernel``; pages are chosen by ``topr`` channels.
    """

def python_policy(
    rule: object, *, column_sums: str = "none", max_memory: int = 0, max_synthetic: int = 0
) -> SparsePolicy:
    """A policy whose hooks are the methods of ``rule``; slow, for trying ideas.

    docs/python-api.md describes them. ``column_sums`` is "none", "part" (weights normalised within
    the chunk and within the memory) or "joint" (of the one softmax over both); ``max_memory``
    bounds the positions of a scored KV head, ``max_synthetic`` the synthetic rows.

    UsageError, here if the rule has no ``select_memory``; in prefill and decode if a method raises
    or returns what cannot be used: it names method, layer and KV head.
    """

class KvCache:
    """Keys and values of every position of a ``ChunkedAttention``."""

    @property
    def n_bytes(self) -> int: ...
    def keys(self, layer: int) -> NDArray[Any]:
        """View [n_kv_heads, max_context, head_dim] of float16 or float32.

        Of q8_0: [n_kv_heads, max_context, head_dim / 32 * 34] of uint8, Q8_0 blocks as in GGUF.
        """

    def values(self, layer: int) -> NDArray[Any]: ...

class _SequenceMethods:
    """What ``ChunkedAttention`` and ``Sequence`` have alike; see ``Runner`` in runners/base.py."""

    @property
    def policy(self) -> SparsePolicy: ...
    @property
    def prefill_end(self) -> int: ...
    @property
    def pairs_computed(self) -> int: ...
    @property
    def pairs_dense(self) -> int: ...
    @property
    def decode_bytes(self) -> int: ...
    @property
    def error_sums(self) -> NDArray[np.float64]: ...
    @property
    def n_dense_reads(self) -> int: ...
    def reset(self) -> None: ...
    def rewind(self, position: int) -> None: ...
    def mark(self) -> bool: ...
    def find_mark(self, position: int) -> int: ...
    @property
    def marks(self) -> list[int]:
        """Positions of the marks, ascending."""

    @property
    def mark_states(self) -> list[bytes]:
        """What is noted at each of ``marks``, for ``load_state``."""

    def save_state(self) -> bytes: ...
    def cached_rows(self) -> list[NDArray[np.uint8]]:
        """Layer by layer, KV head by KV head: the tokens' keys, then their values."""

class ChunkedAttention(_SequenceMethods):
    """Sparse prefill and full decode of attention layers, over a cache of its own.

    q is [n_tokens, n_heads, head_dim], k and v are [n_tokens, n_kv_heads, head_dim], all float32;
    head_dim is a multiple of 8. Rows may lie apart, as those of a fused QKV do. Sizes that do not
    fit raise ValueError. A ``soft_cap`` bounds logits by ``soft_cap * tanh(logit / soft_cap)``.
    ``precision`` is what the products of ``run`` take: "f32", or queries, keys, weights and values
    rounded to "bf16" and summed in float32, or rounded to "f16", 32 products summed in float16 and
    these sums in float32, or rounded to integers ("int8", "int16"). ``decode`` is float32 always.

    q and k are taken to have the rotary embedding applied, unless ``rotary`` gives the cos and sin
    of the tokens, [n_tokens, pairs] each, for the first dimensions of every head: they are then
    rotated, where they lie if they are writable. Pairs are (i, i + pairs), or (2i, 2i + 1) if
    ``is_interleaved``. ``sinks`` are logits [n_heads] that take a part of every softmax and have
    no value. ``out`` is a writable array of the shape of q that takes the output.

    v and the output have heads of ``value_dim``, ``head_dim`` if not said otherwise. Calls are
    shared by ``threads`` of the CPU, by default the number set when it is made. ``checked_rows``
    and ``error_limit`` are described at ``SessionShape``; ``state`` needs ``run`` without them.
    ``recurrent`` [n_layers] gives layers that do not attend the numbers of their recurrent state, 0
    to the others; empty: all attend. Where it is not ``is_causal`` a text is one call of ``run``
    with ``is_last``, whose queries see as many positions behind theirs as before them; the rows of
    all layers then have one place. A ``max_alibi_bias`` takes a slope of the head times the
    distance of query and key from every logit (ALiBi, Press et al. 2021), with slopes of
    ``2**-(max_alibi_bias * i / n)`` for the n heads, i = 1 to n, and ggml's where n is no power of
    two; then the policy is one that reads everything.
    """

    def __init__(
        self,
        policy: SparsePolicy,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        *,
        n_layers: int = 1,
        chunk_size: int,
        batch_size: int,
        max_context: int,
        scale: float | None = None,
        soft_cap: float = 0.0,
        cache_type: str = "f16",
        precision: str = "f32",
        value_dim: int | None = None,
        checked_rows: int = 0,
        error_limit: float = ...,
        threads: int | None = None,
        recurrent: abc.Sequence[int] = (),
        is_causal: bool = True,
        max_alibi_bias: float = 0.0,
    ) -> None: ...
    @staticmethod
    def estimate_bytes(policy: SparsePolicy, *args: int, **sizes: Any) -> dict[str, int]:
        """Bytes by purpose that the constructor would allocate; nothing is allocated."""

    @property
    def cache(self) -> KvCache: ...
    def run(
        self,
        layer: int,
        q: NDArray[np.floating[Any]],
        k: NDArray[np.floating[Any]],
        v: NDArray[np.floating[Any]],
        *,
        window: int = 0,
        is_last: bool,
        stays_open: bool = False,
        rotary: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
        is_interleaved: bool = False,
        sinks: NDArray[np.float32] | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Appends the next tokens of the prompt; returns their output, in the shape of q.

        With a ``window`` the policy is not asked: every query sees so many positions, its own
        included. All calls for one layer have the same window. ``is_last`` ends the prompt;
        with ``stays_open`` another may go on from there.
        """

    def decode(
        self,
        layer: int,
        q: NDArray[np.floating[Any]],
        k: NDArray[np.floating[Any]],
        v: NDArray[np.floating[Any]],
        *,
        window: int = 0,
        rotary: tuple[NDArray[np.float32], NDArray[np.float32]] | None = None,
        is_interleaved: bool = False,
        sinks: NDArray[np.float32] | None = None,
        out: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32]:
        """Appends one token, which reads everything before it; returns [1, n_heads, head_dim]."""

    def short_conv(
        self,
        layer: int,
        bcy: NDArray[np.float32],
        weights: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> None:
        """Reads the next tokens in a layer with a state of ``(n_taps - 1) * dim`` numbers.

        Of the rows [n, 3 * dim] b, c and y side by side: ``out`` [n, dim] is c times the causal
        convolution of u = b * y, which for token t is the sum over j < n_taps of ``weights[j]``
        [n_taps, dim] times u of token t - (n_taps - 1) + j. Changes ``bcy``.
        """

    def state(self) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
        """Softmax state (m, l, o) of the latest run: m and l [n_tokens, n_heads], o like q."""

    def position(self, layer: int) -> int:
        """Tokens of this layer in the cache."""

    @property
    def n_tokens(self) -> int:
        """Tokens that all layers hold, before the call that ``begin_call`` began."""

    def begin_call(self) -> None:
        """The layers are about to read the same tokens; without ``end_call`` it was interrupted."""

    def end_call(self) -> None: ...
    def load_state(self, state: Buffer, marks: abc.Sequence[Buffer] = ()) -> None: ...

class Workspace:
    """The activations and scratch of a model's calls, for any number of its sequences.

    Their calls queue up, and are shared by ``threads`` of the CPU (default: the number then set).
    """

    def __init__(self, model: Model, threads: int | None = None) -> None: ...
    @property
    def threads(self) -> int: ...
    @property
    def written_bytes(self) -> int:
        """What calls have written to since it was allocated, about: the memory that it takes."""
    def forward(
        self, steps: abc.Sequence[tuple[Sequence, NDArray[np.int32], bool | None]]
    ) -> list[NDArray[np.float32] | None]:
        """Appends tokens to several sequences in one pass over the layers.

        A step is a sequence, its tokens, and whether they end its prompt, or None to decode them:
        the first is appended, the others are looked at, as ``BatchRunner.decode_batch`` does.
        Returns what the sequence alone would give: the logits [n, vocab_size] after each decoded
        token, [vocab_size] at the end of a prompt, None inside of one. ValueError, before anything
        is changed, for steps that cannot be made.
        """

class _Prompt(_SequenceMethods):
    """What ``Sequence`` and ``DeviceSequence`` have alike besides."""

    prompt_logits: NDArray[np.float32] | None
    @property
    def position(self) -> int: ...
    @property
    def n_evicted(self) -> int: ...
    @property
    def token_ids(self) -> list[int]: ...
    @property
    def max_context(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def chunk_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_decode_tokens(self) -> int: ...
    @property
    def memory_bytes(self) -> dict[str, int]: ...
    def row_logits(self, first: int, n_rows: int) -> NDArray[np.float32]: ...
    def decode(self, token: int) -> NDArray[np.float32]: ...
    def load_state(
        self,
        state: Buffer,
        token_ids: abc.Sequence[int] | None = None,
        marks: abc.Sequence[Buffer] = (),
    ) -> None:
        """As a runner's, with the ``mark_states`` of what was saved."""

class LentReader:
    """What drafts by attending to the sequences of another model, which stay as they are."""

    def __init__(self, model: Model, threads: int | None = None) -> None:
        """``model`` has a ``main``. ValueError where it does not find the layers that it reads."""
    def guess(
        self, target: Sequence, token: int, hidden: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits [vocab_size] behind ``token``, which ``target`` has not read, and the next row.

        ``hidden`` [1, hidden_dim] is what logits were made of at the token before, or the row that
        the guess of this token gave. ValueError for a sequence of another model.
        """
    @staticmethod
    def estimate_bytes(
        config: DecoderConfig, main: DecoderConfig, max_context: int, threads: int | None = None
    ) -> int:
        """What it allocates for sequences of so many positions; ValueError as ``__init__``."""

class Sequence(_Prompt):
    """One prompt in the decoder: a ``Runner`` (edgeh2o/runners/base.py), which see."""

    def __init__(
        self,
        model: Model,
        policy: SparsePolicy,
        *,
        max_context: int,
        batch_size: int,
        chunk_size: int,
        cache_type: str = "f16",
        precision: str = "f32",
        all_rows: bool = False,
        checked_rows: int = 0,
        error_limit: float = ...,
        threads: int | None = None,
        workspace: Workspace | None = None,
        adapter_scales: abc.Sequence[float] | None = None,
    ) -> None:
        """``row_logits`` and scores of the last layer need ``all_rows``.

        Without a ``workspace`` of the model it makes one of its own, for ``threads``.
        ``adapter_scales`` are what adapters count in it, None: as the configuration has it.
        """
    @property
    def last_call_allocations(self) -> int | None: ...
    @property
    def workspace(self) -> Workspace:
        """What its calls write to; sequences of one workspace go into one ``forward``."""
    def use_small_pages(self) -> None:
        """Before the first token: lets the cache take the memory of what is in it, no more.

        In huge pages, which suit one long prompt, a few tokens take most of it.
        """
    @property
    def mark_bytes(self) -> int:
        """What its marks take besides."""
    @property
    def resident_bytes(self) -> int | None:
        """What of it takes memory, also while it is at work: unwritten rows take none.

        Without its marks. None where the system does not tell.
        """
    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: Callable[[int, int], None] | None = None,
        on_attention: Callable[..., None] | None = None,
        hidden: NDArray[np.float32] | None = None,
    ) -> NDArray[np.float32] | None:
        """``on_attention(layer, residual, q, k, v, attended)`` is called after every attention.

        Not after that of a last layer which attends for the last token only (no ``all_rows``).
        With read-only views, good until it returns, of the residual stream before the layer
        [n, model_dim], q [n, q_dim], k and v [n, kv_dim] with the rotary embedding applied, and
        what attention gave [n, q_dim]. ``hidden`` [n, model_dim] stands beside the tokens, for a
        layer that guesses tokens ahead alone; so in ``decode`` and ``decode_batch``.
        """
    def embed(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        n_rows: int,
        on_layer: Callable[[int, int], None] | None = None,
    ) -> NDArray[np.float32]:
        """As ``prefill``, without logits: what those of the last tokens would be made of.

        [n_rows, model_dim], normed. ValueError for more rows than tokens.
        """
    keeps_hidden: bool
    """Whether calls leave ``hidden``: then a prompt's last layer is computed for all tokens."""
    keeps_last_hidden: bool
    """Of a prompt it is that of the last token alone, for which nothing is computed besides."""
    hidden_layers: list[int]
    """It is the residual stream before these layers, [n, so many * model_dim]; none: as below.

    ValueError for layers that are not of the model, ascending, or have several streams.
    """
    def encode(self, features: NDArray[np.float32]) -> NDArray[np.float32]:
        """Of rows [n, features_dim] of another model what stands beside tokens, [n, model_dim]."""
    @property
    def hidden(self) -> NDArray[np.float32] | None:
        """What the logits of the latest call's tokens are made of [n, model_dim], if it is kept."""
    def decode(
        self, token: int, hidden: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]: ...
    def decode_batch(
        self, tokens: NDArray[np.int32], hidden: NDArray[np.float32] | None = None
    ) -> NDArray[np.float32]: ...
    def accept(self, n: int) -> None: ...
    def allow_eviction(self, is_allowed: bool) -> None: ...
    def read_rest(self, precision: str, *, reads_all: bool) -> None:
        """The rest of the prompt is multiplied in ``precision``.

        And, if it ``reads_all``, is read densely without a guard. ValueError for a precision that
        the instruction set has not got.
        """
    def evict(self, n: int) -> None: ...
    def note_reads(self, is_wanted: bool) -> None:
        """Fills ``reads`` from now on, or no more, which takes time."""
    @property
    def reads(self) -> list[NDArray[np.int32]]:
        """Positions that the latest generated token read, its own included, by KV head.

        Of all layers, one after another; empty where they are not noted.
        """
    def copy_from(self, other: Sequence, position: int) -> None:
        """Takes up the tokens of another sequence of the model, up to one of its ``marks``.

        What comes after is what it would be for the other. ValueError, and no prompt, for a
        position without a mark and for a sequence of other cache types or another policy.
        """
    @staticmethod
    def estimate_bytes(
        config: DecoderConfig, policy: SparsePolicy, **sizes: Any
    ) -> dict[str, int]: ...
    @staticmethod
    def check_eviction(
        config: DecoderConfig,
        policy: SparsePolicy,
        *,
        max_context: int,
        batch_size: int,
        chunk_size: int,
        cache_type: str = "f16",
    ) -> None:
        """ValueError where ``allow_eviction`` of such a sequence would raise it."""

def device_count() -> int:
    """GPUs of the driver. ResourceError, with the reason, where there is none."""

class Device:
    """A GPU, opened: ResourceError, with the reason, if it cannot be."""

    def __init__(self, ordinal: int) -> None: ...
    def properties(self) -> dict[str, Any]: ...
    def load_image(self, image: bytes) -> None:
        """Takes the kernels of a cubin or of PTX; ResourceError if the driver does not."""
    def self_test(self) -> str:
        """Computes what the CPU has computed: what differs, or nothing."""

def check_device_supports(config: DecoderConfig) -> None:
    """ValueError that names the first thing that GPUs have no kernels for."""

class DeviceModel:
    """The weights of a model on a GPU; filled by a ``WeightReader``, then finished."""

    def __init__(self, config: DecoderConfig, device: Device, block_bytes: int = 2**28) -> None:
        """``block_bytes``: most bytes of the GPU's memory that are asked for at a time."""
    @staticmethod
    def estimate_bytes(type: str, rows: int, cols: int) -> int:
        """What a tensor takes on the device."""
    def expect_bytes(self, n_bytes: int) -> None:
        """Says how much is to come, so that it is allocated in few blocks."""
    def finish(self) -> None: ...
    @property
    def weight_bytes(self) -> int: ...

class DeviceSequence(_Prompt):
    """One prompt on a GPU: a ``Runner`` (edgeh2o/runners/base.py), which see."""

    def __init__(
        self,
        model: DeviceModel,
        policy: SparsePolicy,
        *,
        max_context: int,
        batch_size: int,
        chunk_size: int,
        cache_type: str = "f16",
        all_rows: bool = False,
    ) -> None: ...
    def prefill(
        self,
        tokens: NDArray[np.int32],
        *,
        is_last: bool,
        stays_open: bool = False,
        on_layer: Callable[[int, int], None] | None = None,
        on_attention: None = None,
    ) -> NDArray[np.float32] | None: ...
    @staticmethod
    def estimate_bytes(
        config: DecoderConfig, policy: SparsePolicy, **sizes: Any
    ) -> dict[str, int]: ...
