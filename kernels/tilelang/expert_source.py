"""Device code of the grouped products in `expert_gemm`: one template for every tile size and both products.

A producer (one warp, or a warpgroup for large tiles) and consumer warpgroups share a ring of stages in shared memory. A
consumer widens 64x64 weights in its registers while the products of the tile before run, as the mixed-input kernels of
CUTLASS do ("RS" products).
"""

SOURCE = r"""
#include <cuda_fp8.h>
#include <tl_templates/cuda/copy_sm90.h>
#include <tl_templates/cuda/instruction/wgmma.h>

namespace experts {

using u32 = unsigned;
using u64 = unsigned long long;

TL_DEVICE u32 address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Two bf16 times two; subnormal numbers stay exact.
TL_DEVICE u32 scaled(u32 pair, u32 scale) {
  u32 out;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(out) : "r"(pair), "r"(scale));
  return out;
}

// One thread's 32 codes of a 64x64 tile, and its scales of two rows and two blocks, to four m64k16 fragments. Shifted
// to where bf16 has its sign, lowest two exponent bits and highest mantissa bit, an e2m1 code is its value times 2^-126
// (0.5 as a subnormal); stored exponents are 2^126 too large.
TL_DEVICE void widen(uint4 codes, u32 exponents, u32 (&a)[16]) {
  u32 words[4] = {codes.x, codes.y, codes.z, codes.w};
  u32 scales[2][2];  // [block][row]
#pragma unroll
  for (int i = 0; i < 4; ++i)
    scales[i & 1][i >> 1] = __byte_perm(exponents, 0, 0x4040 | i << 8 | i) << 7;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    u32 x = words[j], upper = scales[j / 2][0], lower = scales[j / 2][1];
    a[4 * j + 0] = scaled(x & 0x81C081C0u, upper);
    a[4 * j + 1] = scaled((x << 3) & 0x81C081C0u, lower);
    a[4 * j + 2] = scaled(((x << 6) & 0x01C001C0u) | ((x << 1) & 0x80008000u), upper);
    a[4 * j + 3] = scaled(((x >> 3) & 0x01C001C0u) | ((x << 2) & 0x80008000u), lower);
  }
}

TL_DEVICE void wait(u64 *barrier, int parity) { tl::mbarrier_wait(*(uint64_t *)barrier, parity); }
TL_DEVICE void arrive(u64 *barrier) { tl::mbarrier_arrive(*(uint64_t *)barrier); }

TL_DEVICE void bulk(void *target, const void *source, u32 size, u64 *barrier) {
  tl::tma_load(target, source, *(uint64_t *)barrier, size);
}

TL_DEVICE void copy16(u32 target, const void *source) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source));
}

// A place in the ring of stages.
template <int STAGES> struct Place {
  int stage = 0, phase = 0;
  TL_DEVICE void next() {
    if (++stage == STAGES) stage = 0, phase ^= 1;
  }
};

// Rounds to e4m3 under a power-of-two scale and back.
TL_DEVICE float fp8(float value, float scale, float inverse) {
  __nv_fp8_e4m3 code(value * inverse);
  return (float)code * scale;
}

TL_DEVICE u32 pack(float low, float high) {
  u32 out;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(out) : "f"(high), "f"(low));
  return out;
}

TL_DEVICE float rounded(float x) { return float(bfloat16_t(x)); }

// K columns of w; KIND 0: gate_up, 1: gate_up with rounding, 2: down; OUT columns of the output. An item of work is one
// token tile times GROUPS * BLOCKS * 64 weight rows. Items that share a token tile run side by side.
template <int GROUPS, int BLOCKS, int TOKENS, int STEPS, int STAGES, int PRODUCERS, int KIND, int K, int OUT>
struct Gemm {
  static constexpr int kTiles = GROUPS * BLOCKS;          // of 64 weight rows
  static constexpr int kSteps = K / 64;
  static constexpr int kX = STEPS * TOKENS * 128;         // bytes of a stage
  static constexpr int kW = kTiles * STEPS * 2048;
  static constexpr int kS = kTiles * STEPS * 128;
  static constexpr int kStage = (kX + kW + kS + 1023) / 1024 * 1024;
  static constexpr bool kLend = PRODUCERS == 128 && TOKENS >= 64;  // a producer warpgroup leaves registers to consumers
  static constexpr int kConsumers = 128 * GROUPS;
  static constexpr int kBlockRows = (KIND < 2 ? 2 * OUT : OUT) / 64 / kTiles;
  static constexpr int kPitch = KIND < 2 ? 16 : 48;       // bytes of a token in the staging of a warp
  static constexpr int kStaging = (TOKENS < 32 ? TOKENS : 32) * kPitch;

  unsigned char *stages, *staging;
  u64 *full, *empty;
  float *peaks;
  const bfloat16_t *x;
  const int *rows, *expert;
  const float *weights;
  const unsigned char *w, *s;
  bfloat16_t *out;
  int top_k;
  float limit;

  // Divides shared memory, which `Shape.shared_bytes` counts, and readies the barriers.
  TL_DEVICE void place_memory(unsigned char *memory) {
    stages = memory;
    staging = stages + STAGES * kStage;
    full = (u64 *)(staging + 4 * GROUPS * kStaging);
    empty = full + STAGES;
    peaks = (float *)(empty + STAGES);
    if (threadIdx.x == 0) {
      for (int i = 0; i < STAGES; ++i) {
        tl::mbarrier_init(*(uint64_t *)(full + i), 1 + PRODUCERS);
        tl::mbarrier_init(*(uint64_t *)(empty + i), 4 * GROUPS);
      }
      asm volatile("fence.mbarrier_init.release.cluster;");
    }
    __syncthreads();
  }

  // Fills the ring: tokens row by row, with the swizzle that the tensor cores expect, and weights in bulk.
  TL_DEVICE void produce(int items) {
    constexpr int kRows = TOKENS * 8 > PRODUCERS ? TOKENS * 8 / PRODUCERS : 1;  // token rows of a thread
    static_assert(TOKENS * 8 >= PRODUCERS);
    int thread = threadIdx.x - kConsumers, chunk = thread % 8, first = thread / 8;
    Place<STAGES> here;
    u32 target = address(stages);
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
      int tile = item / kBlockRows, e = expert[tile];
      int row[kRows];
#pragma unroll
      for (int j = 0; j < kRows; ++j) row[j] = rows[tile * TOKENS + first + j * (PRODUCERS / 8)];
      if (e < 0) continue;
#pragma unroll
      for (int j = 0; j < kRows; ++j)
        if (row[j] >= 0) row[j] = KIND < 2 ? row[j] / top_k : tile * TOKENS + first + j * (PRODUCERS / 8);
      size_t weight_tile = ((size_t)e * kBlockRows + item % kBlockRows) * kTiles * kSteps;
      for (int k = 0; k < kSteps; k += STEPS) {
        wait(empty + here.stage, here.phase ^ 1);
        if (thread == 0) {
          unsigned char *place = stages + here.stage * kStage;
          tl::mbarrier_arrive_expect_tx(*(uint64_t *)(full + here.stage), kW + kS);
          for (int t = 0; t < kTiles; ++t) {
            size_t offset = weight_tile + t * kSteps + k;
            bulk(place + kX + t * STEPS * 2048, w + offset * 2048, STEPS * 2048, full + here.stage);
            bulk(place + kX + kW + t * STEPS * 128, s + offset * 128, STEPS * 128, full + here.stage);
          }
        }
        const bfloat16_t *source = x + k * 64 + chunk * 8;
#pragma unroll
        for (int j = 0; j < kRows; ++j) {
          int token = first + j * (PRODUCERS / 8);
          u32 piece = target + here.stage * kStage + token * 128 + ((chunk ^ (token & 7)) << 4);
          if (row[j] >= 0)
#pragma unroll
            for (int step = 0; step < STEPS; ++step)
              copy16(piece + step * TOKENS * 128, source + (size_t)row[j] * K + step * 64);
        }
        // Arrives once this thread's copies have landed.
        tl::mbarrier_cp_async_arrive_noinc(*(uint64_t *)(full + here.stage));
        here.next();
      }
    }
  }

  // Four products of k16 at x, a descriptor's low half, as one group.
  template <int COUNT> TL_DEVICE void multiply(const u32 (&a)[16], u32 x, float (&c)[COUNT / 2]) {
    // K-major rows of 128 bytes, swizzled over 8 rows of 1024 bytes.
    u64 descriptor = (u64)x | (64ull << 32) | (1ull << 62);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int j = 0; j < 4; ++j)
      tl::wgmma_rs<tl::DataType::kBFloat16, tl::DataType::kBFloat16, tl::DataType::kFloat32, 64, COUNT, 16, false,
                   false, 1, 1>(a + 4 * j, descriptor + 2 * j, (u32 *)c, true);
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
  }

  // The products of one item with the first COUNT tokens of its tile. `here` moves over its stages.
  template <int COUNT> TL_DEVICE void consume(Place<STAGES> &here, float (&c)[BLOCKS][COUNT / 2]) {
    int thread = threadIdx.x % 128, group = threadIdx.x / 128;
    u32 a[2][16];
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
      for (int i = 0; i < COUNT / 2; ++i) c[block][i] = 0;
    const unsigned char *mine = stages + kX + group * BLOCKS * STEPS * 2048 + thread * 16;
    const unsigned char *scale = stages + kX + kW + group * BLOCKS * STEPS * 128 + thread / 4 * 4;
    uint4 codes;
    u32 exponents;
    auto load = [&](int inner, int block) {
      codes = *(const uint4 *)(mine + here.stage * kStage + (block * STEPS + inner) * 2048);
      exponents = *(const u32 *)(scale + here.stage * kStage + (block * STEPS + inner) * 128);
    };
    auto enter = [&] {
      wait(full + here.stage, here.phase);
      // Tokens came by ordinary copies, and the tensor cores read them past the cache of those.
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      load(0, 0);
    };
    int left = kSteps / STEPS, previous = -1;
    // Multiplies one stage; the fragments alternate, so that one is widened while the other is multiplied.
    auto stage = [&](u32 (&even)[16], u32 (&odd)[16]) {
      // The shuffle tells the compiler that the descriptor is the same in the whole warp.
      u32 tokens = __shfl_sync(~0u, (address(stages) + here.stage * kStage) / 16 | 1 << 16, 0);
      int begun = previous;
      previous = here.stage;
#pragma unroll
      for (int i = 0; i < STEPS * BLOCKS; ++i) {
        int inner = i / BLOCKS, block = i % BLOCKS;
        widen(codes, exponents, i % 2 ? odd : even);
        multiply<COUNT>(i % 2 ? odd : even, tokens + inner * TOKENS * 8, c[block]);
        // The next codes arrive while these products run.
        if (i + 1 < STEPS * BLOCKS) {
          load((i + 1) / BLOCKS, (i + 1) % BLOCKS);
        } else if (--left > 0) {
          here.next();
          enter();
        }
        asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        // The products before these are done, and with the first of a stage so is the stage before.
        if (i == 0 && begun >= 0 && thread % 32 == 0) arrive(empty + begun);
      }
    };
    enter();
    if constexpr (STEPS * BLOCKS % 2 == 0) {
#pragma unroll 1
      while (left > 0) stage(a[0], a[1]);
    } else {
#pragma unroll 1
      while (left > 1) {
        stage(a[0], a[1]);
        stage(a[1], a[0]);
      }
      if constexpr (kSteps / STEPS % 2) stage(a[0], a[1]);
    }
    here.next();
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    if (thread % 32 == 0) arrive(empty + previous);
  }

  // A thread's token i of its TOKENS / 4, and where its first value lies among the accumulators.
  TL_DEVICE static int token_of(int i) { return i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2; }
  TL_DEVICE static int value_of(int i) { return i / 2 * 4 + i % 2; }

  // g and u to silu(min(g, limit)) clamp(u) weight, rounded; in place of g.
  template <int COUNT> TL_DEVICE void swiglu(int tile, float (&v)[COUNT / 2]) {
    int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    float *peak_of = peaks + group * 4 * TOKENS;
    if constexpr (KIND == 1) asm volatile("bar.sync %0, 128;" ::"r"(group + 1));
#pragma unroll
    for (int i = 0; i < COUNT / 4; ++i) {
      int at = value_of(i), token = token_of(i);
      float g = fminf(rounded(v[at]), limit);
      float u = fminf(fmaxf(rounded(v[at + 2]), -limit), limit);
      float a = __fdividef(g, 1.f + __expf(-g)) * u * weights[tile * TOKENS + token];
      v[at] = rounded(a);
      if constexpr (KIND == 1) {
        float peak = fabsf(v[at]);
#pragma unroll
        for (int step = 4; step < 32; step *= 2) peak = fmaxf(peak, __shfl_xor_sync(~0u, peak, step));
        if (lane < 4) peak_of[warp * TOKENS + token] = peak;
      }
    }
    if constexpr (KIND == 1) {
      asm volatile("bar.sync %0, 128;" ::"r"(group + 1));
#pragma unroll
      for (int i = 0; i < COUNT / 4; ++i) {
        int at = value_of(i), token = token_of(i);
        float peak = fmaxf(fmaxf(peak_of[token], peak_of[TOKENS + token]),
                           fmaxf(peak_of[2 * TOKENS + token], peak_of[3 * TOKENS + token]));
        // Up to the next power of two on the bits: a logarithm would misplace some.
        u32 bits = __float_as_uint(fmaxf(peak, 1e-4f) * (1.f / 448.f)) + 0x7FFFFFu;
        bits &= 0x7F800000u;
        v[at] = fp8(v[at], __uint_as_float(bits), __uint_as_float(0x7F000000u - bits));
      }
    }
  }

  // Turns a warp's rows by tokens into 16-byte pieces of tokens' rows, and stores those of real tokens.
  template <int COUNT> TL_DEVICE void store(int tile, int real, int column, float (&v)[COUNT / 2]) {
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    unsigned char *mine = staging + warp * kStaging;
    constexpr int kBatch = COUNT < 32 ? COUNT : 32;
    constexpr int kPieces = KIND < 2 ? 1 : 2;  // of a token
    u32 target = address(mine) + lane % 8 * kPitch + (kPieces == 2 ? lane / 8 % 2 * 16 : 0);
#pragma unroll
    for (int batch = 0; batch < COUNT; batch += kBatch) {
#pragma unroll
      for (int j = 0; j < kBatch / 8; ++j) {
        float *q = v + (batch / 8 + j) * 4;
        if constexpr (kPieces == 1)
          asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(target + j * 8 * kPitch),
                       "r"(pack(q[0], q[1])) : "memory");
        else
          asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(
                           target + j * 8 * kPitch), "r"(pack(q[0], q[1])), "r"(pack(q[2], q[3])) : "memory");
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kBatch * kPieces; i += 32) {
        int piece = i + lane, token = piece / kPieces, part = piece % kPieces;
        if (piece < kBatch * kPieces && batch + token < real)
          *(uint4 *)(out + (size_t)(tile * TOKENS + batch + token) * OUT + column + part * 8) =
              *(const uint4 *)(mine + token * kPitch + part * 16);
      }
      __syncwarp();
    }
  }

  // One item.
  template <int COUNT> TL_DEVICE void work(Place<STAGES> &here, int item, int real) {
    float c[BLOCKS][COUNT / 2];
    consume<COUNT>(here, c);
    int tile = item / kBlockRows, block_row = item % kBlockRows;
    int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int block = 0; block < BLOCKS; ++block) {
      int rows64 = block_row * kTiles + group * BLOCKS + block;
      if constexpr (KIND < 2) {
        swiglu<COUNT>(tile, c[block]);
        store<COUNT>(tile, real, rows64 * 32 + warp * 8, c[block]);
      } else {
        store<COUNT>(tile, real, rows64 * 64 + warp * 16, c[block]);
      }
    }
  }

  TL_DEVICE void run(unsigned char *memory, int tiles) {
    place_memory(memory);
    int items = tiles * kBlockRows;
    if (threadIdx.x >= kConsumers) {
      if constexpr (kLend) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(GROUPS == 4 ? 32 : 40));
      produce(items);
    } else {
      if constexpr (kLend) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(GROUPS == 4 ? 112 : 232));
      Place<STAGES> here;
      for (int item = blockIdx.x; item < items; item += gridDim.x) {
        int tile = item / kBlockRows, used = expert[tile], real = 0;
        // Real slots come first in a tile, and fewer products do where they fill at most half or a quarter of it.
#pragma unroll
        for (int i = 0; i < TOKENS; i += 32) {
          int token = i + threadIdx.x % 32;
          real += __popc(__ballot_sync(~0u, token < TOKENS && rows[tile * TOKENS + token] >= 0));
        }
        if (used < 0) continue;
        if (TOKENS > 16 && real <= TOKENS / 4)
          work<(TOKENS > 16 ? TOKENS / 4 : TOKENS)>(here, item, real);
        else if (TOKENS > 8 && real <= TOKENS / 2)
          work<(TOKENS > 8 ? TOKENS / 2 : TOKENS)>(here, item, real);
        else
          work<TOKENS>(here, item, real);
      }
    }
  }
};

template <int... NUMBERS>
TL_DEVICE void run(unsigned char *memory, const bfloat16_t *x, const int *rows, const float *weights, const int *expert,
                   const unsigned char *w, const unsigned char *s, bfloat16_t *out, int tiles, int top_k, float limit) {
  Gemm<NUMBERS...> gemm;
  gemm.x = x, gemm.rows = rows, gemm.weights = weights, gemm.expert = expert;
  gemm.w = w, gemm.s = s, gemm.out = out, gemm.top_k = top_k, gemm.limit = limit;
  gemm.run(memory, tiles);
}

}  // namespace experts
"""
