// Codes of quantised caches, of eight numbers a thread: what a byte's e4m3 is and what pack4 makes of it, the same of e2m1,
// the larger magnitude of neighbours, and quotients by a scale in both codes.
#include "quantised.cuh"

namespace mlaforge {

MLAFORGE_DEVICE void store_words(int32_t* to, const uint32_t* words, int count) {
  for (int i = 0; i < count; ++i) store_global(to + i, static_cast<int32_t>(words[i]));
}

extern "C" __global__ void __launch_bounds__(128)
    encode(const float* in, int32_t* e4m3, int32_t* e2m1, float* maxima, int eights) {
  for (int i = static_cast<int>(threadIdx.x); i < eights; i += 128) {
    float x[8];
    for (int e = 0; e < 8; ++e) x[e] = bits_float(float_bits(load_global(in + 8 * i + e)));
    uint32_t words[2];
    Codes<E4m3>::encode(x, words);
    store_words(e4m3 + 2 * i, words, 2);
    uint32_t word[1];
    Codes<E2m1>::encode(x, word);
    store_words(e2m1 + i, word, 1);
    for (int e = 0; e < 8; ++e) store_global(maxima + 8 * i + e, max_nan(x[e], x[(e + 1) % 8]));
  }
}

extern "C" __global__ void __launch_bounds__(128) decode(const unsigned char* in, float* e4m3, float* e2m1, int eights) {
  for (int i = static_cast<int>(threadIdx.x); i < eights; i += 128) {
    uint32_t words[2] = {0, 0};
    for (int e = 0; e < 8; ++e) words[e / 4] |= load_global(in + 8 * i + e) << (8 * (e % 4));
    float x[8];
    Codes<E4m3>::decode(words, x);
    for (int e = 0; e < 8; ++e) store_global(e4m3 + 8 * i + e, x[e]);
    for (int half = 0; half < 2; ++half) {
      Codes<E2m1>::decode(words + half, x);
      for (int e = 0; e < 8; ++e) store_global(e2m1 + 16 * i + 8 * half + e, x[e]);
    }
  }
}

// Each eight numbers by a scale of their own.
extern "C" __global__ void __launch_bounds__(128)
    quotients(const float* in, const float* scales, int32_t* e4m3, int32_t* e2m1, int eights) {
  for (int i = static_cast<int>(threadIdx.x); i < eights; i += 128) {
    float x[8];
    for (int e = 0; e < 8; ++e) x[e] = load_global(in + 8 * i + e);
    divide(x, load_global(scales + i));
    uint32_t words[2];
    Codes<E4m3>::encode(x, words);
    store_words(e4m3 + 2 * i, words, 2);
    uint32_t word[1];
    Codes<E2m1>::encode(x, word);
    store_words(e2m1 + i, word, 1);
  }
}

// Scales of groups whose largest magnitude is given, and what the codes of e2m1's stand for.
extern "C" __global__ void __launch_bounds__(128)
    scales(const float* amax, const float* tensor, float* of_groups, int32_t* codes, float* of_blocks, int count) {
  for (int i = static_cast<int>(threadIdx.x); i < count; i += 128) {
    store_global(of_groups + i, group_scale(load_global(amax + i)));
    const uint32_t code = block_scale(load_global(amax + i), load_global(tensor + i));
    store_global(codes + i, static_cast<int32_t>(code));
    store_global(of_blocks + i, block_scale_of(code));
  }
}

}  // namespace mlaforge
