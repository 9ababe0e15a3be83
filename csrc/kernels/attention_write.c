/* Writing new keys and values into the pool. */
#include "attention.h"

#include <string.h>

/* Tokens of one task. */
#define TOKENS 32

/* The row that token `token` of the step belongs to. */
static int64_t row_of(const struct attention *a, int64_t token) {
    int64_t low = 0, high = a->step->rows;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (a->step->starts[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

static void write_tokens(void *context, int64_t index) {
    const struct attention *a = context;
    size_t itemsize = a->layer->dtype == SHOAL_BFLOAT16 ? 2 : 4;
    size_t key_bytes = itemsize * (size_t)a->layer->key_dim, value_bytes = itemsize * (size_t)a->layer->value_dim;
    int64_t token = index * TOKENS, end = smaller(token + TOKENS, a->step->starts[a->step->rows]);
    for (int64_t row = row_of(a, token); token < end; token++) {
        while (token >= a->step->starts[row + 1]) row++;
        int64_t position = a->step->firsts[row] + token - a->step->starts[row];
        int64_t slot = position % a->step->block_size;
        int64_t block = position / a->step->block_size;
        const int64_t *entries =
            a->step->table + row * a->step->table_row + block * a->step->table_block + a->layer->table_first;
        for (int64_t head = 0; head < a->layer->kv_heads; head++) {
            int64_t offset = entries[head * a->layer->table_head] * a->layer->entry;
            memcpy(a->layer->keys + offset + slot * a->layer->key_token + head * a->layer->key_head,
                   a->key + token * a->new_key_token + head * a->new_key_head, key_bytes);
            memcpy(a->layer->values + offset + slot * a->layer->value_token + head * a->layer->value_head,
                   a->value + token * a->new_value_token + head * a->new_value_head, value_bytes);
        }
    }
}

/* Copy key and value of every token of the step to its place in the pool. */
void KERNEL(shoal_write_kv)(struct attention *a) {
    shoal_parallel((a->step->starts[a->step->rows] + TOKENS - 1) / TOKENS, write_tokens, a);
}
