/* Rows of logits for the programs that test sampling and log-probabilities. */
#ifndef SHOAL_ROWS_H
#define SHOAL_ROWS_H

#include "guard.h"

#include <string.h>

static const int64_t SIZES[] = {1, 3, 16, 255, 256, 257, 1000, 66000};

/* Random logits [rows, vocab]; every other row has but two values. */
static float *make_logits(int64_t rows, int64_t vocab) {
    float *logits = guarded_floats((size_t)(rows * vocab), (uint32_t)vocab);
    for (int64_t i = 0; i < rows * vocab; i++) logits[i] = i / vocab % 2 ? (float)(i % 3 == 0) : 8 * logits[i];
    return logits;
}

/* The same in bfloat16. */
static uint16_t *make_bf16(const float *logits, int64_t count) {
    uint16_t *out = guarded(2 * (size_t)count);
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, logits + i, sizeof bits);
        out[i] = (uint16_t)(bits >> 16);
    }
    return out;
}

#endif
