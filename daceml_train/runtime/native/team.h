// How many threads OpenMP's loops and MKL's matmuls take on the calling thread, while this lives.
#pragma once

#include <omp.h>

#include <algorithm>

// MKL's count for the calling thread precedes OpenMP's, and PyTorch sets it. PyTorch built without MKL has no such function.
extern "C" __attribute__((weak)) int MKL_Set_Num_Threads_Local(int);

namespace daceml {

class Team {
 public:
  Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  ~Team() { use(0); }

  // From here on at most `most` threads, or, where that is 0, as many as before this object.
  void use(int most) {
    if (most == now_) return;
    if (now_ == 0) all_ = omp_get_max_threads();
    const int count = most == 0 ? all_ : std::min(most, all_);
    omp_set_num_threads(count);
    if (MKL_Set_Num_Threads_Local != nullptr) {
      const int before = MKL_Set_Num_Threads_Local(most == 0 ? mkl_ : count);
      if (now_ == 0) mkl_ = before;
    }
    now_ = most;
  }

 private:
  int now_ = 0, all_ = 0, mkl_ = 0;
};

}  // namespace daceml
