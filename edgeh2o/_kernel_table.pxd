# cython: language_level=3
"""What ``_kernels`` and ``_recurrent_kernels`` call of the core: the table of an instruction set."""

from libc.stddef cimport size_t
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint64_t
from libcpp cimport bool as cbool
from libcpp.string cimport string


cdef extern from "quant/widened_types.h" namespace "edgeh2o" nogil:
    cdef enum class PackedFormat(uint8_t):
        pass

cdef extern from "kernels/delta_net.h" namespace "edgeh2o" nogil:
    cdef struct DeltaSlice:
        size_t n_tokens, key_dim, qk_stride, v_stride, decay_stride, rate_stride, out_stride
        bint decays_by_row
        const float* q
        const float* k
        const float* v
        const float* decays
        const float* rates
        float* state
        float* out
    size_t delta_scratch_size(size_t key_dim, bint decays_by_row)

cdef extern from "kernels/ssd.h" namespace "edgeh2o" nogil:
    cdef struct SsdSlice:
        size_t n_tokens, state_dim, stride, gate_stride, out_stride
        const float* x
        const float* b
        const float* c
        const float* decays
        const float* rates
        float skip
        float* state
        float* out

cdef extern from "kernels/selective_scan.h" namespace "edgeh2o" nogil:
    cdef struct ScanSlice:
        size_t n_tokens, state_dim, x_stride, step_stride, bc_stride, out_stride
        const float* x
        const float* steps
        const float* b
        const float* c
        const float* a
        const float* skips
        float* state
        float* out

cdef extern from "kernels/wkv.h" namespace "edgeh2o" nogil:
    cdef struct Wkv6Slice:
        size_t n_tokens, key_dim, stride, own_stride, out_stride
        const float* decays
        const float* keys
        const float* values
        const float* queries
        const float* own
        float* state
        float* out

    cdef struct WkvSlice:
        size_t n_tokens, key_dim, stride, out_stride
        const float* decays
        const float* keys
        const float* values
        const float* directions
        const float* removals
        const float* queries
        float* state
        float* out

cdef extern from "sequence/attention_state.h" namespace "edgeh2o" nogil:
    cdef enum class CacheType(uint8_t):
        pass
    CacheType parse_cache_type(const string&) except +
    size_t kv_row_bytes(CacheType, size_t)

cdef extern from "isa/select.h" namespace "edgeh2o" nogil:
    cdef cppclass PackLayout:
        size_t panel_cols
        size_t tile_rows
        int dot_bias
        cbool has_pairs
        size_t scale_block(PackedFormat)
        cbool is_signed(PackedFormat)
    cdef cppclass AttentionKernels:
        uint64_t (*peak)(float*, size_t) noexcept
        size_t key_block
        void (*pack_keys)(CacheType, float*, const void*, const int32_t*, size_t, size_t) noexcept
    cdef cppclass KernelTable:
        const char* name
        AttentionKernels[4] attention
        PackLayout layout
        void (*rms_norm_f32)(float*, const float*, const float*, size_t, float) noexcept
        void (*rope_f32)(float*, const float*, const float*, size_t) noexcept
        void (*swiglu_f32)(float*, const float*, const float*, size_t) noexcept
        void (*geglu_f32)(float*, const float*, const float*, size_t) noexcept
        void (*swiglu_clamped_f32)(float*, const float*, const float*, size_t) noexcept
        void (*soft_cap_f32)(float*, float, size_t) noexcept
        void (*add_f32)(float*, const float*, size_t) noexcept
        void (*scale_f32)(float*, const float*, float, size_t) noexcept
        void (*load_f32_f16)(float*, const uint16_t*, size_t) noexcept
        void (*store_kv_row_f32)(CacheType, uint8_t*, const float*, size_t) noexcept
        void (*add_kv_rows_f32)(CacheType, float*, const void*, const int32_t*, size_t, size_t) noexcept
        void (*add_kv_squares_f32)(CacheType, float*, const void*, size_t, size_t) noexcept
        void (*score_blocks_f32)(float*, size_t, const float*, size_t, size_t, const int32_t*, size_t,
                                 const void*, size_t, size_t) noexcept
        void (*quantize_q8p_f32)(uint8_t*, const float*, size_t, size_t, size_t, size_t, size_t) noexcept
        void (*gemm_f32_f32_f32p)(float*, size_t, const float*, size_t, const float*, size_t, size_t, size_t,
                                  size_t, cbool) noexcept
        uint64_t (*peak_q4)(float*, size_t) noexcept
        uint64_t (*peak_q8)(float*, size_t) noexcept
        void (*index_scores_f32)(float*, const float*, const float*, size_t, const float*, size_t, size_t) noexcept
        void (*gate_f32)(float*, const float*, const float*, size_t) noexcept
        void (*layer_norm_f32)(float*, const float*, const float*, const float*, size_t, float) noexcept
        void (*gelu_f32)(float*, const float*, const float*, size_t) noexcept
        void (*xielu_f32)(float*, const float*, float, float, float, float, size_t) noexcept
        void (*cut_off_f32)(float*, float, size_t) noexcept
        void (*predict_streams_f32)(float*, size_t, const float*, size_t) noexcept
        void (*correct_streams_f32)(float*, size_t, const float*, const float*, size_t) noexcept
        void (*match_size_f32)(float*, const float*, size_t) noexcept
        void (*reglu_f32)(float*, const float*, const float*, size_t) noexcept
        void (*delta_net_f32)(const DeltaSlice&) noexcept
        void (*delta_net_chunks_f32)(const DeltaSlice&, size_t, float*) noexcept
        void (*ssd_f32)(const SsdSlice&) noexcept
        void (*selective_scan_f32)(const ScanSlice&) noexcept
        void (*wkv_f32)(const WkvSlice&) noexcept
        void (*wkv6_f32)(const Wkv6Slice&) noexcept
        void (*key_decays_f32)(float*, const float*, size_t) noexcept
        void (*row_decays_f32)(float*, const float*, float, float, size_t) noexcept
        void (*multiply_f32)(float*, const float*, const float*, size_t) noexcept
        void (*convolve_f32)(float*, const float* const*, const float*, size_t, size_t, size_t) noexcept
    const KernelTable& find_kernel_table(const string&) except +


cdef inline const KernelTable* table_of(str isa) except NULL:
    return &find_kernel_table(isa.encode())
