// The gradients of both weights of a pair of factors, from x and dy alone: z and dz are computed again and never leave
// the chip.
//
// Both gradients split into independent parts, one for each pair of a block c of x and a block b of dy:
//   dz[c, b, s] = sum_a L[b, a, c, s] dy[b, a]      dR[c, b, s, d] = sum_tokens dz[c, b, s] x[c, d]
//    z[c, b, s] = sum_d R[c, b, s, d]  x[c, d]      dL[b, a, c, s] = sum_tokens  z[c, b, s] dy[b, a]
// A program has a rectangle of C_GROUP x B_GROUP such pairs. Every program reads its blocks of x and dy for every
// `n_lanes`-th tile of tokens, so x is read once for each group of blocks b, and dy once for each group of blocks c.
// Exchanging (c, d, x, R, dz) with (b, a, dy, L, z) changes nothing: both are a `Side`.
//
// A warp keeps in registers what belongs to its blocks: their numbers of 16 * TOKEN_TILES tokens, their weights and the
// sums of their gradients. Only z and dz, which one warp computes and another one needs, pass through shared memory, in
// two buffers, so that one barrier per tile is enough.
//
// x is the second operand of two products: in z its numbers are summed over, in dR its tokens. Lane (g, q) holds numbers
// k = q * LANE, ..., q * LANE + LANE - 1 of a chunk of token g, as they lie in memory. The order of k does not matter in
// z. For dR, `transposed` exchanges tokens and numbers among the lanes; then column n of tile h is number
// k = n / 2 * LANE + 2 h + n % 2, so that a lane has the sums of LANE consecutive numbers.

constexpr int T = 16 * TOKEN_TILES;
// Rows of z and dz are padded by 16 bytes, so that eight rows never share a bank.
constexpr int T_STRIDE = T + 8;
constexpr int C_GROUPS = ceil_div(C, C_GROUP), B_GROUPS = ceil_div(B, B_GROUP), RECTANGLES = C_GROUPS * B_GROUPS;
constexpr u32 ONES = BFLOAT16 ? 0x3f803f80 : 0x3c003c00;
constexpr __host__ __device__ int lane_numbers(int k) { return ceil_div(k, 16) % 2 ? 4 : 8; }

// One side of the rectangle: UNITS blocks of SIZE numbers, in rows of WIDTH numbers. A row of z is a pair of a block of
// the other side (there are OTHERS) and s; 16 rows of a unit are an item, the work of one warp.
template <int UNITS_, int OTHERS, int SIZE, int WIDTH, int VEC>
struct Side {
  static constexpr int UNITS = UNITS_;
  static constexpr int LANE = lane_numbers(SIZE), CHUNK = 4 * LANE, CHUNKS = ceil_div(SIZE, CHUNK);
  static constexpr int COLUMN_TILES = CHUNKS * LANE / 2;
  static constexpr int ROW_GROUPS = ceil_div(OTHERS * S, 16), ITEMS = UNITS * ROW_GROUPS;
  static constexpr int OWN = ceil_div(ITEMS, WARPS), OWN_UNITS = OWN > ROW_GROUPS ? OWN / ROW_GROUPS : 1;
  static_assert(OWN % ROW_GROUPS == 0 || ROW_GROUPS % OWN == 0, "which units a warp has is known to the compiler");
  // A few rows more than there are, so that lanes that write the same row of several units use different banks.
  static constexpr int UNIT_ROWS = 16 * ROW_GROUPS + S % 8;
  static constexpr int Z_NUMBERS = UNITS * UNIT_ROWS * T_STRIDE, WEIGHT_NUMBERS = ITEMS * CHUNKS * 64 * LANE;
  using Fragment = Numbers<LANE>;

  Fragment tile[TOKEN_TILES][OWN_UNITS][CHUNKS][2];
  Fragment next[PREFETCH ? TOKEN_TILES : 1][PREFETCH ? OWN_UNITS : 1][PREFETCH ? CHUNKS : 1][2];
  Fragment held_weights[HELD ? OWN : 1][CHUNKS][2];
  const u16* shared_weights;
  float sums[OWN][COLUMN_TILES][4];
  float bias_sums[BIASED ? OWN_UNITS : 1][COLUMN_TILES][4];

  static __device__ __forceinline__ int warp() { return threadIdx.x / 32; }
  static __device__ __forceinline__ int item(int i) { return warp() * OWN + i; }
  // The unit of an item, among those of the warp and among all.
  static constexpr __host__ __device__ int own_unit(int i) { return OWN > ROW_GROUPS ? i / ROW_GROUPS : 0; }
  static __device__ __forceinline__ int unit(int own) { return warp() * OWN / ROW_GROUPS + own; }

  // Read the numbers of the warp's units for a tile of tokens. Zeros stand for tokens and columns that do not exist.
  template <class Tile>
  __device__ __forceinline__ void load(Tile& to, const u16* __restrict__ source, int first_unit, long long first_token,
                                       long long n_tokens) const {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
      for (int own = 0; own < OWN_UNITS; own++)
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const long long token = first_token + t * 16 + half * 8 + g;
            const int start = (first_unit + unit(own)) * SIZE, end = start + SIZE < WIDTH ? start + SIZE : WIDTH;
            const bool exists = unit(own) < UNITS && token < n_tokens;
            to[t][own][chunk][half] =
                load_columns<LANE, VEC>(source + token * WIDTH, start + chunk * CHUNK + q * LANE, exists ? end : 0);
          }
  }

  // Go on to the next tile.
  __device__ __forceinline__ void advance() {
    if constexpr (PREFETCH)
#pragma unroll
      for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
        for (int own = 0; own < OWN_UNITS; own++)
#pragma unroll
          for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
            for (int half = 0; half < 2; half++) tile[t][own][chunk][half] = next[t][own][chunk][half];
  }

  // Read the weights, with zeros for blocks that do not exist. `at` gives the place of (unit, other, s, k). In shared
  // memory, every lane reads what it has written itself, so there is no barrier.
  template <class At>
  __device__ __forceinline__ void load_weights(u16* shared, const u16* __restrict__ source, int first_unit,
                                               int unit_count, int first_other, int other_count, At at) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    shared_weights = shared;
#pragma unroll
    for (int i = 0; i < OWN; i++)
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int block = first_unit + item(i) / ROW_GROUPS, row = item(i) % ROW_GROUPS * 16 + half * 8 + g;
          const int other = first_other + row / S;
          const bool exists = item(i) < ITEMS && block < unit_count && row < OTHERS * S && other < other_count;
          Fragment w;
#pragma unroll
          for (int e = 0; e < LANE; e += 2) {
            const int k = chunk * CHUNK + q * LANE + e;
            const u32 low = exists && k < SIZE ? source[at(block, other, row % S, k)] : 0;
            const u32 high = exists && k + 1 < SIZE ? source[at(block, other, row % S, k + 1)] : 0;
            w.pair[e / 2] = low | high << 16;
          }
          if (HELD) held_weights[i][chunk][half] = w;
          else if (item(i) < ITEMS) store_columns<LANE, LANE>(shared, weights_place(i, chunk, half), NO_END, w);
        }
  }
  static __device__ __forceinline__ int weights_place(int i, int chunk, int half) {
    return ((item(i) * CHUNKS + chunk) * 2 + half) * 32 * LANE + threadIdx.x % 32 * LANE;
  }

  // z of this side: rows (other, s) of the weights times the tile, written to target[other][unit * S + s][token], where
  // `other` has TARGET_ROWS rows.
  template <int TARGET_ROWS>
  __device__ __forceinline__ void expand(u16* target, float scale) const {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (item(i) >= ITEMS) continue;
      float acc[TOKEN_TILES][2][4] = {};
#pragma unroll
      for (int chunk = 0; chunk < CHUNKS; chunk++) {
        Fragment upper, lower;
        if (HELD) upper = held_weights[i][chunk][0], lower = held_weights[i][chunk][1];
        else {
          upper = load_columns<LANE, LANE>(shared_weights, weights_place(i, chunk, 0), NO_END);
          lower = load_columns<LANE, LANE>(shared_weights, weights_place(i, chunk, 1), NO_END);
        }
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
          for (int half = 0; half < 2; half++) {
            const Fragment& b = tile[t][own_unit(i)][chunk][half];
#pragma unroll
            for (int h = 0; h < LANE / 2; h += 2)
              mma(acc[t][half], upper.pair[h], lower.pair[h], upper.pair[h + 1], lower.pair[h + 1], b.pair[h],
                  b.pair[h + 1]);
          }
      }
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        const int row = item(i) % ROW_GROUPS * 16 + eight * 8 + g;
        if (row >= OTHERS * S) continue;
        u16* out = target + (row / S * TARGET_ROWS + item(i) / ROW_GROUPS * S + row % S) * T_STRIDE + 2 * q;
#pragma unroll
        for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            *reinterpret_cast<u32*>(out + t * 16 + half * 8) =
                pack(acc[t][half][2 * eight] * scale, acc[t][half][2 * eight + 1] * scale);
      }
    }
  }

  // sums [rows of a unit, numbers] += z [rows, tokens] tile [tokens, numbers], and if `sums_bias` also the tile's sums
  // over tokens: the product with a matrix of ones.
  __device__ __forceinline__ void accumulate(const u16* z, bool sums_bias) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int t = 0; t < TOKEN_TILES; t++)
#pragma unroll
      for (int own = 0; own < OWN_UNITS; own++) {
        u32 b[COLUMN_TILES][2];
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
          for (int half = 0; half < 2; half++)
            b[n][half] = transposed(tile[t][own][n / (LANE / 2)][half].pair[n % (LANE / 2)]);
#pragma unroll
        for (int i = 0; i < OWN; i++) {
          if (own_unit(i) != own || item(i) >= ITEMS) continue;
          const int row = item(i) / ROW_GROUPS * UNIT_ROWS + item(i) % ROW_GROUPS * 16 + lane % 16;
          u32 a[4];
          load_matrices(a, z + row * T_STRIDE + t * 16 + lane / 16 * 8);
#pragma unroll
          for (int n = 0; n < COLUMN_TILES; n++) mma(sums[i][n], a[0], a[1], a[2], a[3], b[n][0], b[n][1]);
          if (BIASED && sums_bias && item(i) % ROW_GROUPS == 0)
#pragma unroll
            for (int n = 0; n < COLUMN_TILES; n++) mma(bias_sums[own][n], ONES, ONES, ONES, ONES, b[n][0], b[n][1]);
        }
      }
  }

  // Number of a unit that element e of a lane's column tile n belongs to.
  static __device__ __forceinline__ int number(int n, int e) {
    return n / (LANE / 2) * CHUNK + threadIdx.x % 4 * LANE + n % (LANE / 2) * 2 + e;
  }

  // Write the sums of the warp; `at` as above.
  template <class At>
  __device__ __forceinline__ void store(float* __restrict__ to, int first_unit, int unit_count, int first_other,
                                        int other_count, At at) const {
    const int g = threadIdx.x % 32 / 4;
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const int block = first_unit + item(i) / ROW_GROUPS;
      if (item(i) >= ITEMS || block >= unit_count) continue;
#pragma unroll
      for (int eight = 0; eight < 2; eight++) {
        const int row = item(i) % ROW_GROUPS * 16 + eight * 8 + g, other = first_other + row / S;
        if (row >= OTHERS * S || other >= other_count) continue;
#pragma unroll
        for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
          for (int e = 0; e < 2; e++)
            if (number(n, e) < SIZE) to[at(block, other, row % S, number(n, e))] = sums[i][n][2 * eight + e];
      }
    }
  }

  // Write the sums over tokens, of which every row of the product with ones has a copy.
  __device__ __forceinline__ void store_bias(float* __restrict__ to, int first_unit) const {
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      if (item(i) >= ITEMS || item(i) % ROW_GROUPS || threadIdx.x % 32 >= 4) continue;
#pragma unroll
      for (int n = 0; n < COLUMN_TILES; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const int column = (first_unit + item(i) / ROW_GROUPS) * SIZE + number(n, e);
          if (number(n, e) < SIZE && column < WIDTH) to[column] = bias_sums[BIASED ? own_unit(i) : 0][n][e];
        }
    }
  }
};

using XSide = Side<C_GROUP, B_GROUP, D, D_IN, VEC_IN>;
using DySide = Side<B_GROUP, C_GROUP, A, D_OUT, VEC_OUT>;
// dz is read by the side of x, z by that of dy.
constexpr int Z_NUMBERS = XSide::Z_NUMBERS + DySide::Z_NUMBERS;
static_assert(SHARED_BYTES == 2 * (2 * Z_NUMBERS + (HELD ? 0 : XSide::WEIGHT_NUMBERS + DySide::WEIGHT_NUMBERS)),
              "the host allocates what the kernel uses");

// Sums over the tokens of each lane (a set of tiles, not a thread): the gradients of scale1 R and of scale2 L in
// float32, and of the bias.
extern "C" __global__ void __launch_bounds__(32 * WARPS, PROGRAMS)
weight_gradients(const u16* __restrict__ x, const u16* __restrict__ dy, const u16* __restrict__ first,
                 const u16* __restrict__ second, const float* __restrict__ scale1, const float* __restrict__ scale2,
                 float* __restrict__ sums1, float* __restrict__ sums2, float* __restrict__ bias_sums, long long n_lanes,
                 long long n_tokens) {
  DYNAMIC_SHARED(shared_units);
  u16* buffers = reinterpret_cast<u16*>(shared_units);
  u16* weights = buffers + 2 * Z_NUMBERS;
  const int rectangle = blockIdx.x % RECTANGLES, lane_of_tokens = blockIdx.x / RECTANGLES;
  const int first_c = rectangle % C_GROUPS * C_GROUP, first_b = rectangle / C_GROUPS * B_GROUP;
  const float s1 = SCALED ? *scale1 : 1.f, s2 = SCALED ? *scale2 : 1.f;
  auto at1 = [](int c, int b, int s, int d) { return (c * (B * S) + b * S + s) * D + d; };
  auto at2 = [](int b, int c, int s, int a) { return (b * A + a) * (C * S) + c * S + s; };
  XSide xs{};
  DySide dys{};
  xs.load_weights(weights, first, first_c, C, first_b, B, at1);
  dys.load_weights(weights + XSide::WEIGHT_NUMBERS, second, first_b, B, first_c, C, at2);

  const long long step = static_cast<long long>(n_lanes) * T;
  long long first_token = static_cast<long long>(lane_of_tokens) * T;
  if (first_token < n_tokens) {
    xs.load(xs.tile, x, first_c, first_token, n_tokens);
    dys.load(dys.tile, dy, first_b, first_token, n_tokens);
  }
  for (int buffer = 0; first_token < n_tokens; first_token += step, buffer ^= 1) {
    u16* dz = buffers + buffer * Z_NUMBERS;
    u16* z = dz + XSide::Z_NUMBERS;
    const long long next_token = first_token + step;
    if constexpr (PREFETCH)
      if (next_token < n_tokens) {
        xs.load(xs.next, x, first_c, next_token, n_tokens);
        dys.load(dys.next, dy, first_b, next_token, n_tokens);
      }
    xs.template expand<DySide::UNIT_ROWS>(z, s1);
    dys.template expand<XSide::UNIT_ROWS>(dz, s2);
    BARRIER();
    xs.accumulate(dz, false);
    dys.accumulate(z, first_c == 0);
    if constexpr (PREFETCH) {
      xs.advance();
      dys.advance();
    } else if (next_token < n_tokens) {
      xs.load(xs.tile, x, first_c, next_token, n_tokens);
      dys.load(dys.tile, dy, first_b, next_token, n_tokens);
    }
  }
  const long long lane = lane_of_tokens;
  xs.store(sums1 + lane * (C * B * S * D), first_c, C, first_b, B, at1);
  dys.store(sums2 + lane * (C * B * S * A), first_b, B, first_c, C, at2);
  if (BIASED && first_c == 0) dys.store_bias(bias_sums + lane * D_OUT, first_b);
}
