"""Device code under the two products: what TileLang cannot say, or says slower.

Both compute `y.T = W @ x.T`: 64 rows of the weight are the M of `wgmma`, so a small batch wastes nothing, and the
first operand may come from registers, where codes have just become bf16. An output is one chain of sums over K (or a
fixed number of chains), in steps of 16 columns: it depends neither on the tile of tokens nor on how blocks share K.
"""

SOURCE = r"""
#include <tl_templates/cuda/instruction/wgmma.h>
#include <tl_templates/cuda/intrin.h>
#include <tl_templates/cuda/barrier.h>
#include <tl_templates/cuda/copy_sm90.h>
// TileLang puts a proxy fence before a copy wherever it cannot see that none is needed, and there the loading warp
// waits out the copies under way. No copy here reads what threads wrote, so there is none.
namespace tl { TL_DEVICE void no_fence() {} }
#define fence_proxy_async no_fence
namespace product {
constexpr auto Bf16 = tl::DataType::kBFloat16;
constexpr auto Fp32 = tl::DataType::kFloat32;

// Four e4m3 codes to bf16: the code's exponent and mantissa, moved under bf16's exponent, are its
// value * 2^-120, subnormals included; `scale` holds 2^120 times the block's scale, twice.
TL_DEVICE uint32_t scaled(uint32_t pair, uint32_t scale) {
  uint32_t product;
  asm("mul.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(pair), "r"(scale));
  return product;
}
TL_DEVICE uint32_t expand_high(uint32_t codes, uint32_t scale) {
  return scaled((codes & 0x80008000u) | ((codes >> 4) & 0x07f007f0u), scale);
}
TL_DEVICE uint32_t expand_low(uint32_t codes, uint32_t scale) {
  return scaled(((codes << 8) & 0x80008000u) | ((codes << 4) & 0x07f007f0u), scale);
}

// 16 bytes to two steps' first operands.
TL_DEVICE void expand(uint32_t *to, uint4 codes, uint32_t scale) {
  to[0] = expand_high(codes.x, scale); to[1] = expand_low(codes.x, scale);
  to[2] = expand_high(codes.y, scale); to[3] = expand_low(codes.y, scale);
  to[4] = expand_high(codes.z, scale); to[5] = expand_low(codes.z, scale);
  to[6] = expand_high(codes.w, scale); to[7] = expand_low(codes.w, scale);
}

// wgmma descriptor of a K-major tile, rows of 128 bytes, swizzled by 128 bytes.
TL_DEVICE uint64_t descriptor(const void *tile) {
  return uint64_t((smem_ptr_to_uint(tile) >> 4) & 0x3fff) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

template <int N> TL_DEVICE void hold(float *sums) {
  #pragma unroll
  for (int i = 0; i < N / 2; i++) cute::warpgroup_fence_operand(sums[i]);
}

// sums[64 rows][N tokens] (+)= codes[64][64] times x, by a warpgroup; leaves the group of wgmma under way.
template <int N>
TL_DEVICE void multiply_codes(float *sums, const void *codes, const void *scales, const void *x, bool add) {
  int thread = threadIdx.x & 127;
  uint32_t pair = *reinterpret_cast<const uint32_t *>(scales), a[16];
  #pragma unroll
  for (int half = 0; half < 2; half++)
    expand(a + half * 8, reinterpret_cast<const uint4 *>(codes)[thread / 32 * 64 + half * 32 + thread % 32],
           __byte_perm(pair, 0, half ? 0x3232 : 0x1010));
  uint64_t b = descriptor(x);
  hold<N>(sums);
  #pragma unroll
  for (int i = 0; i < 16; i++) cute::warpgroup_fence_operand(a[i]);
  tl::warpgroup_arrive();
  #pragma unroll
  for (int i = 0; i < 4; i++)
    tl::wgmma_rs<Bf16, Bf16, Fp32, 64, N, 16, false, false, 1, 1>(
        a + 4 * i, b + 2 * i, reinterpret_cast<uint32_t *>(sums), add || i > 0);
  tl::warpgroup_commit_batch();
}

// The same for 64 columns of bf16 weights in shared memory.
template <int N> TL_DEVICE void multiply(float *sums, const void *weight, const void *x, bool add) {
  uint64_t a = descriptor(weight), b = descriptor(x);
  hold<N>(sums);
  tl::warpgroup_arrive();
  #pragma unroll
  for (int i = 0; i < 4; i++)
    tl::wgmma_ss<Bf16, Bf16, Fp32, 64, N, 16, false, false, 1, 1>(
        a + 2 * i, b + 2 * i, reinterpret_cast<uint32_t *>(sums), add || i > 0);
  tl::warpgroup_commit_batch();
}

// Waits until at most `Left` groups of wgmma are under way.
template <int Left, int N> TL_DEVICE void wait(float *sums) {
  tl::warpgroup_wait<Left>();
  if (Left == 0) hold<N>(sums);
}

// Fills a stage with `count` runs of bytes, `apart` from each other in memory; one lane of the calling warp does it.
TL_DEVICE void fill(void *to, const void *from, void *barrier, int count, int bytes, long apart) {
  if (threadIdx.x & 31) return;
  uint64_t &full = *reinterpret_cast<uint64_t *>(barrier);
  tl::mbarrier_expect_tx(full, count * bytes);
  for (int i = 0; i < count; i++)
    tl::tma_load((char *)to + i * bytes, (const char *)from + i * apart, full, bytes);
}

// A warp's 16 rows, Tiles of 64 columns `Apart` bytes from each other: the same sums in the same order by mma.sync.
template <int N, int Tiles, int Apart>
TL_DEVICE void multiply_warp(float *sums, const void *codes, const void *scales, const void *x) {
  int lane = threadIdx.x & 31;
  uint32_t row = smem_ptr_to_uint(x) + (lane & 7) * 128;
  #pragma unroll
  for (int t = 0; t < Tiles; t++) {
    uint32_t pair = reinterpret_cast<const uint32_t *>(scales)[t];
    #pragma unroll
    for (int half = 0; half < 2; half++) {
      uint32_t a[8];
      expand(a, reinterpret_cast<const uint4 *>(codes)[t * (Apart / 16) + half * 32 + lane],
             __byte_perm(pair, 0, half ? 0x3232 : 0x1010));
      #pragma unroll
      for (int j = 0; j < N / 8; j++) {
        uint32_t b[4];
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
          : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
          : "r"(row + (t * N + j * 8) * 128 + (((half * 4 + (lane >> 3)) ^ (lane & 7)) << 4)) : "memory");
        #pragma unroll
        for (int i = 0; i < 2; i++)
          asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
            : "+f"(sums[4 * j]), "+f"(sums[4 * j + 1]), "+f"(sums[4 * j + 2]), "+f"(sums[4 * j + 3])
            : "r"(a[4 * i]), "r"(a[4 * i + 1]), "r"(a[4 * i + 2]), "r"(a[4 * i + 3]), "r"(b[2 * i]), "r"(b[2 * i + 1]));
      }
    }
  }
}

template <int N> TL_DEVICE void zero(float *sums) {
  #pragma unroll
  for (int i = 0; i < N / 2; i++) sums[i] = 0.f;
}

// A wgmma accumulator: register 4 j + e of lane l in warp w is row 16 w + l / 4 + 8 (e / 2), token
// 8 j + 2 (l % 4) + e % 2.

// Sums to y[token][row], at most `tokens` by `rows` of them.
template <int N> TL_DEVICE void drain(const float *sums, void *, float *y, int tokens, long width, int rows) {
  int thread = threadIdx.x & 127, lane = thread & 31;
  #pragma unroll
  for (int i = 0; i < N / 2; i++) {
    int token = i / 4 * 8 + (lane & 3) * 2 + (i & 1), row = (thread >> 5) * 16 + (lane >> 2) + (i & 2) * 4;
    if (token < tokens && row < rows) y[token * width + row] = sums[i];
  }
}

// Stores 16 rows of 16 tokens as bf16 to shared memory, where each lane names the place of 8 rows.
TL_DEVICE void turn(uint32_t to, const float *sums) {
  uint32_t v[4];
  #pragma unroll
  for (int e = 0; e < 4; e++)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(v[e]) : "f"(sums[2 * e + 1]), "f"(sums[2 * e]));
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
    :: "r"(to), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}

// As bf16, 16 bytes a store, turned in shared memory: `buffer` is the warpgroup's, rows of 144 bytes for 64 tokens,
// which spreads the banks.
template <int N>
TL_DEVICE void drain(const float *sums, void *buffer, bfloat16_t *y, int tokens, long width, int rows) {
  int thread = threadIdx.x & 127, lane = thread & 31, name = 8 + (threadIdx.x >> 7);
  uint32_t to = smem_ptr_to_uint(buffer) + ((lane >> 4) * 8 + (lane & 7)) * 144 + (thread >> 5) * 32;
  to += ((lane >> 3) & 1) * 16;
  #pragma unroll
  for (int c = 0; c < N / 64; c++) {
    #pragma unroll
    for (int j = 0; j < 8; j += 2) turn(to + j * 8 * 144, sums + (c * 8 + j) * 4);
    asm volatile("bar.sync %0, 128;" :: "r"(name) : "memory");
    #pragma unroll
    for (int i = thread; i < 64 * 8; i += 128) {
      int token = c * 64 + i / 8, row = i % 8 * 8;
      uint4 v = *reinterpret_cast<const uint4 *>(reinterpret_cast<const char *>(buffer) + (i / 8) * 144 + row * 2);
      if (token < tokens && row < rows) *reinterpret_cast<uint4 *>(y + token * width + row) = v;
    }
    asm volatile("bar.sync %0, 128;" :: "r"(name) : "memory");
  }
}

// A warp's 16 rows the same way, in its columns of a buffer with rows of `Pitch` bytes.
template <int N, int Pitch>
TL_DEVICE void drain_warp(const float *sums, void *buffer, bfloat16_t *y, int tokens, long width) {
  int lane = threadIdx.x & 31;
  char *mine = reinterpret_cast<char *>(buffer) + (threadIdx.x >> 5) * 32;
  uint32_t to = smem_ptr_to_uint(mine) + ((lane >> 4) * 8 + (lane & 7)) * Pitch + ((lane >> 3) & 1) * 16;
  #pragma unroll
  for (int j = 0; j < N / 8; j += 2) turn(to + j * 8 * Pitch, sums + 4 * j);
  __syncwarp();
  #pragma unroll
  for (int i = lane; i < N * 2; i += 32) {
    uint4 v = *reinterpret_cast<const uint4 *>(mine + i / 2 * Pitch + i % 2 * 16);
    if (i / 2 < tokens) *reinterpret_cast<uint4 *>(y + i / 2 * width + i % 2 * 8) = v;
  }
}

// Sums to part[token][row] in shared memory, for `reduce`.
template <int N, int Rows> TL_DEVICE void spill(const float *sums, float *part) {
  int lane = threadIdx.x & 31, row = (threadIdx.x >> 5) * 16 + (lane >> 2);
  #pragma unroll
  for (int i = 0; i < N / 2; i++)
    part[(i / 4 * 8 + (lane & 3) * 2 + (i & 1)) * Rows + row + (i & 2) * 4] = sums[i];
}

TL_DEVICE void put(float *y, float4 v) { *reinterpret_cast<float4 *>(y) = v; }
TL_DEVICE void put(bfloat16_t *y, float4 v) {
  uint2 pairs;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs.x) : "f"(v.y), "f"(v.x));
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pairs.y) : "f"(v.w), "f"(v.z));
  *reinterpret_cast<uint2 *>(y) = pairs;
}

// Adds the cluster's parts in the order of its blocks; each block writes its share of the tokens.
template <int Blocks, int N, int Rows, int Threads, typename Out>
TL_DEVICE void reduce(const float *part, Out *y, int rank, int tokens, long width, int rows) {
  constexpr int Share = (N + Blocks - 1) / Blocks;
  for (int i = threadIdx.x; i < Share * (Rows / 4); i += Threads) {
    int token = rank * Share + i / (Rows / 4), row = i % (Rows / 4) * 4;
    if (token >= min(tokens, N)) return;
    if (row >= rows) continue;
    uint32_t at = smem_ptr_to_uint(part + token * Rows + row);
    float4 sum = make_float4(0, 0, 0, 0);
    #pragma unroll
    for (int block = 0; block < Blocks; block++) {
      uint32_t from;
      float4 v;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(from) : "r"(at), "r"(block));
      asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
        : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(from) : "memory");
      if (block == 0) sum = v;
      else { sum.x += v.x; sum.y += v.y; sum.z += v.z; sum.w += v.w; }
    }
    put(y + token * width + row, sum);
  }
}
} // namespace product
"""
