/* Vectors of WIDTH floats for the attention kernels, with one name for every instruction set.
 *
 * They are the compiler's vector types, so that + - * / and comparisons need no names. */
#ifndef SHOAL_ATTENTION_VEC_H
#define SHOAL_ATTENTION_VEC_H

#include "shoal.h"

#include <string.h>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include <immintrin.h>
#define WIDTH 16
#elif defined(__AVX2__)
#include <immintrin.h>
#define WIDTH 8
#else
#define WIDTH 4
#endif

typedef float vec __attribute__((vector_size(4 * WIDTH)));
typedef int32_t ivec __attribute__((vector_size(4 * WIDTH)));
typedef uint32_t uvec __attribute__((vector_size(4 * WIDTH)));

INLINE vec vec_load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE void vec_store(float *to, vec v) { memcpy(to, &v, sizeof v); }

/* x in every lane; its bits are unchanged. */
INLINE vec vec_all(float x) {
#if WIDTH == 16
    return (vec)_mm512_set1_ps(x);
#elif WIDTH == 8
    return (vec)_mm256_set1_ps(x);
#else
    return (vec){x, x, x, x};
#endif
}

/* a * b + c, rounded once where the instruction set can. */
INLINE vec vec_madd(vec a, vec b, vec c) {
#if WIDTH == 16
    return (vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif WIDTH == 8
    return (vec)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

/* c plus the products of each lane's two bfloat16, or a * b + c of floats. */
INLINE vec vec_dot(const int paired, vec a, vec b, vec c) {
#if defined(__AVX512BF16__)
    if (paired) return (vec)_mm512_dpbf16_ps((__m512)c, (__m512bh)a, (__m512bh)b);
#endif
    (void)paired;
    return vec_madd(a, b, c);
}

/* Lane by lane a where mask is all ones, b where it is 0. */
INLINE vec vec_select(ivec mask, vec a, vec b) { return (vec)((mask & (ivec)a) | (~mask & (ivec)b)); }

/* The larger; b where one of them is NaN. */
INLINE vec vec_max(vec a, vec b) {
#if WIDTH == 16
    return (vec)_mm512_max_ps((__m512)a, (__m512)b);
#elif WIDTH == 8
    return (vec)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return vec_select(a > b, a, b);
#endif
}

INLINE float vec_largest(vec v) {
    float lanes[WIDTH];
    vec_store(lanes, v);
    for (int n = WIDTH / 2; n; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] = lanes[i] > lanes[i + n] ? lanes[i] : lanes[i + n];
    return lanes[0];
}

INLINE float vec_sum(vec v) {
    float lanes[WIDTH];
    vec_store(lanes, v);
    for (int n = WIDTH / 2; n; n /= 2)
        for (int i = 0; i < n; i++) lanes[i] += lanes[i + n];
    return lanes[0];
}

/* exp for x up to 88, 0 below -87.3; within 2 units of the last place. NaN stays NaN. */
INLINE vec vec_exp(vec x) {
    const vec lowest = vec_all(-87.3f), shift = vec_all(12582912.0f + 127.0f);
    ivec tiny = x < lowest;
    vec y = vec_max(lowest, x);
    /* The sum's last bits are the exponent of 2 that is nearest to x / ln 2, biased as a float's. */
    vec sum = vec_madd(y, vec_all(1.44269504f), shift);
    vec n = sum - shift;
    vec r = vec_madd(n, vec_all(-0.693359375f), y);
    r = vec_madd(n, vec_all(2.12194440e-4f), r);
    vec p = vec_all(1.9875691500e-4f); /* Cephes' expf */
    p = vec_madd(p, r, vec_all(1.3981999507e-3f));
    p = vec_madd(p, r, vec_all(8.3334519073e-3f));
    p = vec_madd(p, r, vec_all(4.1665795894e-2f));
    p = vec_madd(p, r, vec_all(1.6666665459e-1f));
    p = vec_madd(p, r, vec_all(5.0000001201e-1f));
    p = vec_madd(p, r * r, r + vec_all(1.0f));
    return (vec)(~tiny & (ivec)(p * (vec)((ivec)sum << 23)));
}

/* tanh, within some units of the last place (Cephes' tanhf). */
INLINE vec vec_tanh(vec x) {
    const ivec sign = (ivec)vec_all(-0.0f);
    vec size = (vec)(~sign & (ivec)x);
    vec square = x * x;
    vec p = vec_all(-5.70498872745e-3f);
    p = vec_madd(p, square, vec_all(2.06390887954e-2f));
    p = vec_madd(p, square, vec_all(-5.37397155531e-2f));
    p = vec_madd(p, square, vec_all(1.33314422036e-1f));
    p = vec_madd(p, square, vec_all(-3.33332819422e-1f));
    vec near = vec_madd(p * square, x, x);
    vec capped = vec_select(size > vec_all(9.0f), vec_all(9.0f), size);
    vec far = vec_all(1.0f) - vec_all(2.0f) / (vec_exp(capped + capped) + vec_all(1.0f));
    return vec_select(size < vec_all(0.625f), near, (vec)((ivec)far | (sign & (ivec)x)));
}

/* The first `bytes` (at most a vector's) at `from`, then zeros. */
INLINE vec vec_load_bytes(const char *from, int64_t bytes) {
    if (bytes >= (int64_t)sizeof(vec)) return vec_load((const float *)from);
#if WIDTH == 16
    return (vec)_mm512_maskz_loadu_epi8(((__mmask64)1 << bytes) - 1, from);
#else
    vec v = {0};
    memcpy(&v, from, (size_t)bytes);
    return v;
#endif
}

/* The first `count` floats at `from`, then zeros. */
INLINE vec vec_load_floats(const float *from, int64_t count) { return vec_load_bytes((const char *)from, 4 * count); }

/* WIDTH bfloat16 at `from` (with any alignment), of which only `count` exist; zeros after them. */
INLINE vec vec_load_bf16(const void *from, int64_t count) {
#if WIDTH == 16
    __mmask16 mask = count >= WIDTH ? 0xffff : (__mmask16)((1u << count) - 1);
    return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, from)), 16);
#else
    uint16_t half[WIDTH] = {0};
    memcpy(half, from, 2 * (size_t)(count < WIDTH ? count : WIDTH));
#if WIDTH == 8
    return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)half)), 16);
#else
    ivec bits;
    for (int i = 0; i < WIDTH; i++) bits[i] = (int32_t)((uint32_t)half[i] << 16);
    return (vec)bits;
#endif
#endif
}

/* WIDTH int8 at `from`, of which only `count` exist; zeros after them. */
INLINE vec vec_load_int8(const int8_t *from, int64_t count) {
#if WIDTH == 16
    __mmask16 mask = count >= WIDTH ? 0xffff : (__mmask16)((1u << count) - 1);
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, from)));
#else
    int8_t bytes[16] = {0};
    memcpy(bytes, from, (size_t)(count < WIDTH ? count : WIDTH));
#if WIDTH == 8
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)bytes)));
#else
    vec v;
    for (int i = 0; i < WIDTH; i++) v[i] = bytes[i];
    return v;
#endif
#endif
}

/* The float of each lane's integer. */
INLINE vec vec_of_ints(ivec v) { return __builtin_convertvector(v, vec); }

/* The integer (of at most 22 bits) that is nearest to each lane; ties go to the even one. */
INLINE ivec vec_round(vec v) {
    const vec shift = vec_all(12582912.0f); /* a unit in the last place of the sum is 1 */
    return (ivec)(v + shift) - (ivec)shift;
}

/* Store the first `count` lanes, which are int8. */
INLINE void vec_store_int8(int8_t *to, ivec v, int64_t count) {
#if WIDTH == 16
    __mmask16 mask = count >= WIDTH ? 0xffff : (__mmask16)((1u << count) - 1);
    _mm512_mask_cvtepi32_storeu_epi8(to, mask, (__m512i)v);
#else
    for (int64_t i = 0; i < (count < WIDTH ? count : WIDTH); i++) to[i] = (int8_t)v[i];
#endif
}

/* Store the first `count` lanes. */
INLINE void vec_store_floats(float *to, vec v, int64_t count) {
    if (count >= WIDTH) vec_store(to, v);
    else memcpy(to, &v, 4 * (size_t)count);
}

/* Store the nearest bfloat16 (ties to even) of the first `count` lanes. */
INLINE void vec_store_bf16(uint16_t *to, vec v, int64_t count) {
    uvec bits = (uvec)v;
    uvec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    rounded = (uvec)vec_select(v == v, (vec)rounded, (vec)(bits >> 16 | 0x40)); /* NaN stays NaN */
#if WIDTH == 16
    __mmask16 mask = count >= WIDTH ? 0xffff : (__mmask16)((1u << count) - 1);
    _mm256_mask_storeu_epi16(to, mask, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
    for (int64_t i = 0; i < (count < WIDTH ? count : WIDTH); i++) to[i] = (uint16_t)rounded[i];
#endif
}

/* Ask the memory for the cache line at `from`; it comes as near as the second level. */
INLINE void vec_prefetch(const void *from) { __builtin_prefetch(from, 0, 2); }

/* Make rows of 32-bit units columns. */
INLINE void vec_transpose(vec rows[WIDTH]) {
#if WIDTH == 16
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i += 2) {
        a[i] = _mm512_unpacklo_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
        a[i + 1] = _mm512_unpackhi_epi32((__m512i)rows[i], (__m512i)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm512_unpacklo_epi64(a[i + j], a[i + 2 + j]);
            b[i + 2 * j + 1] = _mm512_unpackhi_epi64(a[i + j], a[i + 2 + j]);
        }
    /* b[4g + c] has, in 128-bit lane l, unit 4l + c of rows 4g .. 4g + 3. */
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), high = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        rows[c] = (vec)_mm512_shuffle_i32x4(low, low2, 0x88);
        rows[8 + c] = (vec)_mm512_shuffle_i32x4(low, low2, 0xdd);
        rows[4 + c] = (vec)_mm512_shuffle_i32x4(high, high2, 0x88);
        rows[12 + c] = (vec)_mm512_shuffle_i32x4(high, high2, 0xdd);
    }
#elif WIDTH == 8
    __m256 a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + 2 * j] = _mm256_shuffle_ps(a[i + j], a[i + 2 + j], 0x44);
            b[i + 2 * j + 1] = _mm256_shuffle_ps(a[i + j], a[i + 2 + j], 0xee);
        }
    for (int c = 0; c < 4; c++) {
        rows[c] = (vec)_mm256_permute2f128_ps(b[c], b[4 + c], 0x20);
        rows[4 + c] = (vec)_mm256_permute2f128_ps(b[c], b[4 + c], 0x31);
    }
#else
    for (int i = 0; i < WIDTH; i++)
        for (int j = 0; j < i; j++) {
            float swapped = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = swapped;
        }
#endif
}

#endif
