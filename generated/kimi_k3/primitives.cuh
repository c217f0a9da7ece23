// Device primitives of mlaforge: the only place where the kernels touch PTX.
//
// WGMMA comes from CUTLASS' atoms; TMA, mbarriers, fences and matrix stores are a few lines of PTX each, because the
// CuTe headers that hold them cost seconds of compile time and do not compile under every CCCL of CUDA 13.
// Shared memory is addressed by its 32-bit shared-window address (`smem_t`), so that every access goes through here.
#pragma once

#ifdef MLAFORGE_SIMULATOR
#include "primitives.hpp"  // the same names, on a CPU
#else

#include <cute/arch/mma_sm90_gmma.hpp>

namespace mlaforge {

using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long long;
using uint64_t = unsigned long long;

// Address in the shared window of this block, in bytes.
using smem_t = uint32_t;

#define MLAFORGE_DEVICE __device__ __forceinline__

// ---------------------------------------------------------------------------------------------------------------
// Element types. A tag, not a number: values live packed in 32-bit registers.

struct Bf16 {};
struct Fp16 {};
struct E4m3 {};
struct E2m1 {};  // a sign, two bits of exponent, one of mantissa; Hopper can't convert it

// Two float32, rounded to nearest even, as one register; `lo` lands in the low half (the lower address).
template <class Element>
MLAFORGE_DEVICE uint32_t pack2(float lo, float hi);

template <>
MLAFORGE_DEVICE uint32_t pack2<Bf16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

template <>
MLAFORGE_DEVICE uint32_t pack2<Fp16>(float lo, float hi) {
  uint32_t r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
  return r;
}

// The two elements of such a register, as float32: exact.
template <class Element>
MLAFORGE_DEVICE float unpack_low(uint32_t x);
template <class Element>
MLAFORGE_DEVICE float unpack_high(uint32_t x);

template <>
MLAFORGE_DEVICE float unpack_low<Bf16>(uint32_t x) {
  return __uint_as_float(x << 16);
}
template <>
MLAFORGE_DEVICE float unpack_high<Bf16>(uint32_t x) {
  return __uint_as_float(x & 0xffff0000u);
}
template <>
MLAFORGE_DEVICE float unpack_low<Fp16>(uint32_t x) {
  float r;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.f32.f16 %0, lo;\n}" : "=f"(r) : "r"(x));
  return r;
}
template <>
MLAFORGE_DEVICE float unpack_high<Fp16>(uint32_t x) {
  float r;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.f32.f16 %0, hi;\n}" : "=f"(r) : "r"(x));
  return r;
}

// Four float32, rounded to nearest even, as one register of e4m3, the first in the lowest byte. What is beyond 448 is 448,
// NaN is 0x7f.
template <class Element>
MLAFORGE_DEVICE uint32_t pack4(float x0, float x1, float x2, float x3);

template <>
MLAFORGE_DEVICE uint32_t pack4<E4m3>(float x0, float x1, float x2, float x3) {
  uint32_t r;
  asm("{\n"
      ".reg .b16 lo, hi;\n"
      "cvt.rn.satfinite.e4m3x2.f32 lo, %2, %1;\n"
      "cvt.rn.satfinite.e4m3x2.f32 hi, %4, %3;\n"
      "mov.b32 %0, {lo, hi};\n"
      "}"
      : "=r"(r)
      : "f"(x0), "f"(x1), "f"(x2), "f"(x3));
  return r;
}

// The four elements of such a register, as float32: exact.
template <class Element>
MLAFORGE_DEVICE void unpack4(uint32_t x, float (&v)[4]);

template <>
MLAFORGE_DEVICE void unpack4<E4m3>(uint32_t x, float (&v)[4]) {
  uint32_t lo, hi;
  asm("{\n"
      ".reg .b16 lo, hi;\n"
      "mov.b32 {lo, hi}, %2;\n"
      "cvt.rn.f16x2.e4m3x2 %0, lo;\n"
      "cvt.rn.f16x2.e4m3x2 %1, hi;\n"
      "}"
      : "=r"(lo), "=r"(hi)
      : "r"(x));
  v[0] = unpack_low<Fp16>(lo);
  v[1] = unpack_high<Fp16>(lo);
  v[2] = unpack_low<Fp16>(hi);
  v[3] = unpack_high<Fp16>(hi);
}

// The lower and the upper two of them as two fp16: exact.
template <class Element>
MLAFORGE_DEVICE uint32_t widen_low(uint32_t x);
template <class Element>
MLAFORGE_DEVICE uint32_t widen_high(uint32_t x);

template <>
MLAFORGE_DEVICE uint32_t widen_low<E4m3>(uint32_t x) {
  uint32_t r;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.rn.f16x2.e4m3x2 %0, lo;\n}" : "=r"(r) : "r"(x));
  return r;
}
template <>
MLAFORGE_DEVICE uint32_t widen_high<E4m3>(uint32_t x) {
  uint32_t r;
  asm("{\n.reg .b16 lo, hi;\nmov.b32 {lo, hi}, %1;\ncvt.rn.f16x2.e4m3x2 %0, hi;\n}" : "=r"(r) : "r"(x));
  return r;
}

// Bits of x where those of `mask` are set, else of y. The compiler would spread this over what is done with it.
MLAFORGE_DEVICE uint32_t select_bits(uint32_t mask, uint32_t x, uint32_t y) {
  uint32_t r;
  asm("lop3.b32 %0, %1, %2, %3, 0xca;" : "=r"(r) : "r"(mask), "r"(x), "r"(y));
  return r;
}

// Eight e2m1, the first in the lowest bits, as fp16 of 2^-14 of their value: elements 0 and 4, 2 and 6, 1 and 5, 3 and 7.
MLAFORGE_DEVICE void widen_e2m1(uint32_t x, uint32_t (&r)[4]) {
  // Sign, exponent and mantissa where the upper byte of an fp16 has them, whose exponent means 2^14 less.
  constexpr uint32_t kSigns = 0x80808080u;
  constexpr uint32_t kUpper = 0x8e008e00u;
  const uint32_t even = select_bits(kSigns, x << 4, x << 1);
  const uint32_t odd = select_bits(kSigns, x, x >> 3);
  r[0] = even << 8 & kUpper;
  r[1] = even & kUpper;
  r[2] = odd << 8 & kUpper;
  r[3] = odd & kUpper;
}

// Products of two pairs of fp16, rounded to nearest even.
MLAFORGE_DEVICE uint32_t multiply2(uint32_t x, uint32_t y) {
  uint32_t r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(x), "r"(y));
  return r;
}

// A pair of fp16 times one of another pair, the `Which`th.
template <int Which>
MLAFORGE_DEVICE uint32_t multiply2_by(uint32_t x, uint32_t pair) {
  uint32_t r;
  if constexpr (Which == 0) {
    asm("{\n.reg .b16 l, h;\n.reg .b32 both;\nmov.b32 {l, h}, %2;\nmov.b32 both, {l, l};\nmul.rn.f16x2 %0, %1, both;\n}"
        : "=r"(r)
        : "r"(x), "r"(pair));
  } else {
    asm("{\n.reg .b16 l, h;\n.reg .b32 both;\nmov.b32 {l, h}, %2;\nmov.b32 both, {h, h};\nmul.rn.f16x2 %0, %1, both;\n}"
        : "=r"(r)
        : "r"(x), "r"(pair));
  }
  return r;
}

// Four bytes of two words: nibble i of `selector` names the one that becomes byte i, 0 to 3 of x, 4 to 7 of y.
MLAFORGE_DEVICE uint32_t permute_bytes(uint32_t x, uint32_t y, uint32_t selector) { return __byte_perm(x, y, selector); }

// A float32 as its bits, and back.
MLAFORGE_DEVICE uint32_t float_bits(float x) { return __float_as_uint(x); }
MLAFORGE_DEVICE float bits_float(uint32_t x) { return __uint_as_float(x); }

// ---------------------------------------------------------------------------------------------------------------
// Math. Approximate to about 2 ulp; inputs of -inf give 0, which the masks rely on.

MLAFORGE_DEVICE float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

MLAFORGE_DEVICE float log2_approx(float x) {
  float r;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

MLAFORGE_DEVICE float rsqrt_approx(float x) {
  float r;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

MLAFORGE_DEVICE float reciprocal_approx(float x) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

constexpr float kLn2 = 0.693147180559945309f;

// The larger one; NaN if either is.
MLAFORGE_DEVICE float max_nan(float x, float y) {
  float r;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(x), "f"(y));
  return r;
}

MLAFORGE_DEVICE float infinity() { return __int_as_float(0x7f800000); }

// ---------------------------------------------------------------------------------------------------------------
// Threads

MLAFORGE_DEVICE int lane_id() { return static_cast<int>(threadIdx.x) & 31; }

MLAFORGE_DEVICE int warp_id() { return static_cast<int>(threadIdx.x) >> 5; }

// A value that is the same for all lanes of a warp, in a form that tells the compiler so. Every lane takes part.
MLAFORGE_DEVICE int warp_uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// The same value, in a form that keeps the compiler from working out ahead what follows from it: registers that a loop
// needs are not spent on what stands behind it.
MLAFORGE_DEVICE int late(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

// `stride` bytes behind p for each of `count`: one instruction, which the compiler neither takes apart nor works out ahead.
MLAFORGE_DEVICE const unsigned char* strided(const unsigned char* p, int count, int stride) {
  const unsigned char* r;
  asm("mad.wide.s32 %0, %1, %2, %3;" : "=l"(r) : "r"(count), "r"(stride), "l"(p));
  return r;
}

// Whether any lane of the warp brings true. Every lane takes part.
MLAFORGE_DEVICE bool warp_any(bool x) { return __any_sync(0xffffffffu, x) != 0; }

MLAFORGE_DEVICE float shuffle_xor(float x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }
MLAFORGE_DEVICE uint32_t shuffle_xor(uint32_t x, int mask) { return __shfl_xor_sync(0xffffffffu, x, mask); }

// Registers of a thread, by role: the warps of a warpgroup all take or give back together. `Count` is a multiple of 8.
template <int Count>
MLAFORGE_DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Count));
}
template <int Count>
MLAFORGE_DEVICE void give_back_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Count));
}

// Named barrier `id` (1 to 15): waits until `threads` threads have arrived, this one included.
MLAFORGE_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The same, and tells each of them whether any brought true.
MLAFORGE_DEVICE bool named_barrier_any(int id, int threads, bool x) {
  uint32_t any;
  asm volatile(
      "{\n"
      ".reg .pred p, q;\n"
      "setp.ne.u32 p, %3, 0;\n"
      "barrier.red.or.pred q, %1, %2, p;\n"
      "selp.u32 %0, 1, 0, q;\n"
      "}\n"
      : "=r"(any)
      : "r"(id), "r"(threads), "r"(static_cast<uint32_t>(x))
      : "memory");
  return any != 0;
}

// Arrives at the named barrier without waiting.
MLAFORGE_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------
// Memory

extern __shared__ __align__(1024) unsigned char dynamic_smem_bytes[];

// Base of the dynamic shared memory, a multiple of 1024: a constant for the compiler.
MLAFORGE_DEVICE smem_t dynamic_smem() { return static_cast<smem_t>(__cvta_generic_to_shared(dynamic_smem_bytes)); }

MLAFORGE_DEVICE float load_shared_f32(smem_t a) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(a) : "memory");
  return v;
}
MLAFORGE_DEVICE void store_shared_f32(smem_t a, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(a), "f"(v) : "memory");
}
MLAFORGE_DEVICE int32_t load_shared_s32(smem_t a) {
  int32_t v;
  asm volatile("ld.shared.s32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
MLAFORGE_DEVICE void store_shared_s32(smem_t a, int32_t v) {
  asm volatile("st.shared.s32 [%0], %1;" ::"r"(a), "r"(v) : "memory");
}
// Two words; `a` is a multiple of 8.
MLAFORGE_DEVICE void load_shared_v2(smem_t a, float (&v)[2]) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v[0]), "=f"(v[1]) : "r"(a) : "memory");
}
// Four words; `a` is a multiple of 16.
MLAFORGE_DEVICE void load_shared_v4(smem_t a, int32_t (&v)[4]) {
  asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(a)
               : "memory");
}
MLAFORGE_DEVICE void store_shared_v4(smem_t a, const int32_t (&v)[4]) {
  asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(v[0]), "r"(v[1]), "r"(v[2]), "r"(v[3]) : "memory");
}
MLAFORGE_DEVICE void load_shared_v4(smem_t a, float (&v)[4]) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(a)
               : "memory");
}
MLAFORGE_DEVICE void store_shared_v4(smem_t a, const float (&v)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(a), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]) : "memory");
}
// 16 bytes of zeros; `a` is a multiple of 16.
MLAFORGE_DEVICE void store_shared_zero16(smem_t a) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(a), "r"(0) : "memory");
}

MLAFORGE_DEVICE int32_t load_global(const int32_t* p) {
  int32_t v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MLAFORGE_DEVICE int64_t load_global(const int64_t* p) {
  int64_t v;
  asm volatile("ld.global.s64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
  return v;
}
MLAFORGE_DEVICE float load_global(const float* p) {
  float v;
  asm volatile("ld.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
  return v;
}
MLAFORGE_DEVICE uint32_t load_global(const unsigned char* p) {
  uint32_t v;
  asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
MLAFORGE_DEVICE void prefetch_global(const void* p) { asm volatile("prefetch.global.L1 [%0];" ::"l"(p)); }
// Four floats; `p` is a multiple of 16 bytes.
MLAFORGE_DEVICE void load_global_v4(const float* p, float (&v)[4]) {
  asm volatile("ld.global.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "l"(p)
               : "memory");
}
// Eight elements of 16 bits; `p` is a multiple of 16 bytes.
MLAFORGE_DEVICE void load_global_v4(const void* p, uint32_t (&v)[4]) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "l"(p)
               : "memory");
}
MLAFORGE_DEVICE void store_global(int32_t* p, int32_t v) {
  asm volatile("st.global.s32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
MLAFORGE_DEVICE void store_global(float* p, float v) {
  asm volatile("st.global.f32 [%0], %1;" ::"l"(p), "f"(v) : "memory");
}
// Two elements of 16 bits.
MLAFORGE_DEVICE void store_global(void* p, uint32_t x) {
  asm volatile("st.global.b32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
}
// `Offset` bytes behind p: of many stores, each would otherwise get an addition of its own.
template <int Offset>
MLAFORGE_DEVICE void store_global_v2(float* p, float x, float y) {
  asm volatile("st.global.v2.f32 [%0+%3], {%1, %2};" ::"l"(p), "f"(x), "f"(y), "n"(Offset) : "memory");
}
MLAFORGE_DEVICE void store_global_v2(void* p, uint32_t x, uint32_t y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory");
}
MLAFORGE_DEVICE void store_global_v4(void* p, uint32_t x, uint32_t y, uint32_t z, uint32_t w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Adds to a word that other blocks add to, and returns what it was. `acq_rel` also orders: what this thread did or has seen
// before is seen by whoever reads the sum this way afterwards. Relaxed needs a fence_gpu() before (to hand over) and behind
// (to take over).
MLAFORGE_DEVICE int32_t atomic_add_acq_rel(int32_t* p, int32_t v) {
  int32_t before;
  asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
MLAFORGE_DEVICE int32_t atomic_add_relaxed(int32_t* p, int32_t v) {
  int32_t before;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(before) : "l"(p), "r"(v) : "memory");
  return before;
}
// Reads such a word and takes over what its adders handed over.
MLAFORGE_DEVICE int32_t load_global_acquire(const int32_t* p) {
  int32_t v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// Orders this thread's accesses of memory, and those it has seen, for every thread of the GPU.
MLAFORGE_DEVICE void fence_gpu() { asm volatile("fence.acq_rel.gpu;" ::: "memory"); }

// Four 8x8 matrices of 16-bit elements to registers; lane i gives the address of row i%8 of matrix i/8, and gets of each
// matrix two neighbours: row i/4, columns 2(i%4), +1. Transposed: column i/4, rows 2(i%4), +1.
MLAFORGE_DEVICE void ldmatrix_x4(smem_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}
MLAFORGE_DEVICE void ldmatrix_x4_transposed(smem_t row, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(row)
               : "memory");
}

// Four 8x8 matrices of 16-bit elements from registers; lane i gives the address of row i%8 of matrix i/8.
MLAFORGE_DEVICE void stmatrix_x4(smem_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1), "r"(m2),
               "r"(m3)
               : "memory");
}
// The same, each matrix transposed: its columns become the rows that the lanes name.
MLAFORGE_DEVICE void stmatrix_x4_transposed(smem_t row, uint32_t m0, uint32_t m1, uint32_t m2, uint32_t m3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row), "r"(m0), "r"(m1),
               "r"(m2), "r"(m3)
               : "memory");
}
// Two matrices, whose rows lanes 0 to 15 name.
MLAFORGE_DEVICE void stmatrix_x2_transposed(smem_t row, uint32_t m0, uint32_t m1) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(row), "r"(m0), "r"(m1) : "memory");
}

// Makes this thread's earlier plain accesses of shared memory visible to later TMA and WGMMA operations. Each writing
// thread needs it before the barrier after which another thread issues the operation.
MLAFORGE_DEVICE void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory.
MLAFORGE_DEVICE void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------------
// mbarriers: 8 bytes of shared memory each.

MLAFORGE_DEVICE void mbarrier_init(smem_t bar, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(arrivals) : "memory");
}

// Makes initialised mbarriers visible to the async proxy; a block-wide barrier must follow.
MLAFORGE_DEVICE void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

MLAFORGE_DEVICE void mbarrier_arrive(smem_t bar) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

// One arrival, and `bytes` more that asynchronous copies must bring before the phase ends.
MLAFORGE_DEVICE void mbarrier_arrive_expect_tx(smem_t bar, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}

// Waits for the end of the phase of this parity (0 for the first phase, 1 for the second, ...).
MLAFORGE_DEVICE void mbarrier_wait(smem_t bar, int parity) {
  uint32_t done;
  do {
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}\n"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
  } while (!done);
}

// Whether the phase of this parity has ended by now.
MLAFORGE_DEVICE bool mbarrier_test(smem_t bar, int parity) {
  uint32_t done;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}\n"
      : "=r"(done)
      : "r"(bar), "r"(parity)
      : "memory");
  return done != 0;
}

// ---------------------------------------------------------------------------------------------------------------
// TMA

// A CUtensorMap, encoded by the host.
struct alignas(64) TensorMap {
  uint64_t opaque[16];
};

// L2 eviction priority of a copy, in createpolicy's encoding.
constexpr uint64_t kEvictFirst = 0x12f0000000000000ull;
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;

MLAFORGE_DEVICE void tma_prefetch(const TensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies the map's box at element coordinates (c0, c1, c2, c3), innermost first, to `dst`; its bytes, zeros outside of
// the tensor included, are counted on `bar`. `dst` is a multiple of 1024 under the 128-byte swizzle (of the box's row
// below a full swizzle atom).
MLAFORGE_DEVICE void tma_load_4d(const TensorMap& map, smem_t bar, smem_t dst, int c0, int c1, int c2, int c3,
                                 uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7;" ::"r"(dst),
      "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "l"(cache_policy)
      : "memory");
}

// Brings the same box into L2 only, ahead of a copy that can't be issued yet.
MLAFORGE_DEVICE void tma_prefetch_4d(const TensorMap& map, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(&map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3)
               : "memory");
}

// The same copy to every block of the cluster whose rank is set in `blocks`: to `dst` of each, counted on `bar` of each.
MLAFORGE_DEVICE void tma_load_4d_multicast(const TensorMap& map, smem_t bar, smem_t dst, int c0, int c1, int c2, int c3,
                                           uint32_t blocks, uint64_t cache_policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster.L2::cache_hint "
      "[%0], [%1, {%3, %4, %5, %6}], [%2], %7, %8;" ::"r"(dst),
      "l"(&map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "h"(static_cast<unsigned short>(blocks)),
      "l"(cache_policy)
      : "memory");
}

// Copies `bytes` from global memory to `dst`, counted on `bar`; all three are multiples of 16.
MLAFORGE_DEVICE void bulk_load(smem_t bar, smem_t dst, const void* src, int bytes) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}

// Stores, by the async proxy: what plain stores wrote to `src` needs fence_proxy_async() first. They belong to this
// thread's open group, which bulk_commit() closes.

// Copies `bytes` from shared to global memory; all three are multiples of 16.
MLAFORGE_DEVICE void bulk_store(void* dst, smem_t src, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(dst), "r"(src), "r"(bytes)
               : "memory");
}

// Copies the map's box from `src`, laid out as by tma_load_4d, to the tensor; what lies behind its end is left out. No
// coordinate may be negative.
MLAFORGE_DEVICE void tma_store_4d(const TensorMap& map, smem_t src, int c0, int c1, int c2, int c3) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%0, {%2, %3, %4, %5}], [%1];" ::"l"(&map),
               "r"(src), "r"(c0), "r"(c1), "r"(c2), "r"(c3)
               : "memory");
}

MLAFORGE_DEVICE void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Waits until at most `Pending` of this thread's groups are unfinished; a block must not end before bulk_wait_read.
template <int Pending>
MLAFORGE_DEVICE void bulk_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}
// The same, but only until shared memory has been read and may be written again.
template <int Pending>
MLAFORGE_DEVICE void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// ---------------------------------------------------------------------------------------------------------------
// Copies by single threads, of 16 bytes each. Unlike TMA they write by the generic proxy: whoever has waited for them needs
// fence_proxy_async() before TMA or WGMMA touch what they wrote.

// `dst` and `src` are multiples of 16.
// Without a cache policy: of an address in a uniform register and a policy ptxas 13.0 makes an LDGSTS that is none.
MLAFORGE_DEVICE void copy_async_16(smem_t dst, const void* src) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst), "l"(src) : "memory");
}

// One of the arrivals that `bar` counts, as soon as all copies that this thread has started so far have landed.
MLAFORGE_DEVICE void copy_async_arrive(smem_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

// Waits until they have landed; a thread must not end before.
MLAFORGE_DEVICE void copy_async_wait() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------------
// Clusters: blocks that run at the same time and reach each other's shared memory.

MLAFORGE_DEVICE int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

MLAFORGE_DEVICE int cluster_size() {
  int size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return size;
}

// The barrier of all threads of the cluster, in two halves. A block must not end while others may still reach for its
// shared memory.
MLAFORGE_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release;" ::: "memory"); }
MLAFORGE_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire;" ::: "memory"); }
MLAFORGE_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// Arrives at the mbarrier that lies at `bar` in the block of this rank, which may be one's own. It says that a buffer was
// read; plain writes are not handed over to another block: that order would take a fence of the whole GPU.
MLAFORGE_DEVICE void mbarrier_arrive_remote(smem_t bar, int rank) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}\n" ::"r"(bar),
      "r"(rank)
      : "memory");
}

// ---------------------------------------------------------------------------------------------------------------
// Programmatic dependent launch

// Lets a dependent kernel start as soon as this one's blocks leave room for it.
MLAFORGE_DEVICE void grid_launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// Waits until the kernel before this one is complete and its writes are visible.
MLAFORGE_DEVICE void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// ---------------------------------------------------------------------------------------------------------------
// WGMMA: D[64, N] (+)= A[64, 16] B[16, N] of 16-bit operands, or A[64, 32] B[32, N] of e4m3 (K-major only); float32
// accumulators, one warpgroup.
//
// Thread t of the warpgroup holds of D, for each group g of 8 columns: d[4g], d[4g+1] at row 16(t/32) + (t%32)/4 and
// columns 8g + 2(t%4), +1; d[4g+2], d[4g+3] eight rows below. A from registers has the same shape with 16 columns:
// a[0] row r, columns 2(t%4), +1; a[1] row r + 8; a[2] row r, columns + 8; a[3] row r + 8, columns + 8.
// Of e4m3, whose registers hold four, all column numbers are doubled.

// Shared-memory operand under the 128-byte swizzle: rows of 128 bytes (64 elements of 16 bits), 8 rows to an atom of 1024 bytes,
// the 16-byte chunk c of row r stored at chunk c ^ (r % 8). Byte strides are multiples of 16.
//   K-major (the reduction runs along the row): `stride` leads from 8 rows to the next 8; `leading` is not used.
//   MN-major (the reduction runs across rows): `stride` leads from 8 rows to the next 8 of the reduction, `leading` from
//   64 columns to the next 64.
MLAFORGE_DEVICE uint64_t wgmma_descriptor(smem_t start, int leading, int stride) {
  constexpr uint64_t kSwizzle128 = 1ull << 62;
  return kSwizzle128 | (static_cast<uint64_t>((stride & 0x3ffff) >> 4) << 32) |
         (static_cast<uint64_t>((leading & 0x3ffff) >> 4) << 16) | static_cast<uint64_t>((start & 0x3ffff) >> 4);
}

// The same operand `bytes` further on (a multiple of 16; the sum stays inside of the block's shared memory).
MLAFORGE_DEVICE uint64_t wgmma_advance(uint64_t descriptor, int bytes) {
  // The start address never carries out of its 14 bits: an add on the low word is enough.
  const uint32_t low = static_cast<uint32_t>(descriptor) + static_cast<uint32_t>(bytes >> 4);
  return (descriptor & 0xffffffff00000000ull) | low;
}

// Orders this warpgroup's accesses of accumulators and A registers before the wgmma that follow.
MLAFORGE_DEVICE void wgmma_fence() { cute::warpgroup_arrive(); }
// Closes a group of wgmma.
MLAFORGE_DEVICE void wgmma_commit() { cute::warpgroup_commit_batch(); }
// Waits until at most `Pending` groups are unfinished.
template <int Pending>
MLAFORGE_DEVICE void wgmma_wait() {
  cute::warpgroup_wait<Pending>();
}
// Keeps the compiler from moving uses of the accumulators across this point.
template <int Count>
MLAFORGE_DEVICE void wgmma_fence_operand(float (&d)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) cute::warpgroup_fence_operand(d[i]);
}

// The same of A registers: what follows does not take their place before the products that read them are done.
template <int Count>
MLAFORGE_DEVICE void wgmma_fence_operand(uint32_t (&a)[Count]) {
#pragma unroll
  for (int i = 0; i < Count; ++i) cute::warpgroup_fence_operand(a[i]);
}

namespace detail {

// The pack 0, 1, ..., Count - 1.
template <int... I>
struct Indices {};
template <int Count, int... I>
struct MakeIndices : MakeIndices<Count - 1, Count - 1, I...> {};
template <int... I>
struct MakeIndices<0, I...> {
  using type = Indices<I...>;
};
template <int Count>
using IndicesUpTo = typename MakeIndices<Count>::type;
template <int First, class>
struct ShiftIndices;
template <int First, int... I>
struct ShiftIndices<First, Indices<I...>> {
  using type = Indices<First + I...>;
};
template <int First, int Count>
using IndicesFrom = typename ShiftIndices<First, IndicesUpTo<Count>>::type;

using cute::SM90::GMMA::Major;
using cute::SM90::GMMA::ScaleOut;
namespace gmma = cute::SM90::GMMA;

template <class Element, int N, Major B>
struct Atoms;

#define MLAFORGE_ATOMS(N)                                            \
  template <Major B>                                                 \
  struct Atoms<Bf16, N, B> {                                         \
    using SS = gmma::MMA_64x##N##x16_F32BF16BF16_SS<Major::K, B>;    \
    using TS = gmma::MMA_64x##N##x16_F32BF16BF16_SS<Major::MN, B>;   \
    using RS = gmma::MMA_64x##N##x16_F32BF16BF16_RS<Major::K, B>;    \
  };                                                                 \
  template <Major B>                                                 \
  struct Atoms<Fp16, N, B> {                                         \
    using SS = gmma::MMA_64x##N##x16_F32F16F16_SS<Major::K, B>;      \
    using TS = gmma::MMA_64x##N##x16_F32F16F16_SS<Major::MN, B>;     \
    using RS = gmma::MMA_64x##N##x16_F32F16F16_RS<Major::K, B>;      \
  };                                                                 \
  template <>                                                        \
  struct Atoms<E4m3, N, Major::K> {                                  \
    using SS = gmma::MMA_64x##N##x32_F32E4M3E4M3_SS_TN<>;            \
    using RS = gmma::MMA_64x##N##x32_F32E4M3E4M3_RS_TN<>;            \
  };
MLAFORGE_ATOMS(8)
MLAFORGE_ATOMS(16)
MLAFORGE_ATOMS(32)
MLAFORGE_ATOMS(64)
MLAFORGE_ATOMS(96)
MLAFORGE_ATOMS(128)
MLAFORGE_ATOMS(192)
MLAFORGE_ATOMS(256)
#undef MLAFORGE_ATOMS

// CUTLASS keeps these N in a header that takes 3 s to compile, for the hundreds of other atoms in it. A lies K-major or,
// transposed, MN-major, B K-major. The accumulators are operands 0 to A - 1, and behind them the numbers that follow.
template <int N>
constexpr bool kOwnAtom = N > 16 && N % 32 != 0;

#define MLAFORGE_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLAFORGE_D12 MLAFORGE_D4(0), MLAFORGE_D4(4), MLAFORGE_D4(8)
#define MLAFORGE_D20 MLAFORGE_D12, MLAFORGE_D4(12), MLAFORGE_D4(16)
#define MLAFORGE_D24 MLAFORGE_D20, MLAFORGE_D4(20)
#define MLAFORGE_D28 MLAFORGE_D24, MLAFORGE_D4(24)
#define MLAFORGE_D40 MLAFORGE_D28, MLAFORGE_D4(28), MLAFORGE_D4(32), MLAFORGE_D4(36)
#define MLAFORGE_R12 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11"
#define MLAFORGE_R20 MLAFORGE_R12 ", %12, %13, %14, %15, %16, %17, %18, %19"
#define MLAFORGE_R24 MLAFORGE_R20 ", %20, %21, %22, %23"
#define MLAFORGE_R28 MLAFORGE_R24 ", %24, %25, %26, %27"
#define MLAFORGE_R40 MLAFORGE_R28 ", %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39"
#define MLAFORGE_SS_OF(Element, type, N, A, B, P, T)                                             \
  template <int TransposedA>                                                                     \
  MLAFORGE_DEVICE void ss_own(Element, float (&d)[A], uint64_t a, uint64_t b, bool accumulate) { \
    asm volatile(                                                                                \
        "{\n"                                                                                    \
        ".reg .pred p;\n"                                                                        \
        "setp.ne.b32 p, %" #P ", 0;\n"                                                           \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." type "." type                          \
        " {" MLAFORGE_R##A "}, %" #A ", %" #B ", p, 1, 1, %" #T ", 0;\n"                         \
        "}\n"                                                                                    \
        : MLAFORGE_D##A                                                                          \
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(TransposedA));                  \
  }
#define MLAFORGE_SS(N, A, B, P, T)            \
  MLAFORGE_SS_OF(Bf16, "bf16", N, A, B, P, T) \
  MLAFORGE_SS_OF(Fp16, "f16", N, A, B, P, T)
MLAFORGE_SS(24, 12, 13, 14, 15)
MLAFORGE_SS(40, 20, 21, 22, 23)
MLAFORGE_SS(48, 24, 25, 26, 27)
MLAFORGE_SS(56, 28, 29, 30, 31)
MLAFORGE_SS(80, 40, 41, 42, 43)
#undef MLAFORGE_SS
#undef MLAFORGE_SS_OF
#undef MLAFORGE_R40
#undef MLAFORGE_R28
#undef MLAFORGE_R24
#undef MLAFORGE_R20
#undef MLAFORGE_R12
#undef MLAFORGE_D40
#undef MLAFORGE_D28
#undef MLAFORGE_D24
#undef MLAFORGE_D20
#undef MLAFORGE_D12
#undef MLAFORGE_D4

template <class Atom, int Count, int... I>
MLAFORGE_DEVICE void fma_ss(float (&d)[Count], uint64_t a, uint64_t b, bool accumulate, Indices<I...>) {
  Atom::fma(a, b, d[I]..., accumulate ? ScaleOut::One : ScaleOut::Zero);
}
template <class Atom, int Count, int... I>
MLAFORGE_DEVICE void fma_rs(float (&d)[Count], const uint32_t* a, uint64_t b, bool accumulate, Indices<I...>) {
  Atom::fma(a[0], a[1], a[2], a[3], b, d[I]..., accumulate ? ScaleOut::One : ScaleOut::Zero);
}

}  // namespace detail

// D = A B^T, or D += A B^T with `accumulate`: A and B from shared memory, both K-major; B has N rows. D may be wider than
// that: the product then goes to its first columns.
template <class Element, int N, int Count>
MLAFORGE_DEVICE void wgmma_ss_k(float (&d)[Count], uint64_t a, uint64_t b, bool accumulate) {
  static_assert(N / 2 <= Count, "D holds the columns");
  if constexpr (detail::kOwnAtom<N>) {
    detail::ss_own<0>(Element{}, d, a, b, accumulate);
  } else {
    using Atom = typename detail::Atoms<Element, N, detail::Major::K>::SS;
    detail::fma_ss<Atom>(d, a, b, accumulate, detail::IndicesUpTo<N / 2>{});
  }
}

// The same with A from four registers.
template <class Element, int N>
MLAFORGE_DEVICE void wgmma_rs_k(float (&d)[N / 2], const uint32_t* a, uint64_t b, bool accumulate) {
  using Atom = typename detail::Atoms<Element, N, detail::Major::K>::RS;
  detail::fma_rs<Atom>(d, a, b, accumulate, detail::IndicesUpTo<N / 2>{});
}

// D += A B: A from shared memory (K-major), B from shared memory (MN-major, N columns). D may be wider than B: the
// product then goes to its columns from `First` on.
template <class Element, int N, int First = 0, int Count>
MLAFORGE_DEVICE void wgmma_ss_mn(float (&d)[Count], uint64_t a, uint64_t b) {
  static_assert(First % 8 == 0 && First / 2 + N / 2 <= Count, "D holds the columns");
  using Atom = typename detail::Atoms<Element, N, detail::Major::MN>::SS;
  detail::fma_ss<Atom>(d, a, b, true, detail::IndicesFrom<First / 2, N / 2>{});
}

// D += A B^T: A and B from shared memory, A MN-major (64 columns), B K-major with N rows.
template <class Element, int N>
MLAFORGE_DEVICE void wgmma_ss_mn_k(float (&d)[N / 2], uint64_t a, uint64_t b) {
  if constexpr (detail::kOwnAtom<N>) {
    detail::ss_own<1>(Element{}, d, a, b, true);
  } else {
    using Atom = typename detail::Atoms<Element, N, detail::Major::K>::TS;
    detail::fma_ss<Atom>(d, a, b, true, detail::IndicesUpTo<N / 2>{});
  }
}

// D += A B: A[64, 16] from four registers, B from shared memory (MN-major, N columns).
template <class Element, int N>
MLAFORGE_DEVICE void wgmma_rs_mn(float (&d)[N / 2], const uint32_t* a, uint64_t b) {
  using Atom = typename detail::Atoms<Element, N, detail::Major::MN>::RS;
  detail::fma_rs<Atom>(d, a, b, true, detail::IndicesUpTo<N / 2>{});
}

}  // namespace mlaforge

#endif  // MLAFORGE_SIMULATOR
