/* Rows of any length, in both formats, with masks of all kinds: nothing but them is written. */
#include "rows.h"

#include "../kernels/masks.c"

static void check(int64_t vocab, int bf16, int64_t words) {
    float *logits = make_logits(3, vocab), *before = make_logits(3, vocab);
    uint16_t *half = make_bf16(logits, 3 * vocab);
    uint32_t *masks = guarded((size_t)(2 * words) * sizeof *masks);
    for (int64_t word = 0; word < 2 * words; word++)
        masks[word] = word % 3 == 0 ? 0 : word % 3 == 1 ? UINT32_MAX : 0x5a0ff00fu + (uint32_t)word;
    const int64_t rows[] = {2, 0};
    void *data = bf16 ? (void *)half : logits;
    KERNEL(shoal_mask)(data, vocab * (bf16 ? 2 : 4), vocab, bf16, 2, rows, masks, words);
    for (int64_t row = 0; row < 3; row++) {
        const uint32_t *mask = row == 1 ? NULL : masks + (row == 0) * words;
        for (int64_t i = 0; i < vocab; i++) {
            int allowed = mask == NULL || (i / 32 < words && (mask[i / 32] >> i % 32 & 1));
            uint32_t bits;
            memcpy(&bits, before + row * vocab + i, sizeof bits);
            if (bf16) {
                CHECK(half[row * vocab + i] == (allowed ? bits >> 16 : 0xff80));
            } else {
                CHECK(allowed ? logits[row * vocab + i] == before[row * vocab + i]
                              : logits[row * vocab + i] == -INFINITY);
            }
        }
    }
}

int main(void) {
    for (size_t i = 0; i < sizeof SIZES / sizeof *SIZES; i++)
        for (int bf16 = 0; bf16 < 2; bf16++) {
            check(SIZES[i], bf16, (SIZES[i] + 31) / 32);
            if (SIZES[i] > 32) check(SIZES[i], bf16, (SIZES[i] + 31) / 32 - 1);
        }
    return 0;
}
