/* A decoder layer in one call keeps to its buffers, and gives the bits of its operations called one by one. */
#include "guard.h"

#include "../bf16.h"
#include "../kernels/decoder_layer.c"

enum { HIDDEN = 24, HEADS = 4, KV_HEADS = 2, KEY = 8, VALUE = 6, GATED = 20, BLOCK = 16, BLOCKS = 3, ROTARY = 4 };
enum { QKV = HEADS * KEY + KV_HEADS * (KEY + VALUE) };

void KERNEL(shoal_attention_tasks)(struct attention *a, int64_t counts[3]);
int64_t KERNEL(shoal_attention_partial)(const struct attention *a);

struct product {
    int64_t inputs, columns;
};

static float get(int64_t bf16, const void *x, int64_t i) {
    return bf16 ? bf16_to_float(((const uint16_t *)x)[i]) : ((const float *)x)[i];
}

static void put(int64_t bf16, void *x, int64_t i, float value) {
    if (bf16) ((uint16_t *)x)[i] = float_to_bf16(value);
    else ((float *)x)[i] = value;
}

static int64_t multiply_plainly(const struct product *p, const void *x, void *y, int64_t rows, int64_t bf16) {
    for (int64_t row = 0; row < rows; row++)
        for (int64_t c = 0; c < p->columns; c++) {
            float sum = 0;
            for (int64_t i = 0; i < p->inputs; i++)
                sum += get(bf16, x, row * p->inputs + i) * sinf((float)(c * 7 + i * 3 + p->columns));
            put(bf16, y, row * p->columns + c, sum);
        }
    return 1;
}

static int64_t fail(const struct product *p, const void *x, void *y, int64_t rows, int64_t bf16) {
    (void)p, (void)x, (void)y, (void)rows, (void)bf16;
    return 0;
}

static const struct product QKV_PRODUCT = {HIDDEN, QKV}, O_PRODUCT = {HEADS * VALUE, HIDDEN},
                            GATED_PRODUCT = {HIDDEN, GATED}, DOWN_PRODUCT = {GATED, HIDDEN};

/* An empty pool with one sequence's table. */
static struct attention_layer make_cache(int64_t bf16) {
    const int64_t size = bf16 ? 2 : 4;
    struct attention_layer l = {.dtype = bf16, .stored = bf16, .kv_heads = KV_HEADS, .key_dim = KEY, .value_dim = VALUE};
    l.key_head = KEY * size, l.key_token = KV_HEADS * l.key_head;
    l.value_head = VALUE * size, l.value_token = KV_HEADS * l.value_head;
    l.entry = BLOCK * l.key_token;
    l.keys = guarded((size_t)(BLOCKS * l.entry)), l.values = guarded((size_t)(BLOCKS * l.entry));
    return l;
}

static char *numbers(int64_t bf16, int64_t count, uint32_t seed) {
    float *exact = guarded_floats((size_t)count, seed);
    char *x = guarded((size_t)count * (bf16 ? 2 : 4));
    for (int64_t i = 0; i < count; i++) put(bf16, x, i, exact[i]);
    return x;
}

static void share(struct layer_call *c) {
    int64_t counts[3];
    struct attention a = {.step = c->step, .layer = c->cache, .heads = HEADS};
    KERNEL(shoal_attention_tasks)(&a, counts);
    c->task_count = counts[0];
    c->tasks = a.tasks = guarded((size_t)counts[0] * sizeof *a.tasks);
    c->splits = a.splits = guarded((size_t)counts[1] * sizeof *a.splits);
    c->partials = guarded((size_t)(counts[2] * KERNEL(shoal_attention_partial)(&a)) * sizeof(float));
    KERNEL(shoal_attention_tasks)(&a, counts);
}

static void check(int64_t tokens, int64_t bf16, int four_norms, int is_last) {
    const int64_t size = bf16 ? 2 : 4, first = 3;
    const int64_t *starts = (const int64_t[]){0, tokens}, *table = (const int64_t[]){2, 0, 1};
    const struct attention_step step = {1, BLOCK, starts, &first, table, BLOCKS, 1};
    const float *after = guarded_floats(HIDDEN, 1), *scale = is_last ? NULL : guarded_floats(HIDDEN, 2);
    const struct decoder_layer l = {
        .qkv = {multiply_plainly, &QKV_PRODUCT, QKV}, .o = {multiply_plainly, &O_PRODUCT, HIDDEN},
        .gated = {multiply_plainly, &GATED_PRODUCT, GATED}, .down = {multiply_plainly, &DOWN_PRODUCT, HIDDEN},
        .after_attention = four_norms ? after : NULL, .before_mlp = guarded_floats(HIDDEN, 3),
        .after_mlp = four_norms ? after : NULL, .query_scale = four_norms ? guarded_floats(KEY, 4) : NULL,
        .key_scale = four_norms ? guarded_floats(KEY, 5) : NULL,
        .heads = HEADS, .eps = 1e-5, .scale = 0.3};
    struct attention_layer caches[2] = {make_cache(bf16), make_cache(bf16)};
    for (int i = 0; i < 2; i++) { /* what was computed before */
        memset(caches[i].keys, 0, (size_t)(BLOCKS * caches[i].entry));
        memset(caches[i].values, 0, (size_t)(BLOCKS * caches[i].entry));
    }
    const float *cos = guarded_floats((size_t)(tokens * ROTARY), 6), *sin = guarded_floats((size_t)(tokens * ROTARY), 7);
    struct layer_call c = {.step = &step, .cache = &caches[0], .cos = cos, .sin = sin, .rotary_dim = ROTARY};
    c.x = numbers(bf16, tokens * HIDDEN, 8), c.normed = numbers(bf16, tokens * HIDDEN, 9), c.scale = scale;
    const int64_t widths[] = {QKV, HEADS * KEY, HEADS * VALUE, HIDDEN, HIDDEN, GATED, HIDDEN};
    int64_t bytes = 0;
    for (int i = 0; i < 7; i++) bytes += (tokens * widths[i] * size + 63) / 64 * 64;
    c.workspace = guarded((size_t)bytes);
    share(&c);
    CHECK(KERNEL(shoal_decoder_layer)(&l, &c));

    struct layer_call again = c;
    again.cache = &caches[1];
    share(&again);
    char *x = numbers(bf16, tokens * HIDDEN, 8), *normed = numbers(bf16, tokens * HIDDEN, 9), *parts[7];
    for (int i = 0; i < 7; i++) parts[i] = guarded((size_t)(tokens * widths[i] * size));
    char *qkv = parts[0], *attended = parts[2], *sum = parts[3], *inner = parts[4], *gated = parts[5], *made = parts[6];
    multiply_plainly(&QKV_PRODUCT, normed, qkv, tokens, bf16);
    attend(&l, &again, qkv, parts[1], attended);
    multiply_plainly(&O_PRODUCT, attended, made, tokens, bf16);
    KERNEL(shoal_residual_norm)
    (made, l.after_attention, x, sum, l.before_mlp, inner, tokens, HIDDEN, 1e-5f, (int32_t)bf16);
    multiply_plainly(&GATED_PRODUCT, inner, gated, tokens, bf16);
    multiply_plainly(&DOWN_PRODUCT, gated, made, tokens, bf16);
    KERNEL(shoal_residual_norm)(made, l.after_mlp, sum, x, scale, normed, tokens, HIDDEN, 1e-5f, (int32_t)bf16);
    CHECK(!memcmp(c.x, x, (size_t)(tokens * HIDDEN * size)));
    CHECK(!memcmp(c.normed, normed, (size_t)(tokens * HIDDEN * size)));
    for (int64_t i = 0; i < tokens * HIDDEN; i++) CHECK(isfinite(get(bf16, c.x, i)));

    struct decoder_layer failing = l;
    failing.down.multiply = fail;
    CHECK(!KERNEL(shoal_decoder_layer)(&failing, &c));
}

int main(void) {
    const int64_t tokens[] = {1, 7, 40};
    for (int t = 0; t < 3; t++)
        for (int bf16 = 0; bf16 < 2; bf16++)
            for (int which = 0; which < 4; which++) check(tokens[t], bf16, which % 2, which / 2);
    return 0;
}
