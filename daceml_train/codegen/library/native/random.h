// Random numbers of generated kernels: Philox2x32-10, as in ops/random.py. Only kernels that draw include this.
#pragma once
#include "vector_math.h"

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

#if defined(__AVX512F__) && !defined(__clang__)
// gcc makes of 32-bit products with 64 bits 64-bit ones, which take three times as long, and packs and unpacks between
// rounds. So `omp simd` loops call this function for 16 numbers at once, under the name that the vector ABI gives it.
typedef float Float16 __attribute__((vector_size(64)));
typedef int32_t Int16 __attribute__((vector_size(64)));
typedef uint32_t Word16 __attribute__((vector_size(64)));
typedef uint64_t Word8 __attribute__((vector_size(64)));
typedef long long Long8 __attribute__((vector_size(64)));

VM Word8 low_words(uint64_t key, Word8 index) {  // in the lower halves; the upper ones hold anything
  uint32_t k = (uint32_t)key;
  Word8 low = index, high = (index >> 32) ^ (key >> 32);
  const Int16 multiplier = (Int16)((Word8){} + 0xD256D193u);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    Word8 wide = (Word8)__builtin_ia32_pmuludq512_mask((Int16)low, multiplier, (Long8){}, 0xff);
    low = (wide >> 32) ^ (uint64_t)k ^ high;
    high = wide;
    k += 0x9E3779B9u;
  }
  return low;
}
extern "C" {
#pragma omp declare simd simdlen(16) uniform(key) notinbranch
__attribute__((const)) float vm_uniform(uint64_t key, uint64_t index);

float vm_uniform_of_one(uint64_t key, uint64_t index) asm("vm_uniform");
float vm_uniform_of_one(uint64_t key, uint64_t index) { return drawn(key, index); }
Float16 vm_uniform_of_16(uint64_t key, Word8 first, Word8 second) asm("_ZGVeN16uv_vm_uniform");
Float16 vm_uniform_of_16(uint64_t key, Word8 first, Word8 second) {
  const Word16 a = (Word16)low_words(key, first), b = (Word16)low_words(key, second);
  const Word16 low = __builtin_shuffle(a, b, (Word16){0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30});
  return __builtin_convertvector((Int16)(low >> 8), Float16) * 5.9604644775390625e-8f;
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
