/* Products of int8 with AVX2, whose products of bytes want one unsigned factor and saturate sums of two in 16 bits.

   The unsigned factor is the magnitude of an input, at most 127, and the other one is the weight with the input's sign:
   two such products are at most 2 * 127 * 128 = 32,512. Weights are stored as weight + 128, so an exclusive or with 0x80
   gives the weight, and one with 0x7f gives -weight - 1, which is a byte for -128, too. What a negative input thereby
   loses, its magnitude, does not depend on the weight, and is where sums start. */
#ifndef SHOAL_INT8_TILE_AVX2_H
#define SHOAL_INT8_TILE_AVX2_H

enum { LANES = 8, VECTORS = PANEL / LANES };

/* A group of inputs of all rows of a tile. */
struct group {
    uint8_t magnitudes[ROWS][GROUP], flips[ROWS][GROUP]; /* of inputs, and what flips weights for them */
    float scales[ROWS];
    int32_t lost[ROWS]; /* sum of the magnitudes of negative inputs */
};

/* Store the 32 values of a row's group as the products want them. */
INLINE void put_values(const int32_t *values, struct group *group, int row) {
    _Alignas(32) int8_t bytes[GROUP];
    int32_t lost = 0;
    for (int i = 0; i < GROUP; i++) {
        bytes[i] = (int8_t)values[i];
        lost += values[i] < 0 ? -values[i] : 0;
    }
    const __m256i x = _mm256_load_si256((const __m256i *)bytes);
    const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), x);
    _mm256_storeu_si256((__m256i *)group->magnitudes[row], _mm256_abs_epi8(x));
    _mm256_storeu_si256((__m256i *)group->flips[row], _mm256_xor_si256(negative, _mm256_set1_epi8(-128)));
    group->lost[row] = lost;
}

/* Four bytes, in each of 8 lanes. */
INLINE __m256i repeat_four(const uint8_t *bytes) {
    int32_t word;
    __builtin_memcpy(&word, bytes, sizeof word);
    return _mm256_set1_epi32(word);
}

INLINE void fetch_group(const uint8_t *weights) {
#pragma GCC unroll 16
    for (int i = 0; i < GROUP * PANEL; i += 64) _mm_prefetch((const char *)weights + i, _MM_HINT_T1);
}

/* out += a row's products of a group, scaled. */
INLINE void add_group(const struct group *x, int row, const uint8_t *weights, const float *scales, float *out) {
    __m256i sums[VECTORS];
    for (int v = 0; v < VECTORS; v++) sums[v] = _mm256_set1_epi32(x->lost[row]);
    /* Unrolled further, gcc adds in the order of a tree, for which registers do not suffice. */
#pragma GCC unroll 2
    for (int step = 0; step < STEPS; step++) {
        const __m256i magnitudes = repeat_four(x->magnitudes[row] + step * 4);
        const __m256i flips = repeat_four(x->flips[row] + step * 4);
        for (int v = 0; v < VECTORS; v++) {
            const __m256i w = _mm256_loadu_si256((const __m256i *)weights + step * VECTORS + v);
            const __m256i pairs = _mm256_maddubs_epi16(magnitudes, _mm256_xor_si256(w, flips));
            sums[v] = _mm256_add_epi32(sums[v], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        }
    }
    for (int v = 0; v < VECTORS; v++) {
        __m256 sum = _mm256_cvtepi32_ps(sums[v]);
        if (scales) sum = _mm256_mul_ps(sum, _mm256_loadu_ps(scales + v * LANES));
        const __m256 total = _mm256_loadu_ps(out + v * LANES);
        _mm256_storeu_ps(out + v * LANES, _mm256_fmadd_ps(sum, _mm256_set1_ps(x->scales[row]), total));
    }
}

/* out[row][column] for the first rows of a tile and the columns of a panel. */
static void multiply_tile(const struct inputs *inputs, const struct panel *panel, const int rows,
                          float (*out)[PANEL]) {
    const struct group *x = (const struct group *)inputs->first;
    const uint8_t *weights = panel->weights;
    const float *scales = panel->scales;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < PANEL; column++) out[row][column] = 0;
    for (int64_t g = 0; g < panel->groups; g++, x++, weights += GROUP * PANEL) {
        if (g < panel->ahead_groups) fetch_group(panel->ahead + g * GROUP * PANEL);
        for (int row = 0; row < rows; row++) add_group(x, row, weights, scales, out[row]);
        if (scales) scales += PANEL;
    }
}

#endif
