/* Sampling the next token of each row of logits.
 *
 * The draw is searched among the kept tokens in the order of their ids. A row's token depends on the row alone.
 */
#include "../sampling_cut.h"

enum { NO_TOKEN = -1 };

/* How a row is sampled. top_k 0: no limit; inverse_temperature 0: take the likeliest. */
struct choice {
    double draw, top_p;
    int64_t top_k;
    float inverse_temperature, min_p;
};

/* The first token with this logit. */
static int32_t find_token(const struct row *row, float logit) {
    float room[CHUNK];
    for (int64_t c = 0; c < chunks_of(row); c++) {
        if (!reaches(row, c, logit)) continue;
        const float *logits = read_chunk(row, c, room);
        for (int i = 0; i < CHUNK; i += WIDTH) {
            uint32_t lanes = lanes_of(vec_load(logits + i) == vec_all(logit));
            if (lanes) return (int32_t)(c * CHUNK + i + take_lane(&lanes));
        }
    }
    return NO_TOKEN;
}

/* The kept token at which the sum of weights, by rising ids, exceeds the share `draw` of their total. */
static int32_t draw_token(const struct row *row, const struct cut *cut, double draw) {
    int64_t chunks = chunks_of(row), length = row->span;
    double sums[SPANS], total = 0;
    for (int64_t first = 0, span = 0; first < chunks; first += length, span++) {
        int64_t end = first + length < chunks ? first + length : chunks;
        total += sums[span] = sum_kept(row, cut, first, end);
    }
    double passed = 0, before = 0;
    int64_t chosen = 0;
    for (int64_t first = 0, span = 0; first < chunks && passed <= draw * total; first += length, span++) {
        if (sums[span] <= 0) continue;
        chosen = first, before = passed;
        passed += sums[span];
    }
    int32_t last = NO_TOKEN; /* where rounding makes the sum of the span a little less than it was */
    for (int64_t c = chosen; c < chosen + length && c < chunks; c++) {
        float room[CHUNK], weights[WIDTH];
        if (!reaches(row, c, cut->low)) continue;
        const float *logits = read_chunk(row, c, room);
        for (int i = 0; i < CHUNK; i += WIDTH) {
            if (!lanes_of(vec_load(logits + i) >= vec_all(cut->low))) continue;
            vec_store(weights, kept_weights(row, cut, vec_load(logits + i), (int32_t)(c * CHUNK + i)));
            for (int lane = 0; lane < WIDTH; lane++) {
                if (weights[lane] <= 0) continue;
                last = (int32_t)(c * CHUNK + i + lane);
                before += weights[lane];
                if (before > draw * total) return last;
            }
        }
    }
    return last;
}

struct sampling {
    const char *logits;
    int64_t row_bytes, vocab;
    int bf16;
    const struct choice *choices;
    int32_t *tokens;
};

static void sample_row(void *context, int64_t index) {
    const struct sampling *sampling = context;
    const struct choice *choice = sampling->choices + index;
    struct row row = {.logits = sampling->logits + index * sampling->row_bytes,
                      .vocab = sampling->vocab,
                      .bf16 = sampling->bf16,
                      .inverse_temperature = choice->inverse_temperature};
    find_largest(&row);
    int32_t *token = sampling->tokens + index;
    if (!isfinite(row.largest)) {
        *token = NO_TOKEN;
    } else if (row.inverse_temperature == 0) {
        *token = find_token(&row, row.largest);
    } else {
        struct cut cut = EVERYTHING;
        cut_ranking(&row, choice->top_k, choice->top_p, &cut);
        cut.least = choice->min_p;
        *token = draw_token(&row, &cut, choice->draw);
    }
}

/* Sample tokens [rows] from logits [rows, vocab], whose rows are row_bytes apart; NO_TOKEN for rows with NaN or
   infinity, or with nothing but -infinity. */
void KERNEL(shoal_sample)(const void *logits, int64_t row_bytes, int64_t rows, int64_t vocab, int64_t bf16,
                          const struct choice *choices, int32_t *tokens) {
    struct sampling sampling = {logits, row_bytes, vocab, bf16 != 0, choices, tokens};
    shoal_parallel(rows, sample_row, &sampling);
}
