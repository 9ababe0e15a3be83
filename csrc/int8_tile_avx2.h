/* Products of bytes with AVX2, which want one unsigned factor, and saturate sums of two in 16 bits.

   With weights of 8 bits the unsigned factor is the magnitude of an input, at most 127, and the other one is the weight
   with the input's sign: two such products are at most 2 * 127 * 128 = 32,512. Weights are stored as weight + 128, so an
   exclusive or with 0x80 gives the weight, and one with 0x7f gives -weight - 1, which is a byte for -128, too. What a
   negative input thereby loses, its magnitude, does not depend on the weight, and is where sums start.

   With weights of four bits it is the stored weight, 0 to 15: even the 16 products of a group that come together are at
   most 16 * 15 * 127 = 30,480, and are added in 16 bits. */
#ifndef SHOAL_INT8_TILE_AVX2_H
#define SHOAL_INT8_TILE_AVX2_H

enum { LANES = 8, VECTORS = PANEL / LANES };

/* A group of inputs of all rows of a tile. */
struct group {
#if WEIGHT_BITS == 8
    uint8_t magnitudes[ROWS][GROUP], flips[ROWS][GROUP]; /* of inputs, and what flips weights for them */
#else
    int8_t values[ROWS][GROUP];
#endif
    float scales[ROWS];
    int32_t offsets[ROWS]; /* where a row's sums start */
};

/* Store the 32 values of a row's group as the products want them. */
INLINE void put_values(const int32_t *values, struct group *group, int row) {
    _Alignas(32) int8_t bytes[GROUP];
    int32_t offset = 0;
    for (int i = 0; i < GROUP; i++) {
        bytes[i] = (int8_t)values[i];
        offset += WEIGHT_BITS == 4 ? -ZERO * values[i] : values[i] < 0 ? -values[i] : 0;
    }
#if WEIGHT_BITS == 8
    const __m256i x = _mm256_load_si256((const __m256i *)bytes);
    const __m256i negative = _mm256_cmpgt_epi8(_mm256_setzero_si256(), x);
    _mm256_storeu_si256((__m256i *)group->magnitudes[row], _mm256_abs_epi8(x));
    _mm256_storeu_si256((__m256i *)group->flips[row], _mm256_xor_si256(negative, _mm256_set1_epi8(-128)));
#else
    __builtin_memcpy(group->values[row], bytes, sizeof bytes);
#endif
    group->offsets[row] = offset;
}

INLINE void fetch_group(const uint8_t *weights) {
#pragma GCC unroll 16
    for (int i = 0; i < GROUP_BYTES; i += 64) _mm_prefetch((const char *)weights + i, _MM_HINT_T1);
}

/* Four bytes, in each of 8 lanes. */
INLINE __m256i repeat_four(const void *bytes) {
    int32_t word;
    __builtin_memcpy(&word, bytes, sizeof word);
    return _mm256_set1_epi32(word);
}

INLINE __m256i load_weights(const uint8_t *weights, int vector) {
    return _mm256_loadu_si256((const __m256i *)weights + vector);
}

enum { TOGETHER = 2 }; /* rows, which share the unpacking of weights of four bits */

#if WEIGHT_BITS == 8
/* sums = products of a group and rows from first on. */
INLINE void multiply_group(const struct group *x, const int first, const int rows, const uint8_t *weights,
                           __m256i sums[][VECTORS]) {
    for (int row = 0; row < rows; row++) {
        for (int v = 0; v < VECTORS; v++) sums[row][v] = _mm256_set1_epi32(x->offsets[first + row]);
        /* Unrolled further, gcc adds in the order of a tree, for which registers do not suffice. */
#pragma GCC unroll 2
        for (int step = 0; step < STEPS; step++) {
            const __m256i magnitudes = repeat_four(x->magnitudes[first + row] + step * 4);
            const __m256i flips = repeat_four(x->flips[first + row] + step * 4);
            for (int v = 0; v < VECTORS; v++) {
                const __m256i flipped = _mm256_xor_si256(load_weights(weights, step * VECTORS + v), flips);
                const __m256i pairs = _mm256_maddubs_epi16(magnitudes, flipped);
                sums[row][v] = _mm256_add_epi32(sums[row][v], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
            }
        }
    }
}
#else
/* sums = products of a group and rows from first on. */
INLINE void multiply_group(const struct group *x, const int first, const int rows, const uint8_t *weights,
                           __m256i sums[][VECTORS]) {
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) sums[row][v] = _mm256_setzero_si256();
#pragma GCC unroll 1
    for (int step = 0; step < STEPS; step += 2)
        for (int v = 0; v < VECTORS; v++) {
            const __m256i both = load_weights(weights, step / 2 * VECTORS + v);
            const __m256i lower = _mm256_and_si256(both, _mm256_set1_epi8(15));
            const __m256i upper = _mm256_and_si256(_mm256_srli_epi16(both, 4), _mm256_set1_epi8(15));
            for (int row = 0; row < rows; row++) {
                const int8_t *values = x->values[first + row] + step * 4;
                sums[row][v] = _mm256_add_epi16(sums[row][v], _mm256_maddubs_epi16(lower, repeat_four(values)));
                sums[row][v] = _mm256_add_epi16(sums[row][v], _mm256_maddubs_epi16(upper, repeat_four(values + 4)));
            }
        }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++)
            sums[row][v] = _mm256_add_epi32(_mm256_madd_epi16(sums[row][v], _mm256_set1_epi16(1)),
                                            _mm256_set1_epi32(x->offsets[first + row]));
}
#endif

/* out[row] += a group's products, scaled, for rows from first on. */
INLINE void add_group(const struct group *x, const int first, const int rows, const uint8_t *weights,
                      const float *scales, float (*out)[PANEL]) {
    __m256i sums[TOGETHER][VECTORS];
    multiply_group(x, first, rows, weights, sums);
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) {
            float *total = out[first + row] + v * LANES;
            __m256 sum = _mm256_cvtepi32_ps(sums[row][v]);
            if (scales) sum = _mm256_mul_ps(sum, _mm256_loadu_ps(scales + v * LANES));
            _mm256_storeu_ps(total, _mm256_fmadd_ps(sum, _mm256_set1_ps(x->scales[first + row]), _mm256_loadu_ps(total)));
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
    for (int64_t g = 0; g < panel->groups; g++, x++, weights += GROUP_BYTES) {
        if (g < panel->ahead_groups) fetch_group(panel->ahead + g * GROUP_BYTES);
        int row = 0;
        for (; row + TOGETHER <= rows; row += TOGETHER) add_group(x, row, TOGETHER, weights, scales, out);
        if (row < rows) add_group(x, row, 1, weights, scales, out);
        if (scales) scales += PANEL;
    }
}

#endif
