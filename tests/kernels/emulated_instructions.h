// The operations of AVX-VNNI, of AVX-512 with VNNI and BF16, and of AMX that the kernels use, computed with AVX2. Kernels for these
// instructions are so tested on processors without them (tests/support/emulated_processor.py). This file is read before any other.
// Results are those that Intel's manual defines (Software Developer's Manual, volume 2), but `rcp14` only to its accuracy.
// SIMDe is a library for this, but 0.7.4 lacks AMX, the conversions to bfloat16 and eleven others of these operations.
#pragma once
// <immintrin.h> without what is defined here, as in vec.h.
#define _IMMINTRIN_H_INCLUDED
#define _AVXVNNIINTRIN_H_INCLUDED
#include <smmintrin.h>
#include <avxintrin.h>
#include <avx2intrin.h>
#include <f16cintrin.h>
#include <fmaintrin.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#pragma GCC diagnostic ignored "-Wignored-attributes"  // vectors as arguments of templates lose `may_alias`, which copies do not need

typedef float __m512 __attribute__((vector_size(64), may_alias));
typedef long long __m512i __attribute__((vector_size(64), may_alias));
typedef short __m512bh __attribute__((vector_size(64), may_alias));
typedef short __m256bh __attribute__((vector_size(32), may_alias));
typedef unsigned short __mmask16;

#define OPERATION inline __attribute__((noinline))  // inlined, they would take the compiler minutes

namespace emulated {

typedef int8_t Bytes16 __attribute__((vector_size(16)));
typedef uint8_t UnsignedBytes16 __attribute__((vector_size(16)));
typedef int16_t Shorts16 __attribute__((vector_size(32)));
typedef uint16_t UnsignedShorts16 __attribute__((vector_size(32)));
typedef int16_t Shorts32 __attribute__((vector_size(64)));
typedef uint16_t UnsignedShorts32 __attribute__((vector_size(64)));
typedef int32_t Ints8 __attribute__((vector_size(32)));
typedef uint32_t UnsignedInts8 __attribute__((vector_size(32)));
typedef int32_t Ints16 __attribute__((vector_size(64)));
typedef uint32_t UnsignedInts16 __attribute__((vector_size(64)));

template <class H>
struct Halves {
    H low, high;
};
template <class To, class From>
inline To bits(From from) {
    To to;
    static_assert(sizeof to == sizeof from, "");
    std::memcpy(&to, &from, sizeof to);
    return to;
}
inline Halves<__m256i> halves(__m512i x) { return bits<Halves<__m256i>>(x); }
inline __m512i joined(__m256i low, __m256i high) { return bits<__m512i>(Halves<__m256i>{low, high}); }

template <class F>
OPERATION __m512 by_lane(F f, __m512 a, __m512 b = __m512{}) {
    for (int i = 0; i < 16; i++) a[i] = f(a[i], b[i]);
    return a;
}
template <class F>
OPERATION float reduced(F f, __m512 x) {  // in GCC's order
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x[i] = f(x[i + half], x[i]);
    return x[0];
}
template <class V, class... I>
__m512i set(I... last_to_first) {
    V x{};
    int i = sizeof...(I);
    ((x[--i] = last_to_first), ...);
    return (__m512i)x;
}

// Denormal numbers become zeros of their sign.
inline __m512 flush(__m512 x) {
    const UnsignedInts16 all = (UnsignedInts16)x;
    return (__m512)((all & 0x7f800000u) == 0 ? all & 0x80000000u : all);
}
inline __m512 multiply_add(__m512 a, __m512 b, __m512 sum) { return flush(flush(a) * flush(b) + flush(sum)); }
inline __m512 even(UnsignedInts16 pairs) { return (__m512)(pairs << 16); }
inline __m512 odd(UnsignedInts16 pairs) { return (__m512)(pairs & 0xffff0000u); }

// Adds to each sum four products of unsigned bytes of a and signed bytes of b.
template <class Signed, class Unsigned>
Unsigned add_products_of_bytes(Unsigned sums, Unsigned a, Unsigned b) {
    for (int bit = 0; bit < 32; bit += 8) sums += (a >> bit & 255u) * (Unsigned)((Signed)(b << (24 - bit)) >> 24);
    return sums;
}

struct Tiles {
    bool configured = false;
    int rows[8], bytes[8];
    UnsignedInts16 data[8][16];
};
inline thread_local Tiles tiles;

[[noreturn]] inline void fault(const char* why) {
    std::fprintf(stderr, "AMX: %s\n", why);
    std::abort();
}
inline void check(int tile) {
    if (!tiles.configured || !tiles.rows[tile]) fault("a tile without a shape");
}
inline void configure(const uint8_t* shapes) {
    if (shapes[0] != 1) fault("an unknown palette");
    for (int i = 1; i < 16; i++)
        if (shapes[i]) fault("a byte that must be zero");
    for (int tile = 0; tile < 16; tile++) {
        const int bytes = shapes[16 + 2 * tile] + 256 * shapes[17 + 2 * tile], rows = shapes[48 + tile];
        if (bytes > 64 || rows > 16 || !bytes != !rows || (tile >= 8 && rows)) fault("an impossible shape");
        if (tile < 8) tiles.rows[tile] = rows, tiles.bytes[tile] = bytes;
    }
    std::memset(tiles.data, 0, sizeof tiles.data);
    tiles.configured = true;
}
inline void release() { tiles.configured = false; }
inline void zero(int tile) {
    check(tile);
    std::memset(tiles.data[tile], 0, sizeof tiles.data[tile]);
}
inline void load(int tile, const void* from, int64_t stride) {
    zero(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        std::memcpy(&tiles.data[tile][row], (const char*)from + row * stride, tiles.bytes[tile]);
}
inline void store(int tile, void* to, int64_t stride) {
    check(tile);
    for (int row = 0; row < tiles.rows[tile]; row++)
        std::memcpy((char*)to + row * stride, &tiles.data[tile][row], tiles.bytes[tile]);
}
inline UnsignedInts16 row_of_integers(const UnsignedInts16& x, const UnsignedInts16* w, int words, UnsignedInts16 sums) {
    for (int k = 0; k < words; k++) sums = add_products_of_bytes<Ints16>(sums, UnsignedInts16{} + x[k], w[k]);
    return sums;
}
inline UnsignedInts16 row_of_floats(const UnsignedInts16& x, const UnsignedInts16* w, int words, UnsignedInts16 sums) {
    __m512 evens{}, odds{};
    for (int k = 0; k < words; k++) {
        const UnsignedInts16 all = UnsignedInts16{} + x[k];
        evens = multiply_add(even(all), even(w[k]), evens);
        odds = multiply_add(odd(all), odd(w[k]), odds);
    }
    return (UnsignedInts16)flush(flush((__m512)sums) + flush(evens + odds));
}
inline void multiply(const char* name, int sum, int x, int w) {
    for (int tile : {sum, x, w}) check(tile);
    if (tiles.rows[sum] != tiles.rows[x] || tiles.bytes[sum] != tiles.bytes[w] || tiles.bytes[x] != 4 * tiles.rows[w])
        fault("shapes that do not fit");
    const auto row_of = std::strcmp(name, "tdpbusd") ? row_of_floats : row_of_integers;
    for (int row = 0; row < tiles.rows[sum]; row++) {
        const UnsignedInts16 sums = row_of(tiles.data[x][row], tiles.data[w], tiles.rows[w], tiles.data[sum][row]);
        std::memcpy(&tiles.data[sum][row], &sums, tiles.bytes[sum]);
    }
}

}  // namespace emulated

#define TILE_CONFIGURE(shapes) emulated::configure(reinterpret_cast<const uint8_t*>(&shapes))
#define TILE_RELEASE() emulated::release()
#define TILE_LOAD(tile, from, stride) emulated::load(tile, from, stride)
#define TILE_LOAD_ONCE(tile, from, stride) emulated::load(tile, from, stride)
#define TILE_STORE(tile, to, stride) emulated::store(tile, to, stride)
#define TILE_ZERO(tile) emulated::zero(tile)
#define TILE_OPERATION(name, sum, x, w) emulated::multiply(name, sum, x, w)

OPERATION __m256i _mm256_dpbusd_avx_epi32(__m256i sums, __m256i a, __m256i b) {
    using namespace emulated;
    return (__m256i)add_products_of_bytes<Ints8>((UnsignedInts8)sums, (UnsignedInts8)a, (UnsignedInts8)b);
}
OPERATION __m512i _mm512_dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    using namespace emulated;
    return (__m512i)add_products_of_bytes<Ints16>((UnsignedInts16)sums, (UnsignedInts16)a, (UnsignedInts16)b);
}

OPERATION __m512 _mm512_loadu_ps(const void* from) {
    __m512 x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
OPERATION __m512 _mm512_set1_ps(float x) { return x - __m512{}; }
OPERATION __m512i _mm512_set1_epi16(short x) { return (__m512i)(x + emulated::Shorts32{}); }
OPERATION __m512i _mm512_set1_epi32(int x) { return (__m512i)(x + emulated::Ints16{}); }
template <class... I>
OPERATION __m512i _mm512_set_epi16(I... x) { return emulated::set<emulated::Shorts32>(x...); }
template <class... I>
OPERATION __m512i _mm512_set_epi32(I... x) { return emulated::set<emulated::Ints16>(x...); }
OPERATION __m512i _mm512_broadcast_i32x4(__m128i x) { return emulated::joined(_mm256_broadcastsi128_si256(x), _mm256_broadcastsi128_si256(x)); }
OPERATION __m512i _mm512_castsi256_si512(__m256i x) { return emulated::joined(x, _mm256_set1_epi32(0x7fc0dead)); }  // the upper half is undefined
OPERATION __m256i _mm512_castsi512_si256(__m512i x) { return emulated::halves(x).low; }
OPERATION __m256i _mm512_extracti64x4_epi64(__m512i x, int high) { return high ? emulated::halves(x).high : emulated::halves(x).low; }
OPERATION __m512i _mm512_inserti64x4(__m512i x, __m256i y, int high) {
    const auto old = emulated::halves(x);
    return high ? emulated::joined(old.low, y) : emulated::joined(y, old.high);
}
OPERATION __m512i _mm512_permutexvar_epi16(__m512i order, __m512i x) {
    return (__m512i)__builtin_shuffle((emulated::Shorts32)x, (emulated::Shorts32)order);
}
OPERATION __m512 _mm512_permutexvar_ps(__m512i order, __m512 x) { return __builtin_shuffle(x, (emulated::Ints16)order); }
OPERATION __m512i _mm512_shuffle_epi8(__m512i x, __m512i order) {
    const auto bytes = emulated::halves(x), orders = emulated::halves(order);
    return emulated::joined(_mm256_shuffle_epi8(bytes.low, orders.low), _mm256_shuffle_epi8(bytes.high, orders.high));
}

OPERATION __m512i _mm512_add_epi32(__m512i a, __m512i b) { return (__m512i)((emulated::UnsignedInts16)a + (emulated::UnsignedInts16)b); }
OPERATION __m512i _mm512_and_si512(__m512i a, __m512i b) { return a & b; }
OPERATION __m512i _mm512_or_si512(__m512i a, __m512i b) { return a | b; }
OPERATION __m512i _mm512_slli_epi16(__m512i x, int count) { return (__m512i)((emulated::UnsignedShorts32)x << count); }
OPERATION __m512i _mm512_slli_epi32(__m512i x, int count) { return (__m512i)((emulated::UnsignedInts16)x << count); }
OPERATION __m512i _mm512_srai_epi16(__m512i x, int count) { return (__m512i)((emulated::Shorts32)x >> count); }
OPERATION __m512i _mm512_max_epi32(__m512i a_, __m512i b_) {
    const auto a = (emulated::Ints16)a_, b = (emulated::Ints16)b_;
    return (__m512i)(a > b ? a : b);
}
OPERATION __m512i _mm512_madd_epi16(__m512i a_, __m512i b_) {
    const auto a = emulated::halves(a_), b = emulated::halves(b_);
    return emulated::joined(_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high));
}
OPERATION __m512 _mm512_fmadd_ps(__m512 a_, __m512 b_, __m512 c_) {
    using Parts = emulated::Halves<__m256>;
    const auto a = emulated::bits<Parts>(a_), b = emulated::bits<Parts>(b_), c = emulated::bits<Parts>(c_);
    return emulated::bits<__m512>(Parts{_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)});
}
OPERATION __m512 _mm512_max_ps(__m512 a, __m512 b) { return a > b ? a : b; }
OPERATION __m512 _mm512_min_ps(__m512 a, __m512 b) { return a < b ? a : b; }
OPERATION float _mm512_reduce_add_ps(__m512 x) {
    return emulated::reduced([](float a, float b) { return a + b; }, x);
}
OPERATION float _mm512_reduce_max_ps(__m512 x) {
    return emulated::reduced([](float a, float b) { return a > b ? a : b; }, x);
}

// Of the kinds of comparison, reduction and rounding, only those that the kernels use.
OPERATION __mmask16 _mm512_cmp_ps_mask(__m512 a, __m512 b, int kind) {
    if (kind != _CMP_NLT_UQ) std::abort();
    int mask = 0;
    for (int i = 0; i < 16; i++) mask |= !(a[i] < b[i]) << i;
    return __mmask16(mask);
}
OPERATION __mmask16 _mm512_test_epi32_mask(__m512i a, __m512i b) {
    int32_t both[16];
    const __m512i bits = a & b;
    std::memcpy(both, &bits, sizeof both);
    int mask = 0;
    for (int i = 0; i < 16; i++) mask |= (both[i] != 0) << i;
    return __mmask16(mask);
}
OPERATION __m512 _mm512_reduce_ps(__m512 x, int less_floor) {
    if (less_floor != 9) std::abort();
    return emulated::by_lane([](float a, float) { return std::isinf(a) ? 0.0f : a - std::floor(a); }, x);
}
OPERATION __m512 _mm512_roundscale_ps(__m512 x, int to_nearest) {
    if (to_nearest != 0) std::abort();
    return emulated::by_lane([](float a, float) { return std::nearbyint(a); }, x);
}
OPERATION __m512 _mm512_scalef_ps(__m512 x, __m512 exponent) {
    const auto scaled = [](float a, float b) {
        if (std::isnan(a) || std::isnan(b)) return NAN;
        if (std::isinf(b)) return b > 0 ? a * b : std::isinf(a) ? NAN : a * 0.0f;
        return std::ldexp(a, int(std::floor(std::fmin(std::fmax(b, -1000.0f), 1000.0f))));
    };
    return emulated::by_lane(scaled, x, exponent);
}
OPERATION __m512 _mm512_maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 exponent) {
    __m512 scaled = _mm512_scalef_ps(x, exponent);
    for (int i = 0; i < 16; i++)
        if (!(mask >> i & 1)) scaled[i] = 0;
    return scaled;
}
OPERATION __m512 _mm512_rcp14_ps(__m512 x) { return (__m512)((emulated::UnsignedInts16)(1.0f / x) & 0xfffffe00u); }

OPERATION __m512i _mm512_cvtepu8_epi32(__m128i x) { return (__m512i)__builtin_convertvector((emulated::UnsignedBytes16)x, emulated::Ints16); }
OPERATION __m512i _mm512_cvtepu16_epi32(__m256i x) { return (__m512i)__builtin_convertvector((emulated::UnsignedShorts16)x, emulated::Ints16); }
OPERATION __m128i _mm512_cvtepi32_epi8(__m512i x) { return (__m128i)__builtin_convertvector((emulated::Ints16)x, emulated::Bytes16); }
OPERATION __m256i _mm512_cvtepi32_epi16(__m512i x) { return (__m256i)__builtin_convertvector((emulated::Ints16)x, emulated::Shorts16); }
OPERATION __m512i _mm512_cvtps_epi32(__m512 x_) {
    const auto x = emulated::bits<emulated::Halves<__m256>>(x_);
    return emulated::joined(_mm256_cvtps_epi32(x.low), _mm256_cvtps_epi32(x.high));
}
OPERATION __m512 _mm512_cvtph_ps(__m256i x) {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(x)), high = _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1));
    return emulated::bits<__m512>(emulated::Halves<__m256>{low, high});
}
OPERATION __m256bh _mm512_cvtneps_pbh(__m512 x) {
    using namespace emulated;
    const UnsignedInts16 all = (UnsignedInts16)flush(x), rounded = all + 0x7fffu + (all >> 16 & 1u);
    return (__m256bh)__builtin_convertvector((x != x ? all | 0x400000u : rounded) >> 16, UnsignedShorts16);
}
OPERATION __m512bh _mm512_cvtne2ps_pbh(__m512 high, __m512 low) {
    return emulated::bits<__m512bh>(emulated::Halves<__m256bh>{_mm512_cvtneps_pbh(low), _mm512_cvtneps_pbh(high)});
}
OPERATION __m512 _mm512_dpbf16_ps(__m512 sums, __m512bh a_, __m512bh b_) {
    using namespace emulated;
    const auto a = (UnsignedInts16)a_, b = (UnsignedInts16)b_;
    return multiply_add(even(a), even(b), multiply_add(odd(a), odd(b), sums));
}
