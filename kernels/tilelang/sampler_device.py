"""What the sampler's kernels share: how a row is spread over a cluster, and CUDA that they call."""

import math

import torch
from torch import Tensor

RANKS = 8
THREADS = 256
WARPS = THREADS // 32

BINS = 256
COPIES = 4
"""Histograms of a CTA: pairs of warps share one, so that a 32-bit bin holds the mass of all their tokens."""

MASS_BITS = 19
"""Fixed-point bits of a token's mass, relative to the top of its bin."""

MAX_VOCAB = RANKS * 4096 * COPIES
LOG2_E = math.log2(math.e)
LARGEST = 3.4028234663852886e38

SOURCE = r"""
// CTAs of a cluster send what the others need: the asynchronous stores count towards a barrier of the receiver, so no
// fence waits for global memory, as one does where a CTA reads another's shared memory behind a cluster barrier.
static __device__ __forceinline__ unsigned shared_address(const void* own) {
  return static_cast<unsigned>(__cvta_generic_to_shared(own));
}
static __device__ __forceinline__ unsigned peer_address(const void* own, int rank) {
  unsigned there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(rank));
  return there;
}
static __device__ __forceinline__ unsigned peer_word(const void* own, int rank) {
  unsigned value;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(peer_address(own, rank)) : "memory");
  return value;
}
static __device__ __forceinline__ unsigned long peer_long(const void* own, int rank) {
  unsigned long value;
  asm volatile("ld.shared::cluster.u64 %0, [%1];" : "=l"(value) : "r"(peer_address(own, rank)) : "memory");
  return value;
}
static __device__ __forceinline__ void send_word(const void* to, int rank, unsigned word, const void* barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               : : "r"(peer_address(to, rank)), "r"(word), "r"(peer_address(barrier, rank)) : "memory");
}
static __device__ __forceinline__ void send_sum(const void* to, int rank, unsigned long term, const void* barrier) {
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [%0], %1, [%2];"
               : : "r"(peer_address(to, rank)), "l"(term), "r"(peer_address(barrier, rank)) : "memory");
}
// One thread makes a barrier, and says how many bytes its next phase takes.
static __device__ __forceinline__ void make_barrier(const void* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" : : "r"(shared_address(barrier)) : "memory");
}
static __device__ __forceinline__ void expect(const void* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               : : "r"(shared_address(barrier)), "r"(bytes) : "memory");
}
static __device__ __forceinline__ void await(const void* barrier, int parity) {
  asm volatile("{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra again; }"
               : : "r"(shared_address(barrier)), "r"(parity) : "memory");
}
static __device__ __forceinline__ float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// One instruction, where a product of 64-bit numbers takes two.
static __device__ __forceinline__ unsigned long product(unsigned a, unsigned b) {
  unsigned long c;
  asm("mul.wide.u32 %0, %1, %2;" : "=l"(c) : "r"(a), "r"(b));
  return c;
}
static __device__ __forceinline__ float lg2(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
// log2(-ln u) of u = (word + 0.5) / 2^32. Near 1, where lg2 has an absolute error only, by the series in v = 1 - u.
static __device__ __forceinline__ float log2_exponential(unsigned word) {
  const float unit = 2.3283064365386963e-10f;
  float v = (static_cast<float>(~word) + 0.5f) * unit;
  float series = v * (1.0f + v * (0.5f + v * (1.0f / 3 + v * (0.25f + v * (0.2f + v * (1.0f / 6))))));
  float direct = lg2((static_cast<float>(word) + 0.5f) * unit) * -0.69314718f;
  return lg2(v < 0.0625f ? series : direct);
}
// Keys that order like values do, with -0 as +0, and back.
static __device__ __forceinline__ unsigned to_key(float value) {
  int bits = __float_as_int(value + 0.0f);
  return bits ^ (bits >> 31 | 0x80000000);
}
static __device__ __forceinline__ float of_key(unsigned key) {
  return __int_as_float(key & 0x80000000 ? key ^ 0x80000000 : ~key);
}
static __device__ __forceinline__ bool is_between(unsigned key, unsigned low, unsigned high) {
  return key - low <= high - low;
}
// Coarse bin of a depth in quarters of a bit, rounded down; the last is open.
static __device__ __forceinline__ float to_place(float depth) {
  return __fadd_rd(fminf(depth, 255.0f), 8388608.0f) - 8388608.0f;
}
static __device__ __forceinline__ int of_place(float place) {
  return __float_as_int(place + 8388608.0f) - 0x4B000000;
}
// 2^(19 - (depth - place) / 4), to the nearest integer.
static __device__ __forceinline__ unsigned to_mass(float depth, float place) {
  float exponent = __fmaf_rn(depth, -0.25f, __fmaf_rn(place, 0.25f, 19.0f));
  return __float_as_uint(__fadd_rn(ex2(exponent), 8388608.0f)) & 0x7FFFFF;
}
// Adds a mass to its coarse bin, if it is not too small to matter; without a branch.
static __device__ __forceinline__ void add_mass(unsigned* bins, float depth) {
  float raised = __fadd_rd(depth, 8388608.0f);
  unsigned mass = to_mass(depth, raised - 8388608.0f);
  unsigned at = shared_address(bins) - 0x2C000000u +
                __float_as_uint(raised) * 4;
  asm volatile("{ .reg .pred p; setp.lt.f32 p, %2, 0f43280000; @p red.shared.add.u32 [%0], %1; }"
               : : "r"(at), "r"(mass), "f"(depth) : "memory");
}
// Adds a mass, or one, to the bin of its depth within a coarse bin, in 1 / 256 of that; `base` is of the coarse bin.
static __device__ __forceinline__ void add_fine(unsigned* bins, float fine, unsigned base, float exponent,
                                                bool by_mass) {
  unsigned place = __float_as_uint(__fadd_rd(fine, 8388608.0f)) - base;
  float mass = __fadd_rn(ex2(__fmaf_rn(fine, -0.25f / 256, exponent)), 8388608.0f);
  unsigned weight = by_mass ? __float_as_uint(mass) & 0x7FFFFF : 1;
  asm volatile("{ .reg .pred p; setp.lt.u32 p, %2, 256; @p red.shared.add.u32 [%0], %1; }"
               : : "r"(shared_address(bins) + place * 4), "r"(weight), "r"(place) : "memory");
}
// Depth in 1 / 256 of a coarse bin, rounded down, up to `most`.
static __device__ __forceinline__ float to_fine(float depth, float scale, float most) {
  return __fadd_rd(fminf(depth * scale, most), 8388608.0f) - 8388608.0f;
}
// Whether a value is no further than `half` from `mid`, or `before`.
static __device__ __forceinline__ bool is_near(float value, float mid, float half, bool before) {
  return (fabsf(value - mid) <= half) | before;
}
// Whether 1 - u may be below chance * bar, from 23 bits of u; rounding errs to the side of true.
static __device__ __forceinline__ bool may_win(unsigned word, float chance, float bar) {
  float one_plus_u = __uint_as_float((word >> 9) + 0x3F800000);
  return one_plus_u > __fmaf_rd(-chance, bar, 1.99999988f);
}
static __device__ __forceinline__ double quarters(int x) { return ex2(0.25f * x); }
static __device__ __forceinline__ unsigned long to_nearest(double x) { return __double2ull_rn(x); }
static __device__ __forceinline__ unsigned long to_above(double x) { return __double2ull_ru(x); }
"""


def check_logits(logits: Tensor) -> tuple[int, int]:
    """Returns rows and vocabulary; raises ValueError for what no kernel is built."""
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous():
        raise ValueError(f"logits must be contiguous fp32, not {logits.dtype}")
    if vocab % 32 or not 0 < vocab <= MAX_VOCAB:
        raise ValueError(f"{vocab} logits a row: a multiple of 32 up to {MAX_VOCAB} is supported")
    return rows, vocab
