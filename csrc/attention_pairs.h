/* Attention with values in pairs, if the CPU multiplies pairs of bfloat16: those of an even key and the next one.

   Weights are rounded to bfloat16 for that. Sums are float, over a chunk's pairs in order. A value that is not finite
   may also reach rows that see only the other one of its pair, or that are computed with one that does: it is multiplied
   by 0. */
#ifndef SHOAL_ATTENTION_PAIRS_H
#define SHOAL_ATTENTION_PAIRS_H

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)

/* Rounded weights [rows][PAIRS] of a chunk, or of a stretch. */
#define PAIRS (CHUNK / 2)
struct rounded {
    float rows[ROWS][PAIRS];
};

/* Copy values [low, high), at rows[low], ..., into panels [PAIRS][vectors * WIDTH]. */
static void pack_pairs(const struct format *f, const char *const *rows, int64_t low, int64_t high, float *panels) {
    for (int64_t dim = 0, step; dim < f->out_dim; dim += step) {
        step = vectors_at(f, dim) * WIDTH;
        float *panel = panels + dim * PAIRS;
        for (int64_t key = low / 2 * 2; key < high; key += 2) {
            const char *even = key >= low ? rows[key] : NULL, *odd = key + 1 < high ? rows[key + 1] : NULL;
            for (int64_t d = dim; d < dim + step; d += WIDTH)
                vec_store(panel + key / 2 * step + d - dim, load_pair(f->stored, even, odd, d, f->value_dim - d));
        }
    }
}

/* As weigh_rows. */
static void weigh_pairs(const struct format *f, int rows, const float *weights, const float *panels,
                        const float *scales, int64_t low, int64_t high, float *sums) {
    const int int8 = f->stored == SHOAL_INT8;
    const int64_t step = int8 ? SCALED : f->out_dim, first = low / 2, pairs = (high + 1) / 2 - first;
    struct rounded rounded;
    for (int64_t dim = 0; dim < f->out_dim; dim += step, scales += CHUNK) {
        for (int r = 0; r < rows; r++)
            round_weights(weights + r * CHUNK + low, int8 ? scales + low : NULL, low % 2, high - low, rounded.rows[r]);
        const int64_t end = smaller(dim + step, f->out_dim);
#define WEIGH(N)   \
    if (rows == N) \
        weigh_packed(N, 1, f, rounded.rows[0], panels, first, pairs, dim, end, sums, result_size(f));
        EACH_NUMBER_OF_ROWS(WEIGH)
#undef WEIGH
    }
}

/* Vectors 2 i and 2 i + 1 hold 32 dimensions, in the order that load_wide gives them, or in order. */
INLINE void reorder(const int vectors, const int *first, const int *second, vec sums[]) {
    const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
    for (int v = 0; v < vectors; v += 2) {
        const __m512 low = (__m512)sums[v], high = (__m512)sums[v + 1];
        sums[v] = (vec)_mm512_permutex2var_ps(low, a, high);
        sums[v + 1] = (vec)_mm512_permutex2var_ps(low, b, high);
    }
}
static const int WIDE_FIRST[] = {0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27};
static const int WIDE_SECOND[] = {4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31};
static const int PLAIN_FIRST[] = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23};
static const int PLAIN_SECOND[] = {8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31};

/* As load_pair for `vectors` vectors of bfloat16, with fewer instructions and in another order. */
INLINE void load_wide(const int vectors, const char *even, const char *odd, int64_t dim, vec pairs[]) {
    for (int v = 0; v < vectors; v += 2) {
        const __m512i a = even ? _mm512_loadu_si512(even + 2 * (dim + v * WIDTH)) : _mm512_setzero_si512();
        const __m512i b = odd ? _mm512_loadu_si512(odd + 2 * (dim + v * WIDTH)) : _mm512_setzero_si512();
        pairs[v] = (vec)_mm512_unpacklo_epi16(a, b);
        pairs[v + 1] = (vec)_mm512_unpackhi_epi16(a, b);
    }
}

/* As weigh, with `keys` values read in place; odd: the first one is at an odd index. */
INLINE void weigh_pairs_here(const int rows, const int vectors, const int stored, int64_t count,
                             const struct rounded *weights, const char *const *values, const char *const *ahead,
                             int64_t dim, int odd, int64_t keys, float *sums, int64_t stride) {
    const int wide = vectors > 1 && stored == SHOAL_BFLOAT16;
    vec total[ROWS][VECTORS];
    for (int r = 0; r < rows; r++) {
        for (int v = 0; v < vectors; v++) total[r][v] = vec_load(sums + r * stride + v * WIDTH);
        if (wide) reorder(vectors, WIDE_FIRST, WIDE_SECOND, total[r]);
    }
    int64_t pair = 0;
#define ADD(EVEN, ODD)                                                                                          \
    do {                                                                                                        \
        vec value[VECTORS];                                                                                     \
        if (wide) load_wide(vectors, EVEN, ODD, dim, value);                                                    \
        else for (int v = 0; v < vectors; v++) value[v] = load_pair(stored, EVEN, ODD, dim + v * WIDTH, count); \
        for (int r = 0; r < rows; r++) {                                                                        \
            const vec weight = vec_all(weights->rows[r][pair]);                                                 \
            for (int v = 0; v < vectors; v++) total[r][v] = vec_dot(1, weight, value[v], total[r][v]);          \
        }                                                                                                       \
        pair++;                                                                                                 \
    } while (0)
    if (odd) ADD((const char *)NULL, values[0]);
    int64_t k = odd;
    for (; k + 2 <= keys; k += 2) {
        for (int64_t at = 0; at < vectors * WIDTH * bytes_of(stored); at += 64) {
            vec_prefetch(ahead[k] + dim * bytes_of(stored) + at);
            vec_prefetch(ahead[k + 1] + dim * bytes_of(stored) + at);
        }
        ADD(values[k], values[k + 1]);
    }
    if (k < keys) ADD(values[k], (const char *)NULL);
#undef ADD
    for (int r = 0; r < rows; r++) {
        if (wide) reorder(vectors, PLAIN_FIRST, PLAIN_SECOND, total[r]);
        for (int v = 0; v < vectors; v++) vec_store(sums + r * stride + v * WIDTH, total[r][v]);
    }
}

INLINE void weigh_scattered_pairs(const int rows, const int stored, const struct format *f,
                                  const struct rounded *weights, const char *const *values, const char *const *ahead,
                                  int odd, int64_t keys, int64_t dim, int64_t end, float *sums) {
    const int64_t stride = result_size(f);
    for (; dim < end && vectors_at(f, dim) == VECTORS; dim += PANEL)
        weigh_pairs_here(rows, VECTORS, stored, WIDTH, weights, values, ahead, dim, odd, keys, sums + dim, stride);
    for (; dim < end; dim += WIDTH)
        weigh_pairs_here(rows, 1, stored, f->value_dim - dim, weights, values, ahead, dim, odd, keys, sums + dim,
                         stride);
}

/* As weigh_in_place. */
static void weigh_pairs_in_place(const struct format *f, int rows, const float *weights, const char *const *values,
                                 const float *scales, const char *const *ahead, int64_t place, int64_t keys,
                                 float *sums) {
    const int int8 = f->stored == SHOAL_INT8, odd = place % 2;
    const int64_t step = int8 ? SCALED : f->out_dim;
    struct rounded rounded;
    for (int64_t dim = 0; dim < f->out_dim; dim += step, scales += CHUNK) {
        for (int r = 0; r < rows; r++)
            round_weights(weights + r * CHUNK, int8 ? scales : NULL, odd, keys, rounded.rows[r]);
        const int64_t end = smaller(dim + step, f->out_dim);
#define WEIGH_STORED(N, STORED)           \
    if (rows == N && f->stored == STORED) \
        weigh_scattered_pairs(N, STORED, f, &rounded, values, ahead, odd, keys, dim, end, sums);
#define WEIGH(N) WEIGH_STORED(N, SHOAL_BFLOAT16) WEIGH_STORED(N, SHOAL_INT8)
        EACH_NUMBER_OF_ROWS(WEIGH)
#undef WEIGH
#undef WEIGH_STORED
    }
}

#else
#define pack_pairs(...) ((void)0)
#define weigh_pairs(...) ((void)0)
#define weigh_pairs_in_place(...) ((void)0)
#endif

#endif
