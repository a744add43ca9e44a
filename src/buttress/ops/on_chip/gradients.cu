// The gradients of both weights of a pair of factors, from x and dy alone: z and dz are computed again and stay in
// shared memory.
//
// Both gradients split into independent parts, one for each pair of a block c of x and a block b of dy:
//   dz[c, b, s] = sum_a L[b, a, c, s] dy[b, a]      dR[c, b, s, d] = sum_tokens dz[c, b, s] x[c, d]
//    z[c, b, s] = sum_d R[c, b, s, d]  x[c, d]      dL[b, a, c, s] = sum_tokens  z[c, b, s] dy[b, a]
// A program has a rectangle of C_GROUP x B_GROUP such pairs and keeps its gradients in registers, in float32. Every
// program reads its blocks of x and dy for every `n_lanes`-th tile of tokens, so x is read once for each group of
// blocks b, and dy once for each group of blocks c. Exchanging (c, d, x, R, dz) with (b, a, dy, L, z) changes
// nothing: both sides run through the same two functions, `expand` and `accumulate`.

constexpr int T = 16 * TOKEN_TILES, T_STRIDE = T + 8;
constexpr int C_GROUPS = ceil_div(C, C_GROUP), B_GROUPS = ceil_div(B, B_GROUP), RECTANGLES = C_GROUPS * B_GROUPS;
// Rows of shared memory are padded by 16 bytes, so that eight rows never share a bank.
constexpr int DP = round_up(D, 16), AP = round_up(A, 16);
constexpr int X_STRIDE = C_GROUP * DP + 8, DY_STRIDE = B_GROUP * AP + 8;
constexpr int ROWS1 = round_up(B_GROUP * S, 16), ROWS2 = round_up(C_GROUP * S, 16);
// Rows of z and dz between two units: a few more, so that lanes that write the same row of several units use different
// banks.
constexpr int UNIT_ROWS1 = ROWS1 + S % 8, UNIT_ROWS2 = ROWS2 + S % 8;
constexpr int X_NUMBERS = T * X_STRIDE, DY_NUMBERS = T * DY_STRIDE;
constexpr int DZ_NUMBERS = C_GROUP * UNIT_ROWS1 * T_STRIDE, Z_NUMBERS = B_GROUP * UNIT_ROWS2 * T_STRIDE;
constexpr int W1_NUMBERS = C_GROUP * ROWS1 * DP, W2_NUMBERS = B_GROUP * ROWS2 * AP;
constexpr int ITEMS1 = C_GROUP * ROWS1 / 16, ITEMS2 = B_GROUP * ROWS2 / 16;
constexpr int OWN1 = ceil_div(ITEMS1, WARPS), OWN2 = ceil_div(ITEMS2, WARPS);
static_assert(SHARED_BYTES == 2 * (X_NUMBERS + DY_NUMBERS + DZ_NUMBERS + Z_NUMBERS + W1_NUMBERS + W2_NUMBERS),
              "the host allocates what the kernel uses");

// Copy columns [first, first + UNITS * SIZE) of some tokens, in rows of WIDTH numbers, to rows of STRIDE numbers in
// shared memory; each block of SIZE numbers is padded to PADDED numbers. Zeros stand for tokens and columns that do
// not exist. The copy is split in two, so that the loads are in flight while the program computes.
template <int UNITS, int SIZE, int PADDED, int WIDTH, int STRIDE, int VEC>
struct TileCopy {
  static constexpr int PIECES = T * UNITS * (PADDED / 8), OWN = ceil_div(PIECES, 32 * WARPS);
  Numbers<8> held[OWN];

  __device__ __forceinline__ void load(const u16* __restrict__ source, int first, long long first_token,
                                       long long n_tokens) {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int piece = i * 32 * WARPS + threadIdx.x, number = piece % (PADDED / 8) * 8;
      const int unit = piece / (PADDED / 8) % UNITS, t = piece / (PADDED / 8) / UNITS;
      const int start = first + unit * SIZE, end = start + SIZE < WIDTH ? start + SIZE : WIDTH;
      const bool exists = piece < PIECES && first_token + t < n_tokens;
      held[i] = load_columns<8, VEC>(source + (first_token + t) * WIDTH, start + number, exists ? end : 0);
    }
  }
  __device__ __forceinline__ void store(u16* tile) const {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int piece = i * 32 * WARPS + threadIdx.x, number = piece % (PADDED / 8) * 8;
      const int unit = piece / (PADDED / 8) % UNITS, t = piece / (PADDED / 8) / UNITS;
      if (piece < PIECES) store_columns<8, 8>(tile + t * STRIDE, unit * PADDED + number, NO_END, held[i]);
    }
  }
};

// z of one side: for each unit (a block c, say) rows (other, s) of its weight times the tile, [rows, tokens], written
// to target[other][unit * S + s][token], where `other` has TARGET_ROWS rows.
template <int UNITS, int OTHERS, int ROWS, int TARGET_ROWS, int PADDED, int STRIDE>
__device__ __forceinline__ void expand(const u16* weights, const u16* tile, u16* target, float scale) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
  for (int item = warp; item < UNITS * ROWS / 16; item += WARPS) {
    const int unit = item / (ROWS / 16), first_row = item % (ROWS / 16) * 16;
    float acc[2 * TOKEN_TILES][4] = {};
#pragma unroll
    for (int k = 0; k < PADDED; k += 16) {
      const Numbers<8> w = load_columns<8, 8>(weights, ((item * PADDED + k) / 16 * 16 * 16) + lane * 8, NO_END);
#pragma unroll
      for (int t = 0; t < TOKEN_TILES; t++) {
        u32 b[4];
        load_matrices(b, tile + (t * 16 + lane % 8 + lane / 16 * 8) * STRIDE + unit * PADDED + k + lane / 8 % 2 * 8);
        mma(acc[2 * t], w.pair[0], w.pair[1], w.pair[2], w.pair[3], b[0], b[1]);
        mma(acc[2 * t + 1], w.pair[0], w.pair[1], w.pair[2], w.pair[3], b[2], b[3]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = first_row + half * 8 + g;
      if (row >= OTHERS * S) continue;
      u16* out = target + (row / S * TARGET_ROWS + unit * S + row % S) * T_STRIDE + 2 * q;
#pragma unroll
      for (int t = 0; t < 2 * TOKEN_TILES; t++)
        *reinterpret_cast<u32*>(out + t * 8) = pack(acc[t][2 * half] * scale, acc[t][2 * half + 1] * scale);
    }
  }
}

// acc [16 rows of a unit, PADDED] += z [rows, tokens] tile [tokens, PADDED] for the items of a warp, each of which is
// 16 rows of z. A unit has UNIT_ROWS rows, of which ROWS count.
template <int UNITS, int ROWS, int UNIT_ROWS, int PADDED, int STRIDE, int OWN>
__device__ __forceinline__ void accumulate(float (&acc)[OWN][PADDED / 8][4], const u16* z, const u16* tile) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int item = i * WARPS + warp;
    if (item >= UNITS * ROWS / 16) continue;
    const int unit = item / (ROWS / 16), row = unit * UNIT_ROWS + item % (ROWS / 16) * 16 + lane % 16;
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; t++) {
      u32 a[4];
      load_matrices(a, z + row * T_STRIDE + t * 16 + lane / 16 * 8);
#pragma unroll
      for (int n = 0; n < PADDED; n += 16) {
        u32 b[4];
        load_transposed_matrices(b, tile + (t * 16 + lane % 16) * STRIDE + unit * PADDED + n + lane / 16 * 8);
        mma(acc[i][n / 8], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma(acc[i][n / 8 + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }
}

// Rows (other, s) of the weights of a side's units, in the order in which `expand` reads them, with zeros for blocks
// that do not exist. `at` gives the place of (unit, other, s, k).
template <int UNITS, int OTHERS, int ROWS, int SIZE, int PADDED, class At>
__device__ __forceinline__ void load_weights(u16* weights, const u16* __restrict__ source, int first_unit,
                                             int unit_count, int first_other, int other_count, At at) {
  for (int i = threadIdx.x; i < UNITS * ROWS * PADDED; i += 32 * WARPS) {
    const int item = i / (16 * PADDED), lane = i / 8 % 32, register_index = i % 8 / 2;
    const int unit = first_unit + item / (ROWS / 16);
    const int row = item % (ROWS / 16) * 16 + register_index % 2 * 8 + lane / 4;
    const int k = i % (16 * PADDED) / 256 * 16 + register_index / 2 * 8 + lane % 4 * 2 + i % 2;
    const int other = first_other + row / S;
    const bool exists = unit < unit_count && row < OTHERS * S && other < other_count && k < SIZE;
    weights[i] = exists ? source[at(unit, other, row % S, k)] : 0;
  }
}

// Write a warp's sums; `at` as above.
template <int UNITS, int OTHERS, int ROWS, int SIZE, int PADDED, int OWN, class At>
__device__ __forceinline__ void store_sums(float* __restrict__ sums, const float (&acc)[OWN][PADDED / 8][4],
                                           int first_unit, int unit_count, int first_other, int other_count, At at) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const int item = i * WARPS + warp, unit = first_unit + item / (ROWS / 16);
    if (item >= UNITS * ROWS / 16 || unit >= unit_count) continue;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = item % (ROWS / 16) * 16 + half * 8 + g, other = first_other + row / S;
      if (row >= OTHERS * S || other >= other_count) continue;
#pragma unroll
      for (int n = 0; n < PADDED / 8; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int k = n * 8 + q * 2 + e;
          if (k < SIZE) sums[at(unit, other, row % S, k)] = acc[i][n][2 * half + e];
        }
    }
  }
}

// Sums over the tokens of each lane (a set of tiles, not a thread): the gradients of scale1 R and of scale2 L in
// float32, and of the bias.
extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
weight_gradients(const u16* __restrict__ x, const u16* __restrict__ dy, const u16* __restrict__ first,
                 const u16* __restrict__ second, const float* __restrict__ scale1, const float* __restrict__ scale2,
                 float* __restrict__ sums1, float* __restrict__ sums2, float* __restrict__ bias_sums, long long n_lanes,
                 long long n_tokens) {
  DYNAMIC_SHARED(shared_units);
  u16* x_tile = reinterpret_cast<u16*>(shared_units);
  u16* dy_tile = x_tile + X_NUMBERS;
  u16* dz = dy_tile + DY_NUMBERS;
  u16* z = dz + DZ_NUMBERS;
  u16* weights1 = z + Z_NUMBERS;
  u16* weights2 = weights1 + W1_NUMBERS;
  const int rectangle = blockIdx.x % RECTANGLES, lane_of_tokens = blockIdx.x / RECTANGLES;
  const int first_c = rectangle % C_GROUPS * C_GROUP, first_b = rectangle / C_GROUPS * B_GROUP;
  const float s1 = SCALED ? *scale1 : 1.f, s2 = SCALED ? *scale2 : 1.f;
  auto at1 = [](int c, int b, int s, int d) { return (c * (B * S) + b * S + s) * D + d; };
  auto at2 = [](int b, int c, int s, int a) { return (b * A + a) * (C * S) + c * S + s; };
  // Rows that pad dz and z are never written.
  for (int i = threadIdx.x; i < (DZ_NUMBERS + Z_NUMBERS) / 8; i += 32 * WARPS)
    reinterpret_cast<uint4*>(dz)[i] = uint4{0, 0, 0, 0};
  load_weights<C_GROUP, B_GROUP, ROWS1, D, DP>(weights1, first, first_c, C, first_b, B, at1);
  load_weights<B_GROUP, C_GROUP, ROWS2, A, AP>(weights2, second, first_b, B, first_c, C, at2);

  float acc1[OWN1][DP / 8][4] = {}, acc2[OWN2][AP / 8][4] = {};
  constexpr int OWN_COLUMNS = ceil_div(B_GROUP * A, 32 * WARPS);
  float bias_acc[OWN_COLUMNS] = {};
  TileCopy<C_GROUP, D, DP, D_IN, X_STRIDE, VEC_IN> x_copy;
  TileCopy<B_GROUP, A, AP, D_OUT, DY_STRIDE, VEC_OUT> dy_copy;
  const long long step = static_cast<long long>(n_lanes) * T;
  long long first_token = static_cast<long long>(lane_of_tokens) * T;
  if (first_token < n_tokens) {
    x_copy.load(x, first_c * D, first_token, n_tokens);
    dy_copy.load(dy, first_b * A, first_token, n_tokens);
  }
  for (; first_token < n_tokens; first_token += step) {
    BARRIER();
    x_copy.store(x_tile);
    dy_copy.store(dy_tile);
    BARRIER();
    if (first_token + step < n_tokens) {
      x_copy.load(x, first_c * D, first_token + step, n_tokens);
      dy_copy.load(dy, first_b * A, first_token + step, n_tokens);
    }
    expand<C_GROUP, B_GROUP, ROWS1, UNIT_ROWS2, DP, X_STRIDE>(weights1, x_tile, z, s1);
    expand<B_GROUP, C_GROUP, ROWS2, UNIT_ROWS1, AP, DY_STRIDE>(weights2, dy_tile, dz, s2);
    if (BIASED && first_c == 0)
#pragma unroll
      for (int i = 0; i < OWN_COLUMNS; i++) {
        const int column = i * 32 * WARPS + threadIdx.x;
        if (column < B_GROUP * A)
          for (int t = 0; t < T; t++) bias_acc[i] += unpack(dy_tile[t * DY_STRIDE + column / A * AP + column % A]);
      }
    BARRIER();
    accumulate<C_GROUP, ROWS1, UNIT_ROWS1, DP, X_STRIDE>(acc1, dz, x_tile);
    accumulate<B_GROUP, ROWS2, UNIT_ROWS2, AP, DY_STRIDE>(acc2, z, dy_tile);
  }
  const long long lane = lane_of_tokens;
  store_sums<C_GROUP, B_GROUP, ROWS1, D, DP>(sums1 + lane * (C * B * S * D), acc1, first_c, C, first_b, B, at1);
  store_sums<B_GROUP, C_GROUP, ROWS2, A, AP>(sums2 + lane * (C * B * S * A), acc2, first_b, B, first_c, C, at2);
  if (BIASED && first_c == 0)
#pragma unroll
    for (int i = 0; i < OWN_COLUMNS; i++) {
      const int column = i * 32 * WARPS + threadIdx.x;
      if (column < B_GROUP * A && first_b * A + column < D_OUT)
        bias_sums[lane * D_OUT + first_b * A + column] = bias_acc[i];
    }
}
