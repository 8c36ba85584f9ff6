// Random numbers of generated kernels: Philox2x32-10, as in ops/random.py. Only kernels that draw include this.
#pragma once
#include "vector_math.h"
#include "vectors.h"

namespace vm {

VM uint64_t random_key(int64_t seed, int64_t stream) {
  uint64_t z = (uint64_t)seed + 0x9E3779B97F4A7C15ull * ((uint64_t)stream + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}
VM void philox(uint64_t key, uint64_t index, uint32_t& low, uint32_t& high) {
  uint32_t k = (uint32_t)key;
  low = (uint32_t)index, high = (uint32_t)(index >> 32) ^ (uint32_t)(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    uint64_t wide = (uint64_t)low * 0xD256D193u;
    low = (uint32_t)(wide >> 32) ^ k ^ high;
    high = (uint32_t)wide;
    k += 0x9E3779B9u;
  }
}
VM float drawn(uint64_t key, uint64_t index) {
  uint32_t low, high;
  philox(key, index, low, high);
  return (float)(int32_t)(low >> 8) * 5.9604644775390625e-8f;
}

#if defined(__AVX2__) && !defined(__clang__)
// gcc makes of 32-bit products with 64 bits 64-bit ones, which take three times as long, and packs and unpacks between
// rounds. So `omp simd` loops call this function for a vector of numbers at once, under the name that the vector ABI gives
// it.
typedef float Floats __attribute__((vector_size(VECTOR)));
typedef int32_t Ints __attribute__((vector_size(VECTOR)));
typedef uint32_t Words __attribute__((vector_size(VECTOR)));
typedef uint64_t Longs __attribute__((vector_size(VECTOR)));
#if defined(__AVX512F__)
#define VM_AT_ONCE 16
#define VM_UNIFORM "_ZGVeN16uv_vm_uniform"
typedef long long Signed __attribute__((vector_size(VECTOR)));
VM Longs low_products(Ints a, Ints b) { return (Longs)__builtin_ia32_pmuludq512_mask(a, b, Signed{}, 0xff); }
#else
#define VM_AT_ONCE 8
#define VM_UNIFORM "_ZGVdN8uv_vm_uniform"
VM Longs low_products(Ints a, Ints b) { return (Longs)__builtin_ia32_pmuludq256(a, b); }
#endif

VM Longs low_words(uint64_t key, Longs index) {  // in the lower halves; the upper ones hold anything
  uint32_t k = (uint32_t)key;
  Longs low = index, high = (index >> 32) ^ (key >> 32);
  const Ints multiplier = (Ints)((Longs){} + 0xD256D193u);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    Longs wide = low_products((Ints)low, multiplier);
    low = (wide >> 32) ^ (uint64_t)k ^ high;
    high = wide;
    k += 0x9E3779B9u;
  }
  return low;
}
extern "C" {
#pragma omp declare simd simdlen(VM_AT_ONCE) uniform(key) notinbranch
__attribute__((const)) float vm_uniform(uint64_t key, uint64_t index);

float vm_uniform_of_one(uint64_t key, uint64_t index) asm("vm_uniform");
float vm_uniform_of_one(uint64_t key, uint64_t index) { return drawn(key, index); }
Floats vm_uniform_at_once(uint64_t key, Longs first, Longs second) asm(VM_UNIFORM);
Floats vm_uniform_at_once(uint64_t key, Longs first, Longs second) {
  const Words a = (Words)low_words(key, first), b = (Words)low_words(key, second);
  Words halves;
#pragma GCC unroll 16
  for (int i = 0; i < VM_AT_ONCE; ++i) halves[i] = 2 * i;
  const Words low = __builtin_shuffle(a, b, halves);
  return __builtin_convertvector((Ints)(low >> 8), Floats) * 5.9604644775390625e-8f;
}
}
VM float uniform_float(uint64_t key, uint64_t index) { return vm_uniform(key, index); }
#else
VM float uniform_float(uint64_t key, uint64_t index) { return drawn(key, index); }
#endif

VM double uniform_double(uint64_t key, uint64_t index) {
  uint32_t low, high;
  philox(key, index, low, high);
  return (double)(int64_t)(((uint64_t)(low >> 5) << 26) + (high >> 6)) * 1.1102230246251565e-16;
}

}  // namespace vm
