// setmaxnreg: one warpgroup gives registers back, two take them; each then says who it is.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(384, 1) registers(const int32_t* in, int32_t* out) {
  const int t = static_cast<int>(threadIdx.x);
  if (t < 128) {
    give_back_registers<40>();
    store_global(out + t, load_global(in + t) + 1);
  } else {
    take_registers<232>();
    store_global(out + t, load_global(in + t) + 2);
  }
}

}  // namespace mlaforge
