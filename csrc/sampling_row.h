/* Reading rows of logits and the weights of their tokens, for sampling and log-probabilities.
 *
 * The weight of a logit x is exp((x - largest) / temperature): nothing overflows, and nothing need be normalised.
 */
#ifndef SHOAL_SAMPLING_ROW_H
#define SHOAL_SAMPLING_ROW_H

#include "attention_vec.h"

#include <math.h>

enum {
    CHUNK = 256, /* logits that are read at once */
    SPANS = 256  /* parts of a row of which the largest logit is known, and weights are summed apart */
};

/* Logits [vocab], bfloat16 or float32; `tops` are the largest of each span, of `span` chunks. */
struct row {
    const void *logits;
    int64_t vocab, span;
    int bf16;
    float inverse_temperature, largest;
    float tops[SPANS];
};

/* The tokens that are kept: logits above `high`, those from `low` on with ids up to `last`; and of these weights from
   `least` on. */
struct cut {
    float low, high, least;
    int32_t last;
};

static const struct cut EVERYTHING = {.low = -INFINITY, .high = -INFINITY, .least = 0, .last = INT32_MAX};

struct token {
    float logit, weight;
    int32_t id;
};

/* A bit for every lane that is all ones. */
INLINE uint32_t lanes_of(ivec mask) {
#if WIDTH == 16
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif WIDTH == 8
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    return (uint32_t)((mask[0] & 1) | (mask[1] & 2) | (mask[2] & 4) | (mask[3] & 8));
#endif
}

/* The first of some lanes, which is taken from them. */
INLINE int take_lane(uint32_t *lanes) {
    int lane = __builtin_ctz(*lanes);
    *lanes &= *lanes - 1;
    return lane;
}

/* 0, 1, 2 and so on. */
INLINE ivec first_lanes(void) {
#if WIDTH == 16
    return (ivec){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#elif WIDTH == 8
    return (ivec){0, 1, 2, 3, 4, 5, 6, 7};
#else
    return (ivec){0, 1, 2, 3};
#endif
}

static inline int64_t chunks_of(const struct row *row) { return (row->vocab + CHUNK - 1) / CHUNK; }

/* A row's logits from CHUNK * chunk on, -infinity behind its last; in `room`, unless they can be read in place. */
INLINE const float *read_chunk(const struct row *row, int64_t chunk, float room[CHUNK]) {
    int64_t first = chunk * CHUNK, count = row->vocab - first < CHUNK ? row->vocab - first : CHUNK;
    if (row->bf16) {
        const uint16_t *from = (const uint16_t *)row->logits + first;
        for (int64_t i = 0; i < count; i += WIDTH) vec_store(room + i, vec_load_bf16(from + i, count - i));
    } else {
        const float *from = (const float *)row->logits + first;
        if (count == CHUNK) return from;
        memcpy(room, from, 4 * (size_t)count);
    }
    for (int64_t i = count; i < CHUNK; i++) room[i] = -INFINITY;
    return room;
}

/* Find the largest logits of a row; NaN where one is NaN. */
static inline void find_largest(struct row *row) {
    float room[CHUNK];
    ivec nan = {0};
    row->span = (chunks_of(row) + SPANS - 1) / SPANS;
    row->largest = -INFINITY;
    for (int64_t c = 0; c < chunks_of(row); c++) {
        const float *logits = read_chunk(row, c, room);
        vec largest = vec_all(c % row->span ? row->tops[c / row->span] : -INFINITY);
        for (int i = 0; i < CHUNK; i += WIDTH) {
            vec x = vec_load(logits + i);
            nan |= x != x;
            largest = vec_max(largest, x);
        }
        float top = row->tops[c / row->span] = vec_largest(largest);
        row->largest = top > row->largest ? top : row->largest;
    }
    if (lanes_of(nan)) row->largest = NAN;
}

/* Whether a chunk may have logits from `low` on. */
static inline int reaches(const struct row *row, int64_t chunk, float low) {
    return row->tops[chunk / row->span] >= low;
}

INLINE vec weights_of(const struct row *row, vec logits) {
    return vec_exp((logits - vec_all(row->largest)) * vec_all(row->inverse_temperature));
}

/* The weights of kept tokens, 0 of others; ids: that of the first lane. */
INLINE vec kept_weights(const struct row *row, const struct cut *cut, vec logits, int32_t id) {
    vec weights = weights_of(row, logits);
    ivec ids = first_lanes() + id;
    ivec kept = (logits > vec_all(cut->high)) | ((logits >= vec_all(cut->low)) & (ids <= cut->last));
    return (vec)(kept & (weights >= vec_all(cut->least)) & (ivec)weights);
}

/* Sum the weights of the kept tokens from chunk `first` to before chunk `end`. */
static inline double sum_kept(const struct row *row, const struct cut *cut, int64_t first, int64_t end) {
    float room[CHUNK];
    double total = 0;
    for (int64_t c = first; c < end; c++) {
        if (!reaches(row, c, cut->low)) continue;
        const float *logits = read_chunk(row, c, room);
        vec sum = {0};
        for (int i = 0; i < CHUNK; i += WIDTH) {
            vec x = vec_load(logits + i);
            if (lanes_of(x >= vec_all(cut->low))) sum += kept_weights(row, cut, x, (int32_t)(c * CHUNK + i));
        }
        total += vec_sum(sum);
    }
    return total;
}

#endif
