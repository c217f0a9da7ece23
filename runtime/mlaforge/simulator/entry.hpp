// The library's entry: included behind a kernel's text, it runs that kernel on the machine.
#pragma once

#include "primitives.hpp"

namespace mlaforge::sim {

template <class... Parameters>
std::function<void()> bind(void (*kernel)(Parameters...), void* const* arguments) {
  return [=] {
    [&]<std::size_t... I>(std::index_sequence<I...>) {
      kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[I])...);
    }(std::index_sequence_for<Parameters...>{});
  };
}

}  // namespace mlaforge::sim

#define MLAFORGE_SIMULATED_KERNEL(kernel)                                                                              \
  extern "C" __attribute__((visibility("default"))) int mlaforge_launch(                                              \
      const mlaforge::sim::Settings* settings, const mlaforge::sim::Dim3* grid, const mlaforge::sim::Dim3* cluster,    \
      int threads, unsigned smem, const mlaforge::sim::Region* regions, int region_count, void* const* arguments,      \
      char* fault, int fault_size) {                                                                                   \
    return mlaforge::sim::launch(mlaforge::sim::bind(&mlaforge::kernel, arguments), *settings, *grid, *cluster,        \
                                 threads, smem, {regions, regions + region_count}, fault,                              \
                                 static_cast<std::size_t>(fault_size));                                                \
  }
