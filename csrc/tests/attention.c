/* Attention of prompts, chunks and decodes, with keys and values of all dtypes in blocks of both layouts, keeps to its
   buffers, never reads what was not written (which is NaN), and is that of a plain loop. */
#include "guard.h"

#include "../kernels/attention.c"
#include "../kernels/attention_tasks.c"
#include "../kernels/attention_write.c"

enum { SEQUENCES = 3, KV_HEADS = 2, SHARE = 3, HEADS = KV_HEADS * SHARE };
static const int64_t LENGTHS[SEQUENCES] = {1, 37, 290};

struct shape {
    int64_t dtype, stored, key_dim, value_dim, block_size, window, split;
    double softcap;
};

/* A pool with a table [SEQUENCES][blocks][entries of a block]; keys, values and scales each end at a guard. */
struct pool {
    struct attention_layer layer;
    int64_t blocks, entries, *table;
};

static struct pool make_pool(const struct shape *s) {
    struct pool p = {.entries = s->split ? KV_HEADS : 1};
    const int64_t heads = s->split ? 1 : KV_HEADS, key = s->key_dim * bytes_of(s->stored);
    const int64_t value = s->value_dim * bytes_of(s->stored), rows = s->block_size * heads;
    p.blocks = (LENGTHS[SEQUENCES - 1] + s->block_size - 1) / s->block_size;
    const int64_t count = SEQUENCES * p.blocks * p.entries, entry = rows * larger(key, value) + 30;
    struct attention_layer *l = &p.layer;
    *l = (struct attention_layer){.dtype = s->dtype, .stored = s->stored, .kv_heads = KV_HEADS};
    l->key_dim = s->key_dim, l->value_dim = s->value_dim, l->entry = entry + entry % 4;
    l->keys = guarded((size_t)((count - 1) * l->entry + rows * key));
    l->values = guarded((size_t)((count - 1) * l->entry + rows * value));
    l->key_scales = guarded((size_t)((count - 1) * l->entry + rows * 2 * scales_of(s->key_dim)));
    l->value_scales = guarded((size_t)((count - 1) * l->entry + rows * 2 * scales_of(s->value_dim)));
    l->key_token = heads * key, l->value_token = heads * value;
    if (s->split) l->table_head = 1;
    else l->key_head = key, l->value_head = value;
    if (!s->split) l->key_scale_head = s->block_size * 2 * scales_of(s->key_dim);
    if (!s->split) l->value_scale_head = s->block_size * 2 * scales_of(s->value_dim);
    p.table = guarded((size_t)count * sizeof *p.table);
    /* The last entry is one of the longest sequence's first block, all of whose rows are read. */
    const int64_t full = (SEQUENCES - 1) * p.blocks * p.entries + p.entries - 1;
    for (int64_t i = 0; i < count; i++) p.table[i] = (full - i + 2 * count - 1) % count;
    return p;
}

/* Number i of the query (kind 0), key (1) or value (2) of a head and token, in [-2, 2], as the dtype has it. */
static float number(const struct shape *s, int kind, int64_t sequence, int64_t token, int64_t head, int64_t i) {
    const float x = 2 * sinf((float)(kind * 31 + sequence * 17 + token * 7 + head * 3 + i * (kind + 2)));
    return s->dtype == SHOAL_BFLOAT16 ? bf16_to_float(float_to_bf16(x)) : x;
}

static void put(int64_t dtype, void *to, int64_t i, float x) {
    if (dtype == SHOAL_BFLOAT16) ((uint16_t *)to)[i] = float_to_bf16(x);
    else ((float *)to)[i] = x;
}

static float get(int64_t dtype, const void *from, int64_t i) {
    if (dtype == SHOAL_INT8) return ((const int8_t *)from)[i];
    return dtype == SHOAL_BFLOAT16 ? bf16_to_float(((const uint16_t *)from)[i]) : ((const float *)from)[i];
}

/* Number i of a stored key or value; checked against what was written. */
static double stored(const struct shape *s, const struct pool *p, int kind, int64_t sequence, int64_t token,
                     int64_t head, int64_t i) {
    const struct attention_layer *l = &p->layer;
    const int64_t *table = p->table + (sequence * p->blocks + token / s->block_size) * p->entries;
    const int64_t at = table[head * l->table_head] * l->entry, slot = token % s->block_size;
    const char *row = kind == 1 ? l->keys + at + slot * l->key_token + head * l->key_head
                                : l->values + at + slot * l->value_token + head * l->value_head;
    double x = get(s->stored, row, i), error = 0;
    if (s->stored == SHOAL_INT8) {
        const char *scales = kind == 1 ? l->key_scales + head * l->key_scale_head
                                       : l->value_scales + head * l->value_scale_head;
        const double scale = get(SHOAL_BFLOAT16, scales + at, i / SCALED * s->block_size + slot);
        x *= scale, error = scale * 0.5001;
    }
    CHECK(fabs(x - number(s, kind, sequence, token, head, i)) <= error);
    return x;
}

/* The result of a head and token by a plain loop: out [value_dim]. */
static void expect(const struct shape *s, const struct pool *p, int64_t sequence, int64_t token, int64_t head,
                   double scale, double *out) {
    double sum = 0;
    for (int64_t i = 0; i < s->value_dim; i++) out[i] = 0;
    for (int64_t t = s->window ? larger(token - s->window + 1, 0) : 0; t <= token; t++) {
        double score = 0;
        for (int64_t i = 0; i < s->key_dim; i++)
            score += number(s, 0, sequence, token, head, i) * stored(s, p, 1, sequence, t, head / SHARE, i);
        score *= scale;
        if (s->softcap != 0) score = s->softcap * tanh(score / s->softcap);
        sum += exp(score);
        for (int64_t i = 0; i < s->value_dim; i++)
            out[i] += exp(score) * stored(s, p, 2, sequence, t, head / SHARE, i);
    }
    for (int64_t i = 0; i < s->value_dim; i++) out[i] /= sum;
}

static void *make_input(const struct shape *s, const struct attention_step *step, int kind, int64_t heads, int64_t dim) {
    char *x = guarded((size_t)(step->starts[step->rows] * heads * dim * bytes_of(s->dtype)));
    for (int64_t row = 0, at = 0; row < step->rows; row++)
        for (int64_t token = step->starts[row]; token < step->starts[row + 1]; token++)
            for (int64_t head = 0; head < heads; head++)
                for (int64_t i = 0; i < dim; i++, at++)
                    put(s->dtype, x, at, number(s, kind, row, step->firsts[row] + token - step->starts[row], head, i));
    return x;
}

static void share(struct attention *a) {
    int64_t counts[3];
    KERNEL(shoal_attention_tasks)(a, counts);
    a->task_count = counts[0];
    a->tasks = guarded((size_t)counts[0] * sizeof *a->tasks);
    a->splits = guarded((size_t)counts[1] * sizeof *a->splits);
    a->partials = guarded((size_t)(counts[2] * KERNEL(shoal_attention_partial)(a)) * sizeof(float));
    KERNEL(shoal_attention_tasks)(a, counts);
}

/* Attend once more, turned by no angle, which changes nothing, and then with norms and angles. */
static void attend_rotated(const struct shape *s, struct attention *a, int64_t tokens, size_t out_bytes) {
    const int64_t dim = s->key_dim / 4 * 2;
    void *plain = a->out;
    float *cos = guarded((size_t)(tokens * dim) * sizeof *cos), *sin = guarded((size_t)(tokens * dim) * sizeof *sin);
    for (int64_t i = 0; i < tokens * dim; i++) cos[i] = 1, sin[i] = 0;
    struct attention_rotary rotary = {.cos = cos, .sin = sin, .dim = dim, .eps = 1e-5};
    rotary.queries = guarded((size_t)(tokens * HEADS * s->key_dim * bytes_of(s->dtype)));
    a->out = guarded(out_bytes);
    KERNEL(shoal_attend_rotated)(a, &rotary);
    CHECK(!memcmp(a->out, plain, out_bytes));
    rotary.query_scale = rotary.key_scale = guarded_floats((size_t)s->key_dim, 5);
    rotary.sin = rotary.cos = guarded_floats((size_t)(tokens * dim), 6), rotary.interleaved = 1;
    KERNEL(shoal_attend_rotated)(a, &rotary);
    for (size_t i = 0; i < out_bytes / (size_t)bytes_of(s->dtype); i++)
        CHECK(isfinite(get(s->dtype, a->out, (int64_t)i)));
}

/* Compute tokens [firsts, ends) of each sequence. */
static void attend(const struct shape *s, const struct pool *p, const int64_t *firsts, const int64_t *ends, int rotated) {
    int64_t *starts = guarded((SEQUENCES + 1) * sizeof *starts), *begin = guarded(SEQUENCES * sizeof *begin);
    starts[0] = 0;
    for (int i = 0; i < SEQUENCES; i++) begin[i] = firsts[i], starts[i + 1] = starts[i] + ends[i] - firsts[i];
    const struct attention_step step = {SEQUENCES, s->block_size, starts, begin, p->table, p->blocks * p->entries,
                                        p->entries};
    struct attention a = {.step = &step, .layer = &p->layer, .heads = HEADS, .window = s->window, .scale = 0.25};
    const int64_t size = bytes_of(s->dtype), tokens = starts[SEQUENCES];
    const size_t out_bytes = (size_t)(tokens * HEADS * s->value_dim * size);
    a.softcap = s->softcap;
    a.query = make_input(s, &step, 0, HEADS, s->key_dim), a.key = make_input(s, &step, 1, KV_HEADS, s->key_dim);
    a.value = make_input(s, &step, 2, KV_HEADS, s->value_dim), a.out = guarded(out_bytes);
    a.query_head = a.new_key_head = s->key_dim * size, a.new_value_head = s->value_dim * size;
    a.query_token = HEADS * a.query_head, a.new_key_token = KV_HEADS * a.new_key_head;
    a.new_value_token = KV_HEADS * a.new_value_head;
    share(&a);
    KERNEL(shoal_attend)(&a);
    double *expected = guarded((size_t)s->value_dim * sizeof *expected);
    for (int64_t row = 0, at = 0; row < SEQUENCES; row++)
        for (int64_t token = firsts[row]; token < ends[row]; token++)
            for (int64_t head = 0; head < HEADS; head++) {
                /* Some long sequences are enough: an error in one shows as NaN, or at a buffer's end, in others. */
                const int checked = token % 29 == 0 || token + 1 == LENGTHS[row];
                if (checked) expect(s, p, row, token, head, a.scale, expected);
                for (int64_t i = 0; i < s->value_dim; i++, at++) {
                    const float found = get(s->dtype, a.out, at);
                    CHECK(isfinite(found));
                    CHECK(!checked || fabs(found - expected[i]) < (s->dtype == SHOAL_BFLOAT16 ? 0.02 : 1e-4));
                }
            }
    if (rotated) attend_rotated(s, &a, tokens, out_bytes);
}

/* Prompts whole, then in chunks with a decode at the end, over another pool. */
static void test(struct shape s) {
    int64_t done[SEQUENCES] = {0}, ends[SEQUENCES];
    struct pool whole = make_pool(&s), parts = make_pool(&s);
    attend(&s, &whole, done, LENGTHS, 1);
    for (int64_t part = 1; part <= 3; part++) {
        for (int i = 0; i < SEQUENCES; i++) {
            ends[i] = part == 1 ? (LENGTHS[i] + 1) / 2 : part == 2 ? LENGTHS[i] - 1 : LENGTHS[i];
            ends[i] = larger(ends[i], done[i] + 1); /* a row has a token; the shortest computes its one again */
            if (ends[i] > LENGTHS[i]) ends[i] = LENGTHS[i], done[i] = LENGTHS[i] - 1;
        }
        attend(&s, &parts, done, ends, 0);
        memcpy(done, ends, sizeof done);
    }
}

int main(void) {
    const int64_t stored[][2] = {{SHOAL_FLOAT32, SHOAL_FLOAT32}, {SHOAL_BFLOAT16, SHOAL_BFLOAT16},
                                 {SHOAL_FLOAT32, SHOAL_INT8}, {SHOAL_BFLOAT16, SHOAL_INT8}};
    for (int i = 0; i < 4; i++) {
        const int64_t dtype = stored[i][0], as = stored[i][1];
        test((struct shape){dtype, as, 20, 18, 7, 0, 0, 0});
        test((struct shape){dtype, as, 64, 64, 16, 9, 0, 0});
        test((struct shape){dtype, as, 68, 34, 16, 0, 1, 2.5});
        test((struct shape){dtype, as, 6, 100, 1, 280, 1, 0});
    }
    return 0;
}
