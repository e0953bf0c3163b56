# cython: boundscheck=False, wraparound=False, embedsignature=True
"""Every kernel of every instruction set as a function of arrays, for tests and benchmarks.

Private. Each function takes the name of an instruction set first ("scalar", "avx2", ...; see
``edgeh2o._core.available_isas``) and returns new arrays; ValueError for an unknown name or sizes that
do not fit.
"""

import numpy as np

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint64_t, uintptr_t
from libcpp cimport bool as cbool
from libcpp.string cimport string
from libcpp.vector cimport vector

from edgeh2o._kernel_table cimport (
    CacheType,
    KernelTable,
    PackedFormat,
    kv_row_bytes,
    parse_cache_type,
    table_of,
)


cdef extern from "quant/widened_types.h" namespace "edgeh2o" nogil:
    cdef cppclass FormatInfo:
        PackedFormat format
        cbool is_quantised
    const FormatInfo& find_held_format(const string&) except +
    cdef cppclass PackedMatrix:
        PackedMatrix() except +
        size_t n_bytes()
        void dequantize_row(float*, size_t)
    PackedMatrix pack_tensor(const string&, const uint8_t*, size_t, size_t, size_t, size_t, cbool) except +

cdef extern from "ops/matmul.h" namespace "edgeh2o" nogil:
    cdef cppclass Activations8:
        @staticmethod
        size_t bytes(const KernelTable&, size_t, size_t)
    cdef cppclass ConstRows "edgeh2o::MatView<const float>":
        const float* data
        size_t rows, cols, stride
    cdef cppclass MatmulInput:
        Activations8 packed
        ConstRows rows
    cdef cppclass MatmulOutput:
        const PackedMatrix* weight
        const float* bias
        float* out
        size_t out_stride
        cbool accumulate
    cdef cppclass ConstOutputs "edgeh2o::Span<const edgeh2o::MatmulOutput>":
        const MatmulOutput* data
        size_t size
    size_t matmul_scratch_bytes(const KernelTable&)
    cdef cppclass MatmulContext:
        uint8_t* scratch
    cdef cppclass PackedOut:
        uint8_t* packed
        size_t scale_block
    Activations8 quantize_rows(const KernelTable&, ConstRows, const PackedOut&) except +
    void c_matmul "edgeh2o::matmul"(const KernelTable&, const MatmulInput&, ConstOutputs, const MatmulContext&) except +

cdef extern from "ops/read_bandwidth.h" namespace "edgeh2o" nogil:
    vector[double] measure_reading(const KernelTable&, size_t, int) except +

cdef extern from *:
    """
    #include <chrono>
    static double seconds_now() {
      return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }
    """
    double seconds_now() nogil

cdef extern from "base/parallel.h" namespace "edgeh2o" nogil:
    int num_threads()
    void c_set_num_threads "edgeh2o::set_num_threads"(int) except +


def set_num_threads(int n_threads):
    """Threads of the matrix products here; ``edgeh2o._core`` has a number of its own."""
    c_set_num_threads(n_threads)


def layout(str isa):
    """(columns of a weight panel, rows of an activation tile) of an instruction set."""
    cdef const KernelTable* table = table_of(isa)
    return table.layout.panel_cols, table.layout.tile_rows


def peak(str isa, str kind, size_t n_rounds):
    """Chains of independent products in registers, on one thread; kind: "f32", "bf16", "f16", "int8", "int16", or weights "q4", "q8".

    Returns the number of operations. Raises ValueError for a type that the instruction set has no products of."""
    cdef const KernelTable* table = table_of(isa)
    cdef float[16] out
    cdef uint64_t n_operations = 0
    kinds = ("f32", "bf16", "f16", "int8", "int16", "q4", "q8")
    if kind not in kinds: raise ValueError(f"kind is {kind!r}, not one of {', '.join(kinds)}")
    cdef int which = kinds.index(kind)
    if which < 5 and table.attention[which].peak == NULL:
        raise ValueError(f"{isa} has no products of {kind}")
    out[:] = [0.0] * 16
    with nogil:
        if which < 5:
            n_operations = table.attention[which].peak(&out[0], n_rounds)
        elif which == 5:
            n_operations = table.peak_q4(&out[0], n_rounds)
        else:
            n_operations = table.peak_q8(&out[0], n_rounds)
    return n_operations


def measure_read(str isa, size_t n_bytes, int n_rounds):
    """Seconds [n_rounds] that the threads take to read n_bytes of memory, rounded up to whole MiB."""
    cdef const KernelTable* table = table_of(isa)
    cdef vector[double] seconds
    with nogil:
        seconds = measure_reading(table[0], n_bytes, n_rounds)
    return np.array(seconds)


def rms_norm(str isa, const float[::1] x, const float[::1] weight, float eps):
    """x / sqrt(mean(x^2) + eps) * weight; all [n] float32."""
    if weight.shape[0] != x.shape[0]:
        raise ValueError(f"weight has {weight.shape[0]} elements, x has {x.shape[0]}")
    cdef float[::1] out = np.empty(x.shape[0], np.float32)
    table_of(isa).rms_norm_f32(&out[0], &x[0], &weight[0], <size_t>x.shape[0], eps)
    return np.asarray(out)


def rope(str isa, const float[::1] x, const float[::1] cos, const float[::1] sin):
    """Rotates the pairs (x[i], x[i + n]) by the angles of cos and sin, both [n]; x is [2 n]."""
    if cos.shape[0] != sin.shape[0] or x.shape[0] != 2 * cos.shape[0]:
        raise ValueError("x must have twice as many elements as cos and sin")
    cdef float[::1] out = np.array(x)
    table_of(isa).rope_f32(&out[0], &cos[0], &sin[0], <size_t>cos.shape[0])
    return np.asarray(out)


cdef gated(void (*kernel)(float*, const float*, const float*, size_t) noexcept, const float[::1] gate,
           const float[::1] up):
    if gate.shape[0] != up.shape[0]:
        raise ValueError(f"gate has {gate.shape[0]} elements, up has {up.shape[0]}")
    cdef float[::1] out = np.empty(gate.shape[0], np.float32)
    kernel(&out[0], &gate[0], &up[0], <size_t>gate.shape[0])
    return np.asarray(out)


def swiglu(str isa, const float[::1] gate, const float[::1] up):
    """silu(gate) * up; all [n] float32."""
    return gated(table_of(isa).swiglu_f32, gate, up)


def geglu(str isa, const float[::1] gate, const float[::1] up):
    """gelu(gate) * up with the tanh form of GELU; all [n] float32."""
    return gated(table_of(isa).geglu_f32, gate, up)


def swiglu_clamped(str isa, const float[::1] gate, const float[::1] up):
    """g sigmoid(1.702 g) * (u + 1), g = min(gate, 7), u = up in [-7, 7]; all [n] float32."""
    return gated(table_of(isa).swiglu_clamped_f32, gate, up)


def soft_cap(str isa, const float[::1] x, float cap):
    """cap * tanh(x / cap); [n] float32."""
    cdef float[::1] out = np.array(x)
    table_of(isa).soft_cap_f32(&out[0], cap, <size_t>out.shape[0])
    return np.asarray(out)


def add(str isa, const float[::1] x, const float[::1] y):
    """x + y; all [n] float32."""
    if x.shape[0] != y.shape[0]:
        raise ValueError(f"x has {x.shape[0]} elements, y has {y.shape[0]}")
    cdef float[::1] out = np.array(x)
    table_of(isa).add_f32(&out[0], &y[0], <size_t>x.shape[0])
    return np.asarray(out)


def scale(str isa, const float[::1] x, float factor):
    """x * factor; [n] float32."""
    cdef float[::1] out = np.empty(x.shape[0], np.float32)
    table_of(isa).scale_f32(&out[0], &x[0], factor, <size_t>x.shape[0])
    return np.asarray(out)


def to_f16(str isa, const float[::1] x):
    """float32 to float16, round to nearest even; [n]."""
    return store_kv_row(isa, "f16", x).view(np.float16)


def from_f16(str isa, x):
    """float16 to float32; [n]."""
    cdef const uint16_t[::1] bits = np.ascontiguousarray(x).view(np.uint16)
    cdef float[::1] out = np.empty(bits.shape[0], np.float32)
    table_of(isa).load_f32_f16(&out[0], &bits[0], <size_t>bits.shape[0])
    return np.asarray(out)


def store_kv_row(str isa, str cache_type, const float[::1] x):
    """The bytes of one row x [head_dim] of a key-value cache; head_dim fits the type."""
    cdef CacheType kind = parse_cache_type(cache_type.encode())
    cdef size_t head_dim = <size_t>x.shape[0]
    cdef uint8_t[::1] row = np.empty(kv_row_bytes(kind, head_dim), np.uint8)
    table_of(isa).store_kv_row_f32(kind, &row[0], &x[0], head_dim)
    return np.asarray(row)


# The type of cached rows by that of NumPy.
CACHE_TYPES = {"float16": b"f16", "float32": b"f32", "uint8": b"q8_0"}


cdef CacheType type_of_rows(rows, const uint8_t[:, ::1] data, size_t head_dim) except *:
    """That of rows [n][head_dim] whose bytes are `data`."""
    cdef CacheType kind = parse_cache_type(CACHE_TYPES[rows.dtype.name])
    if <size_t>data.shape[1] != kv_row_bytes(kind, head_dim):
        raise ValueError(f"rows are {rows.shape} of {rows.dtype}, x has {head_dim} elements")
    return kind


def add_kv_rows(str isa, const float[::1] x, rows, const int32_t[::1] positions=None):
    """x [head_dim] plus the rows at `positions`; None: all rows.

    rows: [n][head_dim] of float16 or float32, or [n][bytes] of uint8: of type q8_0.
    """
    cdef const uint8_t[:, ::1] data = np.ascontiguousarray(rows).view(np.uint8)
    cdef CacheType kind = type_of_rows(rows, data, <size_t>x.shape[0])
    cdef size_t n_rows = <size_t>data.shape[0]
    cdef const int32_t* indices = NULL
    if positions is not None:
        n_rows = <size_t>positions.shape[0]
        if n_rows and not 0 <= np.min(positions) <= np.max(positions) < data.shape[0]:
            raise ValueError(f"a position is not in [0, {data.shape[0]})")
        indices = &positions[0] if n_rows else NULL
    cdef float[::1] out = np.array(x)
    table_of(isa).add_kv_rows_f32(kind, &out[0], &data[0, 0], indices, n_rows, <size_t>x.shape[0])
    return np.asarray(out)


def add_kv_squares(str isa, const float[::1] x, rows):
    """x [head_dim] plus the squares of the rows, as those of `add_kv_rows`."""
    cdef const uint8_t[:, ::1] data = np.ascontiguousarray(rows).view(np.uint8)
    cdef CacheType kind = type_of_rows(rows, data, <size_t>x.shape[0])
    cdef float[::1] out = np.array(x)
    table_of(isa).add_kv_squares_f32(kind, &out[0], &data[0, 0], <size_t>data.shape[0], <size_t>x.shape[0])
    return np.asarray(out)


def score_blocks(str isa, const float[:, ::1] q, const uint8_t[:, :, ::1] blocks, const int32_t[::1] channels):
    """[n_rows][32 n_blocks] products of q [n_rows][width] with blocks [n_blocks][width][34] of q8_0, over channels."""
    cdef size_t width = <size_t>q.shape[1], n_blocks = <size_t>blocks.shape[0]
    if q.shape[1] != blocks.shape[1] or blocks.shape[2] != 34 or not 0 <= np.min(channels) <= np.max(channels) < width:
        raise ValueError(f"q is {q.shape}, blocks are {blocks.shape}, channels {np.asarray(channels)}")
    cdef float[:, ::1] out = np.empty((q.shape[0], 32 * n_blocks), np.float32)
    table_of(isa).score_blocks_f32(&out[0, 0], 32 * n_blocks, &q[0, 0], width, <size_t>q.shape[0], &channels[0],
                                   <size_t>channels.shape[0], &blocks[0, 0, 0], n_blocks, width)
    return np.asarray(out)


def scale_block(str isa, str type_name):
    """How many neighbouring activations share a scale where they meet weights of a type: 32 or 256."""
    return table_of(isa).layout.scale_block(find_held_format(type_name.encode()).format)


def quantize_q8(str isa, const float[:, ::1] x, size_t scale_block=32):
    """Packed 8-bit activations of x [n_rows][depth] (quant/packed_format.h); scale_block of them share a scale.

    Returns (records uint8 [tiles][depth / 32][56 tile_rows], what dot products start at, whether starts are pairs).
    """
    cdef const KernelTable* table = table_of(isa)
    cdef size_t n_rows = <size_t>x.shape[0], depth = <size_t>x.shape[1], mr = table.layout.tile_rows, tile
    if scale_block not in (32, 256) or depth % scale_block or n_rows == 0 or depth == 0:
        raise ValueError(f"depth must be a multiple of {scale_block}, 32 or 256; got {depth} for {n_rows} rows")
    packed = np.zeros(((n_rows + mr - 1) // mr, depth // 32, 56 * mr), np.uint8)
    cdef uint8_t[:, :, ::1] out = packed
    for tile in range(<size_t>out.shape[0]):
        table.quantize_q8p_f32(&out[tile, 0, 0], &x[tile * mr, 0], depth, min(mr, n_rows - tile * mr), mr, depth,
                               scale_block)
    return packed, table.layout.dot_bias, table.layout.has_pairs


def gemm_f32(str isa, const float[:, ::1] a, const float[:, ::1] b):
    """a [m][k] times b [k][n], float32, panel by panel."""
    cdef const KernelTable* table = table_of(isa)
    cdef size_t m = <size_t>a.shape[0], k = <size_t>a.shape[1], n = <size_t>b.shape[1], nr = table.layout.panel_cols
    cdef size_t column
    if b.shape[0] != a.shape[1]:
        raise ValueError(f"a is {a.shape[0]} x {a.shape[1]}, b is {b.shape[0]} x {b.shape[1]}")
    padded = np.zeros((k, (n + nr - 1) // nr * nr), np.float32)
    padded[:, :n] = b
    cdef const float[:, ::1] panels = padded
    cdef float[:, ::1] c = np.empty((m, n), np.float32)
    for column in range(0, n, nr):
        table.gemm_f32_f32_f32p(&c[0, column], n, &a[0, 0], k, &panels[0, column], <size_t>panels.shape[1], m,
                                min(nr, n - column), k, False)
    return np.asarray(c)


cdef class Weights:
    """A weight matrix [n_out][depth] packed for one instruction set from GGUF tensor data.

    data: the tensor's bytes; type_name: its GGUF type ("Q4_0", "F16", ...).
    """

    cdef PackedMatrix matrix
    cdef const KernelTable* table
    cdef cbool is_quantised
    cdef size_t scale_block
    cdef readonly size_t rows, cols

    def __init__(self, str isa, str type_name, const uint8_t[::1] data, size_t rows, size_t cols):
        cdef const FormatInfo* info = &find_held_format(type_name.encode())
        self.table = table_of(isa)
        self.is_quantised = info.is_quantised
        self.scale_block = self.table.layout.scale_block(info.format)
        self.matrix = pack_tensor(type_name.encode(), &data[0], <size_t>data.shape[0], rows, cols,
                                  self.table.layout.panel_cols, self.table.layout.is_signed(info.format))
        self.rows, self.cols = rows, cols

    @property
    def n_bytes(self):
        """Bytes of the packed weights."""
        return self.matrix.n_bytes()

    def dequantize(self):
        """The weights as float32 [n_out][depth]."""
        cdef float[:, ::1] out = np.empty((self.rows, self.cols), np.float32)
        cdef size_t i
        for i in range(self.rows):
            self.matrix.dequantize_row(&out[i, 0], i)
        return np.asarray(out)

    def matmul(self, const float[:, ::1] x, const float[::1] bias=None, const float[:, ::1] add_to=None):
        """x [n_rows][depth] times the transposed weights, plus bias [n_out], plus add_to [n_rows][n_out].

        Quantised weights see x rounded to 8 bits (``quantize_q8``). One row takes the matrix-vector kernel.
        """
        cdef float[:, ::1] out = np.zeros((x.shape[0], self.rows), np.float32) if add_to is None else np.array(add_to)
        self.run(x, out, bias, add_to is not None, 1)
        return np.asarray(out)

    def measure(self, const float[:, ::1] x, int n_rounds):
        """Seconds [n_rounds][2] that the rounding of x [n_rows][depth] to 8 bits and the product take."""
        return self.run(x, np.empty((x.shape[0], self.rows), np.float32), None, False, n_rounds)

    cdef run(self, const float[:, ::1] x, float[:, ::1] out, const float[::1] bias, cbool accumulate, int n_rounds):
        cdef size_t n_rows = <size_t>x.shape[0]
        if <size_t>x.shape[1] != self.cols or n_rows == 0:
            raise ValueError(f"x is {x.shape[0]} x {x.shape[1]}, the weights have depth {self.cols}")
        cdef uint8_t[::1] packed = np.empty(Activations8.bytes(self.table[0], n_rows, self.cols) + 64, np.uint8)
        cdef uint8_t[::1] scratch = np.empty(matmul_scratch_bytes(self.table[0]) * num_threads() + 64, np.uint8)
        cdef double[:, ::1] seconds = np.empty((n_rounds, 2))
        cdef double start, middle
        cdef int i
        cdef MatmulInput input
        cdef PackedOut rounded
        cdef MatmulOutput output
        cdef ConstOutputs outputs
        cdef MatmulContext context
        context.scratch = <uint8_t*>((<uintptr_t>&scratch[0] + 63) // 64 * 64)
        rounded.packed, rounded.scale_block = &packed[0], self.scale_block
        input.rows.data = &x[0, 0]
        input.rows.rows = n_rows
        input.rows.cols = input.rows.stride = self.cols
        output.weight = &self.matrix
        output.bias = NULL
        if bias is not None:
            output.bias = &bias[0]
        output.out, output.out_stride = &out[0, 0], self.rows
        output.accumulate = accumulate
        outputs.data, outputs.size = &output, 1
        with nogil:
            for i in range(n_rounds):
                start = seconds_now()
                if self.is_quantised:
                    input.packed = quantize_rows(self.table[0], input.rows, rounded)
                middle = seconds_now()
                c_matmul(self.table[0], input, outputs, context)
                seconds[i, 0] = middle - start
                seconds[i, 1] = seconds_now() - middle
        return np.asarray(seconds)
