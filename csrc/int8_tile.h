/* A tile of quantised rows times a panel of 32 columns of int8, for each instruction set.

   All variants compute the same bits: sums of a group of 32 products are exact integers, and groups are
   added in order by one fused multiply-add each. A file that includes this has defined WEIGHT_BITS, 8 or 4. Weights are
   stored as weight + 128 or weight + 8. Those of four bits, -8 to 7, are two to a byte: the lower ones are of a step, and
   the upper ones, of the same columns, of the next step. */
#ifndef SHOAL_INT8_TILE_H
#define SHOAL_INT8_TILE_H

#include "inputs.h"

#include <math.h>
#include <stdint.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum {
    GROUP = 32, /* inputs that share a scale */
    STEPS = GROUP / 4,
    PANEL = 32, /* columns that are stored together */
#if defined(__AVX2__) && !defined(__AVX512F__)
    ROWS = 12, /* of a tile: multiplied in turn with a panel's group, which stays in the first cache */
#else
    ROWS = 6, /* of a tile: as many as leave registers for their sums */
#endif
    PART_ROWS = ROWS,
    BLOCK_TILES = 16,
    LARGE_BLOCK_TILES = BLOCK_TILES,
    GROUP_BYTES = GROUP * PANEL * WEIGHT_BITS / 8,
    ZERO = 1 << (WEIGHT_BITS - 1), /* what is added to stored weights */
};

#define INLINE static inline __attribute__((always_inline))

INLINE void begin_products(void) {}
INLINE void end_products(void) {}

/* 32 columns of weights. */
struct panel {
    const uint8_t *weights; /* [groups, STEPS, PANEL, 4], or STEPS / 2 where weights have four bits */
    const float *scales;    /* [groups, PANEL], or NULL where groups have none */
    int64_t groups;
    const uint8_t *ahead; /* other weights, to be fetched into the second cache meanwhile */
    int64_t ahead_groups;
};

#if defined(__AVX2__) && !defined(__AVX512F__)
#include "int8_tile_avx2.h"
#else

#if defined(__AVX512VNNI__)
enum { WORDS = 1 }; /* four bytes */
#else
enum { WORDS = 2 }; /* the even two of four values, then the odd two, in 16 bits each */
#endif

/* A group of inputs of all rows of a tile. Sums start at offset, since stored weights are not the weights. */
struct group {
    int32_t values[ROWS][STEPS][WORDS]; /* four inputs each */
    float scales[ROWS];
    int32_t offsets[ROWS]; /* -ZERO * sum of the row's values */
};

#if defined(__AVX512F__)
#define LANES 16
typedef __m512i ints;
typedef __m512 floats;
#define SET_INT _mm512_set1_epi32
#define SET_FLOAT _mm512_set1_ps
#define LOAD_INTS(p) _mm512_loadu_si512((const void *)(p))
#define LOAD_FLOATS _mm512_loadu_ps
#define STORE_FLOATS _mm512_storeu_ps
#define TO_FLOATS _mm512_cvtepi32_ps
#define MULTIPLY _mm512_mul_ps
#define MULTIPLY_ADD _mm512_fmadd_ps
#define LOWER_BITS(w) _mm512_and_si512(w, _mm512_set1_epi8(15))
#define UPPER_BITS(w) _mm512_srli_epi16(w, 4)
#define EVEN_BYTES(w) _mm512_and_si512(w, _mm512_set1_epi16(255))
#define ODD_BYTES(w) _mm512_srli_epi16(w, 8)
#define ADD_PAIRS(sum, w, x) _mm512_add_epi32(sum, _mm512_madd_epi16(w, x))
#endif

/* Store the 32 values of a row's group as the products want them. */
INLINE void put_values(const int32_t *values, struct group *group, int row) {
#if defined(__AVX512VNNI__)
    int8_t *bytes = (int8_t *)group->values[row];
    for (int i = 0; i < GROUP; i++) bytes[i] = (int8_t)values[i];
#else
    for (int step = 0; step < STEPS; step++) {
        const int32_t *four = values + step * 4;
        group->values[row][step][0] = (four[0] & 0xffff) | (int32_t)((uint32_t)four[2] << 16);
        group->values[row][step][1] = (four[1] & 0xffff) | (int32_t)((uint32_t)four[3] << 16);
    }
#endif
    int32_t sum = 0;
    for (int i = 0; i < GROUP; i++) sum += values[i];
    group->offsets[row] = -ZERO * sum;
}

#ifdef LANES
enum { VECTORS = 2 }; /* of columns at a time */

INLINE void fetch_group(const uint8_t *weights) {
#pragma GCC unroll 16
    for (int i = 0; i < GROUP_BYTES; i += 64) _mm_prefetch((const char *)weights + i, _MM_HINT_T1);
}

/* A step's weights of a group, as stored, in bytes: four of each column of a vector. */
INLINE ints load_weights(const uint8_t *weights, const int step, const int v) {
    if (WEIGHT_BITS == 8) return LOAD_INTS(weights + (step * PANEL + v * LANES) * 4);
    const ints both = LOAD_INTS(weights + (step / 2 * PANEL + v * LANES) * 4);
    return LOWER_BITS(step % 2 ? UPPER_BITS(both) : both);
}

/* sums[row] += 4 inputs of a row times 4 bytes of each column, for all rows. */
INLINE void add_step(ints sums[][VECTORS], const int32_t (*values)[STEPS][WORDS], const int step,
                     const uint8_t *weights, const int rows) {
    ints w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = load_weights(weights, step, v);
#if defined(__AVX512VNNI__)
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++)
            sums[row][v] = _mm512_dpbusd_epi32(sums[row][v], w[v], SET_INT(values[row][step][0]));
#else
    ints odd[VECTORS];
    for (int v = 0; v < VECTORS; v++) odd[v] = ODD_BYTES(w[v]), w[v] = EVEN_BYTES(w[v]);
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) {
            sums[row][v] = ADD_PAIRS(sums[row][v], w[v], SET_INT(values[row][step][0]));
            sums[row][v] = ADD_PAIRS(sums[row][v], odd[v], SET_INT(values[row][step][1]));
        }
#endif
}

/* out[row][column] for a number of rows that is known to the compiler. */
INLINE void multiply_part(const struct group *x, const struct panel *panel, float (*out)[PANEL], const int rows) {
    const uint8_t *weights = panel->weights;
    const float *scales = panel->scales;
    floats totals[ROWS][VECTORS];
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) totals[row][v] = SET_FLOAT(0);
    for (int64_t g = 0; g < panel->groups; g++, x++, weights += GROUP_BYTES) {
        if (g < panel->ahead_groups) fetch_group(panel->ahead + g * GROUP_BYTES);
        ints sums[ROWS][VECTORS];
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < VECTORS; v++) sums[row][v] = SET_INT(x->offsets[row]);
#pragma GCC unroll 8
        for (int step = 0; step < STEPS; step++)
            add_step(sums, x->values, step, weights, rows);
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < VECTORS; v++) {
                floats sum = TO_FLOATS(sums[row][v]);
                if (scales) sum = MULTIPLY(sum, LOAD_FLOATS(scales + g * PANEL + v * LANES));
                totals[row][v] = MULTIPLY_ADD(sum, SET_FLOAT(x->scales[row]), totals[row][v]);
            }
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) STORE_FLOATS(out[row] + v * LANES, totals[row][v]);
}

/* out[row][column] for the first rows of a tile and the columns of a panel. */
INLINE void multiply_tile(const struct inputs *inputs, const struct panel *panel, const int rows,
                          float (*out)[PANEL]) {
    const struct group *x = (const struct group *)inputs->first;
    switch (rows) {
#define CASE(n) case n: multiply_part(x, panel, out, n); break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#undef CASE
    }
}

#else

/* A weight of a column, as stored: of four inputs of a step. */
static int32_t weight_at(const uint8_t *group, int step, int column, int i) {
    if (WEIGHT_BITS == 8) return group[(step * PANEL + column) * 4 + i];
    return group[(step / 2 * PANEL + column) * 4 + i] >> step % 2 * 4 & 15;
}

/* One output of the above. */
static float multiply_column(const struct group *x, const struct panel *panel, int row, int column) {
    float total = 0;
    for (int64_t g = 0; g < panel->groups; g++) {
        const uint8_t *weights = panel->weights + g * GROUP_BYTES;
        int32_t sum = x[g].offsets[row];
        for (int step = 0; step < STEPS; step++) {
            const int32_t even = x[g].values[row][step][0], odd = x[g].values[row][step][WORDS - 1];
            sum += weight_at(weights, step, column, 0) * (int16_t)even + weight_at(weights, step, column, 2) * (even >> 16);
            sum += weight_at(weights, step, column, 1) * (int16_t)odd + weight_at(weights, step, column, 3) * (odd >> 16);
        }
        const float value = panel->scales ? (float)sum * panel->scales[g * PANEL + column] : (float)sum;
        total = fmaf(value, x[g].scales[row], total);
    }
    return total;
}

INLINE void multiply_tile(const struct inputs *inputs, const struct panel *panel, const int rows,
                          float (*out)[PANEL]) {
    const struct group *x = (const struct group *)inputs->first;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < PANEL; column++) out[row][column] = multiply_column(x, panel, row, column);
}
#endif

#endif

#endif
