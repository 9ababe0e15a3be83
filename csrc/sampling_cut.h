/* Top-k and top-p: which tokens of a row are kept.
 *
 * Tokens are ranked by falling logit, and equal ones by rising id; the first of the ranking are kept. Where they end
 * is found by counting logits in bins, and again in the bin in which they end.
 */
#ifndef SHOAL_SAMPLING_CUT_H
#define SHOAL_SAMPLING_CUT_H

#include "sampling_row.h"

enum {
    BINS = 1024,
    FEW = 64 /* this many are sorted instead of counted */
};

/* How long a beginning of the ranking is: `count` tokens, or the fewest whose weights make `mass`. */
struct prefix {
    int64_t count;
    double mass;
};

struct bins {
    int32_t count[BINS];
    double mass[BINS];
};

/* A logit that at least `count` logits of the row reach; -infinity where that is not known. */
static float find_floor(const struct row *row, int64_t count) {
    float largest[SPANS];
    int64_t found = 0, spans = (chunks_of(row) + row->span - 1) / row->span;
    if (count > spans) return -INFINITY;
    for (int64_t span = 0; span < spans; span++) {
        if (found == count && row->tops[span] <= largest[found - 1]) continue;
        int64_t at = found < count ? found++ : count - 1;
        for (; at > 0 && largest[at - 1] < row->tops[span]; at--) largest[at] = largest[at - 1];
        largest[at] = row->tops[span];
    }
    return largest[count - 1];
}

/* Bin of logits in a range that begins at `high`; logits above it are in the first bin, those below in the last. */
INLINE ivec bins_of(vec logits, float high, float bins_per_unit) {
    vec bin = vec_max((vec_all(high) - logits) * vec_all(bins_per_unit), vec_all(0.0f));
    bin = -vec_max(-bin, vec_all(-(float)(BINS - 1)));
    return __builtin_convertvector(bin, ivec);
}

static float bins_per_unit(float low, float high) {
    float scale = (float)(BINS - 1) / (high - low);
    return scale < 1e30f ? scale : 1e30f;
}

/* Count the logits from low to high, and sum their weights, in bins. */
static void fill_bins(const struct row *row, float low, float high, struct bins *bins) {
    float room[CHUNK], weights[WIDTH];
    int32_t places[WIDTH];
    float scale = bins_per_unit(low, high);
    memset(bins, 0, sizeof *bins);
    for (int64_t c = 0; c < chunks_of(row); c++) {
        if (!reaches(row, c, low)) continue;
        const float *logits = read_chunk(row, c, room);
        for (int i = 0; i < CHUNK; i += WIDTH) {
            vec x = vec_load(logits + i);
            uint32_t lanes = lanes_of((x >= vec_all(low)) & (x <= vec_all(high)));
            if (!lanes) continue;
            ivec place = bins_of(x, high, scale);
            memcpy(places, &place, sizeof places);
            vec_store(weights, weights_of(row, x));
            while (lanes) {
                int lane = take_lane(&lanes);
                bins->count[places[lane]]++;
                bins->mass[places[lane]] += weights[lane];
            }
        }
    }
}

/* The logits of one bin: their range, the first FEW of them in the order of their ids, and how many there are. */
static int64_t read_bin(const struct row *row, float *low, float *high, int bin, struct token tokens[FEW]) {
    float room[CHUNK], weights[WIDTH], below = *low, above = *high, scale = bins_per_unit(below, above);
    int64_t found = 0;
    *low = INFINITY, *high = -INFINITY;
    for (int64_t c = 0; c < chunks_of(row); c++) {
        if (!reaches(row, c, below)) continue;
        const float *logits = read_chunk(row, c, room);
        for (int i = 0; i < CHUNK; i += WIDTH) {
            vec x = vec_load(logits + i);
            ivec inside = (x >= vec_all(below)) & (x <= vec_all(above)) & (bins_of(x, above, scale) == bin);
            uint32_t lanes = lanes_of(inside);
            if (!lanes) continue;
            vec_store(weights, weights_of(row, x));
            while (lanes) {
                int lane = take_lane(&lanes);
                float logit = logits[i + lane];
                *low = logit < *low ? logit : *low;
                *high = logit > *high ? logit : *high;
                int32_t id = (int32_t)(c * CHUNK + i + lane);
                if (found < FEW) tokens[found] = (struct token){logit, weights[lane], id};
                found++;
            }
        }
    }
    return found;
}

/* Rank tokens that come in the order of their ids. */
static void rank_tokens(struct token *tokens, int64_t count) {
    for (int64_t i = 1; i < count; i++) {
        struct token token = tokens[i];
        int64_t at = i;
        for (; at > 0 && tokens[at - 1].logit < token.logit; at--) tokens[at] = tokens[at - 1];
        tokens[at] = token;
    }
}

/* The id of the n-th (from 1) of the logits from low to high; the last such id where there are fewer. */
static int32_t find_nth(const struct row *row, float low, float high, int64_t n) {
    float room[CHUNK];
    int32_t last = -1;
    for (int64_t c = 0; c < chunks_of(row); c++) {
        if (!reaches(row, c, low)) continue;
        const float *logits = read_chunk(row, c, room);
        for (int i = 0; i < CHUNK; i += WIDTH) {
            vec x = vec_load(logits + i);
            uint32_t lanes = lanes_of((x >= vec_all(low)) & (x <= vec_all(high)));
            while (lanes) {
                int lane = take_lane(&lanes);
                last = (int32_t)(c * CHUNK + i + lane);
                if (!--n) return last;
            }
        }
    }
    return last;
}

/* Cut within `count` logits from low to high that cannot be told apart, each of them of this weight. `passed` is what
   comes before, and afterwards what is kept. */
static void cut_equals(const struct row *row, struct prefix wanted, struct prefix *passed, float weight,
                       int64_t count, struct cut *cut) {
    double more = ceil((wanted.mass - passed->mass) / weight);
    int64_t kept = wanted.count - passed->count;
    if (kept > count) kept = count;
    if (more < (double)kept) kept = more < 1 ? 1 : (int64_t)more;
    passed->count += kept;
    passed->mass += (double)kept * weight;
    cut->last = kept == count ? INT32_MAX : find_nth(row, cut->low, cut->high, kept);
}

/* Where the wanted beginning of the ranking ends, of which nothing lies below the logit `low`. Returns how long it
   is: `low` may end it first. */
static struct prefix find_cut(const struct row *row, struct prefix wanted, float low, struct cut *cut) {
    struct prefix passed = {0, 0};
    struct bins bins;
    struct token tokens[FEW];
    float high = row->largest;
    for (;;) {
        fill_bins(row, low, high, &bins);
        int bin = 0;
        for (; bin < BINS; bin++) {
            struct prefix next = {passed.count + bins.count[bin], passed.mass + bins.mass[bin]};
            if (next.count >= wanted.count || next.mass >= wanted.mass) break;
            passed = next;
        }
        cut->low = cut->high = low, cut->last = INT32_MAX;
        if (bin == BINS) return passed;
        float before_low = low, before_high = high;
        int64_t count = read_bin(row, &low, &high, bin, tokens);
        cut->low = low, cut->high = high;
        if (count <= FEW) {
            rank_tokens(tokens, count);
            for (int64_t i = 0; i < count && passed.count < wanted.count && passed.mass < wanted.mass; i++) {
                passed.count++;
                passed.mass += tokens[i].weight;
                cut->low = cut->high = tokens[i].logit, cut->last = tokens[i].id;
            }
            return passed;
        }
        if (low == high || (low == before_low && high == before_high)) {
            cut_equals(row, wanted, &passed, tokens[0].weight, count, cut);
            return passed;
        }
    }
}

/* The logit of weight exp(-distance). */
static float logit_of_weight(const struct row *row, double distance) {
    return (float)(row->largest - distance / row->inverse_temperature);
}

/* Cut a row to the tokens that top-k (0: all) and then top-p keep. */
static void cut_ranking(const struct row *row, int64_t top_k, double top_p, struct cut *cut) {
    struct prefix wanted = {top_k ? top_k : INT64_MAX, INFINITY};
    double left = 0;
    if (top_k) {
        float floor = find_floor(row, top_k), lightest = logit_of_weight(row, 88); /* below, weights are 0 */
        left = find_cut(row, wanted, floor > lightest ? floor : lightest, cut).mass;
    }
    if (top_p >= 1) return;
    if (!top_k) left = sum_kept(row, cut, 0, chunks_of(row));
    wanted.mass = top_p * left;
    /* All tokens together that weigh less than (1 - top_p) * left / vocab are not what top-p keeps. */
    double rest = log((double)row->vocab / ((1 - top_p) * left)) + 0.01;
    float lightest = logit_of_weight(row, rest < 88 ? rest : 88);
    find_cut(row, wanted, cut->low > lightest ? cut->low : lightest, cut);
}

#endif
