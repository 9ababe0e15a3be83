/* The arithmetic of attention on small tiles: products, softmax, and the merging of chunks.
 *
 * Scores have a lane for each key and are summed over the head's dimensions in order; outputs have a lane for
 * each dimension and are summed over a chunk's keys in order. So the order of every sum is the same however
 * many query rows are computed together. (With pairs of values and with AMX it is another: see
 * attention_pairs.h and attention_amx.h.) */
#ifndef SHOAL_ATTENTION_TILE_H
#define SHOAL_ATTENTION_TILE_H

#include "amx.h"
#include "attention.h"
#include "attention_vec.h"

#include <math.h>

/* Query rows whose sums are in registers together, and vectors of keys (or of dimensions) of each. */
#define ROWS 6
#if WIDTH == 16
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define PANEL (VECTORS * WIDTH)

#define EACH_NUMBER_OF_ROWS(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)

/* How a layer's queries, keys and values are computed with. */
struct format {
    int64_t key_dim, value_dim;
    int64_t units;   /* 32-bit numbers of a query or key: floats, or pairs of bfloat16; zeros up to whole tiles */
    int64_t out_dim; /* value_dim in whole vectors */
    int64_t key_scales, value_scales; /* scales of a key and of a value: of int8, else 0 */
    int bfloat16;    /* whether queries and results are bfloat16, not floats */
    int stored;      /* the dtype of keys and values */
    int paired;      /* queries and keys are multiplied as pairs of bfloat16, which int8 keys become */
    int tiled;       /* they, and weights and values, are multiplied by AMX: see attention_amx.h */
    int value_pairs; /* weights and values are multiplied as pairs, too: see attention_pairs.h */
};

static struct format format_of(const struct attention_layer *layer) {
    struct format f = {.key_dim = layer->key_dim, .value_dim = layer->value_dim};
    f.bfloat16 = layer->dtype == SHOAL_BFLOAT16;
    f.stored = (int)layer->stored;
#if defined(__AVX512BF16__)
    f.paired = f.bfloat16;
#endif
#if defined(__AMX_BF16__)
    f.tiled = f.paired;
#endif
    f.value_pairs = f.paired && !f.tiled;
    f.units = f.paired ? (f.key_dim + 1) / 2 : f.key_dim;
    if (f.tiled) f.units = (f.units + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS;
    f.out_dim = (f.value_dim + WIDTH - 1) / WIDTH * WIDTH;
    if (f.stored == SHOAL_INT8) f.key_scales = scales_of(f.key_dim), f.value_scales = scales_of(f.value_dim);
    return f;
}

/* How many query rows of a tile are computed together. */
static inline int64_t rows_together(const struct format *f) { return f->tiled ? TILE_ROWS : ROWS; }

/* Floats of a query row's result: out_dim sums, the largest score, and the sum of weights. */
static inline int64_t result_size(const struct format *f) { return f->out_dim + 2; }

/* ---- Reading ---- */

static void pack_query(const struct format *f, const char *from, float *to) {
    if (!f->bfloat16 || f->paired) {
        const int64_t whole = f->key_dim / (f->paired ? 2 : 1);
        memset(to + whole, 0, 4 * (size_t)(f->units - whole));
        memcpy(to, from, (size_t)f->key_dim * (f->paired ? 2 : 4));
        return;
    }
    for (int64_t i = 0; i < f->key_dim; i += WIDTH)
        vec_store_floats(to + i, vec_load_bf16((const uint16_t *)from + i, f->key_dim - i), f->key_dim - i);
}

/* Store unit `unit` of WIDTH keys, and those after it, from `column`: 4 bytes of each key. Returns the next unit. */
INLINE int64_t store_column(const int stored, const int paired, ivec column, int64_t unit, int64_t units, float *to) {
    vec parts[4] = {(vec)column};
    int count = 1;
    if (stored == SHOAL_BFLOAT16 && !paired) {
        parts[0] = (vec)(column << 16), parts[1] = (vec)(column & (int32_t)0xffff0000);
        count = 2;
    } else if (stored == SHOAL_INT8) {
        for (int i = 0; i < 4; i++) parts[i] = vec_of_ints(column << (24 - 8 * i) >> 24);
        count = 4;
        if (paired) { /* the lower halves of these floats are 0 */
            for (int i = 0; i < 2; i++)
                parts[i] = (vec)((ivec)((uvec)parts[2 * i] >> 16) | (ivec)parts[2 * i + 1]);
            count = 2;
        }
    }
    for (int i = 0; i < count && unit < units; i++, unit++) vec_store(to + unit * PANEL, parts[i]);
    return unit;
}

/* Copy keys [low, high), at rows[low], ..., into panels [units][PANEL] of key 0 and after;
   those around them, up to a whole vector, become 0. ahead: keys to ask the memory for meanwhile, or NULL. */
INLINE void pack_keys_as(const struct format *f, const int stored, const int paired, const char *const *rows,
                         const char *const *ahead, int64_t low, int64_t high, float *panels) {
    int64_t bytes = f->key_dim * bytes_of(stored);
    for (int64_t group = low / WIDTH * WIDTH; group < high; group += WIDTH) {
        float *to = panels + group / PANEL * PANEL * f->units + group % PANEL;
        for (int64_t at = 0; at < bytes; at += 4 * WIDTH) {
            vec columns[WIDTH];
            for (int64_t i = 0, key = group; i < WIDTH; i++, key++)
                columns[i] = key >= low && key < high ? vec_load_bytes(rows[key] + at, bytes - at) : vec_all(0);
            for (int64_t key = group; ahead && key < group + WIDTH; key++) vec_prefetch(ahead[key] + at);
            vec_transpose(columns);
            int64_t unit = at / bytes_of(stored) / (paired ? 2 : 1);
            for (int i = 0; i < WIDTH && unit < f->units; i++)
                unit = store_column(stored, paired, (ivec)columns[i], unit, f->units, to);
        }
    }
}

static void pack_keys(const struct format *f, const char *const *rows, const char *const *ahead, int64_t low,
                      int64_t high, float *panels) {
#define PACK(STORED, PAIRED) \
    if (f->stored == STORED && f->paired == PAIRED) pack_keys_as(f, STORED, PAIRED, rows, ahead, low, high, panels);
    PACK(SHOAL_FLOAT32, 0)
    PACK(SHOAL_BFLOAT16, 0)
    PACK(SHOAL_INT8, 0)
#if defined(__AVX512BF16__)
    PACK(SHOAL_BFLOAT16, 1)
    PACK(SHOAL_INT8, 1)
#endif
#undef PACK
}

/* WIDTH elements of a value from dimension `dim`, of which `count` exist; those of int8 are still to be scaled. */
INLINE vec load_value(const int stored, const char *value, int64_t dim, int64_t count) {
    if (stored == SHOAL_INT8) return vec_load_int8((const int8_t *)value + dim, count);
    if (stored == SHOAL_BFLOAT16) return vec_load_bf16((const uint16_t *)value + dim, count);
    return vec_load_bytes(value + 4 * dim, 4 * count);
}

/* How many vectors of dimensions are computed together from `dim` on, a multiple of WIDTH. */
INLINE int vectors_at(const struct format *f, int64_t dim) { return f->value_dim - dim >= PANEL ? VECTORS : 1; }

/* Copy values [low, high), at rows[low], ..., into panels [CHUNK][vectors * WIDTH] as floats. */
static void pack_values(const struct format *f, const char *const *rows, int64_t low, int64_t high, float *panels) {
    for (int64_t dim = 0, step; dim < f->out_dim; dim += step) {
        step = vectors_at(f, dim) * WIDTH;
        float *panel = panels + dim * CHUNK;
        for (int64_t key = low; key < high; key++)
            for (int64_t d = dim; d < dim + step; d += WIDTH)
                vec_store(panel + key * step + d - dim, load_value(f->stored, rows[key], d, f->value_dim - d));
    }
}

#if defined(__AVX512BF16__)

/* WIDTH elements of two values from dimension `dim`, side by side; NULL is a value of zeros. */
INLINE vec load_pair(const int stored, const char *even, const char *odd, int64_t dim, int64_t count) {
    const vec a = even ? load_value(stored, even, dim, count) : vec_all(0);
    const vec b = odd ? load_value(stored, odd, dim, count) : vec_all(0);
    return (vec)((uvec)a >> 16 | (uvec)b); /* the lower halves of these floats are 0 */
}

/* `count` weights in bfloat16, times `scales` unless that is NULL, behind `before` zeros, and with zeros after them up
   to a multiple of 32. */
static void round_weights(const float *weights, const float *scales, int64_t before, int64_t count, void *rounded) {
    _Alignas(64) float exact[CHUNK + 2 * WIDTH];
    const int64_t all = (before + count + 2 * WIDTH - 1) / (2 * WIDTH) * (2 * WIDTH);
    for (int64_t i = 0; i < before; i++) exact[i] = 0;
    for (int64_t i = 0; i < count; i += WIDTH) {
        vec weight = vec_load_floats(weights + i, count - i);
        if (scales) weight *= vec_load_floats(scales + i, count - i);
        vec_store_floats(exact + before + i, weight, count - i);
    }
    for (int64_t i = before + count; i < all; i++) exact[i] = 0;
    for (int64_t i = 0; i < all; i += 2 * WIDTH) {
        const vec a = vec_load(exact + i), b = vec_load(exact + i + WIDTH);
        _mm512_storeu_si512((uint16_t *)rounded + i, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
    }
}

#endif

/* ---- Products ---- */

/* scores [rows][CHUNK] of `units` units of `rows` queries, which are `stride` apart, and `vectors` vectors of keys. */
INLINE void score(const int rows, const int vectors, const int paired, const float *queries, int64_t stride,
                  int64_t units, const float *keys, float *scores) {
    vec sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = vec_all(0);
    for (int64_t u = 0; u < units; u++) {
        vec key[VECTORS];
        for (int v = 0; v < vectors; v++) key[v] = vec_load(keys + u * PANEL + v * WIDTH);
        for (int r = 0; r < rows; r++) {
            vec query = vec_all(queries[r * stride + u]);
            for (int v = 0; v < vectors; v++) sums[r][v] = vec_dot(paired, query, key[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) vec_store(scores + r * CHUNK + v * WIDTH, sums[r][v]);
}

#include "attention_amx.h"

/* Scores by `units` units of queries and keys from `first` on. */
INLINE void score_keys(const int rows, const int paired, const struct format *f, const float *queries,
                       const float *panels, int64_t first, int64_t units, int64_t low, int64_t high, float *scores) {
    for (int64_t key = low / WIDTH * WIDTH; key < high;) {
        const float *keys = panels + key / PANEL * PANEL * f->units + first * PANEL + key % PANEL;
        if (key % PANEL == 0 && high - key > PANEL - WIDTH) {
            score(rows, VECTORS, paired, queries + first, f->units, units, keys, scores + key);
            key += PANEL;
        } else {
            score(rows, 1, paired, queries + first, f->units, units, keys, scores + key);
            key += WIDTH;
        }
    }
}

/* Add the scores [rows][CHUNK] of one group of int8 keys, times its scales, to those of the groups before; before the
   first there are none. Around keys [low, high), up to whole vectors, anything may come out. */
static void add_scaled(int rows, const float *part, const float *scales, int is_first, int64_t low, int64_t high,
                       float *scores) {
    for (int r = 0; r < rows; r++, part += CHUNK, scores += CHUNK)
        for (int64_t i = low / WIDTH * WIDTH; i < high; i += WIDTH) {
            vec number = vec_load(part + i), scale = vec_load(scales + i);
            vec_store(scores + i, is_first ? number * scale : vec_madd(number, scale, vec_load(scores + i)));
        }
}

/* scores [rows][CHUNK] of `rows` (at most rows_together) queries for keys [low, high), in whole vectors. scales: of
   int8 keys, [groups][CHUNK]. */
static void score_rows(const struct format *f, int rows, const float *queries, const float *panels,
                       const float *scales, int64_t low, int64_t high, float *scores) {
    const int int8 = f->stored == SHOAL_INT8;
    const int64_t step = !int8 ? f->units : f->paired ? SCALED / 2 : SCALED;
    float part[TILE_ROWS * CHUNK], *to = int8 ? part : scores;
    for (int64_t first = 0; first < f->units; first += step, scales += CHUNK) {
        int64_t units = smaller(step, f->units - first);
        if (f->tiled) {
            score_tiles(f, queries, panels, first, units, low, high, to);
            if (int8) add_scaled(rows, part, scales, first == 0, low, high, scores);
            continue;
        }
#define SCORE(N)                                                                              \
    if (rows == N) {                                                                          \
        if (f->paired) score_keys(N, 1, f, queries, panels, first, units, low, high, to);     \
        else score_keys(N, 0, f, queries, panels, first, units, low, high, to);               \
    }
        EACH_NUMBER_OF_ROWS(SCORE)
#undef SCORE
        if (int8) add_scaled(rows, part, scales, first == 0, low, high, scores);
    }
}

/* Add to sums [rows][stride] the sum of packed values [keys][vectors * WIDTH] by weights [rows][CHUNK]; or of pairs of
   both, of which there are half as many. */
INLINE void weigh(const int rows, const int vectors, const int paired, const float *weights, const float *values,
                  int64_t keys, float *sums, int64_t stride) {
    const int64_t row_weights = paired ? CHUNK / 2 : CHUNK;
    vec total[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) total[r][v] = vec_load(sums + r * stride + v * WIDTH);
    for (int64_t k = 0; k < keys; k++) {
        vec value[VECTORS];
        for (int v = 0; v < vectors; v++) value[v] = vec_load(values + (k * vectors + v) * WIDTH);
        for (int r = 0; r < rows; r++) {
            vec weight = vec_all(weights[r * row_weights + k]);
            for (int v = 0; v < vectors; v++) total[r][v] = vec_dot(paired, weight, value[v], total[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) vec_store(sums + r * stride + v * WIDTH, total[r][v]);
}

/* The same of `keys` keys, or pairs, from `low` on, and dimensions [dim, end); the first weight is that of `low`. */
INLINE void weigh_packed(const int rows, const int paired, const struct format *f, const float *weights,
                         const float *panels, int64_t low, int64_t keys, int64_t dim, int64_t end, float *sums,
                         int64_t stride) {
    while (dim < end) {
        int vectors = vectors_at(f, dim);
        const float *values = panels + dim * (paired ? CHUNK / 2 : CHUNK) + low * vectors * WIDTH;
        if (vectors == VECTORS) weigh(rows, VECTORS, paired, weights, values, keys, sums + dim, stride);
        else weigh(rows, 1, paired, weights, values, keys, sums + dim, stride);
        dim += vectors * WIDTH;
    }
}

#include "attention_pairs.h"

/* Weights [rows][CHUNK] of keys [low, high), times the scales of one group of their values. */
static const float *scale_weights(int rows, const float *weights, const float *scales, int64_t low, int64_t high,
                                  float *scaled) {
    for (int r = 0; r < rows; r++)
        for (int64_t i = low; i < high; i += WIDTH)
            vec_store_floats(scaled + r * CHUNK + i, vec_load_floats(weights + r * CHUNK + i, high - i) *
                                                         vec_load_floats(scales + i, high - i), high - i);
    return scaled;
}

/* Add to sums [rows][result_size] values [low, high) of `panels` by weights [rows][CHUNK]. scales: of int8 values,
   [groups][CHUNK]. */
static void weigh_rows(const struct format *f, int rows, const float *weights, const float *panels,
                       const float *scales, int64_t low, int64_t high, float *sums) {
    if (f->value_pairs) {
        weigh_pairs(f, rows, weights, panels, scales, low, high, sums);
        return;
    }
    const int int8 = f->stored == SHOAL_INT8;
    const int64_t step = int8 ? SCALED : f->out_dim;
    float scaled[ROWS * CHUNK];
    for (int64_t dim = 0; dim < f->out_dim; dim += step, scales += CHUNK) {
        const float *by = int8 ? scale_weights(rows, weights, scales, low, high, scaled) : weights;
        int64_t end = smaller(dim + step, f->out_dim);
#define WEIGH(N) \
    if (rows == N) weigh_packed(N, 0, f, by + low, panels, low, high - low, dim, end, sums, result_size(f));
        EACH_NUMBER_OF_ROWS(WEIGH)
#undef WEIGH
    }
}

/* As weigh, with values read in place: `vectors` vectors of them from dimension `dim`. */
INLINE void weigh_here(const int rows, const int vectors, const int stored, int64_t count, const float *weights,
                       const char *const *values, const char *const *ahead, int64_t dim, int64_t keys,
                       float *sums, int64_t stride) {
    vec total[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) total[r][v] = vec_load(sums + r * stride + v * WIDTH);
    for (int64_t k = 0; k < keys; k++) {
        vec value[VECTORS];
        for (int v = 0; v < vectors; v++) value[v] = load_value(stored, values[k], dim + v * WIDTH, count);
        for (int64_t at = 0; at < vectors * WIDTH * bytes_of(stored); at += 64)
            vec_prefetch(ahead[k] + dim * bytes_of(stored) + at);
        for (int r = 0; r < rows; r++) {
            vec weight = vec_all(weights[r * CHUNK + k]);
            for (int v = 0; v < vectors; v++) total[r][v] = vec_madd(weight, value[v], total[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) vec_store(sums + r * stride + v * WIDTH, total[r][v]);
}

INLINE void weigh_scattered(const int rows, const int stored, const struct format *f, const float *weights,
                            const char *const *values, const char *const *ahead, int64_t keys, int64_t dim,
                            int64_t end, float *sums, int64_t stride) {
    for (; dim < end && vectors_at(f, dim) == VECTORS; dim += PANEL)
        weigh_here(rows, VECTORS, stored, WIDTH, weights, values, ahead, dim, keys, sums + dim, stride);
    for (; dim < end; dim += WIDTH)
        weigh_here(rows, 1, stored, f->value_dim - dim, weights, values, ahead, dim, keys, sums + dim, stride);
}

/* Add to sums [rows][result_size] `keys` values, at values[0], ..., by weights [rows][CHUNK]. The same
   bits as weigh_rows, if all are finite; the better one where few rows share the values. scales: as there, of values[0] and after.
   ahead: as many places to ask the memory for meanwhile. place: of the first key in the chunk. */
static void weigh_in_place(const struct format *f, int rows, const float *weights, const char *const *values,
                           const float *scales, const char *const *ahead, int64_t place, int64_t keys, float *sums) {
    if (f->value_pairs) {
        weigh_pairs_in_place(f, rows, weights, values, scales, ahead, place, keys, sums);
        return;
    }
    const int64_t step = f->stored == SHOAL_INT8 ? SCALED : f->out_dim;
    float scaled[ROWS * CHUNK];
    (void)place; /* for pairs only */
    for (int64_t dim = 0; dim < f->out_dim; dim += step, scales += CHUNK) {
        const float *by = f->stored == SHOAL_INT8 ? scale_weights(rows, weights, scales, 0, keys, scaled) : weights;
        int64_t end = smaller(dim + step, f->out_dim);
        if (f->tiled) by = rounded_weights(rows, by, keys, scaled);
#define WEIGH_STORED(N, STORED)                                                                        \
    if (rows == N && f->stored == STORED) {                                                            \
        if (f->tiled && STORED != SHOAL_FLOAT32)                                                       \
            weigh_few_tiles(N, STORED, f, by, values, ahead, place, keys, dim, end, sums, result_size(f)); \
        else weigh_scattered(N, STORED, f, by, values, ahead, keys, dim, end, sums, result_size(f));   \
    }
#define WEIGH(N) WEIGH_STORED(N, SHOAL_FLOAT32) WEIGH_STORED(N, SHOAL_BFLOAT16) WEIGH_STORED(N, SHOAL_INT8)
        EACH_NUMBER_OF_ROWS(WEIGH)
#undef WEIGH
#undef WEIGH_STORED
    }
}

/* ---- Softmax ---- */

/* Turn scores of keys [all_low, all_high), whole vectors, into weights: exp(score - largest), and 0 but for the
   visible ones, [low, high). result: the largest score, and the sum of weights. */
static void soften(const struct attention *a, float *scores, int64_t low, int64_t high, int64_t all_low,
                   int64_t all_high, float result[2]) {
    const vec scale = vec_all((float)a->scale), cap = vec_all((float)a->softcap);
    if (a->softcap) {
        const vec inner = vec_all((float)(a->scale / a->softcap));
        for (int64_t i = all_low; i < all_high; i += WIDTH)
            vec_store(scores + i, cap * vec_tanh(vec_load(scores + i) * inner));
    } else {
        for (int64_t i = all_low; i < all_high; i += WIDTH) vec_store(scores + i, vec_load(scores + i) * scale);
    }
    for (int64_t i = all_low; i < low; i++) scores[i] = -INFINITY;
    for (int64_t i = high; i < all_high; i++) scores[i] = -INFINITY;
    vec top = vec_all(-INFINITY), sum = vec_all(0);
    for (int64_t i = all_low; i < all_high; i += WIDTH) top = vec_max(vec_load(scores + i), top);
    result[0] = vec_largest(top);
    top = vec_all(result[0]);
    for (int64_t i = all_low; i < all_high; i += WIDTH) {
        vec weight = vec_exp(vec_load(scores + i) - top);
        vec_store(scores + i, weight);
        sum += weight;
    }
    result[1] = vec_sum(sum);
}

/* Merge a chunk's result [dim + 2] into that of the chunks before it; a sum of weights of 0 says that there was
   no visible key. */
static void merge(float *before, const float *chunk, int64_t dim) {
    if (chunk[dim + 1] == 0) return;
    if (before[dim + 1] == 0) {
        memcpy(before, chunk, 4 * (size_t)(dim + 2));
        return;
    }
    float largest = before[dim] > chunk[dim] ? before[dim] : chunk[dim];
    vec old = vec_exp(vec_all(before[dim] - largest)), new = vec_exp(vec_all(chunk[dim] - largest));
    for (int64_t i = 0; i < dim; i += WIDTH)
        vec_store(before + i, vec_madd(vec_load(chunk + i), new, vec_load(before + i) * old));
    before[dim] = largest;
    before[dim + 1] = before[dim + 1] * old[0] + chunk[dim + 1] * new[0];
}

#endif
