/* A tile of rows times a panel of 32 bfloat16 columns, for each instruction set.

   Where the CPU has products of bfloat16 that are faster than float32 (matrix products of tiles, else dot products),
   they are used, and inputs in float32 are rounded; elsewhere weights become float32 in registers. A row's sums have
   the same order in any tile. */
#ifndef SHOAL_BF16_TILE_H
#define SHOAL_BF16_TILE_H

#include "amx.h"
#include "bf16.h"
#include "inputs.h"

#include <math.h>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

enum {
    GROUP = 32, /* inputs; padded with zeros at the end */
    PAIRS = GROUP / 2,
    PANEL = 32, /* columns that are stored together */
#if defined(__AMX_BF16__)
    PART_ROWS = TILE_ROWS,
    ROWS = 2 * TILE_ROWS,
    BLOCK_TILES = 4,
    LARGE_BLOCK_TILES = 1, /* a tile of many stays in the first cache, and panels come from the second */
#else
    ROWS = 12, /* of a tile: as many as leave registers for their sums */
    PART_ROWS = ROWS,
    BLOCK_TILES = 8,
    LARGE_BLOCK_TILES = BLOCK_TILES,
#endif
    GROUP_BYTES = GROUP * PANEL * 2,
};

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512BF16__)
enum { WORDS = 1 }; /* a pair as it is */
#else
enum { WORDS = 2 }; /* both as floats */
#endif

/* A group of inputs of all rows of a part of a tile. */
struct group {
    float values[PART_ROWS][PAIRS][WORDS];
};

#if defined(__AVX512BF16__)
/* y = 32 values, rounded as float_to_bf16 does, but that subnormal ones become 0, and a NaN keeps its bits. */
#define ROUND_PANEL(values, y) \
    _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(_mm512_loadu_ps((values) + 16), _mm512_loadu_ps(values)))
#endif

/* 32 columns of weights. */
struct panel {
    const uint8_t *weights; /* [groups, PAIRS, PANEL, 2] */
    const float *scales;    /* NULL */
    int64_t groups;
    const uint8_t *ahead; /* other weights, to be fetched into the second cache meanwhile */
    int64_t ahead_groups;
};

/* Store the 32 values of a row's group, which are bfloat16, as the products want them. */
INLINE void put_values(const float *values, struct group *group, int row) {
#if defined(__AVX512BF16__)
    uint16_t *pairs = (uint16_t *)group->values[row];
    for (int i = 0; i < GROUP; i++) pairs[i] = float_to_bf16(values[i]);
#else
    memcpy(group->values[row], values, GROUP * sizeof *values);
#endif
}

#if defined(__AMX_BF16__)
#include "bf16_tile_amx.h"
#else
INLINE void begin_products(void) {}
INLINE void end_products(void) {}

#if defined(__AVX512F__)
#define LANES 16
#define VECTOR_ROWS ROWS
#define CASES CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
typedef __m512i ints;
typedef __m512 floats;
#define LOAD_INTS(p) _mm512_loadu_si512((const void *)(p))
#define FIRSTS(w) _mm512_castsi512_ps(_mm512_slli_epi32(w, 16))
#define SECONDS(w) _mm512_castsi512_ps(_mm512_and_si512(w, _mm512_set1_epi32(-65536)))
#define SET_FLOAT _mm512_set1_ps
#define STORE_FLOATS _mm512_storeu_ps
#define MULTIPLY_ADD _mm512_fmadd_ps
#elif defined(__AVX2__)
#define LANES 8
#define VECTOR_ROWS 4
#define CASES CASE(1) CASE(2) CASE(3) CASE(4)
typedef __m256i ints;
typedef __m256 floats;
#define LOAD_INTS(p) _mm256_loadu_si256((const __m256i *)(p))
#define FIRSTS(w) _mm256_castsi256_ps(_mm256_slli_epi32(w, 16))
#define SECONDS(w) _mm256_castsi256_ps(_mm256_and_si256(w, _mm256_set1_epi32(-65536)))
#define SET_FLOAT _mm256_set1_ps
#define STORE_FLOATS _mm256_storeu_ps
#define MULTIPLY_ADD _mm256_fmadd_ps
#endif

#ifdef LANES
enum { VECTORS = 2 }; /* of columns at a time */

INLINE void fetch_group(const uint8_t *weights) {
#pragma GCC unroll 32
    for (int i = 0; i < GROUP_BYTES; i += 64) _mm_prefetch((const char *)weights + i, _MM_HINT_T1);
}

/* sums[row] += a pair of a row times a pair of each column, for all rows. */
INLINE void add_pair(floats sums[][VECTORS], const float (*values)[PAIRS][WORDS], const int pair,
                     const uint8_t *weights, const int rows) {
    ints w[VECTORS];
    for (int v = 0; v < VECTORS; v++) w[v] = LOAD_INTS(weights + v * LANES * 4);
#if defined(__AVX512BF16__)
    for (int row = 0; row < rows; row++) {
        const __m512bh x = (__m512bh)SET_FLOAT(values[row][pair][0]);
        for (int v = 0; v < VECTORS; v++) sums[row][v] = _mm512_dpbf16_ps(sums[row][v], (__m512bh)w[v], x);
    }
#else
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) {
            sums[row][v] = MULTIPLY_ADD(FIRSTS(w[v]), SET_FLOAT(values[row][pair][0]), sums[row][v]);
            sums[row][v] = MULTIPLY_ADD(SECONDS(w[v]), SET_FLOAT(values[row][pair][1]), sums[row][v]);
        }
#endif
}

/* out[row][column] for some rows and VECTORS * LANES columns. */
INLINE void multiply_part(const struct group *x, const struct panel *panel, float (*out)[PANEL], const int first,
                          const int rows, const int column) {
    const uint8_t *weights = panel->weights + column * 4;
    floats sums[VECTOR_ROWS][VECTORS];
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) sums[row][v] = SET_FLOAT(0);
    for (int64_t g = 0; g < panel->groups; g++, x++, weights += GROUP_BYTES) {
        if (first + column == 0 && g < panel->ahead_groups) fetch_group(panel->ahead + g * GROUP_BYTES);
#pragma GCC unroll 4
        for (int pair = 0; pair < PAIRS; pair++)
            add_pair(sums, x->values + first, pair, weights + pair * PANEL * 4, rows);
    }
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < VECTORS; v++) STORE_FLOATS(out[first + row] + column + v * LANES, sums[row][v]);
}

/* The same for 1 to VECTOR_ROWS rows. */
INLINE void multiply_rows(const struct group *x, const struct panel *panel, float (*out)[PANEL], const int first,
                          const int rows, const int column) {
    switch (rows) {
#define CASE(n) case n: multiply_part(x, panel, out, first, n, column); break;
        CASES
#undef CASE
    }
}

/* out[row][column] for the first rows of a tile and the columns of a panel. */
static void multiply_tile(const struct inputs *inputs, const struct panel *panel, const int rows,
                          float (*out)[PANEL]) {
    const struct group *x = (const struct group *)inputs->first;
    for (int column = 0; column < PANEL; column += VECTORS * LANES)
        for (int first = 0; first < rows; first += VECTOR_ROWS)
            multiply_rows(x, panel, out, first, rows - first < VECTOR_ROWS ? rows - first : VECTOR_ROWS, column);
}

#else

/* One output of the above. */
static float multiply_column(const struct group *x, const struct panel *panel, int row, int column) {
    float total = 0;
    for (int64_t g = 0; g < panel->groups; g++)
        for (int pair = 0; pair < PAIRS; pair++) {
            const uint16_t *w = (const uint16_t *)panel->weights + ((g * PAIRS + pair) * PANEL + column) * 2;
            for (int i = 0; i < WORDS; i++) total = fmaf(bf16_to_float(w[i]), x[g].values[row][pair][i], total);
        }
    return total;
}

static void multiply_tile(const struct inputs *inputs, const struct panel *panel, const int rows,
                          float (*out)[PANEL]) {
    const struct group *x = (const struct group *)inputs->first;
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < PANEL; column++) out[row][column] = multiply_column(x, panel, row, column);
}
#endif
#endif

#endif
