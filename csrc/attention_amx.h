/* Attention products with AMX: queries and keys are multiplied as pairs of bfloat16.

   Weights are rounded to bfloat16 before values are multiplied by them, and sums are float: over tiles of 32 dimensions
   for scores, and over tiles of 32 keys, which begin at multiples of that, for outputs. So a row's sums have the same
   order however many rows are computed together. A value that is not finite also reaches rows that do not see it, where
   they are computed with one that does, or its tile is theirs: it is multiplied by 0. */
#ifndef SHOAL_ATTENTION_AMX_H
#define SHOAL_ATTENTION_AMX_H

/* Keys of a tile of weights or values. */
#define TILE_KEYS 32

#if defined(__AMX_BF16__)

/* scores [rows][CHUNK] by `units` units of queries and keys from `first` on, for whole vectors of keys. */
static void score_tiles(const struct format *f, const float *queries, const float *panels, int64_t first,
                        int64_t units, int64_t low, int64_t high, float *scores) {
    finish_writes();
    for (int64_t key = low / WIDTH * WIDTH; key < high;) {
        const float *keys = panels + key / PANEL * PANEL * f->units + first * PANEL + key % PANEL;
        const int four = key % PANEL == 0 && high - key > PANEL - WIDTH;
        _tile_zero(0);
        if (four) {
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t u = 0; u < units; u += TILE_ROWS) {
            _tile_loadd(4, queries + first + u, f->units * 4);
            _tile_loadd(6, keys + u * PANEL, PANEL * 4);
            _tile_dpbf16ps(0, 4, 6);
            if (!four) continue;
            _tile_loadd(7, keys + u * PANEL + WIDTH, PANEL * 4);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(6, keys + u * PANEL + 2 * WIDTH, PANEL * 4);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(7, keys + u * PANEL + 3 * WIDTH, PANEL * 4);
            _tile_dpbf16ps(3, 4, 7);
        }
        _tile_stored(0, scores + key, CHUNK * 4);
        if (four) {
            _tile_stored(1, scores + key + WIDTH, CHUNK * 4);
            _tile_stored(2, scores + key + 2 * WIDTH, CHUNK * 4);
            _tile_stored(3, scores + key + 3 * WIDTH, CHUNK * 4);
        }
        key += four ? PANEL : WIDTH;
    }
}

/* The tiles of keys [low, high) begin and end here. */
static inline int64_t first_key(int64_t low) { return low / TILE_KEYS * TILE_KEYS; }
static inline int64_t last_key(int64_t high) { return (high + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS; }

/* Copy values [low, high), at rows[low], ..., interleaved in pairs: pairs [CHUNK / 2][out_dim]. Around
   them, up to whole tiles, are zeros. */
static void pair_values(const struct format *f, const char *const *rows, int64_t low, int64_t high, float *pairs) {
    for (int64_t key = first_key(low); key < last_key(high); key += 2) {
        const char *even = key >= low && key < high ? rows[key] : NULL;
        const char *odd = key + 1 >= low && key + 1 < high ? rows[key + 1] : NULL;
        float *to = pairs + key / 2 * f->out_dim;
        for (int64_t d = 0; d < f->out_dim; d += WIDTH)
            vec_store(to + d, load_pair(f->stored, even, odd, d, f->value_dim - d));
    }
}

/* Add to sums [rows][result_size] the values of four vectors of dimensions, or of one. */
INLINE void weigh_dimensions(const struct format *f, const int four, const uint16_t *rounded, const float *pairs,
                             int64_t first, int64_t last, float *sums) {
    const int64_t stride = result_size(f) * 4, out = f->out_dim * 4;
    _tile_loadd(0, sums, stride);
    if (four) {
        _tile_loadd(1, sums + WIDTH, stride);
        _tile_loadd(2, sums + 2 * WIDTH, stride);
        _tile_loadd(3, sums + 3 * WIDTH, stride);
    }
    for (int64_t key = first; key < last; key += TILE_KEYS, pairs += TILE_KEYS / 2 * f->out_dim) {
        _tile_loadd(4, rounded + key, CHUNK * 2);
        _tile_loadd(6, pairs, out);
        _tile_dpbf16ps(0, 4, 6);
        if (!four) continue;
        _tile_loadd(7, pairs + WIDTH, out);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, pairs + 2 * WIDTH, out);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, pairs + 3 * WIDTH, out);
        _tile_dpbf16ps(3, 4, 7);
    }
    _tile_stored(0, sums, stride);
    if (!four) return;
    _tile_stored(1, sums + WIDTH, stride);
    _tile_stored(2, sums + 2 * WIDTH, stride);
    _tile_stored(3, sums + 3 * WIDTH, stride);
}

/* Add to sums [rows][result_size] the values [low, high), as pair_values put them, by weights [rows][CHUNK]. scales: of
   int8 values, [groups][CHUNK]. */
static void weigh_tiles(const struct format *f, int rows, const float *weights, const float *pairs,
                        const float *scales, int64_t low, int64_t high, float *sums) {
    const int int8 = f->stored == SHOAL_INT8;
    const int64_t first = first_key(low), last = last_key(high), step = int8 ? SCALED : f->out_dim;
    _Alignas(64) uint16_t rounded[TILE_ROWS * CHUNK];
    pairs += first / 2 * f->out_dim;
    for (int64_t dim = 0; dim < f->out_dim; dim += step, scales += CHUNK) {
        for (int row = 0; row < rows; row++)
            round_weights(weights + row * CHUNK + low, int8 ? scales + low : NULL, low - first, high - low,
                          rounded + row * CHUNK + first);
        finish_writes();
        const int64_t end = smaller(dim + step, f->out_dim);
        for (int64_t d = dim; d < end;) {
            const int four = end - d >= 4 * WIDTH;
            if (four) weigh_dimensions(f, 1, rounded, pairs + d, first, last, sums + d);
            else weigh_dimensions(f, 0, rounded, pairs + d, first, last, sums + d);
            d += (four ? 4 : 1) * WIDTH;
        }
    }
}

/* total[row] += a value, of which `vectors` vectors are at `dim`, by the weights of its key. */
INLINE void add_value(const int rows, const int vectors, const int stored, int64_t count, const float *weights,
                      const char *value, const char *ahead, int64_t dim, vec total[][VECTORS]) {
    vec part[VECTORS];
    for (int v = 0; v < vectors; v++) part[v] = load_value(stored, value, dim + v * WIDTH, count);
    for (int64_t at = 0; at < vectors * WIDTH * bytes_of(stored); at += 64)
        vec_prefetch(ahead + dim * bytes_of(stored) + at);
    for (int r = 0; r < rows; r++) {
        const vec weight = vec_all(weights[r * CHUNK]);
        for (int v = 0; v < vectors; v++) total[r][v] = vec_madd(weight, part[v], total[r][v]);
    }
}

/* As weigh_dimensions, with `keys` values read in place, and the same bits (but for the sign of zeros): a tile's
   even keys are added up, and its odd ones, and then both to the sums. place: of the first key in the chunk. Returns
   how many keys of the tile there are. */
INLINE int64_t weigh_tile_here(const int rows, const int vectors, const int stored, int64_t count,
                               const float *weights, const char *const *values, const char *const *ahead,
                               int64_t dim, int64_t place, int64_t keys, float *sums, int64_t stride) {
    const int64_t stop = smaller(keys, TILE_KEYS - place % TILE_KEYS);
    vec even[ROWS][VECTORS], odd[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) even[r][v] = odd[r][v] = vec_all(0);
    int64_t k = 0;
#define ADD(TOTAL) add_value(rows, vectors, stored, count, weights + k, values[k], ahead[k], dim, TOTAL), k++;
    if (place % 2) ADD(odd)
    while (k + 2 <= stop) {
        ADD(even)
        ADD(odd)
    }
    if (k < stop) ADD(even)
#undef ADD
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            float *sum = sums + r * stride + v * WIDTH;
            vec_store(sum, vec_load(sum) + (even[r][v] + odd[r][v]));
        }
    return stop;
}

INLINE void weigh_tiles_here(const int rows, const int vectors, const int stored, int64_t count, const float *weights,
                             const char *const *values, const char *const *ahead, int64_t dim, int64_t place,
                             int64_t keys, float *sums, int64_t stride) {
    for (int64_t k = 0; k < keys;)
        k += weigh_tile_here(rows, vectors, stored, count, weights + k, values + k, ahead + k, dim, place + k,
                             keys - k, sums, stride);
}

/* The weights [rows][CHUNK] of `keys` keys in bfloat16, as floats again. */
static const float *rounded_weights(int rows, const float *weights, int64_t keys, float *rounded) {
    for (int r = 0; r < rows; r++)
        for (int64_t i = 0; i < keys; i += WIDTH) {
            const __m512 weight = (__m512)vec_load_floats(weights + r * CHUNK + i, keys - i);
            const __m512i half = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(weight));
            vec_store_floats(rounded + r * CHUNK + i, (vec)_mm512_slli_epi32(half, 16), keys - i);
        }
    return rounded;
}

/* Dimensions [dim, end) of values; see weigh_in_place. */
INLINE void weigh_few_tiles(const int rows, const int stored, const struct format *f, const float *weights,
                            const char *const *values, const char *const *ahead, int64_t place, int64_t keys,
                            int64_t dim, int64_t end, float *sums, int64_t stride) {
    enum { FEW = VECTORS / 2 }; /* so that the sums of more than three rows stay in registers */
    enum { NO_SUBNORMALS = 0x8040 };
    const int vectors = rows > 3 ? FEW : VECTORS;
    const unsigned before = _mm_getcsr();
    _mm_setcsr(before | NO_SUBNORMALS); /* AMX takes them for 0, and makes none */
    finish_writes();
    for (; f->value_dim - dim >= vectors * WIDTH && dim + vectors * WIDTH <= end; dim += vectors * WIDTH)
        weigh_tiles_here(rows, vectors, stored, WIDTH, weights, values, ahead, dim, place, keys, sums + dim, stride);
    for (; dim < end; dim += WIDTH)
        weigh_tiles_here(rows, 1, stored, f->value_dim - dim, weights, values, ahead, dim, place, keys, sums + dim,
                         stride);
    finish_writes();
    _mm_setcsr(before);
}

#else
#define score_tiles(...) ((void)0)
#define pair_values(...) ((void)0)
#define weigh_tiles(...) ((void)0)
#define weigh_few_tiles(...) ((void)0)
#define rounded_weights(rows, weights, keys, rounded) (weights)
#endif

#endif
