// Vectors of the instruction set this file is compiled for, through GCC's vector extension: the
// same source makes the AVX2, the AVX-512 and the generic library. Half types live here too.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#if defined(__F16C__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

#define FLASH_EXT_INLINE inline __attribute__((always_inline))

namespace flash_ext::cpu {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
#else
constexpr int kVectorBytes = 16;
#endif

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// What a type is accumulated in.
template <class T>
struct Accumulator {
  using Type = float;
};
template <>
struct Accumulator<double> {
  using Type = double;
};
template <class T>
using Acc = typename Accumulator<T>::Type;

// A: float or double. 2^f = 1 + f * q(f) on [-1/2, 1/2], q the minimax polynomial (relative error
// of the whole below 1e-8 and 2e-17).
template <class A>
struct Simd;
template <>
struct Simd<float> {
  typedef float Vector __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Integers __attribute__((vector_size(kVectorBytes)));
  static constexpr int kMantissaBits = 23;
  static constexpr float kMinExponent = -126;
  static constexpr float kRound = 12582912;  // 1.5 * 2^23: adding it leaves the nearest integer
  static constexpr float kExp2[] = {0.693147188f,   0.240226508f,   0.0555035711f,
                                    0.00961808256f, 0.00133908634f, 0.000154531629f};
};
template <>
struct Simd<double> {
  typedef double Vector __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Integers __attribute__((vector_size(kVectorBytes)));
  static constexpr int kMantissaBits = 52;
  static constexpr double kMinExponent = -1022;
  static constexpr double kRound = 6755399441055744;  // 1.5 * 2^52
  static constexpr double kExp2[] = {
      0.6931471805599453094,   0.2402265069591009822,   0.05550410866482159434,
      0.009618129107606888527, 0.001333355814641693531, 0.0001540353044173605015,
      1.525273382983611839e-5, 1.321544258792168965e-6, 1.017806244584577352e-7,
      7.0725859492692237e-9,   4.454960598186518394e-10};
};
template <class A>
using Vec = typename Simd<A>::Vector;
template <class A>
using IntVec = typename Simd<A>::Integers;
template <class A>
constexpr int kWidth = kVectorBytes / static_cast<int>(sizeof(A));  // lanes of a vector

template <class A>
using Integer = std::conditional_t<sizeof(A) == 4, int32_t, int64_t>;  // a lane of IntVec

constexpr double kLog2e = 1.44269504088896340736;

template <class A>
FLASH_EXT_INLINE Vec<A> load(const A* from) {
  Vec<A> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <class A>
FLASH_EXT_INLINE void store(A* to, Vec<A> x) {
  std::memcpy(to, &x, sizeof(x));
}

template <class A>
FLASH_EXT_INLINE Vec<A> splat(A x) {
  return x - Vec<A>{};
}

template <class A>
FLASH_EXT_INLINE Vec<A> maximum(Vec<A> x, Vec<A> y) {
  return x > y ? x : y;
}

template <class A>
FLASH_EXT_INLINE bool any_differs(Vec<A> x, A from) {
  const IntVec<A> differs = x != from;
  bool any = false;
  for (int lane = 0; lane < kWidth<A>; ++lane) any |= differs[lane] != 0;
  return any;
}

// 0, 1, 2, ... one a lane.
template <class A>
FLASH_EXT_INLINE Vec<A> lane_numbers() {
  Vec<A> x;
  for (int lane = 0; lane < kWidth<A>; ++lane) x[lane] = static_cast<A>(lane);
  return x;
}

// 2^(x * factor) = power * (1 + rest), rest accurate also near zero.
template <class A>
struct Exp2Parts {
  Vec<A> rest;
  IntVec<A> exponent;  // of power, already shifted to its place
  IntVec<A> underflow;
};

template <class A>
FLASH_EXT_INLINE Exp2Parts<A> exp2_parts(Vec<A> x, A factor) {
  using S = Simd<A>;
  constexpr int kTerms = sizeof(S::kExp2) / sizeof(A);
  const Vec<A> rounded = x * factor + S::kRound;
  const Vec<A> fraction = x * factor - (rounded - S::kRound);
  Vec<A> q = splat<A>(S::kExp2[kTerms - 1]);
#pragma GCC unroll 16
  for (int i = kTerms - 2; i >= 0; --i) q = q * fraction + S::kExp2[i];
  return {q * fraction, reinterpret_cast<IntVec<A>>(rounded) << S::kMantissaBits,
          rounded < S::kRound + S::kMinExponent};
}

// exp of log2: 2^(x * factor), for results up to about 1; -inf and whatever underflows give 0.
template <class A>
FLASH_EXT_INLINE Vec<A> exp2(Vec<A> x, A factor) {
  const Exp2Parts<A> parts = exp2_parts<A>(x, factor);
  const IntVec<A> bits = reinterpret_cast<IntVec<A>>(parts.rest + A{1}) + parts.exponent;
  return parts.underflow ? Vec<A>{} : reinterpret_cast<Vec<A>>(bits);
}

// tanh(x) = e / (e + 2) with e = exp(2x) - 1, which stays accurate near zero.
template <class A>
FLASH_EXT_INLINE Vec<A> tanh(Vec<A> x) {
  const A limit = 20;  // tanh is 1 to the last bit beyond it, in both precisions
  x = x > limit ? splat<A>(limit) : x < -limit ? splat<A>(-limit) : x;
  const Exp2Parts<A> parts = exp2_parts<A>(x, static_cast<A>(2 * kLog2e));
  const IntVec<A> one = reinterpret_cast<IntVec<A>>(splat<A>(1));
  const Vec<A> power = reinterpret_cast<Vec<A>>(one + parts.exponent);
  const Vec<A> e = power * parts.rest + (power - A{1});
  return e / (e + A{2});
}

// Scalars of every type, to and from what they are accumulated in.
FLASH_EXT_INLINE float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
FLASH_EXT_INLINE uint32_t float_to_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

FLASH_EXT_INLINE float widen(float x) { return x; }
FLASH_EXT_INLINE double widen(double x) { return x; }
FLASH_EXT_INLINE float widen(BFloat16 x) { return bits_to_float(uint32_t{x.bits} << 16); }
FLASH_EXT_INLINE float widen(Half x) {
#ifdef __F16C__
  return _cvtsh_ss(x.bits);
#else
  const uint32_t sign = uint32_t{x.bits} << 16 & 0x80000000, magnitude = x.bits & 0x7fff;
  if (magnitude >= 0x7c00) return bits_to_float(sign | 0x7f800000 | magnitude << 13);
  // A float with the half's bits at its own places is too small by 2^112, subnormal or not.
  return bits_to_float(sign | float_to_bits(bits_to_float(magnitude << 13) * 0x1p112f));
#endif
}

template <class T>
FLASH_EXT_INLINE T narrow(Acc<T> x) {
  return x;
}
template <>
FLASH_EXT_INLINE BFloat16 narrow<BFloat16>(float x) {
  const uint32_t bits = float_to_bits(x);
  if (x != x) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
template <>
FLASH_EXT_INLINE Half narrow<Half>(float x) {
#ifdef __F16C__
  return {static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT))};
#else
  const uint32_t bits = float_to_bits(x), magnitude = bits & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return {static_cast<uint16_t>(sign | 0x7e00)};
  if (magnitude >= 0x47800000) return {static_cast<uint16_t>(sign | 0x7c00)};
  if (magnitude < 0x38800000) {  // subnormal: adding 1/2 moves the bits to their place, rounded
    const uint32_t rounded = float_to_bits(bits_to_float(magnitude) + 0.5f) - 0x3f000000;
    return {static_cast<uint16_t>(sign | rounded)};
  }
  const uint32_t rounded = magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1);
  return {static_cast<uint16_t>(sign | rounded >> 13)};
#endif
}

// A vector of any type, widened, and the first `count` numbers of one, narrowed.
typedef uint16_t ShortVec __attribute__((vector_size(kVectorBytes / 2)));

FLASH_EXT_INLINE Vec<float> load_wide(const float* from) { return load<float>(from); }
FLASH_EXT_INLINE Vec<double> load_wide(const double* from) { return load<double>(from); }
FLASH_EXT_INLINE IntVec<float> load_wide_bits(const uint16_t* from) {
#ifdef __AVX512F__  // GCC 12 would convert the halves one by one
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return reinterpret_cast<IntVec<float>>(_mm512_maskz_cvtepu16_epi32(0xffff, bits));
#else
  ShortVec bits;
  std::memcpy(&bits, from, sizeof(bits));
  return __builtin_convertvector(bits, IntVec<float>);
#endif
}
FLASH_EXT_INLINE Vec<float> load_wide(const BFloat16* from) {
  return reinterpret_cast<Vec<float>>(load_wide_bits(&from->bits) << 16);
}
FLASH_EXT_INLINE Vec<float> load_wide(const Half* from) {
#if defined(__AVX512F__)
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_maskz_cvtph_ps(0xffff, bits);  // the unmasked form warns in GCC 12
#elif defined(__F16C__)
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
  Vec<float> x;
  for (int lane = 0; lane < kWidth<float>; ++lane) x[lane] = widen(from[lane]);
  return x;
#endif
}

template <class T>
FLASH_EXT_INLINE void store_narrow(T* to, Vec<Acc<T>> x, int count) {
  if constexpr (sizeof(T) == sizeof(Acc<T>)) {
    if (count == kWidth<T>) return store<T>(to, x);
  } else if (count == kWidth<float>) {
#if defined(__AVX512F__)
    if constexpr (std::is_same_v<T, Half>) {
      const __m256i bits = _mm512_maskz_cvtps_ph(0xffff, x, _MM_FROUND_TO_NEAREST_INT);
      return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), bits);
    }
#endif
    if constexpr (std::is_same_v<T, BFloat16>) {
      typedef uint32_t Bits __attribute__((vector_size(kVectorBytes)));
      const Bits bits = reinterpret_cast<Bits>(x);
      const Bits rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
      const ShortVec shorts =
          __builtin_convertvector(x == x ? rounded : bits >> 16 | 0x40, ShortVec);
      std::memcpy(to, &shorts, sizeof(shorts));
      return;
    }
  }
  for (int i = 0; i < count; ++i) to[i] = narrow<T>(x[i]);
}

}  // namespace flash_ext::cpu
