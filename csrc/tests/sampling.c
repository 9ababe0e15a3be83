/* Rows of any length, in both formats and with all kinds of limits: nothing but them is read. */
#include "rows.h"

#include "../kernels/sampling.c"

static const struct choice CHOICES[] = {
    {.inverse_temperature = 0, .top_p = 1},
    {.inverse_temperature = 1, .top_p = 1, .draw = 0.3},
    {.inverse_temperature = 1, .top_p = 1, .draw = 0.9999999999999999},
    {.inverse_temperature = 5, .top_p = 0.9, .draw = 0},
    {.inverse_temperature = 0.01f, .top_p = 0.7, .draw = 0.99},
    {.inverse_temperature = 1, .top_p = 0.999, .top_k = 70, .draw = 0.5},
    {.inverse_temperature = 1, .top_p = 1, .top_k = INT32_MAX, .min_p = 0.5f, .draw = 0.5},
    {.inverse_temperature = 1e5f, .top_p = 1e-6, .top_k = 3, .draw = 0.7},
};
enum { ROWS = sizeof CHOICES / sizeof *CHOICES };

static void check(const void *logits, int64_t vocab, int bf16) {
    int32_t *tokens = guarded(ROWS * sizeof *tokens);
    KERNEL(shoal_sample)(logits, vocab * (bf16 ? 2 : 4), ROWS, vocab, bf16, CHOICES, tokens);
    for (int row = 0; row < ROWS; row++) CHECK(0 <= tokens[row] && tokens[row] < vocab);
}

int main(void) {
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++) {
        float *logits = make_logits(ROWS, SIZES[i]);
        check(logits, SIZES[i], 0);
        check(make_bf16(logits, ROWS * SIZES[i]), SIZES[i], 1);
    }
    int32_t token;
    float *broken = guarded_floats(300, 1);
    broken[299] = NAN;
    KERNEL(shoal_sample)(broken, 1200, 1, 300, 0, CHOICES + 1, &token);
    CHECK(token == NO_TOKEN);
    return 0;
}
