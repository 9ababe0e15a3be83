/* What happens to new queries, keys and values before they are attended: per-head norm, rotary position
   embedding, and the copy of keys and values into the pool. */
#include "../attention.h"
#include "../attention_vec.h"

#include <math.h>

/* Tokens of one task. */
#define TOKENS 8

struct writing {
    const struct attention *call;
    const struct attention_rotary *rotary; /* NULL: keys are stored as they are, and queries left alone */
};

/* The row that token `token` of the step belongs to. */
static int64_t row_of(const struct attention_step *step, int64_t token) {
    int64_t low = 0, high = step->rows;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        if (step->starts[middle] <= token) low = middle;
        else high = middle;
    }
    return low;
}

/* Multiply x [size] by scale / sqrt(mean of squares + eps). */
static void norm(float *x, const float *scale, int64_t size, float eps) {
    float sums[16] = {0}, sum = 0;
    for (int64_t i = 0; i < size; i++) sums[i % 16] += x[i] * x[i];
    for (int i = 0; i < 16; i++) sum += sums[i];
    float factor = 1.0f / sqrtf(sum / (float)size + eps);
    for (int64_t i = 0; i < size; i++) x[i] = x[i] * factor * scale[i];
}

/* Rotate the first 2 * half elements of x by the angles with these cosines and sines. */
static void rotate(float *restrict x, const float *restrict cos, const float *restrict sin, int64_t half,
                   int64_t interleaved) {
    if (interleaved) {
        for (int64_t i = 0; i < 2 * half; i += 2) {
            float first = x[i], second = x[i + 1];
            x[i] = first * cos[i] - second * sin[i];
            x[i + 1] = second * cos[i + 1] + first * sin[i + 1];
        }
        return;
    }
    for (int64_t i = 0; i < half; i++) {
        float first = x[i], second = x[i + half];
        x[i] = first * cos[i] - second * sin[i];
        x[i + half] = second * cos[i + half] + first * sin[i + half];
    }
}

/* Norm (where scale is given) and rotate one head of `token` on its way from one place to another. */
static void turn_head(const struct writing *w, int64_t token, const float *scale, const char *from, char *to) {
    const struct attention_rotary *r = w->rotary;
    const struct attention_layer *layer = w->call->layer;
    int64_t size = layer->key_dim, bfloat16 = layer->dtype == SHOAL_BFLOAT16;
    float x[LARGEST_HEAD];
    if (bfloat16)
        for (int64_t i = 0; i < size; i += WIDTH)
            vec_store_floats(x + i, vec_load_bf16((const uint16_t *)from + i, size - i), size - i);
    else
        memcpy(x, from, 4 * (size_t)size);
    if (scale) norm(x, scale, size, (float)r->eps);
    rotate(x, r->cos + token * r->dim, r->sin + token * r->dim, r->dim / 2, r->interleaved);
    if (bfloat16)
        for (int64_t i = 0; i < size; i += WIDTH)
            vec_store_bf16((uint16_t *)to + i, vec_load_bytes((char *)(x + i), 4 * (size - i)), size - i);
    else
        memcpy(to, x, 4 * (size_t)size);
}

static void write_tokens(void *context, int64_t index) {
    const struct writing *w = context;
    const struct attention *a = w->call;
    const struct attention_step *step = a->step;
    const struct attention_layer *layer = a->layer;
    size_t itemsize = layer->dtype == SHOAL_BFLOAT16 ? 2 : 4;
    size_t key_bytes = itemsize * (size_t)layer->key_dim, value_bytes = itemsize * (size_t)layer->value_dim;
    int64_t token = index * TOKENS, end = smaller(token + TOKENS, step->starts[step->rows]);
    for (int64_t row = row_of(step, token); token < end; token++) {
        while (token >= step->starts[row + 1]) row++;
        int64_t position = step->firsts[row] + token - step->starts[row];
        int64_t block = position / step->block_size, slot = position % step->block_size;
        const int64_t *entries = step->table + row * step->table_row + block * step->table_block + layer->table_first;
        for (int64_t head = 0; head < layer->kv_heads; head++) {
            int64_t offset = entries[head * layer->table_head] * layer->entry;
            const char *key = a->key + token * a->new_key_token + head * a->new_key_head;
            char *to = layer->keys + offset + slot * layer->key_token + head * layer->key_head;
            if (w->rotary) turn_head(w, token, w->rotary->key_scale, key, to);
            else memcpy(to, key, key_bytes);
            memcpy(layer->values + offset + slot * layer->value_token + head * layer->value_head,
                   a->value + token * a->new_value_token + head * a->new_value_head, value_bytes);
        }
        for (int64_t head = 0; w->rotary && head < a->heads; head++)
            turn_head(w, token, w->rotary->query_scale, a->query + token * a->query_token + head * a->query_head,
                      w->rotary->queries + (token * a->heads + head) * (int64_t)key_bytes);
    }
}

/* Store key and value of every token of the step in the pool. With `rotary` keys and queries are normed and
   rotated before, the queries into rotary->queries. */
void KERNEL(shoal_write_kv)(const struct attention *a, const struct attention_rotary *rotary) {
    struct writing w = {a, rotary};
    shoal_parallel((a->step->starts[a->step->rows] + TOKENS - 1) / TOKENS, write_tokens, &w);
}
