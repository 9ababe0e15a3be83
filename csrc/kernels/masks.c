/* Applying grammar masks: minus infinity for the logits of tokens that are not allowed. */
#include <math.h>
#include <string.h>

#include "../shoal.h"

enum { WORD = 32, BF16_MINUS_INFINITY = 0xff80 };

struct masking {
    char *logits;
    int64_t row_bytes, vocab;
    int bf16;
    const int64_t *rows;
    const uint32_t *masks;
    int64_t words;
};

/* Keep what is allowed of `count` logits from `first` on; without branches, as there is no telling which. */
static void keep(void *row, int bf16, int64_t first, int64_t count, uint32_t allowed) {
    uint16_t *half = (uint16_t *)row + first;
    float *full = (float *)row + first;
    if (bf16)
        for (int64_t i = 0; i < count; i++) half[i] = allowed >> i & 1 ? half[i] : BF16_MINUS_INFINITY;
    else
        for (int64_t i = 0; i < count; i++) full[i] = allowed >> i & 1 ? full[i] : -INFINITY;
}

static void mask_row(void *context, int64_t index) {
    const struct masking *masking = context;
    void *row = masking->logits + masking->rows[index] * masking->row_bytes;
    const uint32_t *mask = masking->masks + index * masking->words;
    int64_t vocab = masking->vocab, width = masking->bf16 ? 2 : 4;
    uint16_t half[WORD];
    float full[WORD];
    for (int i = 0; i < WORD; i++) half[i] = BF16_MINUS_INFINITY, full[i] = -INFINITY;
    const void *nothing = masking->bf16 ? (const void *)half : full;
    for (int64_t first = 0; first < vocab; first += WORD) {
        int64_t word = first / WORD, count = vocab - first < WORD ? vocab - first : WORD;
        uint32_t allowed = word < masking->words ? mask[word] : 0;
        if (allowed == 0) {
            memcpy((char *)row + first * width, nothing, (size_t)(count * width));
        } else if (allowed != UINT32_MAX) {
            keep(row, masking->bf16, first, count, allowed);
        }
    }
}

/* Of logits [.., vocab], float or bf16, whose rows are row_bytes apart, those in `rows` [count] keep what their
   masks [count, words] allow: bit b of word w is token 32 * w + b. Tokens behind the words are not allowed. */
void KERNEL(shoal_mask)(void *logits, int64_t row_bytes, int64_t vocab, int64_t bf16, int64_t count,
                        const int64_t *rows, const uint32_t *masks, int64_t words) {
    struct masking masking = {logits, row_bytes, vocab, bf16 != 0, rows, masks, words};
    shoal_parallel(count, mask_row, &masking);
}
