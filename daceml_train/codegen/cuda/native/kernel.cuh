// What generated CUDA kernels need: fragments, reductions over threads, launches. nvcc includes <cuda_runtime.h> itself;
// nothing else is included, because headers are most of what a kernel costs to compile.
#pragma once
#ifdef VM_EMULATOR
#include "emulator.h"
#endif
#include <stdint.h>
#define VM static __device__ __forceinline__
#define VM_EXPORT __attribute__((visibility("default")))
#include "math.cuh"

VM_BOTH int64_t int_floor(int64_t a, int64_t b) { return a / b; }
VM_BOTH int64_t vm_modulo(int64_t a, int64_t b) { return a % b; }
VM_BOTH int64_t vm_least(int64_t a, int64_t b) { return a < b ? a : b; }
VM_BOTH int64_t vm_groups(int64_t size, int64_t group) { return (size + group - 1) / group; }
VM_BOTH int64_t vm_tiles(int64_t size, int64_t group) { return size <= group ? 1 : (size + group - 1) / group; }
VM int vm_thread() { return (int)threadIdx.x; }

namespace vm {

// ---- fragments: elements that one thread owns -----------------------------------------------------------------------
template <typename T, int V> struct alignas(V * sizeof(T) < 16 ? V * sizeof(T) : 16) Pack {
  T at[V];
  __device__ __forceinline__ T& operator[](int i) { return at[i]; }
};
template <int B> struct Word;
template <> struct Word<16> { typedef uint4 type; };
template <> struct Word<8> { typedef uint2 type; };
template <> struct Word<4> { typedef uint32_t type; };
template <> struct Word<2> { typedef uint16_t type; };
template <> struct Word<1> { typedef uint8_t type; };

// The first `count` elements of a fragment, which has V. WIDE: at min(16, V * sizeof(T)) bytes a time, to which the
// pointer is aligned; else element by element. RAGGED: there may be less than V.
template <bool WIDE, bool RAGGED, typename T, int V>
VM void load(Pack<T, V>& to, const T* __restrict__ from, int64_t count) {
  if (WIDE && (!RAGGED || count >= V)) {
    constexpr int B = V * sizeof(T) < 16 ? V * sizeof(T) : 16, N = V * sizeof(T) / B;
    typedef typename Word<B>::type W;
#pragma unroll
    for (int i = 0; i < N; ++i) reinterpret_cast<W*>(to.at)[i] = reinterpret_cast<const W*>(from)[i];
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i) to.at[i] = !RAGGED || i < count ? from[i] : T();
  }
}
template <bool WIDE, bool RAGGED, typename T, int V>
VM void store(T* __restrict__ to, const Pack<T, V>& from, int64_t count) {
  if (WIDE && (!RAGGED || count >= V)) {
    constexpr int B = V * sizeof(T) < 16 ? V * sizeof(T) : 16, N = V * sizeof(T) / B;
    typedef typename Word<B>::type W;
#pragma unroll
    for (int i = 0; i < N; ++i) reinterpret_cast<W*>(to)[i] = reinterpret_cast<const W*>(from.at)[i];
  } else {
#pragma unroll
    for (int i = 0; i < V; ++i)
      if (!RAGGED || i < count) to[i] = from.at[i];
  }
}

// ---- reductions over threads: the same order always, the same bits in every thread ------------------------------------
struct sum { template <typename T> VM T of(T a, T b) { return a + b; } };
struct prod { template <typename T> VM T of(T a, T b) { return a * b; } };
struct max_ { template <typename T> VM T of(T a, T b) { return vm::max<T>(a, b); } };
struct min_ { template <typename T> VM T of(T a, T b) { return vm::min<T>(a, b); } };
struct any { template <typename T> VM T of(T a, T b) { return a || b; } };
struct all { template <typename T> VM T of(T a, T b) { return a && b; } };

template <typename T> VM T shuffle(uint32_t mask, T value, int across) {
  if constexpr (sizeof(T) == 8) {
    uint2 word;
    memcpy(&word, &value, 8);
    word.x = __shfl_xor_sync(mask, word.x, across);
    word.y = __shfl_xor_sync(mask, word.y, across);
    memcpy(&value, &word, 8);
  } else {
    uint32_t word = 0;
    memcpy(&word, &value, sizeof(T));
    word = __shfl_xor_sync(mask, word, across);
    memcpy(&value, &word, sizeof(T));
  }
  return value;
}

// Over aligned groups of G threads of a warp.
template <typename Op, int G, typename T, int N> VM void over_warp(T (&value)[N]) {
  const uint32_t mask = G == 32 ? ~0u : ((1u << (G & 31)) - 1u) << (threadIdx.x & 31u & ~(G - 1u));
#pragma unroll
  for (int across = G / 2; across; across /= 2)
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] = Op::of(value[n], shuffle(mask, value[n], across));
}

#ifndef VM_EMULATOR
// Barrier 0 is __syncthreads; a block has 16 of them.
VM void team_barrier(int team, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(1 + team), "r"(threads) : "memory"); }
#endif
template <int G, int TEAMS> VM void barrier() {
  if constexpr (TEAMS == 1) {
    __syncthreads();
  } else {
    team_barrier(threadIdx.x / G, G);
  }
}

// Over groups of G threads; every thread of the group calls it. A block has TEAMS of them.
template <typename Op, int G, int TEAMS, typename T, int N> VM void over_group(T (&value)[N]) {
  over_warp<Op, (G < 32 ? G : 32)>(value);
  if constexpr (G > 32) {
    constexpr int WARPS = G / 32;
    __shared__ T parts[N][TEAMS * WARPS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, first = warp - warp % WARPS;
    barrier<G, TEAMS>();  // whoever still reads the parts of the reduction before this one
#pragma unroll
    for (int n = 0; n < N; ++n)
      if (lane == 0) parts[n][warp] = value[n];
    barrier<G, TEAMS>();
#pragma unroll
    for (int n = 0; n < N; ++n) value[n] = parts[n][first + lane % WARPS];
    over_warp<Op, WARPS>(value);
  }
}
template <typename Op, int G, typename T> VM T over_block(T value) {
  T values[1] = {value};
  over_group<Op, G, 1>(values);
  return values[0];
}

// Element by element over the TEAMS groups of G threads of a block, into the first group; every thread calls it.
template <typename Op, int TEAMS, int G, typename T, int V, int K> VM void over_teams(Pack<T, V> (&value)[K]) {
  if constexpr (TEAMS > 1) {
    __shared__ T parts[TEAMS * G];
#pragma unroll
    for (int i = 0; i < K * V; ++i) {
      __syncthreads();
      parts[threadIdx.x] = value[i / V][i % V];
      __syncthreads();
      if (threadIdx.x < G) {
        T total = parts[threadIdx.x];
#pragma unroll
        for (int team = 1; team < TEAMS; ++team) total = Op::of(total, parts[team * G + threadIdx.x]);
        value[i / V][i % V] = total;
      }
    }
  }
}

// Over the SLICES rows of a block of LANES columns, into the first row; every thread calls it.
template <typename Op, int SLICES, int LANES, typename T> VM T over_slices(T value) {
  if constexpr (SLICES > 1) {
    __shared__ T parts[SLICES * LANES];
    __syncthreads();
    parts[threadIdx.x] = value;
    __syncthreads();
    if (threadIdx.x < LANES) {
#pragma unroll
      for (int slice = 1; slice < SLICES; ++slice) value = Op::of(value, parts[slice * LANES + threadIdx.x]);
    }
  }
  return value;
}

// ---- launches ---------------------------------------------------------------------------------------------------------
template <typename... P, typename... A>
static inline int launch(void (*kernel)(P...), int64_t blocks, int threads, void* stream, A... arguments) {
  if (blocks < 1) return 0;
#ifdef VM_EMULATOR
  return emulator::launch([=] { kernel((P)arguments...); }, blocks, threads);
#else
  kernel<<<dim3((unsigned)blocks), dim3(threads), 0, (cudaStream_t)stream>>>((P)arguments...);
  return (int)cudaGetLastError();
#endif
}
template <typename T> static inline bool aligned(const T* pointer, int width) {
  return (uintptr_t)pointer % (width * sizeof(T) < 16 ? width * sizeof(T) : 16) == 0;
}

}  // namespace vm
