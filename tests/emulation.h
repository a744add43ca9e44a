// Runs CUDA kernels on the CPU, one program (thread block) after the other. Every thread is a fiber. Instructions of a
// whole warp wait for its 32 lanes; a barrier waits for all threads. Warps run in an order that a seed decides, so a
// missing barrier gives wrong numbers. Shared memory starts as NaN, and 64 bytes behind it must stay untouched.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct Dim { int x; };
static Dim threadIdx, blockIdx, blockDim, gridDim;

namespace emulation {
struct Fiber {
  ucontext_t context;
  std::vector<char> stack;
  bool finished = false;
  const char* waits_for = nullptr;  // the instruction that this thread waits for, or null
  const void* site = nullptr;       // where in the program that is
  void* operands = nullptr;
};
static ucontext_t scheduler;
static std::vector<Fiber> fibers;
static int current;
static uint4* shared;
// The kernel with its arguments: a function that takes the place where they are stored.
static void (*body)(const void*);
static const void* body_arguments;

[[noreturn]] inline void fail(const char* why) { std::fprintf(stderr, "emulation: %s\n", why); std::abort(); }

// Wait until every thread of the warp (or program) is at the same instruction.
inline void wait(const char* instruction, void* operands, const void* site = nullptr) {
  const int self = current;
  fibers[self].waits_for = instruction, fibers[self].operands = operands, fibers[self].site = site;
  swapcontext(&fibers[self].context, &scheduler);
}
inline void start() {
  body(body_arguments);
  fibers[current].finished = true;
  swapcontext(&fibers[current].context, &scheduler);
}
inline void resume(int thread) {
  current = thread, threadIdx.x = thread;
  swapcontext(&scheduler, &fibers[thread].context);
}

struct Mma { float* acc; unsigned a[4], b[2]; };
struct Matrices { unsigned* registers; const uint16_t* row; };
struct Transpose { unsigned row, column; };
inline float number(unsigned bits);
inline void execute_mma(Fiber* lanes) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const Mma& o = *static_cast<Mma*>(lanes[lane].operands);
    const int g = lane / 4, q = lane % 4;
    for (int r = 0; r < 4; r++)
      for (int e = 0; e < 2; e++) a[g + r % 2 * 8][q * 2 + e + r / 2 * 8] = number(o.a[r] >> 16 * e & 0xffff);
    for (int r = 0; r < 2; r++)
      for (int e = 0; e < 2; e++) b[q * 2 + e + r * 8][g] = number(o.b[r] >> 16 * e & 0xffff);
  }
  for (int lane = 0; lane < 32; lane++)
    for (int r = 0; r < 4; r++) {
      const int row = lane / 4 + r / 2 * 8, column = lane % 4 * 2 + r % 2;
      float sum = static_cast<Mma*>(lanes[lane].operands)->acc[r];
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
      static_cast<Mma*>(lanes[lane].operands)->acc[r] = sum;
    }
}
inline void execute_matrices(Fiber* lanes) {
  unsigned results[32][4];
  for (int matrix = 0; matrix < 4; matrix++) {
    uint16_t m[8][8];
    for (int row = 0; row < 8; row++) {
      const uint16_t* p = static_cast<Matrices*>(lanes[matrix * 8 + row].operands)->row;
      if (reinterpret_cast<uintptr_t>(p) % 16) fail("a row of ldmatrix does not start at a multiple of 16 bytes");
      std::memcpy(m[row], p, 16);
    }
    for (int lane = 0; lane < 32; lane++) {
      const int i = lane / 4, j = lane % 4 * 2;
      results[lane][matrix] = m[i][j] | m[i][j + 1] << 16;
    }
  }
  for (int lane = 0; lane < 32; lane++)
    std::memcpy(static_cast<Matrices*>(lanes[lane].operands)->registers, results[lane], 16);
}

inline void execute_transpose(Fiber* lanes) {
  uint16_t m[8][8];
  for (int lane = 0; lane < 32; lane++)
    for (int e = 0; e < 2; e++)
      m[lane / 4][lane % 4 * 2 + e] = static_cast<Transpose*>(lanes[lane].operands)->row >> 16 * e;
  for (int lane = 0; lane < 32; lane++) {
    const int i = lane / 4, j = lane % 4 * 2;
    static_cast<Transpose*>(lanes[lane].operands)->column = m[j][i] | m[j + 1][i] << 16;
  }
}

static const char *const MMA = "mma", *const MATRICES = "ldmatrix", *const TRANSPOSE = "movmatrix";
static const char* const BARRIER_NAME = "barrier";

// Run lanes of a warp, in any order, until all of them wait or have finished. Execute what they wait for, unless it is
// a barrier.
inline bool advance(int warp, unsigned order) {
  Fiber* lanes = &fibers[warp * 32];
  int finished = 0;
  for (int i = 0; i < 32; i++) {
    const int lane = (i * (2 * (order >> 5) + 1) + order) % 32;
    if (!lanes[lane].finished && !lanes[lane].waits_for) resume(warp * 32 + lane);
    finished += lanes[lane].finished;
  }
  if (finished == 32) return false;
  for (int lane = 1; lane < 32; lane++)
    if (finished || lanes[lane].waits_for != lanes[0].waits_for || lanes[lane].site != lanes[0].site)
      fail("lanes of a warp wait for different instructions");
  if (lanes[0].waits_for == BARRIER_NAME) return false;
  if (lanes[0].waits_for == MMA) execute_mma(lanes);
  else if (lanes[0].waits_for == TRANSPOSE) execute_transpose(lanes);
  else execute_matrices(lanes);
  for (int lane = 0; lane < 32; lane++) lanes[lane].waits_for = nullptr;
  return true;
}

// Steps of a linear congruential generator; the upper bits of its state are the random number.
struct Random {
  uint64_t state;
  unsigned operator()() { return (state = state * 6364136223846793005u + 1442695040888963407u) >> 33; }
};

template <class Kernel>
void launch(int programs, int threads, size_t shared_bytes, unsigned seed, const Kernel& kernel) {
  Random random{seed};
  const size_t guard = 64;
  std::vector<uint4> memory((shared_bytes + guard) / 16 + 1);
  shared = memory.data();
  body = [](const void* arguments) { (*static_cast<const Kernel*>(arguments))(); }, body_arguments = &kernel;
  blockDim.x = threads, gridDim.x = programs;
  for (int program = 0; program < programs; program++) {
    std::memset(shared, 0xff, shared_bytes + guard);
    blockIdx.x = program;
    fibers = std::vector<Fiber>(threads);
    for (auto& fiber : fibers) {
      fiber.stack.resize(1 << 16);
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = fiber.stack.size();
      makecontext(&fiber.context, start, 0);
    }
    std::vector<int> warps;
    for (int warp = 0; warp < threads / 32; warp++) warps.push_back(warp);
    while (true) {
      // Between two barriers, warps run in any order, each for a random number of instructions at a time.
      auto running = warps;
      while (!running.empty()) {
        const size_t i = random() % running.size();
        bool more = true;
        for (unsigned steps = 1 + random() % 64; more && steps; steps--) more = advance(running[i], random() % 1024);
        if (!more) running.erase(running.begin() + i);
      }
      int finished = 0;
      for (auto& fiber : fibers) finished += fiber.finished, fiber.waits_for = nullptr;
      if (finished == threads) break;
      if (finished) fail("some threads wait at a barrier that others never reach");
    }
    for (size_t i = 0; i < guard; i++)
      if (reinterpret_cast<unsigned char*>(shared)[shared_bytes + i] != 0xff) fail("a write behind shared memory");
  }
}
}  // namespace emulation

#define DYNAMIC_SHARED(name) uint4* const name = emulation::shared
#define BARRIER() emulation::wait(emulation::BARRIER_NAME, nullptr)
// Functions of their own, so that the place from which they are called is known.
#define INSTRUCTION static __attribute__((noinline)) void

INSTRUCTION mma(float* acc, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  emulation::Mma operands{acc, {a0, a1, a2, a3}, {b0, b1}};
  emulation::wait(emulation::MMA, &operands, __builtin_return_address(0));
}
INSTRUCTION load_matrices(unsigned* registers, const uint16_t* row) {
  emulation::Matrices operands{registers, row};
  emulation::wait(emulation::MATRICES, &operands, __builtin_return_address(0));
}
static __attribute__((noinline)) unsigned transposed(unsigned row) {
  emulation::Transpose operands{row, 0};
  emulation::wait(emulation::TRANSPOSE, &operands, __builtin_return_address(0));
  return operands.column;
}

inline float emulation::number(unsigned bits) {
  if (BFLOAT16) {
    bits <<= 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  _Float16 half;
  const uint16_t low = static_cast<uint16_t>(bits);
  std::memcpy(&half, &low, 2);
  return static_cast<float>(half);
}
inline float unpack(uint16_t number) { return emulation::number(number); }
inline unsigned rounded(float value) {
  if (BFLOAT16) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return 0x7fff;
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  }
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
inline unsigned pack(float low, float high) { return rounded(low) | rounded(high) << 16; }
