"""CUDA that the attention kernels call: conversions on bits, and what ends a row."""

SOURCE = r"""
// Keys in shared memory are their values times 2^-7, which lets one product apply a scale in bf16's range.

// Two scale bytes of NVFP4 (e4m3) to bf16 scales * 2^119.
static __device__ __forceinline__ unsigned fm_kv_scales(unsigned bytes) {
  // Code bits moved under bf16's exponent are the value times 2^-120.
  unsigned scales = ((bytes & 0x7F) << 4) | ((bytes & 0x7F00) << 12);
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scales) : "r"(scales), "r"(0x7B807B80u));  // 2^120
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(scales) : "r"(scales), "r"(0x7B007B00u));  // 2^119
  return scales;
}

// Eight e2m1 codes, lowest nibble first, times one of fm_kv_scales: exact.
static __device__ __forceinline__ void fm_kv_values(void *out, unsigned codes, unsigned scales, int which) {
  unsigned *values = reinterpret_cast<unsigned *>(out);
  unsigned even = codes & 0x0F0F0F0F, odd = (codes >> 4) & 0x0F0F0F0F;
  unsigned scale = __byte_perm(scales, 0, which ? 0x3232 : 0x1010);
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    // An even code in the lower half, its odd neighbour in the upper one; the bytes above them copy sign bits, zeros.
    unsigned pair;
    asm("prmt.b32 %0, %1, %2, %3;" : "=r"(pair) : "r"(even), "r"(odd), "r"(0xC480 + 0x1111 * j));
    // Its sign moves to the top, and the rest under bf16's exponent, which is the value times 2^-126.
    unsigned bits = (pair * 0x1040u) & 0x81C081C0u;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(values[j]) : "r"(bits), "r"(scale));
  }
}

// Eight e4m3 codes, lowest byte first, times 2^-7 and the power of two whose exponent byte is given: exact.
static __device__ __forceinline__ void fm_window_values(void *out, unsigned low, unsigned high,
                                                        unsigned exponent) {
  unsigned *values = reinterpret_cast<unsigned *>(out), scale = exponent * 0x00800080u;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    unsigned pair = __byte_perm(j < 2 ? low : high, 0, j & 1 ? 0x3424 : 0x1404);
    unsigned bits = (pair & 0x80008000u) | ((pair >> 4) & 0x07F007F0u), value;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(value) : "r"(bits), "r"(0x78007800u));  // 2^113
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(values[j]) : "r"(value), "r"(scale));
  }
}

// Whether any of a warp's sums decays.
static __device__ __forceinline__ int fm_decays(const float *decay) {
  return __any_sync(0xFFFFFFFFu, decay[0] != 1.f || decay[1] != 1.f);
}

// What the sums of a head over one half of its keys [0:64] and over the other [64:128] are multiplied by in the
// result, from the halves' peaks and totals, [0:64] and [64:128] too.
static __device__ __forceinline__ void fm_shares(float *shares, const float *peaks, const float *totals,
                                                 const float *sink, float factor, int halves, int t) {
  if (t >= 64) return;
  float peak0 = peaks[t] * factor, peak1 = halves == 2 ? peaks[64 + t] * factor : peak0;
  float total1 = halves == 2 ? totals[64 + t] : 0.f, sink_logit = sink[t] * 1.4426950408889634f;
  float top = fmaxf(fmaxf(peak0, peak1), sink_logit);
  float share0 = exp2f(peak0 - top), share1 = exp2f(peak1 - top);
  float sum = fmaf(total1, share1, totals[t] * share0) + exp2f(sink_logit - top);
  float scale = 128.f / fmaxf(sum, 1e-30f);  // without any key and any sink: zeros
  shares[t] = share0 * scale;
  shares[64 + t] = share1 * scale;
}

// Of sums of 64 x 256 a thread holds rows r and r + 8, and of each the pairs of columns 8 i + 2 (t % 4).
static __device__ __forceinline__ int fm_row(int t) { return (t >> 5) * 16 + ((t & 31) >> 2); }

static __device__ __forceinline__ void fm_weigh(float *all, const float *shares, int t) {
  float upper = shares[fm_row(t)], lower = shares[fm_row(t) + 8];
#pragma unroll
  for (int i = 0; i < 128; ++i) all[i] *= i & 2 ? lower : upper;
}

// An ordinary load of what fm_keep stored would leave it in registers.
static __device__ __forceinline__ float4 fm_load(const float4 *from) {
  float4 value;
  asm volatile("ld.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(value.x), "=f"(value.y), "=f"(value.z), "=f"(value.w)
               : "l"(from)
               : "memory");
  return value;
}

// Copies the 128 registers of each of 128 threads to memory; fm_merge finds them.
static __device__ __forceinline__ void fm_keep(const float *all, float *kept, int t) {
  float4 *to = reinterpret_cast<float4 *>(kept) + t;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float *sums = all + i * 4;
    to[i * 128] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  }
}

// Adds kept sums to weighted ones.
static __device__ __forceinline__ void fm_merge(float *all, const void *kept, const float *shares, int t) {
  const float4 *from = reinterpret_cast<const float4 *>(kept) + t;
  float upper = shares[fm_row(t)], lower = shares[fm_row(t) + 8];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float4 other = fm_load(from + i * 128);
    float *sums = all + i * 4;
    sums[0] = fmaf(other.x, upper, sums[0]);
    sums[1] = fmaf(other.y, upper, sums[1]);
    sums[2] = fmaf(other.z, lower, sums[2]);
    sums[3] = fmaf(other.w, lower, sums[3]);
  }
}

// The same, of weighted kept sums and others: what fm_weigh and fm_merge make of them with the roles exchanged.
static __device__ __forceinline__ void fm_merge_into_kept(float *all, const void *kept, const float *shares,
                                                          int t) {
  const float4 *from = reinterpret_cast<const float4 *>(kept) + t;
  float upper0 = shares[fm_row(t)], lower0 = shares[fm_row(t) + 8];
  float upper1 = shares[64 + fm_row(t)], lower1 = shares[64 + fm_row(t) + 8];
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    float4 other = fm_load(from + i * 128);
    float *sums = all + i * 4;
    sums[0] = fmaf(sums[0], upper1, other.x * upper0);
    sums[1] = fmaf(sums[1], upper1, other.y * upper0);
    sums[2] = fmaf(sums[2], lower1, other.z * lower0);
    sums[3] = fmaf(sums[3], lower1, other.w * lower0);
  }
}

// Turns the last 64 of 256 columns back; a thread holds both numbers of a pair.
static __device__ __forceinline__ void fm_turn_back(float *all, const float *cos, const float *sin, int t) {
#pragma unroll
  for (int i = 96; i < 128; i += 2) {
    int pair = (i - 96) / 4 * 4 + (t & 3);
    float x = all[i], y = all[i + 1], c = cos[pair], s = sin[pair];
    all[i] = x * c + y * s;
    all[i + 1] = y * c - x * s;
  }
}

// Rounds and writes 256 columns of 64 rows of 512, 32 at a time through a warp's 16 rows of shared memory. Those are 40
// columns wide, which puts the rows of a store in different banks.
static __device__ __forceinline__ void fm_write(const float *all, void *shared, void *out, int t) {
  unsigned *tile = reinterpret_cast<unsigned *>(shared) + (t >> 5) * 320;
  int lane = t & 31, row = lane >> 2, column = lane & 3;
  uint4 *to = reinterpret_cast<uint4 *>(out) + ((t >> 5) * 16 + row) * 64 + column;
#pragma unroll
  for (int c = 0; c < 8; ++c) {
    const float *sums = all + c * 16;
    __syncwarp();
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      unsigned upper, lower;
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(upper) : "f"(sums[4 * j + 1]), "f"(sums[4 * j]));
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(lower) : "f"(sums[4 * j + 3]), "f"(sums[4 * j + 2]));
      tile[row * 20 + j * 4 + column] = upper;
      tile[(row + 8) * 20 + j * 4 + column] = lower;
    }
    __syncwarp();
    to[c * 4] = *reinterpret_cast<const uint4 *>(tile + row * 20 + column * 4);
    to[c * 4 + 512] = *reinterpret_cast<const uint4 *>(tile + (row + 8) * 20 + column * 4);
  }
}

// Shared memory of another block of the cluster.
static __device__ __forceinline__ unsigned fm_address(const void *shared, int block) {
  unsigned own = (unsigned)__cvta_generic_to_shared(shared), theirs;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(own), "r"(block));
  return theirs;
}

// Fetches a half's 64 numbers.
static __device__ __forceinline__ void fm_fetch(float *shared, int block, int t) {
  float value;
  if (t >= 64) return;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(fm_address(shared + t, block)));
  shared[t] = value;
}

// fm_keep to another block.
static __device__ __forceinline__ void fm_send(const float *all, void *shared, int block, int t) {
  unsigned to = fm_address(shared, block) + t * 16;
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    const float *sums = all + i * 4;
    asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(to + i * 2048), "f"(sums[0]),
                 "f"(sums[1]), "f"(sums[2]), "f"(sums[3]));
  }
}
"""
