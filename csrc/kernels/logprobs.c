/* Log-probabilities of chosen tokens, and the likeliest tokens of their rows. */
#include "../sampling_row.h"

enum { MOST_LIKELY = 20 };

/* What to report of a row: the log-probability of a token, and the `count` likeliest tokens. */
struct report {
    int64_t row;
    int32_t token, count;
};

struct reporting {
    const char *logits;
    int64_t row_bytes, vocab;
    int bf16;
    const struct report *reports;
    int64_t most;
    float *logprobs;
    int32_t *ids;
};

/* The first `count` of the ranking, in order. */
static void find_likeliest(const struct row *row, int64_t count, struct token *likeliest) {
    float room[CHUNK], least = -INFINITY;
    int64_t found = 0;
    for (int64_t c = 0; c < chunks_of(row) && count; c++) {
        if (found == count && !reaches(row, c, least)) continue;
        const float *logits = read_chunk(row, c, room);
        for (int i = 0; i < CHUNK; i += WIDTH) {
            if (found == count && !lanes_of(vec_load(logits + i) > vec_all(least))) continue;
            for (int lane = i; lane < i + WIDTH; lane++) {
                if (c * CHUNK + lane >= row->vocab || (found == count && logits[lane] <= least)) continue;
                int64_t at = found < count ? found++ : count - 1;
                for (; at > 0 && likeliest[at - 1].logit < logits[lane]; at--) likeliest[at] = likeliest[at - 1];
                likeliest[at] = (struct token){logits[lane], 0, (int32_t)(c * CHUNK + lane)};
                least = likeliest[found - 1].logit;
            }
        }
    }
}

static float logit_of(const struct row *row, int32_t id) {
    if (!row->bf16) return ((const float *)row->logits)[id];
    return vec_load_bf16((const uint16_t *)row->logits + id, 1)[0];
}

static void report_row(void *context, int64_t index) {
    const struct reporting *job = context;
    const struct report *report = job->reports + index;
    struct row row = {.logits = job->logits + report->row * job->row_bytes,
                      .vocab = job->vocab,
                      .bf16 = job->bf16,
                      .inverse_temperature = 1};
    find_largest(&row);
    double total = row.largest + log(sum_kept(&row, &EVERYTHING, 0, chunks_of(&row)));
    float *logprobs = job->logprobs + index * (job->most + 1);
    int32_t *ids = job->ids + index * job->most;
    logprobs[0] = (float)(logit_of(&row, report->token) - total);
    struct token likeliest[MOST_LIKELY];
    find_likeliest(&row, report->count, likeliest);
    for (int64_t i = 0; i < report->count; i++) {
        ids[i] = likeliest[i].id;
        logprobs[1 + i] = (float)(likeliest[i].logit - total);
    }
}

/* Of each report, logprobs [reports, 1 + most] has that of its token, then those of the likeliest tokens, whose ids
   [reports, most] are in the same order. `most` is at most MOST_LIKELY, and the rows are finite. */
void KERNEL(shoal_logprobs)(const void *logits, int64_t row_bytes, int64_t vocab, int64_t bf16, int64_t count,
                            const struct report *reports, int64_t most, float *logprobs, int32_t *ids) {
    struct reporting reporting = {logits, row_bytes, vocab, bf16 != 0, reports, most, logprobs, ids};
    shoal_parallel(count, report_row, &reporting);
}
