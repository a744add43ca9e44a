// y = scale2 L (scale1 R x) + bias for a pair of factors, with the intermediate z in shared memory alone.
//
// x is C blocks of D numbers; block c of R makes B * S numbers of them, (b, s) in this order; block b of L takes the
// C * S numbers (c, s) of z that belong to b and makes A outputs of them. The input gradient is the same with the roles
// of the factors exchanged, so a program is compiled for either direction, with C, D, B, A as they are in it.
//
// A program takes 16 * M_TILES tokens at a time. Each warp keeps the tokens' x of some blocks c in registers. The
// outputs are computed in groups of GROUP blocks b: every warp multiplies its x by the group's columns of R and writes
// z of the group to shared memory; after a barrier, warps take blocks b of the group and multiply z by L. z has two
// buffers, so that one barrier per group is enough.
//
// The order of k inside a product does not matter, if it is the same for both operands. Lane (g, q) holds the numbers
// k = q * LANE, ..., q * LANE + LANE - 1 of a chunk, so x and z are read as they lie in memory. `arrange_weights`
// stores the weights in the order in which lanes need them, padded with zeros, and permutes the outputs so that those
// of a lane are consecutive.

constexpr int K2 = C * S;
constexpr __host__ __device__ int lane_numbers(int k) { return ceil_div(k, 16) % 2 ? 4 : 8; }
// Numbers of a lane, numbers of a chunk (four lanes) and chunks of the inner dimension, for each factor.
constexpr int LANE1 = lane_numbers(D), CHUNK1 = 4 * LANE1, CHUNKS1 = ceil_div(D, CHUNK1);
constexpr int LANE2 = lane_numbers(K2), CHUNK2 = 4 * LANE2, CHUNKS2 = ceil_div(K2, CHUNK2);
constexpr int TOKENS = 16 * M_TILES;
constexpr int GROUPS = ceil_div(B, GROUP), COLUMN_TILES = GROUP * S / 8;
constexpr int OWN = ceil_div(C, WARPS);
constexpr int OUT_TILES = ceil_div(A, 8);
// 16-byte units in a row of z: a multiple of 8, so that the swizzle below stays inside a row.
constexpr int ROW_UNITS = round_up(CHUNKS2 * CHUNK2, 64) / 8;
constexpr int Z_UNITS = GROUP * TOKENS * ROW_UNITS;
// Warps that share a block b, and the token tiles of each.
constexpr int SHARING = WARPS > GROUP ? WARPS / GROUP : 1, OWN_TILES = ceil_div(M_TILES, SHARING);
static_assert(GROUP * S % 8 == 0, "the columns of a group fill whole tiles");
static_assert(SHARED_BYTES == 16 * BUFFERS * Z_UNITS, "the host allocates what the kernel uses");

// The n-tiles of a block's outputs are taken four at a time.
constexpr __host__ __device__ int tiles_together(int first) { return OUT_TILES - first < 4 ? OUT_TILES - first : 4; }

// Numbers of the arranged weights of both factors, the first before the second.
constexpr int ARRANGED1 = GROUPS * C * COLUMN_TILES * CHUNKS1 * 32 * LANE1;
constexpr int ARRANGED2 = B * OUT_TILES * CHUNKS2 * 32 * LANE2;
static_assert(ARRANGED_NUMBERS == ARRANGED1 + ARRANGED2, "the host allocates what the kernel uses");

// z[b][k] is stored at k ^ z_shift(b), so that lanes that write the same k of neighboring blocks use different banks.
__device__ __forceinline__ int z_shift(int b) { return 2 * (b * S / 2 & 3); }

extern "C" __global__ void arrange_weights(const u16* __restrict__ first, const u16* __restrict__ second,
                                           u16* __restrict__ arranged) {
  // Without a sign, so that the last step beyond the numbers does not overflow.
  const u32 threads = gridDim.x * blockDim.x;
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < u32(ARRANGED1 + ARRANGED2); i += threads) {
    if (i < u32(ARRANGED1)) {
      int rest = i;
      const int number = rest % LANE1; rest /= LANE1;
      const int lane = rest % 32; rest /= 32;
      const int chunk = rest % CHUNKS1; rest /= CHUNKS1;
      const int tile = rest % COLUMN_TILES; rest /= COLUMN_TILES;
      const int c = rest % C, group = rest / C;
      const int column = tile * 8 + lane / 4, b = group * GROUP + column / S, s = column % S;
      const int k = chunk * CHUNK1 + lane % 4 * LANE1 + number;
      const bool inside = b < B && k < D;
      const int at = TRANSPOSED ? (c * D + k) * (B * S) + b * S + s : (c * (B * S) + b * S + s) * D + k;
      arranged[i] = inside ? first[at] : 0;
    } else {
      int rest = i - ARRANGED1;
      const int number = rest % LANE2; rest /= LANE2;
      const int lane = rest % 32; rest /= 32;
      const int chunk = rest % CHUNKS2; rest /= CHUNKS2;
      const int tile = rest % OUT_TILES, b = rest / OUT_TILES;
      // Column n of tile `tile` is the output a that makes the outputs of lane q, columns 2 q and 2 q + 1 of up to four
      // tiles, consecutive: a = 8 start + q * (2 * together) + 2 * (tile - start) + n % 2, where q = n / 2.
      const int start = tile / 4 * 4, together = tiles_together(start), n = lane / 4;
      const int a = start * 8 + n / 2 * 2 * together + 2 * (tile - start) + n % 2;
      const int k = (chunk * CHUNK2 + lane % 4 * LANE2 + number) ^ z_shift(b);
      const bool inside = a < A && k < K2;
      const int at = TRANSPOSED ? (b * K2 + k) * A + a : (b * A + a) * K2 + k;
      arranged[i] = inside ? second[at] : 0;
    }
  }
}

// acc [16, 8] += a [16, chunk] w [chunk, 8]; `upper` and `lower` are rows g and g + 8 of a.
template <int N>
__device__ __forceinline__ void multiply(float* acc, const Numbers<N>& upper, const Numbers<N>& lower,
                                         const Numbers<N>& w) {
#pragma unroll
  for (int h = 0; h < N / 2; h += 2)
    mma(acc, upper.pair[h], lower.pair[h], upper.pair[h + 1], lower.pair[h + 1], w.pair[h], w.pair[h + 1]);
}

// Where number k of a token is stored, in the part of z that belongs to one block. Permuting the units of eight numbers
// by the token lets eight tokens be read from different banks.
__device__ __forceinline__ int z_place(int block, int token, int k) {
  const int unit = k / 8 ^ ((token & 1) << 2 | (token >> 1 & 3));
  return ((block * TOKENS + token) * ROW_UNITS + unit) * 8 + k % 8;
}

template <int TOGETHER>
__device__ __forceinline__ void outputs(const u16* z, const u16* __restrict__ arranged2, const u16* __restrict__ bias,
                                        u16* __restrict__ y, float scale, long long first_token, long long n_tokens,
                                        int block, int b, int first_tile, int first_m) {
  const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  float acc[OWN_TILES][TOGETHER][4] = {};
#pragma unroll
  for (int chunk = 0; chunk < CHUNKS2; chunk++) {
    Numbers<LANE2> w[TOGETHER];
#pragma unroll
    for (int tile = 0; tile < TOGETHER; tile++)
      w[tile] = load_columns<LANE2, 8>(
          arranged2, (((b * OUT_TILES + first_tile + tile) * CHUNKS2 + chunk) * 32 + lane) * LANE2, NO_END);
#pragma unroll
    for (int m = 0; m < OWN_TILES; m++) {
      if (first_m + m >= M_TILES) continue;
      const int token = (first_m + m) * 16 + g, k = chunk * CHUNK2 + q * LANE2;
      const Numbers<LANE2> upper = load_columns<LANE2, 8>(z, z_place(block, token, k), NO_END);
      const Numbers<LANE2> lower = load_columns<LANE2, 8>(z, z_place(block, token + 8, k), NO_END);
#pragma unroll
      for (int tile = 0; tile < TOGETHER; tile++) multiply(acc[m][tile], upper, lower, w[tile]);
    }
  }
  const int a = first_tile * 8 + q * 2 * TOGETHER, column = b * A + a;
  const int end = (b + 1) * A < D_OUT ? (b + 1) * A : D_OUT;
#pragma unroll
  for (int m = 0; m < OWN_TILES; m++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const long long token = first_token + (first_m + m) * 16 + half * 8 + g;
      if (first_m + m >= M_TILES || token >= n_tokens) continue;
      Numbers<2 * TOGETHER> values;
#pragma unroll
      for (int tile = 0; tile < TOGETHER; tile++) {
        float low = acc[m][tile][2 * half] * scale, high = acc[m][tile][2 * half + 1] * scale;
        if constexpr (BIASED) {
          const int at = column + 2 * tile;
          low += at < end ? unpack(bias[at]) : 0.f, high += at + 1 < end ? unpack(bias[at + 1]) : 0.f;
        }
        values.pair[tile] = pack(low, high);
      }
      store_columns<2 * TOGETHER, VEC_OUT>(y + token * D_OUT, column, end, values);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, PROGRAMS)
apply_pair(const u16* __restrict__ x, const u16* __restrict__ arranged, const float* __restrict__ scale1,
           const float* __restrict__ scale2, const u16* __restrict__ bias, u16* __restrict__ y, long long n_tokens) {
  DYNAMIC_SHARED(z_units);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  const float s1 = SCALED ? *scale1 : 1.f, s2 = SCALED ? *scale2 : 1.f;
  // What pads the rows of z is multiplied by zeros, and must be finite. It is never written again.
  for (int i = threadIdx.x; i < BUFFERS * Z_UNITS; i += 32 * WARPS) z_units[i] = uint4{0, 0, 0, 0};
  BARRIER();

  Numbers<LANE1> xs[OWN][M_TILES][CHUNKS1][2];
  auto fetch = [&](long long first_token) {
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
      for (int m = 0; m < M_TILES; m++)
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS1; chunk++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const int c = warp * OWN + i, end = (c + 1) * D < D_IN ? (c + 1) * D : D_IN;
            const long long token = first_token + m * 16 + half * 8 + g;
            xs[i][m][chunk][half] = load_columns<LANE1, VEC_IN>(
                x + token * D_IN, c * D + chunk * CHUNK1 + q * LANE1, token < n_tokens ? end : 0);
          }
  };
  Numbers<LANE1> ws[OWN][COLUMN_TILES][CHUNKS1];
  auto fetch_weights = [&](int group) {
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
      for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS1; chunk++) {
          const int c = warp * OWN + i;
          const int place = (((group * C + c) * COLUMN_TILES + tile) * CHUNKS1 + chunk) * 32 + lane;
          if (c < C) ws[i][tile][chunk] = load_columns<LANE1, 8>(arranged, place * LANE1, NO_END);
        }
  };

  const long long step = static_cast<long long>(gridDim.x) * TOKENS;
  long long first_token = static_cast<long long>(blockIdx.x) * TOKENS;
  if (first_token < n_tokens) fetch(first_token);
  if (PREFETCH) fetch_weights(0);
  int buffer = 0;
  for (; first_token < n_tokens; first_token += step) {
#pragma unroll 1
    for (int group = 0; group < GROUPS; group++) {
      u16* z = reinterpret_cast<u16*>(z_units + buffer * Z_UNITS);
      if (BUFFERS > 1) buffer ^= 1;
      if (!PREFETCH) fetch_weights(group);
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const int c = warp * OWN + i;
        if (c >= C) continue;
#pragma unroll
        for (int tile = 0; tile < COLUMN_TILES; tile++)
#pragma unroll
          for (int m = 0; m < M_TILES; m++) {
            float acc[4] = {};
#pragma unroll
            for (int chunk = 0; chunk < CHUNKS1; chunk++)
              multiply(acc, xs[i][m][chunk][0], xs[i][m][chunk][1], ws[i][tile][chunk]);
            const int column = tile * 8 + q * 2;
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const u32 both = pack(acc[2 * half] * s1, acc[2 * half + 1] * s1);
              const int token = m * 16 + half * 8 + g;
              const int block = column / S, k = c * S + column % S;
              if constexpr (S % 2 == 0) {
                *reinterpret_cast<u32*>(z + z_place(block, token, k ^ z_shift(block))) = both;
              } else {
                const int next_block = (column + 1) / S, next_k = c * S + (column + 1) % S;
                z[z_place(block, token, k ^ z_shift(block))] = static_cast<u16>(both);
                z[z_place(next_block, token, next_k ^ z_shift(next_block))] = static_cast<u16>(both >> 16);
              }
            }
          }
      }
      // x of this tile is not needed any more: that of the next one arrives while L is applied.
      if (group == GROUPS - 1 && first_token + step < n_tokens) fetch(first_token + step);
      BARRIER();
      if (PREFETCH) fetch_weights(group + 1 < GROUPS ? group + 1 : 0);
      for (int block = warp / SHARING; block < GROUP; block += WARPS / SHARING) {
        const int b = group * GROUP + block, first_m = warp % SHARING * OWN_TILES;
        // Warps are left over if they are not shared evenly, or if there are more of them than tiles of tokens.
        if (b >= B || warp / SHARING >= WARPS / SHARING || first_m >= M_TILES) continue;
#pragma unroll
        for (int tile = 0; tile < OUT_TILES; tile += 4) {
          const u16* second = arranged + ARRANGED1;
          if (OUT_TILES - tile >= 4)
            outputs<4>(z, second, bias, y, s2, first_token, n_tokens, block, b, tile, first_m);
          else
            outputs<OUT_TILES % 4 ? OUT_TILES % 4 : 4>(z, second, bias, y, s2, first_token, n_tokens, block, b, tile,
                                                       first_m);
        }
      }
      if (BUFFERS == 1) BARRIER();
    }
  }
}
