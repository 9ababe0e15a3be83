/* A whole decoder layer in one call, since for few rows Python between kernels takes longer than the kernels. */
#include "../attention.h"

#include <string.h>

struct product;
typedef int64_t (*multiply)(const struct product *product, const void *x, void *y, int64_t rows, int64_t bf16);

/* A matrix product of the layer, and how many columns it gives. */
struct layer_product {
    multiply multiply;
    const struct product *product;
    int64_t columns;
};

/* What does not change from step to step; see shoal.execute.model.native_layer. Scales of norms are NULL without a norm. */
struct decoder_layer {
    struct layer_product qkv, o, gated, down;
    const float *after_attention, *before_mlp, *after_mlp, *query_scale, *key_scale;
    int64_t heads, window, interleaved;
    double eps, scale, softcap;
};

/* What does. */
struct layer_call {
    const struct attention_step *step;
    const struct attention_layer *cache;
    int64_t task_count; /* of attention; see struct attention */
    struct attention_task *tasks;
    struct attention_split *splits;
    float *partials;
    const float *cos, *sin; /* [tokens, rotary_dim] */
    int64_t rotary_dim;
    char *x;             /* [tokens, hidden]: the residual stream, to which the layer adds */
    char *normed;        /* the same, normed for this layer; then for the next one */
    const float *scale;  /* of that norm; NULL after the last layer */
    char *workspace;
};

void KERNEL(shoal_attend_rotated)(struct attention *a, const struct attention_rotary *rotary);
void KERNEL(shoal_residual_norm)(const void *x, const float *before, const void *residual, void *sum,
                                 const float *after, void *out, int64_t rows, int64_t size, float eps, int32_t bf16);

/* Cut some bytes off a workspace, in whole cache lines. */
static char *take(char **workspace, int64_t bytes) {
    char *taken = *workspace;
    *workspace += (bytes + 63) / 64 * 64;
    return taken;
}

static void attend(const struct decoder_layer *l, const struct layer_call *c, char *qkv, char *rotated, char *out) {
    const int64_t size = bytes_of(c->cache->dtype), key = c->cache->key_dim * size, value = c->cache->value_dim * size;
    const int64_t token = l->qkv.columns * size;
    struct attention a = {.step = c->step, .layer = c->cache, .heads = l->heads, .window = l->window};
    a.scale = l->scale, a.softcap = l->softcap;
    a.query = qkv, a.key = qkv + l->heads * key, a.value = a.key + c->cache->kv_heads * key;
    a.query_token = a.new_key_token = a.new_value_token = token;
    a.query_head = a.new_key_head = key, a.new_value_head = value;
    a.out = out;
    a.task_count = c->task_count, a.tasks = c->tasks, a.splits = c->splits, a.partials = c->partials;
    const struct attention_rotary rotary = {
        c->cos, c->sin, c->rotary_dim, l->interleaved, l->query_scale, l->key_scale, l->eps, rotated};
    KERNEL(shoal_attend_rotated)(&a, &rotary);
}

/* Compute the layer: c->x and c->normed change. Returns 0 where memory did not suffice, else 1. */
int64_t KERNEL(shoal_decoder_layer)(const struct decoder_layer *l, const struct layer_call *c) {
    const int64_t rows = c->step->starts[c->step->rows], bf16 = c->cache->dtype == SHOAL_BFLOAT16;
    const int64_t number = rows * bytes_of(c->cache->dtype), hidden = l->o.columns;
    char *workspace = c->workspace;
    char *qkv = take(&workspace, number * l->qkv.columns);
    char *rotated = take(&workspace, number * l->heads * c->cache->key_dim);
    char *attended = take(&workspace, number * l->heads * c->cache->value_dim);
    char *sum = take(&workspace, number * hidden), *normed = take(&workspace, number * hidden);
    char *gated = take(&workspace, number * l->gated.columns), *made = take(&workspace, number * hidden);
    const float eps = (float)l->eps;
    if (!l->qkv.multiply(l->qkv.product, c->normed, qkv, rows, bf16)) return 0;
    attend(l, c, qkv, rotated, attended);
    if (!l->o.multiply(l->o.product, attended, made, rows, bf16)) return 0;
    KERNEL(shoal_residual_norm)(made, l->after_attention, c->x, sum, l->before_mlp, normed, rows, hidden, eps, bf16);
    if (!l->gated.multiply(l->gated.product, normed, gated, rows, bf16)) return 0;
    if (!l->down.multiply(l->down.product, gated, made, rows, bf16)) return 0;
    KERNEL(shoal_residual_norm)(made, l->after_mlp, sum, c->x, c->scale, c->normed, rows, hidden, eps, bf16);
    return 1;
}
