// The instructions that the kernels are made of. A host that emulates them names a file with its own (EMULATION).
typedef unsigned int u32;
typedef unsigned short u16;

#ifdef EMULATION
#include EMULATION
#else
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]
#define BARRIER() __syncthreads()

// acc [16, 8] += a [16, 16] b [16, 8]
__device__ __forceinline__ void mma(float* acc, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (BFLOAT16) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(acc[0]), "+f"(acc[1]), "+f"(acc[2]), "+f"(acc[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

// Two numbers, rounded to the dtype of x.
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  if constexpr (BFLOAT16) asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}

__device__ __forceinline__ float unpack(u16 number) {
  float value;
  if constexpr (BFLOAT16) value = __uint_as_float(static_cast<u32>(number) << 16);
  else asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(number));
  return value;
}

// Four 8 x 8 matrices from shared memory; each lane gives the address of one row of one of them.
__device__ __forceinline__ void load_matrices(u32* r, const u16* row) {
  u32 address = static_cast<u32>(__cvta_generic_to_shared(row));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}

// The transpose of an 8 x 8 matrix, of which lane (g, q) holds columns 2 q and 2 q + 1 of row g.
__device__ __forceinline__ u32 transposed(u32 row) {
  u32 column;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(column) : "r"(row));
  return column;
}
#endif

constexpr __host__ __device__ int ceil_div(int n, int divisor) { return (n + divisor - 1) / divisor; }
constexpr __host__ __device__ int round_up(int n, int divisor) { return ceil_div(n, divisor) * divisor; }

constexpr __host__ __device__ int common_divisor(int n, int m) { return m ? common_divisor(m, n % m) : n; }

// N consecutive numbers, two to a register.
template <int N>
struct Numbers {
  u32 pair[N / 2];
};

// An `end` behind every column.
constexpr int NO_END = 0x7fffffff;

// Numbers [column, column + N) of a row, with zeros from `end` on. VEC numbers are read at a time: rows, `column` and
// `end` are multiples of it. `__restrict__` holds for rows in shared memory, too: nothing writes to them before the next
// barrier.
template <int N, int VEC>
__device__ __forceinline__ Numbers<N> load_columns(const u16* __restrict__ row, int column, int end) {
  Numbers<N> numbers;
  constexpr int WIDE = common_divisor(N, VEC);
#pragma unroll
  for (int i = 0; i < N; i += WIDE) {
    const bool inside = column + i < end;
    const u16* p = row + column + i;
    if constexpr (WIDE == 8) {
      uint4 v = inside ? *reinterpret_cast<const uint4*>(p) : uint4{0, 0, 0, 0};
      numbers.pair[i / 2] = v.x, numbers.pair[i / 2 + 1] = v.y;
      numbers.pair[i / 2 + 2] = v.z, numbers.pair[i / 2 + 3] = v.w;
    } else if constexpr (WIDE == 4) {
      uint2 v = inside ? *reinterpret_cast<const uint2*>(p) : uint2{0, 0};
      numbers.pair[i / 2] = v.x, numbers.pair[i / 2 + 1] = v.y;
    } else if constexpr (WIDE == 2) {
      numbers.pair[i / 2] = inside ? *reinterpret_cast<const u32*>(p) : 0;
    } else {
      const u32 number = inside ? *p : 0;
      numbers.pair[i / 2] = i % 2 ? numbers.pair[i / 2] | number << 16 : number;
    }
  }
  return numbers;
}

// The inverse: N numbers to columns below `end`.
template <int N, int VEC>
__device__ __forceinline__ void store_columns(u16* __restrict__ row, int column, int end, const Numbers<N>& numbers) {
  constexpr int WIDE = common_divisor(N, VEC);
#pragma unroll
  for (int i = 0; i < N; i += WIDE) {
    if (column + i >= end) continue;
    u16* p = row + column + i;
    if constexpr (WIDE == 8)
      *reinterpret_cast<uint4*>(p) =
          uint4{numbers.pair[i / 2], numbers.pair[i / 2 + 1], numbers.pair[i / 2 + 2], numbers.pair[i / 2 + 3]};
    else if constexpr (WIDE == 4) *reinterpret_cast<uint2*>(p) = uint2{numbers.pair[i / 2], numbers.pair[i / 2 + 1]};
    else if constexpr (WIDE == 2) *reinterpret_cast<u32*>(p) = numbers.pair[i / 2];
    else *p = static_cast<u16>(numbers.pair[i / 2] >> 16 * (i % 2));
  }
}
