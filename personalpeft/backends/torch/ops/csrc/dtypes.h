// The dtype of a library, its conversions, a vector, and a vectorisable exponential.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__FMA__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace {

// Below this number of operations, waking other threads takes longer than the work.
constexpr int64_t WORTH_THREADS = 1 << 15;

struct bfloat16 {
    uint16_t bits;
};

// IEEE half precision, the format of stored adapters and of scales in GGUF files.
struct half {
    uint16_t bits;
};

// The dtype of all tensors. An option of the compiler sets it.
using T = DTYPE;

// A vector is one register wide. Compilers compute wider ones piece by piece on the stack, ten times
// as slowly.
#if defined(__AVX512F__)
constexpr int64_t VECTOR = 16;
#elif defined(__AVX__)
constexpr int64_t VECTOR = 8;
#else
constexpr int64_t VECTOR = 4;
#endif
typedef float Vector __attribute__((vector_size(VECTOR * sizeof(float))));

// sums + factor * wide, rounded once where the processor can. It is not left to the compiler, which
// may decide otherwise for another tile: a token's bits would then depend on the rest of its pass.
inline Vector multiply_add(float factor, Vector wide, Vector sums) {
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(_mm512_set1_ps(factor), wide, sums);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(_mm256_set1_ps(factor), wide, sums);
#else
    return sums + factor * wide;
#endif
}

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

inline float as_float(float value) { return value; }

inline float as_float(bfloat16 value) { return from_bits(static_cast<uint32_t>(value.bits) << 16); }

// Subnormal numbers included.
inline float as_float(half value) {
    const uint32_t wide = static_cast<uint32_t>(value.bits) << 16;
    const uint32_t sign = wide & 0x80000000u, doubled = wide + wide;
    const float normal = from_bits((doubled >> 4) + (0xE0u << 23)) * 0x1.0p-112f;
    const float subnormal = from_bits((doubled >> 17) | (126u << 23)) - 0.5f;
    return from_bits(sign | to_bits(doubled < (1u << 27) ? subnormal : normal));
}

inline void store(float value, float& target) { target = value; }

inline void store(float value, bfloat16& target) {
    const uint32_t bits = to_bits(value);
    target.bits = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// e^x for x <= 0, with a relative error of about 1e-7. Compilers vectorise this form.
inline float exp_of_negative(float x) {
    x = x < -87.0f ? -87.0f : x;
    const float scaled = x * 1.44269504f;
    const float whole = std::nearbyint(scaled);
    const float f = (scaled - whole) * 0.693147181f;
    const float power =
        1.0f +
        f * (1.0f + f * (0.5f + f * (0.166666667f + f * (0.0416666667f + f * 0.00833333333f))));
    return power * from_bits((static_cast<int32_t>(whole) + 127) << 23);
}

}  // namespace
