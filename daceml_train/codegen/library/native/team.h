// How many threads run a parallel loop over blocks: as many as there are blocks, but no more than the caller allows. How the
// work is cut into blocks does not depend on it, and so neither does any bit of the results.
#pragma once
#include <omp.h>
#include <stdint.h>

static inline int vm_team(int64_t blocks) {
  const int most = omp_get_max_threads();
  return blocks < most ? (int)blocks : most;
}
