// The second implementation of primitives.cuh: the same names, on the machine of machine.hpp. Each primitive knows from
// where it was called, so that a fault names a line of the kernel.
#pragma once

#include <cmath>
#include <limits>
#include <utility>

#include "machine.hpp"

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define MLAFORGE_DEVICE inline

namespace mlaforge {

using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;
using smem_t = uint32_t;
using sim::Where;

namespace sim {

inline Dim3 thread_index() { return {static_cast<unsigned>(machine->thread()), 0, 0}; }
inline Dim3 block_index() { return machine->block(); }
inline Dim3 grid_dim() { return machine->grid(); }

// A value from another lane: each lane brings one and names its source; -1 keeps its own.
template <class T>
T shuffle(const char* what, T value, int source, const Where& where) {
  struct Lane {
    T value;
    int source;
    T result;
  } mine{value, source, value};
  machine->gather(what, where, &mine, [](void* const* slots) {
    for (int i = 0; i < kWarp; ++i) {
      auto* lane = static_cast<Lane*>(slots[i]);
      if (lane->source >= 0) lane->result = static_cast<Lane*>(slots[lane->source])->value;
    }
  });
  return mine.result;
}

// Whether any lane brings true.
inline bool any(const char* what, bool value, const Where& where) {
  struct Lane {
    bool value;
  } mine{value};
  machine->gather(what, where, &mine, [](void* const* slots) {
    bool result = false;
    for (int i = 0; i < kWarp; ++i) result = result || static_cast<Lane*>(slots[i])->value;
    for (int i = 0; i < kWarp; ++i) static_cast<Lane*>(slots[i])->value = result;
  });
  return mine.value;
}

// A meeting of the warp's lanes for an instruction that they execute together; `once` runs when all are there.
template <class F>
void together(const char* what, const Where& where, F once) {
  int nothing = 0;
  machine->gather(what, where, &nothing, [&once](void* const*) { once(); });
}

}  // namespace sim
}  // namespace mlaforge

#define threadIdx (::mlaforge::sim::thread_index())
#define blockIdx (::mlaforge::sim::block_index())
#define gridDim (::mlaforge::sim::grid_dim())

template <class T>
T __shfl_sync(unsigned, T value, int lane, std::source_location where = std::source_location::current()) {
  return mlaforge::sim::shuffle("shfl", value, lane, where);
}
template <class T>
T __shfl_up_sync(unsigned, T value, int delta, std::source_location where = std::source_location::current()) {
  const int lane = mlaforge::sim::machine->lane();
  return mlaforge::sim::shuffle("shfl.up", value, lane >= delta ? lane - delta : -1, where);
}
inline void __syncwarp(std::source_location where = std::source_location::current()) {
  mlaforge::sim::machine->sync_warp(where);
}
inline void __syncthreads(std::source_location where = std::source_location::current()) {
  mlaforge::sim::machine->sync_named(0, mlaforge::sim::machine->threads(), where);
}
using std::fmaf;
using std::fmaxf;

namespace mlaforge {

// ---- Element types

struct Bf16 {};
struct Fp16 {};
struct E4m3 {};
struct E2m1 {};

namespace sim {

// The element that NaN becomes: always the same, unless it stands for what is undefined.
inline std::uint16_t round_nan(float x) {
  const Mark mark = machine->mark_of(x);
  return mark == kNoMark ? 0x7fff : machine->as_element(mark);
}
inline std::uint16_t round_to(Bf16, float x) {
  std::uint32_t u;
  std::memcpy(&u, &x, 4);
  if (x != x) return round_nan(x);
  u += 0x7fff + ((u >> 16) & 1);
  return static_cast<std::uint16_t>(u >> 16);
}
inline std::uint16_t round_to(Fp16, float x) {
  if (x != x) return round_nan(x);
  const _Float16 h = static_cast<_Float16>(x);
  std::uint16_t u;
  std::memcpy(&u, &h, 2);
  return u;
}
inline float widen(Bf16, std::uint16_t u) {
  const std::uint32_t w = static_cast<std::uint32_t>(u) << 16;
  float x;
  std::memcpy(&x, &w, 4);
  return x;
}
inline float widen(Fp16, std::uint16_t u) {
  _Float16 h;
  std::memcpy(&h, &u, 2);
  return static_cast<float>(h);
}
// Sign, four bits of exponent, three of mantissa; no infinity, and NaN where all but the sign is set.
inline float widen(E4m3, std::uint8_t u) {
  const int exponent = u >> 3 & 15;
  const int mantissa = u & 7;
  float x = exponent ? std::ldexp(8.f + mantissa, exponent - 10) : std::ldexp(static_cast<float>(mantissa), -9);
  if ((u & 0x7f) == 0x7f) x = std::numeric_limits<float>::quiet_NaN();
  return u & 0x80 ? -x : x;
}

inline std::uint8_t round_to(E4m3, float x) {
  if (x != x) return 0x7f;
  const float size = std::fmin(std::fabs(x), 448.f);
  std::uint32_t u;
  std::memcpy(&u, &size, 4);
  // Below the normal numbers the steps are 2^-9; above, three bits of mantissa are left.
  const auto code = size < 0x1p-6f ? static_cast<std::uint32_t>(std::nearbyint(size * 0x1p9f))
                                   : ((u + 0x7ffff + (u >> 20 & 1)) >> 20) - (120 << 3);
  return static_cast<std::uint8_t>(code | (std::signbit(x) ? 0x80 : 0));
}

// How an element is stored.
template <class Element>
struct BitsOf {
  using type = std::uint16_t;
};
template <>
struct BitsOf<E4m3> {
  using type = std::uint8_t;
};
template <class Element>
using Bits = typename BitsOf<Element>::type;

}  // namespace sim

template <class Element>
uint32_t pack2(float lo, float hi) {
  return sim::round_to(Element{}, lo) | static_cast<uint32_t>(sim::round_to(Element{}, hi)) << 16;
}

namespace sim {

// An element in a register; a mark stays one.
template <class Element>
float unpack(std::uint16_t element) {
  const Mark mark = machine->mark_of(element);
  return mark == kNoMark ? widen(Element{}, element) : as_float(mark);
}

}  // namespace sim

template <class Element>
float unpack_low(uint32_t x) {
  return sim::unpack<Element>(static_cast<std::uint16_t>(x));
}
template <class Element>
float unpack_high(uint32_t x) {
  return sim::unpack<Element>(static_cast<std::uint16_t>(x >> 16));
}

template <class Element>
uint32_t pack4(float x0, float x1, float x2, float x3) {
  uint32_t r = 0;
  for (const float x : {x3, x2, x1, x0}) r = r << 8 | sim::round_to(Element{}, x);
  return r;
}
template <class Element>
void unpack4(uint32_t x, float (&v)[4]) {
  for (int i = 0; i < 4; ++i) v[i] = sim::widen(Element{}, static_cast<std::uint8_t>(x >> 8 * i));
}

namespace sim {

// Two fp16 of codes in a register; marks stay what they are. One NaN may look like one by chance, though not both halves.
template <class Value>
uint32_t widened(uint32_t codes, Value value) {
  const auto half = static_cast<std::uint16_t>(codes);
  const Mark mark = half == codes >> 16 ? machine->mark_of(half) : kNoMark;
  if (mark != kNoMark) return machine->as_element(mark) * 0x10001u;
  return pack2<Fp16>(value(0), value(1));
}

}  // namespace sim

template <class Element>
uint32_t widen_low(uint32_t x) {
  return sim::widened(x, [x](int i) { return sim::widen(Element{}, static_cast<std::uint8_t>(x >> 8 * i)); });
}
template <class Element>
uint32_t widen_high(uint32_t x) {
  return sim::widened(x, [x](int i) { return sim::widen(Element{}, static_cast<std::uint8_t>(x >> (16 + 8 * i))); });
}
inline void widen_e2m1(uint32_t x, uint32_t (&r)[4]) {
  constexpr float kValues[8] = {0.f, .5f, 1.f, 1.5f, 2.f, 3.f, 4.f, 6.f};
  for (int pair = 0; pair < 4; ++pair) {
    const auto value = [&](int i) {
      // Elements 0 and 4, 2 and 6, 1 and 5, 3 and 7. All bits are numbers, so that what is undefined can't be told.
      const uint32_t code = x >> 4 * (pair % 2 * 2 + pair / 2 + 4 * i);
      return (code & 8 ? -kValues[code & 7] : kValues[code & 7]) * 0x1p-14f;
    };
    r[pair] = pack2<Fp16>(value(0), value(1));
  }
}
inline uint32_t multiply2(uint32_t x, uint32_t y) {
  return pack2<Fp16>(unpack_low<Fp16>(x) * unpack_low<Fp16>(y), unpack_high<Fp16>(x) * unpack_high<Fp16>(y));
}
template <int Which>
uint32_t multiply2_by(uint32_t x, uint32_t pair) {
  const uint32_t one = pair >> 16 * Which & 0xffff;
  return multiply2(x, one * 0x10001u);
}
inline uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(y) << 32 | x;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) r |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
  return r;
}
inline uint32_t float_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, 4);
  return u;
}
inline float bits_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, 4);
  return x;
}

// ---- Math

namespace sim {

// What is below the normal numbers is zero, on the way in and out.
inline float flushed(float x) { return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(0.f, x) : x; }

}  // namespace sim

inline float exp2_approx(float x) { return sim::flushed(std::exp2(sim::flushed(x))); }
inline float log2_approx(float x) { return std::log2(sim::flushed(x)); }
inline float rsqrt_approx(float x) { return 1.f / std::sqrt(sim::flushed(x)); }
inline float reciprocal_approx(float x) { return sim::flushed(1.f / sim::flushed(x)); }
constexpr float kLn2 = 0.693147180559945309f;
inline float max_nan(float x, float y) { return x != x || y != y ? x + y : std::fmax(x, y); }
inline float infinity() { return std::numeric_limits<float>::infinity(); }

// ---- Threads

inline int lane_id() { return sim::machine->lane(); }
inline int warp_id() { return sim::machine->warp(); }
inline int warp_uniform(int x, Where where = Where::current()) { return sim::shuffle("shfl", x, 0, where); }
inline int late(int x) { return x; }
inline const unsigned char* strided(const unsigned char* p, int count, int stride) {
  return p + static_cast<int64_t>(count) * stride;
}
inline bool warp_any(bool x, Where where = Where::current()) { return sim::any("vote.any", x, where); }
template <class T>
T shuffle_xor(T x, int mask, Where where = Where::current()) {
  return sim::shuffle("shfl.bfly", x, sim::machine->lane() ^ mask, where);
}
template <int Count>
void take_registers(Where where = Where::current()) {
  static_assert(Count % 8 == 0 && Count >= 24 && Count <= 256);
  sim::together("setmaxnreg", where, [] {});
}
template <int Count>
void give_back_registers(Where where = Where::current()) {
  take_registers<Count>(where);
}
inline bool named_barrier_any(int id, int threads, bool x, Where where = Where::current()) {
  return sim::machine->sync_named(id, threads, where, x);
}
inline void named_barrier_sync(int id, int threads, Where where = Where::current()) {
  sim::machine->sync_named(id, threads, where);
}
inline void named_barrier_arrive(int id, int threads, Where where = Where::current()) {
  sim::machine->arrive_named(id, threads, where);
  sim::machine->event("barrier arrive", where, {{"id", id}});
  sim::machine->maybe_yield();
}

// ---- Memory

inline smem_t dynamic_smem() { return sim::kSharedBase; }

namespace sim {

template <class T>
T load_shared(smem_t a, const Where& where) {
  static_assert(sizeof(T) == 4);
  T v;
  const unsigned char* p = machine->plain(a, 4, false, where);
  if (machine->may_be_marked(machine->home(), a, 4)) {
    machine->require_defined_load(a, p, std::is_same_v<T, float>, where);
  }
  std::memcpy(&v, p, 4);
  return v;
}
template <class T>
void store_shared(smem_t a, T v, const Where& where) {
  std::memcpy(machine->plain(a, sizeof(T), true, where), &v, sizeof(T));
  if constexpr (std::is_same_v<T, float>) {
    if (machine->mark_of(v) != kNoMark) machine->flag_marked(a);
  }
}
template <class T, int Count>
void load_global(const T* p, T* v, const Where& where) {
  machine->global(p, Count * sizeof(T), false, where);
  std::memcpy(v, p, Count * sizeof(T));
}
template <class T, int Count>
void store_global(void* p, const T* v, const Where& where) {
  machine->global(p, Count * sizeof(T), true, where);
  for (int i = 0; i < Count; ++i) {
    if constexpr (std::is_same_v<T, float>) {
      machine->require_defined(machine->mark_of(v[i]), p, where);
    } else if constexpr (std::is_same_v<T, uint32_t>) {  // two elements; a signed number is one number
      machine->require_defined(machine->mark_of(static_cast<std::uint16_t>(v[i])), p, where);
      machine->require_defined(machine->mark_of(static_cast<std::uint16_t>(v[i] >> 16)), p, where);
    }
  }
  std::memcpy(p, v, Count * sizeof(T));
}

}  // namespace sim

inline float load_shared_f32(smem_t a, Where where = Where::current()) { return sim::load_shared<float>(a, where); }
inline void store_shared_f32(smem_t a, float v, Where where = Where::current()) { sim::store_shared(a, v, where); }
inline int32_t load_shared_s32(smem_t a, Where where = Where::current()) { return sim::load_shared<int32_t>(a, where); }
inline void store_shared_s32(smem_t a, int32_t v, Where where = Where::current()) { sim::store_shared(a, v, where); }
inline void load_shared_v2(smem_t a, float (&v)[2], Where where = Where::current()) {
  if (a % 8 != 0) sim::machine->fail(where, "an access of 8 bytes off its border");
  for (int i = 0; i < 2; ++i) v[i] = sim::load_shared<float>(a + 4 * i, where);
}
namespace sim {
template <class T>
void load_shared_v4(smem_t a, T (&v)[4], const Where& where) {
  if (a % 16 != 0) machine->fail(where, "an access of 16 bytes off its border");
  for (int i = 0; i < 4; ++i) v[i] = load_shared<T>(a + 4 * i, where);
}
template <class T>
void store_shared_v4(smem_t a, const T (&v)[4], const Where& where) {
  if (a % 16 != 0) machine->fail(where, "an access of 16 bytes off its border");
  for (int i = 0; i < 4; ++i) store_shared(a + 4 * i, v[i], where);
}
}  // namespace sim
inline void load_shared_v4(smem_t a, int32_t (&v)[4], Where where = Where::current()) {
  sim::load_shared_v4(a, v, where);
}
inline void load_shared_v4(smem_t a, float (&v)[4], Where where = Where::current()) { sim::load_shared_v4(a, v, where); }
inline void store_shared_v4(smem_t a, const int32_t (&v)[4], Where where = Where::current()) {
  sim::store_shared_v4(a, v, where);
}
inline void store_shared_v4(smem_t a, const float (&v)[4], Where where = Where::current()) {
  sim::store_shared_v4(a, v, where);
}
inline void store_shared_zero16(smem_t a, Where where = Where::current()) {
  std::memset(sim::machine->plain(a, 16, true, where), 0, 16);
}
inline int32_t load_global(const int32_t* p, Where where = Where::current()) {
  int32_t v;
  sim::load_global<int32_t, 1>(p, &v, where);
  return v;
}
inline int64_t load_global(const int64_t* p, Where where = Where::current()) {
  int64_t v;
  sim::load_global<int64_t, 1>(p, &v, where);
  return v;
}
inline float load_global(const float* p, Where where = Where::current()) {
  float v;
  sim::load_global<float, 1>(p, &v, where);
  return v;
}
inline uint32_t load_global(const unsigned char* p, Where where = Where::current()) {
  unsigned char v;
  sim::load_global<unsigned char, 1>(p, &v, where);
  return v;
}
inline void prefetch_global(const void*) {}
inline void load_global_v4(const float* p, float (&v)[4], Where where = Where::current()) {
  sim::load_global<float, 4>(p, v, where);
}
inline void load_global_v4(const void* p, uint32_t (&v)[4], Where where = Where::current()) {
  sim::load_global<uint32_t, 4>(static_cast<const uint32_t*>(p), v, where);
}
inline void store_global(int32_t* p, int32_t v, Where where = Where::current()) {
  sim::store_global<int32_t, 1>(p, &v, where);
}
inline void store_global(float* p, float v, Where where = Where::current()) { sim::store_global<float, 1>(p, &v, where); }
inline void store_global(void* p, uint32_t x, Where where = Where::current()) {
  sim::store_global<uint32_t, 1>(p, &x, where);
}
template <int Offset>
void store_global_v2(float* p, float x, float y, Where where = Where::current()) {
  const float v[2] = {x, y};
  sim::store_global<float, 2>(p + Offset / 4, v, where);
}
inline void store_global_v2(void* p, uint32_t x, uint32_t y, Where where = Where::current()) {
  const uint32_t v[2] = {x, y};
  sim::store_global<uint32_t, 2>(p, v, where);
}
inline void store_global_v4(void* p, uint32_t x, uint32_t y, uint32_t z, uint32_t w, Where where = Where::current()) {
  const uint32_t v[4] = {x, y, z, w};
  sim::store_global<uint32_t, 4>(p, v, where);
}

// Other blocks may change the word at any time, but not while this runs: one thread runs at a time.
namespace sim {

inline int32_t atomic_add(int32_t* p, int32_t v, bool ordered, const Where& where) {
  machine->global(p, 4, true, where, {.atomic = true});
  machine->atomic(p, ordered, ordered);
  const int32_t before = *p;
  *p = static_cast<int32_t>(static_cast<uint32_t>(before) + static_cast<uint32_t>(v));
  if (v == 0) {
    machine->poll(p, before, where);
  } else {
    machine->maybe_yield();
  }
  return before;
}

}  // namespace sim

inline int32_t atomic_add_acq_rel(int32_t* p, int32_t v, Where where = Where::current()) {
  return sim::atomic_add(p, v, true, where);
}
inline int32_t atomic_add_relaxed(int32_t* p, int32_t v, Where where = Where::current()) {
  return sim::atomic_add(p, v, false, where);
}
inline int32_t load_global_acquire(const int32_t* p, Where where = Where::current()) {
  sim::machine->global(p, 4, false, where, {.atomic = true});
  sim::machine->atomic(p, true, false);
  const int32_t v = *p;
  sim::machine->poll(p, v, where);
  return v;
}
inline void fence_gpu() { sim::machine->fence_gpu(); }

namespace sim {

inline void load_matrices(smem_t row, uint32_t (&m)[4], bool transposed, const Where& where) {
  struct Lane {
    smem_t row;
    uint32_t* m;
    std::int32_t actor;
    const View* view;
  } mine{row, m, machine->actor(), &machine->view()};
  machine->gather("ldmatrix", where, &mine, [&where, transposed](void* const* slots) {
    std::uint16_t matrices[4][8][8];
    for (int i = 0; i < kWarp; ++i) {
      const auto* at = static_cast<const Lane*>(slots[i]);
      if (at->row % 16) machine->fail(where, "ldmatrix from a row at %u, no multiple of 16", at->row - kSharedBase);
      std::memcpy(matrices[i / 8][i % 8], machine->shared(at->row, 16, where), 16);
      const Access access{at->actor, at->view->seen[at->actor], Proxy::generic, where};
      machine->touch(at->row, 16, false, access, *at->view);
      if (!machine->may_be_marked(machine->home(), at->row, 16)) continue;
      for (std::uint16_t& element : matrices[i / 8][i % 8]) {
        const Mark mark = machine->take_mark(element, at->row, access);
        if (mark != kNoMark) element = machine->as_element(mark);
      }
    }
    for (int i = 0; i < kWarp; ++i) {
      for (int matrix = 0; matrix < 4; ++matrix) {
        const int line = i / 4, pair = i % 4 * 2;
        const auto& of = matrices[matrix];
        const std::uint32_t low = transposed ? of[pair][line] : of[line][pair];
        const std::uint32_t high = transposed ? of[pair + 1][line] : of[line][pair + 1];
        static_cast<Lane*>(slots[i])->m[matrix] = low | high << 16;
      }
    }
  });
}

}  // namespace sim

inline void ldmatrix_x4(smem_t row, uint32_t (&m)[4], Where where = Where::current()) {
  sim::load_matrices(row, m, false, where);
}
inline void ldmatrix_x4_transposed(smem_t row, uint32_t (&m)[4], Where where = Where::current()) {
  sim::load_matrices(row, m, true, where);
}

namespace sim {

// Of `Count` matrices, whose rows the first 8 lanes of each name.
template <std::size_t Count>
void store_matrices(smem_t row, const std::array<uint32_t, Count>& m, bool transposed, const Where& where) {
  struct Lane {
    smem_t row;
    std::array<uint32_t, Count> m;
    std::int32_t actor;
    const View* view;
  } mine{row, m, machine->actor(), &machine->view()};
  machine->gather("stmatrix", where, &mine, [&where, transposed](void* const* slots) {
    for (int i = 0; i < 8 * static_cast<int>(Count); ++i) {
      // Lane i addresses row i % 8 of matrix i / 8, whose four pairs of columns four lanes hold; transposed, it is a
      // column, of which every fourth lane holds an element.
      const auto* at = static_cast<const Lane*>(slots[i]);
      if (at->row % 16) machine->fail(where, "stmatrix to a row at %u, no multiple of 16", at->row);
      unsigned char* p = machine->shared(at->row, 16, where);
      machine->touch(at->row, 16, true, {at->actor, at->view->seen[at->actor], Proxy::generic, where}, *at->view);
      for (int column = 0; column < 8; ++column) {
        const int line = transposed ? column : i % 8;
        const int pair = transposed ? i % 8 : column;
        const uint32_t word = static_cast<const Lane*>(slots[line * 4 + pair / 2])->m[i / 8];
        const auto element = static_cast<std::uint16_t>(word >> 16 * (pair % 2));
        std::memcpy(p + 2 * column, &element, 2);
        if (machine->mark_of(element) != kNoMark) machine->flag_marked(at->row + 2 * column);
      }
    }
  });
}

}  // namespace sim

inline void stmatrix_x4(smem_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3, Where where = Where::current()) {
  sim::store_matrices<4>(row, {m0, m1, m2, m3}, false, where);
}
inline void stmatrix_x4_transposed(smem_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3,
                                   Where where = Where::current()) {
  sim::store_matrices<4>(row, {m0, m1, m2, m3}, true, where);
}
inline void stmatrix_x2_transposed(smem_t row, uint32_t m0, uint32_t m1, Where where = Where::current()) {
  sim::store_matrices<2>(row, {m0, m1}, true, where);
}

inline void fence_proxy_async() { sim::machine->fence_async(); }
// Global memory is one here: which proxy sees it how is not modelled.
inline void fence_proxy_async_global() {}

// ---- mbarriers

inline void mbarrier_init(smem_t bar, int arrivals, Where where = Where::current()) {
  sim::machine->init_mbarrier(bar, arrivals, where);
}
inline void fence_mbarrier_init() { sim::machine->fence_mbarriers(); }
inline void mbarrier_arrive(smem_t bar, Where where = Where::current()) { sim::machine->arrive_mbarrier(bar, 0, where); }
inline void mbarrier_arrive_expect_tx(smem_t bar, int bytes, Where where = Where::current()) {
  sim::machine->arrive_mbarrier(bar, bytes, where);
}
inline void mbarrier_wait(smem_t bar, int parity, Where where = Where::current()) {
  sim::machine->wait_mbarrier(bar, parity, where);
}
inline bool mbarrier_test(smem_t bar, int parity, Where where = Where::current()) {
  return sim::machine->test_mbarrier(bar, parity, where);
}

// ---- TMA

// What the host encodes in place of a CUtensorMap; 128 bytes, mirrored by simulator.py.
struct alignas(64) TensorMap {
  uint64_t address;
  uint64_t dims[4];     // elements, innermost first
  uint64_t strides[3];  // bytes, of all but the innermost
  uint32_t box[4];
  uint32_t element_bytes;
  uint32_t swizzle_bytes;
};

constexpr uint64_t kEvictFirst = 0;
constexpr uint64_t kEvictNormal = 0;

namespace sim {

// Where the 16 bytes at `address` lie under a swizzle of 32, 64 or 128 bytes, or without one.
inline std::uint32_t swizzled(std::uint32_t address, std::uint32_t bytes) {
  if (bytes == 0) return address;
  const std::uint32_t mask = bytes / 16 - 1;
  return address ^ (((address >> 7) & mask) << 4);
}

}  // namespace sim

inline void tma_prefetch(const TensorMap&) {}
inline void tma_prefetch_4d(const TensorMap&, int, int, int, int) {}

namespace sim {

// Calls f(element or null, shared address) for every element of the map's box at (c0, c1, c2, c3), whose image in shared
// memory begins at `image`; null stands for one outside of the tensor. `chunk` is called before each 16 bytes of shared
// memory, with their address.
template <class Chunk, class F>
void for_box(const TensorMap& m, smem_t image, const std::array<std::int64_t, 4>& first, Chunk chunk, F f) {
  const std::uint32_t line = m.box[0] * m.element_bytes;
  for (std::uint32_t row = 0; row < m.box[1] * m.box[2] * m.box[3]; ++row) {
    const std::int64_t at[4] = {0, first[1] + row % m.box[1], first[2] + row / m.box[1] % m.box[2],
                                first[3] + row / m.box[1] / m.box[2]};
    bool inside = true;
    std::uint64_t from = m.address;
    for (int d = 1; d < 4; ++d) {
      inside = inside && at[d] >= 0 && static_cast<std::uint64_t>(at[d]) < m.dims[d];
      from += static_cast<std::uint64_t>(at[d]) * m.strides[d - 1];
    }
    for (std::uint32_t piece = 0; piece < line; piece += 16) {
      const std::uint32_t to = swizzled(image + row * line + piece, m.swizzle_bytes);
      chunk(to);
      for (std::uint32_t byte = 0; byte < 16; byte += m.element_bytes) {
        const std::int64_t column = first[0] + (piece + byte) / m.element_bytes;
        const bool here = inside && column >= 0 && static_cast<std::uint64_t>(column) < m.dims[0];
        f(here ? reinterpret_cast<unsigned char*>(from + static_cast<std::uint64_t>(column) * m.element_bytes) : nullptr,
          to + byte);
      }
    }
  }
}

inline std::uint32_t box_bytes(const TensorMap& m) {
  return m.box[0] * m.box[1] * m.box[2] * m.box[3] * m.element_bytes;
}

// What the hardware refuses, of a copy in either direction.
inline void check_box(const TensorMap& map, smem_t image, std::int64_t column, const Where& where) {
  if (image % 128) machine->fail(where, "TMA with shared address %u, no multiple of 128", image - kSharedBase);
  if (column * map.element_bytes % 16) {
    machine->fail(where, "TMA at column %d, whose bytes are no multiple of 16", static_cast<int>(column));
  }
  machine->shared(image, box_bytes(map), where);
}

inline void load_box(Block& target, const TensorMap& map, smem_t bar, smem_t dst, std::array<std::int64_t, 4> first,
                     const Where& where) {
  check_box(map, dst, first[0], where);
  // A copy of the map: the thread's own is gone if the kernel ends before this lands.
  machine->copy_async(target, bar, box_bytes(map), where, [=, &target, map = map](Access access, const View& view) {
    const std::uint32_t element_bytes = map.element_bytes;
    const auto chunk = [&](std::uint32_t to) { machine->touch(target, to, 16, true, access, view); };
    for_box(map, dst, first, chunk, [&](const unsigned char* from, std::uint32_t to) {
      unsigned char* p = machine->shared(target, to, element_bytes, access.where);
      if (from) {
        const bool undefined = machine->global(from, element_bytes, false, access.where, {.copies = true});
        std::memcpy(p, from, element_bytes);
        if (undefined) {
          machine->copy_mark(target, to, element_bytes, access, from);
        } else if (to % 4 == 0) {
          machine->unflag_marked(target, to);
        }
      } else {
        std::memset(p, 0, element_bytes);
      }
    });
  });
}

}  // namespace sim

inline void tma_load_4d(const TensorMap& map, smem_t bar, smem_t dst, int c0, int c1, int c2, int c3, uint64_t,
                        Where where = Where::current()) {
  sim::load_box(sim::machine->home(), map, bar, dst, {c0, c1, c2, c3}, where);
}

inline void tma_load_4d_multicast(const TensorMap& map, smem_t bar, smem_t dst, int c0, int c1, int c2, int c3,
                                  uint32_t blocks, uint64_t, Where where = Where::current()) {
  for (int rank = 0; rank < 16; ++rank) {
    if (blocks >> rank & 1) sim::load_box(sim::machine->peer(rank, where), map, bar, dst, {c0, c1, c2, c3}, where);
  }
}

inline void bulk_load(smem_t bar, smem_t dst, const void* src, int bytes, Where where = Where::current()) {
  using namespace sim;
  const auto size = static_cast<std::uint32_t>(bytes);
  if (bytes <= 0 || (size | dst | reinterpret_cast<std::uintptr_t>(src)) % 16) {
    machine->fail(where, "bulk copy of %d bytes from %p to shared address %u: no multiples of 16", bytes, src, dst - kSharedBase);
  }
  machine->shared(dst, size, where);
  Block& target = machine->home();
  machine->copy_async(target, bar, bytes, where, [=, &target](Access access, const View& view) {
    machine->touch(dst, size, true, access, view);
    const bool undefined = machine->global(src, size, false, access.where, {.copies = true});
    std::memcpy(machine->shared(dst, size, access.where), src, size);
    for (std::uint32_t word = 0; undefined && word < size; word += 4) {
      const void* from = static_cast<const unsigned char*>(src) + word;
      if (!machine->global(from, 4, false, access.where, {.copies = true})) continue;
      machine->copy_mark(target, dst + word, 4, access, from);
    }
  });
}

inline void bulk_store(void* dst, smem_t src, int bytes, Where where = Where::current()) {
  using namespace sim;
  const auto size = static_cast<std::uint32_t>(bytes);
  if (bytes <= 0 || (size | src | reinterpret_cast<std::uintptr_t>(dst)) % 16) {
    machine->fail(where, "bulk store of %d bytes from shared address %u to %p: no multiples of 16", bytes, src - kSharedBase, dst);
  }
  machine->shared(src, size, where);
  auto data = std::make_shared<std::vector<unsigned char>>(size);
  const auto read = [=](Access access, const View& view) {
    machine->touch(src, size, false, access, view);
    machine->require_defined_copy(src, size, dst, access.where);
    std::memcpy(data->data(), machine->shared(src, size, access.where), size);
  };
  machine->store_async(where, read, [=](Access access) {
    machine->global(dst, size, true, access.where, {.async = &access});
    std::memcpy(dst, data->data(), size);
  });
}

inline void tma_store_4d(const TensorMap& map, smem_t src, int c0, int c1, int c2, int c3, Where where = Where::current()) {
  using namespace sim;
  check_box(map, src, c0, where);
  const std::array<std::int64_t, 4> first{c0, c1, c2, c3};
  for (std::int64_t c : first) {
    // So an H200 does, which leaves out what lies behind the tensor's end alone.
    if (c < 0) machine->fail(where, "a TMA store that begins before the tensor, at %d: an illegal instruction", static_cast<int>(c));
  }
  const std::uint32_t element_bytes = map.element_bytes;
  auto data = std::make_shared<std::vector<unsigned char>>();
  const auto read = [=, map = map](Access access, const View& view) {
    const auto chunk = [&](std::uint32_t from) { machine->touch(from, 16, false, access, view); };
    for_box(map, src, first, chunk, [&](const unsigned char* to, std::uint32_t from) {
      if (to) machine->require_defined_copy(from, element_bytes, to, access.where);
      const unsigned char* p = machine->shared(from, element_bytes, access.where);
      data->insert(data->end(), p, p + element_bytes);
    });
  };
  machine->store_async(where, read, [=, map = map](Access access) {
    const unsigned char* from = data->data();
    for_box(map, src, first, [](std::uint32_t) {}, [&](unsigned char* to, std::uint32_t) {
      if (to) {
        machine->global(to, element_bytes, true, access.where, {.async = &access});
        std::memcpy(to, from, element_bytes);
      }
      from += element_bytes;
    });
  });
}

inline void bulk_commit() { sim::machine->commit_stores(); }
template <int Pending>
void bulk_wait(Where where = Where::current()) {
  sim::machine->wait_stores(Pending, true, where);
}
template <int Pending>
void bulk_wait_read(Where where = Where::current()) {
  sim::machine->wait_stores(Pending, false, where);
}

// ---- Copies by single threads

inline void copy_async_16(smem_t dst, const void* src, Where where = Where::current()) {
  if ((dst | reinterpret_cast<std::uintptr_t>(src)) % 16) {
    sim::machine->fail(where, "copy of 16 bytes from %p to shared address %u: no multiples of 16", src, dst - sim::kSharedBase);
  }
  sim::machine->shared(dst, 16, where);
  sim::machine->copy_alone(dst, src, where);
}
inline void copy_async_arrive(smem_t bar, Where where = Where::current()) { sim::machine->arrive_copied(bar, where); }
inline void copy_async_wait(Where where = Where::current()) { sim::machine->wait_copied(where); }

// ---- Clusters

inline int cluster_rank() { return sim::machine->cluster_rank(); }
inline int cluster_size() { return sim::machine->cluster_size(); }
inline void cluster_arrive(Where where = Where::current()) { sim::machine->arrive_cluster(where); }
inline void cluster_wait(Where where = Where::current()) { sim::machine->wait_cluster(where); }
inline void cluster_sync(Where where = Where::current()) {
  cluster_arrive(where);
  cluster_wait(where);
}
inline void mbarrier_arrive_remote(smem_t bar, int rank, Where where = Where::current()) {
  sim::machine->arrive_mbarrier(sim::machine->peer(rank, where), bar, 0, where);
}

// ---- Programmatic dependent launch

inline void grid_launch_dependents() {}
inline void grid_wait() { sim::machine->current().overlap_waited = true; }

// ---- WGMMA

inline uint64_t wgmma_descriptor(smem_t start, int leading, int stride) {
  return (1ull << 62) | (static_cast<uint64_t>((stride & 0x3ffff) >> 4) << 32) |
         (static_cast<uint64_t>((leading & 0x3ffff) >> 4) << 16) | static_cast<uint64_t>((start & 0x3ffff) >> 4);
}
inline uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
  return (descriptor & 0xffffffff00000000ull) | static_cast<uint32_t>(static_cast<uint32_t>(descriptor) + (bytes >> 4));
}
inline void wgmma_fence(Where where = Where::current()) {
  sim::together("wgmma fence", where, [] { sim::machine->queue().fenced = true; });
}
inline void wgmma_commit(Where where = Where::current()) {
  sim::together("wgmma commit", where, [&where] { sim::machine->commit_matmuls(where); });
}
template <int Pending>
void wgmma_wait(Where where = Where::current()) {
  if (sim::machine->lane() == 0) sim::machine->event("wgmma wait", where);
  sim::together("wgmma wait", where, [&where] { sim::machine->wait_matmuls(Pending, where); });
  sim::machine->see_matmuls();
}
template <class T, int Count>
void wgmma_fence_operand(T (&)[Count]) {}

namespace sim {

// A shared-memory operand, decoded from the 64 bits of its descriptor.
struct Operand {
  std::uint32_t start, leading, stride, swizzle;

  Operand(std::uint64_t d, const Where& where)
      : start(static_cast<std::uint32_t>(d & 0x3fff) << 4),
        leading(static_cast<std::uint32_t>(d >> 16 & 0x3fff) << 4),
        stride(static_cast<std::uint32_t>(d >> 32 & 0x3fff) << 4),
        swizzle(0) {
    switch (d >> 62) {
      case 1: swizzle = 128; break;
      case 2: swizzle = 64; break;
      case 3: swizzle = 32; break;
      default: machine->fail(where, "wgmma descriptor %#lx: layouts without a swizzle are not known here", d);
    }
    if (d >> 49 & 7) machine->fail(where, "wgmma descriptor %#lx: a base offset is not known here", d);
  }

  // Address of 16 bytes, the first or second half of a row of the reduction: K-major.
  std::uint32_t k_major(int row, int chunk) const {
    return swizzled(start + row / 8 * stride + row % 8 * swizzle + chunk * 16, swizzle);
  }
  // The same with 8 elements of M or N at one k: MN-major.
  std::uint32_t mn_major(int k, int chunk) const {
    const int per_line = static_cast<int>(swizzle) / 16;
    return swizzled(start + chunk / per_line * leading + k / 8 * stride + k % 8 * swizzle + chunk % per_line * 16, swizzle);
  }
};

// Puts a mark, if it is one, in the place of the numbers that 16 bits hold: one, or two of e4m3.
template <class Element>
void put_mark(Mark mark, float* to) {
  if (mark != kNoMark) std::fill_n(to, 2 / sizeof(Bits<Element>), as_float(mark));
}

template <class Element>
void read_chunk(std::uint32_t address, float* to, const Access& access, const View& view) {
  const unsigned char* p = machine->shared(address, 16, access.where);
  machine->touch(address, 16, false, access, view);
  Bits<Element> elements[16 / sizeof(Bits<Element>)];
  std::memcpy(elements, p, 16);
  for (std::size_t i = 0; i < std::size(elements); ++i) to[i] = widen(Element{}, elements[i]);
  if (!machine->may_be_marked(machine->home(), address, 16)) return;
  std::uint16_t halves[8];
  std::memcpy(halves, p, 16);
  for (int i = 0; i < 8; ++i) {
    put_mark<Element>(machine->take_mark(halves[i], address + 2 * i, access), to + i * std::size(elements) / 8);
  }
}

// What the lanes of a warp bring to an operation: their accumulators and, if A is in registers, their part of it.
struct MatmulLane {
  float* d;
  const uint32_t* a;
};

template <class Element, int N, bool TransposedB, bool TransposedA = false>
void matmul(float* d, const uint32_t* a_registers, std::uint64_t a, std::uint64_t b, bool accumulate, const Where& where) {
  if (machine->warp() / 4 * 4 + 4 > (machine->threads() + kWarp - 1) / kWarp) {
    machine->fail(where, "wgmma outside of a full warpgroup");
  }
  MatmulLane mine{d, a_registers};
  machine->gather("wgmma", where, &mine, [&](void* const* slots) {
    TensorQueue* queue = &machine->queue();
    float* const key = static_cast<MatmulLane*>(slots[0])->d;
    Accumulators& acc = queue->accumulators[key];
    if (acc.in_flight++ == 0) {
      const float mark = as_float(machine->mark_in_flight(where));
      std::memcpy(&acc.meanwhile, &mark, 4);
      acc.meanwhile &= ~kQuiet;
      acc.values.resize(kWarp * (N / 2));
      for (int lane = 0; lane < kWarp; ++lane) {
        acc.registers[lane] = static_cast<MatmulLane*>(slots[lane])->d;
        std::memcpy(&acc.values[lane * (N / 2)], acc.registers[lane], N / 2 * sizeof(float));
        for (int i = 0; i < N / 2; ++i) std::memcpy(acc.registers[lane] + i, &acc.meanwhile, 4);
      }
    }
    std::array<const uint32_t*, kWarp> a_of;
    std::array<std::array<uint32_t, 4>, kWarp> a_then{};
    for (int lane = 0; lane < kWarp; ++lane) {
      a_of[lane] = static_cast<MatmulLane*>(slots[lane])->a;
      if (a_of[lane]) std::memcpy(a_then[lane].data(), a_of[lane], 16);
    }
    const int quarter = machine->warp() % 4;
    const auto compute = [=](Access access, const View& view) {
      constexpr int kPer16 = 16 / sizeof(Bits<Element>);  // elements of 16 bytes
      constexpr int kPerWord = kPer16 / 4;
      constexpr int kDepth = 2 * kPer16;  // of the reduction
      float left[16][kDepth];
      float right[kDepth][N];
      if (a_of[0]) {
        for (int lane = 0; lane < kWarp; ++lane) {
          for (int i = 0; i < 4; ++i) {
            float* to = &left[lane / 4 + i % 2 * 8][kPerWord * (lane % 4) + i / 2 * kPer16];
            Bits<Element> elements[kPerWord];
            std::memcpy(elements, &a_then[lane][i], 4);
            for (int j = 0; j < kPerWord; ++j) to[j] = widen(Element{}, elements[j]);
            for (int half = 0; half < 2; ++half) {
              const auto bits = static_cast<std::uint16_t>(a_then[lane][i] >> 16 * half);
              put_mark<Element>(machine->mark_of(bits), to + half * kPerWord / 2);
            }
          }
        }
      } else {
        const Operand operand(a, access.where);
        if constexpr (TransposedA) {
          float line[kPer16];
          for (int k = 0; k < kDepth; ++k) {
            for (int chunk = 0; chunk < 16 / kPer16; ++chunk) {
              read_chunk<Element>(operand.mn_major(k, 16 / kPer16 * quarter + chunk), line, access, view);
              for (int i = 0; i < kPer16; ++i) left[kPer16 * chunk + i][k] = line[i];
            }
          }
        } else {
          for (int row = 0; row < 16; ++row) {
            for (int chunk = 0; chunk < 2; ++chunk) {
              read_chunk<Element>(operand.k_major(16 * quarter + row, chunk), &left[row][kPer16 * chunk], access, view);
            }
          }
        }
      }
      const Operand operand(b, access.where);
      if constexpr (TransposedB) {
        for (int k = 0; k < kDepth; ++k) {
          for (int chunk = 0; chunk < N / kPer16; ++chunk) {
            read_chunk<Element>(operand.mn_major(k, chunk), &right[k][kPer16 * chunk], access, view);
          }
        }
      } else {
        for (int n = 0; n < N; ++n) {
          float row[kDepth];
          for (int chunk = 0; chunk < 2; ++chunk) {
            read_chunk<Element>(operand.k_major(n, chunk), row + kPer16 * chunk, access, view);
          }
          for (int k = 0; k < kDepth; ++k) right[k][n] = row[k];
        }
      }
      Accumulators& target = queue->accumulators[key];
      for (int row = 0; row < 16; ++row) {
        float sum[N] = {};
        for (int k = 0; k < kDepth; ++k) {
          for (int n = 0; n < N; ++n) sum[n] += left[row][k] * right[k][n];
        }
        for (int n = 0; n < N; ++n) {
          const int lane = row % 8 * 4 + n % 8 / 2;
          float& value = target.values[lane * (N / 2) + n / 8 * 4 + row / 8 * 2 + n % 2];
          value = accumulate ? value + sum[n] : sum[n];
        }
      }
    };
    machine->match_matmul(where, a, b, N, accumulate);
    machine->issue_matmul(where, compute, [=] {
      for (int lane = 0; lane < kWarp && a_of[0]; ++lane) {
        if (std::memcmp(a_then[lane].data(), a_of[lane], 16) != 0) {
          machine->fail(where, "the A registers of lane %d changed before the wgmma was waited for", lane);
        }
      }
      Accumulators& target = queue->accumulators[key];
      if (--target.in_flight > 0) return;
      for (int lane = 0; lane < kWarp; ++lane) {
        for (int i = 0; i < N / 2; ++i) {
          if (std::memcmp(target.registers[lane] + i, &target.meanwhile, 4) != 0) {
            machine->fail(where, "an accumulator of lane %d was written before the wgmma was waited for", lane);
          }
        }
        std::memcpy(target.registers[lane], &target.values[lane * (N / 2)], N / 2 * sizeof(float));
      }
      queue->accumulators.erase(key);
    });
  });
}

}  // namespace sim

template <class Element, int N, int Count>
void wgmma_ss_k(float (&d)[Count], uint64_t a, uint64_t b, bool accumulate, Where where = Where::current()) {
  static_assert(N / 2 <= Count, "D holds the columns");
  sim::matmul<Element, N, false>(d, nullptr, a, b, accumulate, where);
}
template <class Element, int N>
void wgmma_rs_k(float (&d)[N / 2], const uint32_t* a, uint64_t b, bool accumulate, Where where = Where::current()) {
  sim::matmul<Element, N, false>(d, a, 0, b, accumulate, where);
}
template <class Element, int N, int First = 0, int Count>
void wgmma_ss_mn(float (&d)[Count], uint64_t a, uint64_t b, Where where = Where::current()) {
  static_assert(sizeof(sim::Bits<Element>) == 2, "only 16-bit operands may lie with their columns along the row");
  static_assert(First % 8 == 0 && First / 2 + N / 2 <= Count, "D holds the columns");
  sim::matmul<Element, N, true>(reinterpret_cast<float (&)[N / 2]>(d[First / 2]), nullptr, a, b, true, where);
}
template <class Element, int N>
void wgmma_ss_mn_k(float (&d)[N / 2], uint64_t a, uint64_t b, Where where = Where::current()) {
  static_assert(sizeof(sim::Bits<Element>) == 2, "only 16-bit operands may lie with their columns along the row");
  sim::matmul<Element, N, false, true>(d, nullptr, a, b, true, where);
}
template <class Element, int N>
void wgmma_rs_mn(float (&d)[N / 2], const uint32_t* a, uint64_t b, Where where = Where::current()) {
  static_assert(sizeof(sim::Bits<Element>) == 2, "only 16-bit operands may lie with their columns along the row");
  sim::matmul<Element, N, true>(d, a, 0, b, true, where);
}

}  // namespace mlaforge
