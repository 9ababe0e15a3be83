/* Rows of any length and in both formats, with and without the likeliest tokens: nothing but them is read. */
#include "rows.h"

#include "../kernels/logprobs.c"

enum { ROWS = 4 };

static void check(const void *logits, int64_t vocab, int bf16) {
    int64_t most = vocab < MOST_LIKELY ? vocab : MOST_LIKELY;
    int32_t *ids = guarded((size_t)(ROWS * most) * sizeof *ids);
    float *logprobs = guarded((size_t)(ROWS * (1 + most)) * sizeof *logprobs);
    struct report *reports = guarded(ROWS * sizeof *reports);
    for (int row = 0; row < ROWS; row++)
        reports[row] = (struct report){row, (int32_t)(vocab - 1), (int32_t)(row < 2 ? most : 0)};
    KERNEL(shoal_logprobs)(logits, vocab * (bf16 ? 2 : 4), vocab, bf16, ROWS, reports, most, logprobs, ids);
    for (int row = 0; row < ROWS; row++) {
        const float *found = logprobs + row * (1 + most);
        CHECK(found[0] <= 1e-5f);
        for (int64_t i = 0; i < reports[row].count; i++) {
            CHECK(0 <= ids[row * most + i] && ids[row * most + i] < vocab);
            CHECK(i == 0 || found[1 + i] <= found[i]);
        }
    }
}

int main(void) {
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        float *logits = make_logits(ROWS, SIZES[i]);
        check(logits, SIZES[i], 0);
        check(make_bf16(logits, ROWS * SIZES[i]), SIZES[i], 1);
    }
    return 0;
}
