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

template <class... Parameters>
int launch(void (*kernel)(Parameters...), const Settings* settings, const Dim3* grid, const Dim3* cluster, int threads,
           std::uint32_t smem, const Region* regions, int region_count, void* const* arguments, char* fault, int fault_size) {
  Machine here(*settings, *grid, *cluster, threads, smem, std::vector<Region>(regions, regions + region_count));
  machine = &here;
  const std::string text = here.run(bind(kernel, arguments));
  machine = nullptr;
  std::snprintf(fault, static_cast<std::size_t>(fault_size), "%s", text.c_str());
  return text.empty() ? 0 : 1;
}

}  // namespace mlaforge::sim

#define MLAFORGE_SIMULATED_KERNEL(kernel)                                                                              \
  extern "C" int mlaforge_launch(const mlaforge::sim::Settings* settings, const mlaforge::sim::Dim3* grid,             \
                                 const mlaforge::sim::Dim3* cluster, int threads, unsigned smem,                       \
                                 const mlaforge::sim::Region* regions, int region_count, void* const* arguments,       \
                                 char* fault, int fault_size) {                                                        \
    return mlaforge::sim::launch(&mlaforge::kernel, settings, grid, cluster, threads, smem, regions, region_count,     \
                                 arguments, fault, fault_size);                                                        \
  }
