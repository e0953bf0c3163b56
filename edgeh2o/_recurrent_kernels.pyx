# cython: boundscheck=False, wraparound=False, embedsignature=True
"""Kernels of recurrent layers, of their models, and of the lightning indexer; see ``edgeh2o._kernels``."""

import numpy as np

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t

from edgeh2o._kernel_table cimport (
    CacheType,
    DeltaSlice,
    KernelTable,
    ScanSlice,
    SsdSlice,
    Wkv6Slice,
    WkvSlice,
    delta_scratch_size,
    kv_row_bytes,
    parse_cache_type,
    table_of,
)


def gate(str isa, const float[::1] gate, const float[::1] up):
    """up / (1 + exp(-gate)); all [n] float32."""
    if gate.shape[0] != up.shape[0]:
        raise ValueError(f"gate has {gate.shape[0]} elements, up has {up.shape[0]}")
    cdef float[::1] out = np.array(gate)
    table_of(isa).gate_f32(&out[0], &out[0], &up[0], <size_t>gate.shape[0])
    return np.asarray(out)


def layer_norm(str isa, const float[::1] x, const float[::1] weight, const float[::1] bias, float eps):
    """LayerNorm of x, all [n] float32; bias may be None."""
    if weight.shape[0] != x.shape[0] or (bias is not None and bias.shape[0] != x.shape[0]):
        raise ValueError(f"x has {x.shape[0]} elements, its weights have {weight.shape[0]}")
    cdef float[::1] out = np.empty(x.shape[0], np.float32)
    cdef const float* shift = NULL
    if bias is not None:
        shift = &bias[0]
    table_of(isa).layer_norm_f32(&out[0], &x[0], &weight[0], shift, <size_t>x.shape[0], eps)
    return np.asarray(out)


def gelu(str isa, const float[::1] x):
    """The tanh form of GELU; [n] float32."""
    cdef float[::1] out = np.array(x)
    table_of(isa).gelu_f32(&out[0], &out[0], NULL, <size_t>x.shape[0])
    return np.asarray(out)


def xielu(str isa, const float[::1] x, float p, float n, float beta, float eps):
    """p x^2 + beta x where x > 0, else n (exp(min(x, eps)) - 1 - x) + beta x; [n] float32."""
    cdef float[::1] out = np.array(x)
    table_of(isa).xielu_f32(&out[0], &out[0], p, n, beta, eps, <size_t>x.shape[0])
    return np.asarray(out)


def cut_off(str isa, const float[::1] x, float n_stds):
    """max(x - mean - n_stds * std, 0), of a sample's standard deviation; [n] float32."""
    cdef float[::1] out = np.array(x)
    table_of(isa).cut_off_f32(&out[0], n_stds, <size_t>x.shape[0])
    return np.asarray(out)


def match_size(str isa, const float[::1] x, const float[::1] like):
    """x with the root mean square of ``like``; all [n] float32."""
    if x.shape[0] != like.shape[0]:
        raise ValueError(f"x has {x.shape[0]} elements, the other {like.shape[0]}")
    cdef float[::1] out = np.array(x)
    table_of(isa).match_size_f32(&out[0], &like[0], <size_t>x.shape[0])
    return np.asarray(out)


def predict_streams(str isa, const float[:, ::1] streams, const float[:, ::1] weights):
    """streams + weights @ streams; [4, n], [4, 4] float32."""
    if streams.shape[0] != 4 or weights.shape[0] != 4 or weights.shape[1] != 4:
        raise ValueError("there are 4 streams, and 4 weights for each")
    cdef float[:, ::1] out = np.array(streams)
    cdef size_t n = streams.shape[1]
    table_of(isa).predict_streams_f32(&out[0, 0], n, &weights[0, 0], n)
    return np.asarray(out)


def correct_streams(str isa, const float[:, ::1] streams, const float[::1] computed, const float[::1] weights):
    """streams + weights[:, None] * (computed - streams[0]); [4, n], [n], [4] float32."""
    if streams.shape[0] != 4 or weights.shape[0] != 4 or computed.shape[0] != streams.shape[1]:
        raise ValueError("there are 4 streams, a weight for each, and as many numbers as one has")
    cdef float[:, ::1] out = np.array(streams)
    cdef size_t n = streams.shape[1]
    table_of(isa).correct_streams_f32(&out[0, 0], n, &computed[0], &weights[0], n)
    return np.asarray(out)


def reglu(str isa, const float[::1] gate, const float[::1] up):
    """max(gate, 0) * up; all [n] float32."""
    if gate.shape[0] != up.shape[0]:
        raise ValueError(f"gate has {gate.shape[0]} elements, up has {up.shape[0]}")
    cdef float[::1] out = np.array(gate)
    table_of(isa).reglu_f32(&out[0], &out[0], &up[0], <size_t>gate.shape[0])
    return np.asarray(out)


cdef object _made(given, shape):
    """`given`, an array of that shape, or a new one. Raises ValueError for another shape."""
    if given is None:
        return np.empty(shape, np.float32)
    if given.shape != tuple(shape):
        raise ValueError(f"an array that is written to is {given.shape} and must be {tuple(shape)}")
    return given


cdef object _decays(given, size_t n_rates, size_t n, size_t key_dim):
    """[n, 1] or [n, key_dim] of `given`. Raises ValueError for another shape."""
    if given.shape not in ((n,), (n, key_dim)) or n_rates != n or key_dim > 512:
        raise ValueError("rates must have a number per token, and decays one or key_dim, at most 512")
    return given.reshape(n, -1)


def delta_net(str isa, const float[:, ::1] q, const float[:, ::1] k, const float[:, ::1] v,
              decays, const float[::1] rates, const float[:, ::1] state,
              out=None, after=None):
    """Outputs [n, 32] of n tokens, and the state [key_dim, 32] after them; all float32.

    q and k are [n, key_dim], v is [n, 32]; rates are [n], and decays too, or [n, key_dim]. Given arrays
    `out` and `after` are written to; an `after` holds the state before already, and `state` gives its
    shape alone.
    """
    cdef size_t n = q.shape[0], key_dim = q.shape[1]
    if k.shape[0] != q.shape[0] or k.shape[1] != q.shape[1] or v.shape[0] != q.shape[0]:
        raise ValueError("q, k and v differ in shape")
    if v.shape[1] != 32 or state.shape[0] != q.shape[1] or state.shape[1] != 32 or key_dim % 2:
        raise ValueError("v must be [n, 32] and the state [key_dim, 32], key_dim an even number")
    cdef const float[:, ::1] decayed = _decays(decays, rates.shape[0], n, key_dim)
    cdef float[:, ::1] rows = _made(out, (n, 32))
    cdef float[:, ::1] states = np.array(state) if after is None else _made(after, (key_dim, 32))
    cdef DeltaSlice piece
    piece.n_tokens, piece.key_dim, piece.qk_stride = n, key_dim, key_dim
    piece.q, piece.k, piece.v = &q[0, 0], &k[0, 0], &v[0, 0]
    piece.v_stride = piece.out_stride = 32
    piece.decays, piece.decay_stride = &decayed[0, 0], decayed.shape[1]
    piece.decays_by_row = decays.ndim == 2
    piece.rates, piece.rate_stride = &rates[0], 1
    piece.state, piece.out = &states[0, 0], &rows[0, 0]
    table_of(isa).delta_net_f32(piece)
    return np.asarray(rows), np.asarray(states)


def delta_net_chunks(str isa, const float[:, ::1] q, const float[:, ::1] k,
                     const float[:, ::1] v, decays, const float[::1] rates,
                     const float[:, :, ::1] state, out=None, after=None):
    """As `delta_net` in chunks of tokens, for m slices of 32 columns of one head.

    v and the outputs are [n, 32 m], the state is [m, key_dim, 32].
    """
    cdef size_t n = q.shape[0], key_dim = q.shape[1], m = state.shape[0]
    if k.shape[0] != q.shape[0] or k.shape[1] != q.shape[1] or v.shape[0] != q.shape[0]:
        raise ValueError("q, k and v differ in shape")
    if <size_t>state.shape[1] != key_dim or state.shape[2] != 32 or key_dim % 32 or key_dim == 0:
        raise ValueError("the state must be [m, key_dim, 32], key_dim a multiple of 32")
    if <size_t>v.shape[1] != 32 * m:
        raise ValueError("v must be [n, 32 m]")
    cdef const float[:, ::1] decayed = _decays(decays, rates.shape[0], n, key_dim)
    cdef float[:, ::1] rows = _made(out, (n, 32 * m))
    cdef float[:, :, ::1] states = np.array(state) if after is None else _made(after, (m, key_dim, 32))
    cdef float[::1] scratch = np.empty(delta_scratch_size(key_dim, decays.ndim == 2), np.float32)
    cdef DeltaSlice piece
    piece.n_tokens, piece.key_dim, piece.qk_stride = n, key_dim, key_dim
    piece.q, piece.k, piece.v = &q[0, 0], &k[0, 0], &v[0, 0]
    piece.v_stride = piece.out_stride = 32 * m
    piece.decays, piece.decay_stride = &decayed[0, 0], decayed.shape[1]
    piece.decays_by_row = decays.ndim == 2
    piece.rates, piece.rate_stride = &rates[0], 1
    piece.state, piece.out = &states[0, 0, 0], &rows[0, 0]
    table_of(isa).delta_net_chunks_f32(piece, m, &scratch[0])
    return np.asarray(rows), np.asarray(states)


def ssd(str isa, const float[:, ::1] rows, const float[::1] decays, const float[::1] rates,
        float skip, const float[:, ::1] state):
    """Outputs [n, 16] of n tokens, and the state [state_dim, 16] after them; all float32.

    rows is [n, 16 + 2 * state_dim]: x, what writes to the state and what reads it; decays and rates
    are [n].
    """
    cdef size_t n = rows.shape[0], state_dim = state.shape[0]
    if state.shape[1] != 16 or state_dim % 16 or state_dim == 0:
        raise ValueError("the state must be [state_dim, 16], state_dim a multiple of 16")
    if <size_t>rows.shape[1] != 16 + 2 * state_dim:
        raise ValueError("rows must be [n, 16 + 2 * state_dim]")
    if decays.shape[0] != rows.shape[0] or rates.shape[0] != rows.shape[0]:
        raise ValueError("decays and rates must have a number per token")
    cdef float[:, ::1] out = np.empty((n, 16), np.float32)
    cdef float[:, ::1] after = np.array(state)
    cdef SsdSlice piece
    piece.n_tokens, piece.state_dim, piece.stride = n, state_dim, rows.shape[1]
    piece.x = &rows[0, 0]
    piece.b = piece.x + 16
    piece.c = piece.b + state_dim
    piece.decays, piece.rates, piece.gate_stride = &decays[0], &rates[0], 1
    piece.skip, piece.state = skip, &after[0, 0]
    piece.out, piece.out_stride = &out[0, 0], 16
    table_of(isa).ssd_f32(piece)
    return np.asarray(out), np.asarray(after)


def selective_scan(str isa, const float[:, ::1] x, const float[:, ::1] steps, const float[:, ::1] bc,
                   const float[:, ::1] a, const float[::1] skips, const float[:, ::1] state):
    """Outputs [n, 16] of n tokens, and the state [state_dim, 16] after them; all float32.

    x and steps are [n, 16], bc is [n, 2 * state_dim]: what writes to the state and what reads it; a is
    [state_dim, 16], skips [16] or None.
    """
    cdef size_t n = x.shape[0], state_dim = state.shape[0]
    if state.shape[1] != 16 or state_dim % 16 or state_dim == 0:
        raise ValueError("the state must be [state_dim, 16], state_dim a multiple of 16")
    if a.shape[0] != state.shape[0] or a.shape[1] != 16 or (skips is not None and skips.shape[0] != 16):
        raise ValueError("a must be as the state is, and skips [16]")
    if x.shape[1] != 16 or steps.shape[1] != 16 or steps.shape[0] != x.shape[0]:
        raise ValueError("x and steps must be [n, 16]")
    if bc.shape[0] != x.shape[0] or <size_t>bc.shape[1] != 2 * state_dim:
        raise ValueError("bc must be [n, 2 * state_dim]")
    cdef float[:, ::1] out = np.empty((n, 16), np.float32)
    cdef float[:, ::1] after = np.array(state)
    cdef const float* direct = NULL
    if skips is not None:
        direct = &skips[0]
    cdef ScanSlice piece
    piece.n_tokens, piece.state_dim = n, state_dim
    piece.x, piece.steps, piece.b = &x[0, 0], &steps[0, 0], &bc[0, 0]
    piece.c = piece.b + state_dim
    piece.x_stride, piece.step_stride, piece.bc_stride = 16, 16, 2 * state_dim
    piece.a, piece.skips = &a[0, 0], direct
    piece.state, piece.out, piece.out_stride = &after[0, 0], &out[0, 0], 16
    table_of(isa).selective_scan_f32(piece)
    return np.asarray(out), np.asarray(after)


def wkv(str isa, const float[:, ::1] rows, const float[:, ::1] state):
    """Outputs [n, 16] of n tokens, and the state [key_dim, 16] after them; all float32.

    rows are [n, 5 * key_dim + 16]: decays, keys, directions, removals and queries, then values.
    """
    cdef size_t n = rows.shape[0], dim = state.shape[0]
    if state.shape[1] != 16 or dim % 16 or dim == 0:
        raise ValueError("the state must be [key_dim, 16], key_dim a multiple of 16")
    if n == 0 or <size_t>rows.shape[1] != 5 * dim + 16:
        raise ValueError("rows must be [n, 5 * key_dim + 16]")
    cdef float[:, ::1] out = np.empty((n, 16), np.float32)
    cdef float[:, ::1] after = np.array(state)
    cdef const float* data = &rows[0, 0]
    cdef WkvSlice piece
    piece.n_tokens, piece.key_dim, piece.stride, piece.out_stride = n, dim, 5 * dim + 16, 16
    piece.decays, piece.keys, piece.directions = data, data + dim, data + 2 * dim
    piece.removals, piece.queries, piece.values = data + 3 * dim, data + 4 * dim, data + 5 * dim
    piece.state, piece.out = &after[0, 0], &out[0, 0]
    table_of(isa).wkv_f32(piece)
    return np.asarray(out), np.asarray(after)


def wkv6(str isa, const float[:, ::1] rows, const float[:, ::1] state):
    """Outputs [n, 16] of n tokens, and the state [key_dim, 16] after them; all float32.

    rows are [n, 3 * key_dim + 17]: decays, keys and queries, then values, and how much of these goes
    to the output directly.
    """
    cdef size_t n = rows.shape[0], dim = state.shape[0]
    if state.shape[1] != 16 or dim % 16 or dim == 0:
        raise ValueError("the state must be [key_dim, 16], key_dim a multiple of 16")
    if n == 0 or <size_t>rows.shape[1] != 3 * dim + 17:
        raise ValueError("rows must be [n, 3 * key_dim + 17]")
    cdef float[:, ::1] out = np.empty((n, 16), np.float32)
    cdef float[:, ::1] after = np.array(state)
    cdef const float* data = &rows[0, 0]
    cdef Wkv6Slice piece
    piece.n_tokens, piece.key_dim, piece.out_stride = n, dim, 16
    piece.stride, piece.own_stride = 3 * dim + 17, 3 * dim + 17
    piece.decays, piece.keys, piece.queries = data, data + dim, data + 2 * dim
    piece.values, piece.own = data + 3 * dim, data + 3 * dim + 16
    piece.state, piece.out = &after[0, 0], &out[0, 0]
    table_of(isa).wkv6_f32(piece)
    return np.asarray(out), np.asarray(after)


def key_decays(str isa, const float[::1] x, const float[::1] biases):
    """exp(-exp(x + biases)), float32 [n]."""
    if biases.shape[0] != x.shape[0] or x.shape[0] == 0:
        raise ValueError("biases must be as long as x, which is not empty")
    cdef float[::1] out = np.array(x)
    table_of(isa).key_decays_f32(&out[0], &biases[0], out.shape[0])
    return np.asarray(out)


def row_decays(str isa, const float[::1] x, const float[::1] biases, float a, float log_floor):
    """exp(log_floor * sigmoid(a * (x + biases))), or exp(a * softplus(x + biases)) of a floor of 0; [n] float32."""
    if x.shape[0] != biases.shape[0]:
        raise ValueError(f"x has {x.shape[0]} elements, biases has {biases.shape[0]}")
    cdef float[::1] out = np.array(x)
    table_of(isa).row_decays_f32(&out[0], &biases[0], a, log_floor, <size_t>x.shape[0])
    return np.asarray(out)


def multiply(str isa, const float[::1] x, const float[::1] y):
    """x * y; all [n] float32."""
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"x has {x.shape[0]} elements, y has {y.shape[0]}")
    cdef float[::1] out = np.array(x)
    table_of(isa).multiply_f32(&out[0], &out[0], &y[0], <size_t>x.shape[0])
    return np.asarray(out)


def convolve(str isa, const float[:, ::1] taps, const float[:, ::1] weights):
    """Sums over the rows of taps * weights, [n]; both [n_taps, n] float32, at most 16 taps."""
    cdef const float* rows[16]
    if not 0 < taps.shape[0] <= 16:
        raise ValueError(f"there are {taps.shape[0]} taps, not 1 to 16")
    if taps.shape[0] != weights.shape[0] or taps.shape[1] != weights.shape[1]:
        raise ValueError("taps and weights differ in shape")
    for i in range(taps.shape[0]):
        rows[i] = &taps[i, 0]
    cdef size_t n = taps.shape[1]
    cdef float[::1] out = np.empty(n, np.float32)
    table_of(isa).convolve_f32(&out[0], rows, &weights[0, 0], n, <size_t>taps.shape[0], n)
    return np.asarray(out)


def index_scores(str isa, const float[:, ::1] q, const float[::1] weights, str type_name, const uint8_t[:, ::1] keys):
    """[n] sums over the heads of q [n_heads][key_dim] of weights * max(0, q . key), n cached rows as keys."""
    cdef CacheType kind = parse_cache_type(type_name.encode())
    cdef size_t n_keys = keys.shape[0], dim = q.shape[1], bytes_of_key = keys.shape[1]
    if weights.shape[0] != q.shape[0] or kv_row_bytes(kind, dim) != bytes_of_key:
        raise ValueError(f"q is {q.shape}, weights {weights.shape}, keys {keys.shape} of {type_name}")
    cdef const KernelTable* table = table_of(isa)
    cdef size_t block = table.attention[0].key_block
    cdef float[::1] panels = np.empty(-(-n_keys // block) * block * dim, np.float32)
    cdef float[::1] out = np.empty(n_keys, np.float32)
    table.attention[0].pack_keys(kind, &panels[0], &keys[0, 0], NULL, n_keys, dim)
    table.index_scores_f32(&out[0], &q[0, 0], &weights[0], <size_t>q.shape[0], &panels[0], n_keys, dim)
    return np.asarray(out)
