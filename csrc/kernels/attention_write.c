/* Preparing new queries, keys and values for attention: per-head norm, rotary position embedding, and writing
   keys and values to the KV pool, also quantised to int8. */
#include "../attention.h"
#include "../attention_vec.h"
#include "../bf16.h"

#include <float.h>
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

/* The `size` numbers of a query, key or value of the model's dtype as floats, and zeros up to a whole vector. */
static void load_head(const struct attention_layer *layer, const char *from, int64_t size, float *x) {
    for (int64_t i = 0; i < size; i += WIDTH)
        vec_store(x + i, layer->dtype == SHOAL_BFLOAT16 ? vec_load_bf16(from + 2 * i, size - i)
                                                        : vec_load_bytes(from + 4 * i, 4 * (size - i)));
}

/* The way back. */
static void store_head(const struct attention_layer *layer, const float *x, int64_t size, char *to) {
    for (int64_t i = 0; i < size; i += WIDTH)
        if (layer->dtype == SHOAL_BFLOAT16) vec_store_bf16((uint16_t *)to + i, vec_load(x + i), size - i);
        else vec_store_floats((float *)to + i, vec_load(x + i), size - i);
}

/* Store a group of numbers [size] as int8 with a scale: the bfloat16 that is nearest to the largest / 127, which is
   near enough that no quotient is rounded beyond 127. Numbers too small for a normal scale become zeros with scale 0;
   a group that is not finite, zeros with scale NaN, so that every result it has part in is NaN. */
static void quantise_group(const float *x, int64_t size, char *to, char *scale_to) {
    ivec most = {0}; /* as integers, floats without sign are in order, with infinity and NaN behind them all */
    for (int64_t i = 0; i < size; i += WIDTH) {
        ivec bits = (ivec)vec_load(x + i) & 0x7fffffff;
        most = (ivec)vec_select(bits > most, (vec)bits, (vec)most);
    }
    int32_t largest = 0;
    for (int i = 0; i < WIDTH; i++) largest = largest > most[i] ? largest : most[i];
    float scale;
    memcpy(&scale, &largest, sizeof scale);
    scale = largest < 0x7f800000 ? bf16_to_float(float_to_bf16(scale / 127)) : NAN;
    if (scale < FLT_MIN) scale = 0;
    const int usable = scale > 0;
    for (int64_t i = 0; i < size; i += WIDTH) {
        vec quotient = usable ? vec_load(x + i) / vec_all(scale) : vec_all(0);
        vec_store_int8((int8_t *)to + i, vec_round(quotient), size - i);
    }
    uint16_t stored = float_to_bf16(scale);
    memcpy(scale_to, &stored, sizeof stored);
}

/* Store a key or value [size] as int8; the scales of its groups are `step` bytes apart. */
static void quantise(const float *x, int64_t size, char *to, char *scales, int64_t step) {
    for (int64_t i = 0; i < size; i += SCALED, scales += step)
        quantise_group(x + i, smaller(size - i, SCALED), to + i, scales);
}

/* Norm (where scale is given) and rotate one head of `token`, x [key_dim]. */
static void turn_head(const struct writing *w, int64_t token, const float *scale, float *x) {
    const struct attention_rotary *r = w->rotary;
    if (scale) norm(x, scale, w->call->layer->key_dim, (float)r->eps);
    rotate(x, r->cos + token * r->dim, r->sin + token * r->dim, r->dim / 2, r->interleaved);
}

/* Store key and value of one KV head of `token` in a slot of the pool: in `entry`, which is as many bytes behind
   entry 0, at token `slot` of it. */
static void write_head(const struct writing *w, int64_t token, int64_t head, int64_t entry, int64_t slot) {
    const struct attention *a = w->call;
    const struct attention_layer *l = a->layer;
    const char *key = a->key + token * a->new_key_token + head * a->new_key_head;
    const char *value = a->value + token * a->new_value_token + head * a->new_value_head;
    char *key_to = l->keys + entry + slot * l->key_token + head * l->key_head;
    char *value_to = l->values + entry + slot * l->value_token + head * l->value_head;
    const int int8 = l->stored == SHOAL_INT8;
    float x[LARGEST_HEAD];
    if (w->rotary || int8) {
        load_head(l, key, l->key_dim, x);
        if (w->rotary) turn_head(w, token, w->rotary->key_scale, x);
    }
    if (!int8) {
        if (w->rotary) store_head(l, x, l->key_dim, key_to);
        else memcpy(key_to, key, (size_t)(l->key_dim * bytes_of(l->dtype)));
        memcpy(value_to, value, (size_t)(l->value_dim * bytes_of(l->dtype)));
        return;
    }
    const int64_t size = bytes_of(SHOAL_BFLOAT16), step = a->step->block_size * size;
    char *key_scales = l->key_scales + entry + head * l->key_scale_head + slot * size;
    char *value_scales = l->value_scales + entry + head * l->value_scale_head + slot * size;
    quantise(x, l->key_dim, key_to, key_scales, step);
    load_head(l, value, l->value_dim, x);
    quantise(x, l->value_dim, value_to, value_scales, step);
}

/* Norm and rotate the queries of `token` on their way to rotary->queries. */
static void turn_queries(const struct writing *w, int64_t token) {
    const struct attention *a = w->call;
    const struct attention_layer *l = a->layer;
    float x[LARGEST_HEAD];
    for (int64_t head = 0; head < a->heads; head++) {
        load_head(l, a->query + token * a->query_token + head * a->query_head, l->key_dim, x);
        turn_head(w, token, w->rotary->query_scale, x);
        store_head(l, x, l->key_dim, w->rotary->queries + (token * a->heads + head) * l->key_dim * bytes_of(l->dtype));
    }
}

static void write_tokens(void *context, int64_t index) {
    const struct writing *w = context;
    const struct attention *a = w->call;
    const struct attention_step *step = a->step;
    const struct attention_layer *layer = a->layer;
    int64_t token = index * TOKENS, end = smaller(token + TOKENS, step->starts[step->rows]);
    for (int64_t row = row_of(step, token); token < end; token++) {
        while (token >= step->starts[row + 1]) row++;
        int64_t position = step->firsts[row] + token - step->starts[row];
        int64_t block = position / step->block_size, slot = position % step->block_size;
        const int64_t *entries = step->table + row * step->table_row + block * step->table_block + layer->table_first;
        for (int64_t head = 0; head < layer->kv_heads; head++)
            write_head(w, token, head, entries[head * layer->table_head] * layer->entry, slot);
        if (w->rotary) turn_queries(w, token);
    }
}

/* Store key and value of every token of the step in the pool. With `rotary` keys and queries are normed and
   rotated before, the queries into rotary->queries. */
void KERNEL(shoal_write_kv)(const struct attention *a, const struct attention_rotary *rotary) {
    struct writing w = {a, rotary};
    shoal_parallel((a->step->starts[a->step->rows] + TOKENS - 1) / TOKENS, write_tokens, &w);
}
