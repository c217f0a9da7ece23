// tma_store_4d: images of boxes, each to its own place in the tensor; what lies outside of it is left out.
#include "primitives.cuh"

namespace mlaforge {

extern "C" __global__ void __launch_bounds__(64)
    tma_store(const __grid_constant__ TensorMap map, const int32_t* images, const int32_t* corners, int boxes,
              int box_bytes) {
  const smem_t base = dynamic_smem();
  const int t = static_cast<int>(threadIdx.x);
  for (int i = t; i < boxes * box_bytes / 4; i += 64) store_shared_s32(base + 4 * i, load_global(images + i));
  fence_proxy_async();
  __syncthreads();
  if (t < boxes) {
    const int32_t* corner = corners + 4 * t;
    tma_store_4d(map, base + t * box_bytes, load_global(corner), load_global(corner + 1), load_global(corner + 2),
                 load_global(corner + 3));
    bulk_commit();
    bulk_wait_read<0>();
  }
}

}  // namespace mlaforge
