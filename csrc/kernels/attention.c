/* Paged attention over keys and values in the KV pool, with softmax in two passes over each chunk of keys. */
#include "../attention_tile.h"

#include <alloca.h>

/* Keys that are read at once where few query rows share them; a multiple of every PANEL. */
#define STRETCH 64

/* A task's working memory, 64-byte aligned. */
struct workspace {
    float *queries; /* [heads][rows][units] */
    float *keys;    /* panels, of a chunk or a stretch */
    float *values;  /* panels of a chunk, or pairs */
    float *scores;  /* [heads][ROWS][CHUNK], or [rows_together][CHUNK] */
    float *scales;  /* [heads][groups of keys, groups of values][CHUNK], where they are int8 */
    float *sums;    /* results of a chunk: [rows_together], or of all heads */
    float *state;   /* [rows] results of the chunks so far */
};

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Whether a task has so few query rows that it is not worth putting keys and values in order for them. */
static int is_few(const struct attention_task *task) {
    return task->end - task->begin <= ROWS && task->chunk_end - task->chunk == 1;
}

/* Floats of a chunk's scales, of keys and values. */
static int64_t scales_size(const struct format *f) { return (f->key_scales + f->value_scales) * CHUNK; }

/* Cut `memory` (NULL: only measure) into a workspace; returns its bytes. */
static int64_t make_workspace(const struct format *f, const struct attention_task *task, char *memory,
                              struct workspace *w) {
    int few = is_few(task);
    int64_t rows = task->end - task->begin, scored = few ? task->head_end - task->head : 1;
    float **parts[] = {&w->queries, &w->keys, &w->values, &w->scores, &w->scales, &w->sums, &w->state};
    int64_t together = few ? ROWS : rows_together(f);
    int64_t sizes[] = {
        scored * rows * f->units,
        (few ? STRETCH : CHUNK) * f->units,
        few ? 0 : CHUNK * f->out_dim,
        scored * together * CHUNK,
        scored * scales_size(f),
        scored * together * result_size(f),
        few ? 0 : rows * result_size(f),
    };
    int64_t used = 0;
    for (int i = 0; i < 7; used = round_up(used + 4 * sizes[i], 64), i++)
        if (memory) *parts[i] = (float *)(memory + used);
    return used;
}

/* Where a row's keys or values of one KV head are: those of token 0 of entry 0, and the way from there. */
struct place {
    const char *base;
    const int64_t *table;
    int64_t table_block, block_size, entry, token;
};

static struct place keys_of(const struct attention *a, int64_t row, int64_t head) {
    const struct attention_step *s = a->step;
    const struct attention_layer *l = a->layer;
    const int64_t *table = s->table + row * s->table_row + l->table_first + head * l->table_head;
    return (struct place){l->keys + head * l->key_head, table, s->table_block, s->block_size, l->entry, l->key_token};
}

static struct place values_of(const struct attention *a, int64_t row, int64_t head) {
    struct place place = keys_of(a, row, head);
    place.base = a->layer->values + head * a->layer->value_head;
    place.token = a->layer->value_token;
    return place;
}

/* Addresses of positions [low, high). */
static void find_rows(struct place p, int64_t low, int64_t high, const char **rows) {
    int64_t block = low / p.block_size, token = low % p.block_size;
    for (int64_t i = 0; i < high - low; block++, token = 0) {
        const char *at = p.base + p.table[block * p.table_block] * p.entry + token * p.token;
        for (; token < p.block_size && i < high - low; token++, i++, at += p.token) rows[i] = at;
    }
}

/* Put scales of one group of keys or values [low, high) of a chunk side by side as floats. p: where they are. */
static void find_scales(struct place p, int64_t chunk, int64_t low, int64_t high, float *scales) {
    int64_t block = (chunk * CHUNK + low) / p.block_size, token = (chunk * CHUNK + low) % p.block_size;
    for (int64_t i = low; i < high; block++, token = 0) {
        const char *from = p.base + p.table[block * p.table_block] * p.entry + token * p.token;
        int64_t count = smaller(p.block_size - token, high - i);
        for (int64_t t = 0; t < count; t += WIDTH)
            vec_store_floats(scales + i + t, vec_load_bf16(from + t * p.token, count - t), count - t);
        i += count;
    }
}

/* Find all scales of keys and values [span[0], span[1]) of a chunk and one KV head: none where they are not int8. */
static void find_all_scales(const struct attention *a, int64_t row, int64_t head, int64_t chunk,
                            const struct format *f, const int64_t span[2], float *scales) {
    const struct attention_layer *l = a->layer;
    struct place place = keys_of(a, row, head);
    place.token = bytes_of(SHOAL_BFLOAT16);
    place.base = l->key_scales + head * l->key_scale_head;
    for (int64_t group = 0; group < f->key_scales + f->value_scales; group++, scales += CHUNK) {
        if (group == f->key_scales) place.base = l->value_scales + head * l->value_scale_head;
        find_scales(place, chunk, span[0], span[1], scales);
        place.base += place.block_size * place.token;
    }
}

/* Keys of a chunk that a token at `position` sees: [span[0], span[1]), relative to the chunk's first. */
static void visible(const struct attention *a, int64_t position, int64_t chunk, int64_t span[2]) {
    span[0] = a->window ? larger(position - a->window + 1 - chunk * CHUNK, 0) : 0;
    span[1] = smaller(position + 1 - chunk * CHUNK, CHUNK);
}

/* The same of query rows [begin, end) of a task's row. */
static void visible_to_all(const struct attention *a, const struct attention_task *task, int64_t begin, int64_t end,
                           int64_t chunk, int64_t span[2]) {
    int64_t group = a->heads / a->layer->kv_heads, last[2];
    visible(a, a->step->firsts[task->row] + (end - 1) / group, chunk, last);
    visible(a, a->step->firsts[task->row] + begin / group, chunk, span);
    span[1] = last[1];
}

/* Turn scores of query rows [begin, end) for keys [low, high) into weights. */
static void soften_rows(const struct attention *a, const struct attention_task *task, int64_t begin, int64_t end,
                        int64_t chunk, const int64_t span[2], float *scores, float *results, int64_t dim) {
    int64_t group = a->heads / a->layer->kv_heads, own[2];
    int64_t low = span[0] / WIDTH * WIDTH, high = round_up(span[1], WIDTH);
    for (int64_t row = begin; row < end; row++, scores += CHUNK, results += dim + 2) {
        visible(a, a->step->firsts[task->row] + row / group, chunk, own);
        memset(results, 0, 4 * (size_t)dim);
        if (own[0] < own[1]) {
            soften(a, scores, own[0], own[1], low, high, results + dim);
        } else {
            memset(scores + low, 0, 4 * (size_t)(high - low));
            results[dim] = -INFINITY, results[dim + 1] = 0;
        }
    }
}

static void pack_queries(const struct attention *a, const struct attention_task *task, int64_t head,
                         const struct format *f, float *to) {
    int64_t group = a->heads / a->layer->kv_heads;
    for (int64_t row = task->begin; row < task->end; row++, to += f->units) {
        int64_t token = a->step->starts[task->row] + row / group;
        pack_query(f, a->query + token * a->query_token + (head * group + row % group) * a->query_head, to);
    }
}

/* Divide results [rows] of a task and KV head by the sums of weights, and store them. */
static void finish(const struct attention *a, const struct attention_task *task, int64_t head, const struct format *f,
                   const float *results) {
    int64_t group = a->heads / a->layer->kv_heads;
    for (int64_t row = task->begin; row < task->end; row++, results += result_size(f)) {
        int64_t token = a->step->starts[task->row] + row / group;
        int64_t at = (token * a->heads + head * group + row % group) * f->value_dim;
        vec factor = vec_all(1.0f / results[f->out_dim + 1]);
        for (int64_t d = 0; d < f->value_dim; d += WIDTH) {
            /* Which zero a sum is may depend on what was computed with it; this makes it the positive one. */
            vec v = vec_load(results + d) * factor + vec_all(0);
            if (f->bfloat16) vec_store_bf16((uint16_t *)a->out + at + d, v, f->value_dim - d);
            else vec_store_floats((float *)a->out + at + d, v, f->value_dim - d);
        }
    }
}

/* ---- Many query rows: keys and values of a chunk are put in order once for all of them ---- */

/* One chunk for the query rows of a task. The results go to `results`, or are merged into the state. */
static void attend_chunk(const struct attention *a, const struct attention_task *task, int64_t head, int64_t chunk,
                         const struct format *f, const struct workspace *w, float *results) {
    const char *rows[CHUNK];
    int64_t all[2], size = result_size(f), first = chunk * CHUNK;
    visible_to_all(a, task, task->begin, task->end, chunk, all);
    find_rows(keys_of(a, task->row, head), first + all[0], first + all[1], rows + all[0]);
    pack_keys(f, rows, NULL, all[0], all[1], w->keys);
    find_rows(values_of(a, task->row, head), first + all[0], first + all[1], rows + all[0]);
    if (f->tiled) pair_values(f, rows, all[0], all[1], w->values);
    else if (f->value_pairs) pack_pairs(f, rows, all[0], all[1], w->values);
    else pack_values(f, rows, all[0], all[1], w->values);
    find_all_scales(a, task->row, head, chunk, f, all, w->scales);
    const float *value_scales = w->scales + f->key_scales * CHUNK;
    for (int64_t begin = task->begin; begin < task->end; begin += rows_together(f)) {
        int64_t end = smaller(begin + rows_together(f), task->end), at = begin - task->begin, span[2];
        float *sums = results ? results + at * size : w->sums;
        visible_to_all(a, task, begin, end, chunk, span);
        if (span[0] >= span[1]) {
            for (int64_t r = 0; r < end - begin; r++) sums[r * size + f->out_dim + 1] = 0;
            continue;
        }
        const int count = (int)(end - begin);
        if (f->tiled) begin_tiles(count);
        score_rows(f, count, w->queries + at * f->units, w->keys, w->scales, span[0], span[1], w->scores);
        soften_rows(a, task, begin, end, chunk, span, w->scores, sums, f->out_dim);
        if (f->tiled) weigh_tiles(f, count, w->scores, w->values, value_scales, span[0], span[1], sums);
        else weigh_rows(f, count, w->scores, w->values, value_scales, span[0], span[1], sums);
        for (int64_t r = 0; !results && r < end - begin; r++)
            merge(w->state + (at + r) * size, sums + r * size, f->out_dim);
    }
}

/* All chunks of a task for one KV head, stored; or the results of its only chunk, put where `results` says. */
static void attend_many(const struct attention *a, const struct attention_task *task, int64_t head,
                        const struct format *f, const struct workspace *w, float *results) {
    pack_queries(a, task, head, f, w->queries);
    for (int64_t row = 0; row < task->end - task->begin; row++)
        w->state[row * result_size(f) + f->out_dim + 1] = 0;
    for (int64_t chunk = task->chunk; chunk < task->chunk_end; chunk++)
        attend_chunk(a, task, head, chunk, f, w, results);
    if (!results) finish(a, task, head, f, w->state);
}

/* ---- Few query rows, as of a decode: keys and values are read once, in memory order ---- */

/* The end of the stretch that begins at `low`, of a chunk of which keys `span` are visible. */
static int64_t stretch_end(int64_t low, const int64_t span[2]) {
    return smaller(low / STRETCH * STRETCH + STRETCH, span[1]);
}

/* Addresses of the stretch of a chunk that begins at `low`, to be prefetched; those beyond its end are kept. */
static void find_ahead(struct place p, int64_t chunk, int64_t low, const int64_t span[2], const char **ahead) {
    find_rows(p, chunk * CHUNK + low, chunk * CHUNK + stretch_end(low, span), ahead);
}

/* Scores of the query rows of a task and all its KV heads: w->scores [heads][ROWS][CHUNK]. */
static void score_few(const struct attention *a, const struct attention_task *task, const struct format *f,
                      const struct workspace *w, const int64_t span[2]) {
    const char *rows[STRETCH], *ahead[STRETCH];
    int64_t count = task->end - task->begin, heads = task->head_end - task->head, first = task->chunk * CHUNK;
    for (int64_t low = span[0], high; low < span[1]; low = high) {
        high = stretch_end(low, span);
        int64_t from = low % STRETCH, to = from + high - low;
        for (int64_t h = 0; h < heads; h++) {
            struct place keys = keys_of(a, task->row, task->head + h);
            find_rows(keys, first + low, first + high, rows + from);
            for (int i = 0; i < STRETCH; i++) ahead[i] = rows[from];
            if (high < span[1]) find_ahead(keys, task->chunk, high, span, ahead);
            else find_ahead(values_of(a, task->row, task->head + h), task->chunk, span[0], span, ahead);
            pack_keys(f, rows, ahead, from, to, w->keys);
            score_rows(f, (int)count, w->queries + h * count * f->units, w->keys,
                       w->scales + h * scales_size(f) + low - from, from, to,
                       w->scores + h * ROWS * CHUNK + low - from);
        }
    }
}

/* Add the values to results [heads][rows], by the weights in w->scores. next: the task after this one, or NULL. */
static void weigh_few(const struct attention *a, const struct attention_task *task, const struct format *f,
                      const struct workspace *w, const int64_t span[2], const struct attention_task *next,
                      float *results) {
    const char *rows[STRETCH], *ahead[STRETCH];
    int64_t count = task->end - task->begin, heads = task->head_end - task->head, first = task->chunk * CHUNK;
    int64_t coming[2] = {0, 0};
    if (next) visible_to_all(a, next, next->begin, next->end, next->chunk, coming);
    for (int64_t low = span[0], high; low < span[1]; low = high) {
        high = stretch_end(low, span);
        for (int64_t h = 0; h < heads; h++) {
            struct place values = values_of(a, task->row, task->head + h);
            find_rows(values, first + low, first + high, rows);
            for (int i = 0; i < STRETCH; i++) ahead[i] = rows[0];
            if (high < span[1]) find_ahead(values, task->chunk, high, span, ahead);
            else if (next && next->head + h < next->head_end)
                find_ahead(keys_of(a, next->row, next->head + h), next->chunk, coming[0], coming, ahead);
            const float *scales = w->scales + h * scales_size(f) + f->key_scales * CHUNK + low;
            weigh_in_place(f, (int)count, w->scores + h * ROWS * CHUNK + low, rows, scales, ahead, low, high - low,
                           results + h * count * result_size(f));
        }
    }
}

/* One chunk for the query rows of a task and all its KV heads: results [heads][rows]. Memory is prefetched a
   stretch ahead, so that it arrives all the while. */
static void attend_few(const struct attention *a, const struct attention_task *task, const struct format *f,
                       const struct workspace *w, const struct attention_task *next, float *results) {
    int64_t count = task->end - task->begin, span[2];
    visible_to_all(a, task, task->begin, task->end, task->chunk, span);
    for (int64_t h = 0; h < task->head_end - task->head; h++)
        pack_queries(a, task, task->head + h, f, w->queries + h * count * f->units);
    for (int64_t h = 0; h < task->head_end - task->head; h++)
        find_all_scales(a, task->row, task->head + h, task->chunk, f, span, w->scales + h * scales_size(f));
    if (f->tiled) begin_tiles((int)count);
    score_few(a, task, f, w, span);
    for (int64_t h = 0; h < task->head_end - task->head; h++)
        soften_rows(a, task, task->begin, task->end, task->chunk, span, w->scores + h * ROWS * CHUNK,
                    results + h * count * result_size(f), f->out_dim);
    weigh_few(a, task, f, w, span, next, results);
}

/* ---- Tasks ---- */

/* Merge the partial results [chunks][heads][rows] of a split into the first chunk's. */
static void merge_split(const struct attention_split *split, int64_t rows, const struct format *f, float *partials) {
    for (int64_t chunk = 1; chunk < split->chunks; chunk++)
        for (int64_t row = 0; row < rows; row++)
            merge(partials + row * result_size(f), partials + (chunk * rows + row) * result_size(f), f->out_dim);
}

static void attend_task(void *context, int64_t index) {
    const struct attention *a = context;
    const struct attention_task *task = a->tasks + index;
    const struct format f = format_of(a->layer);
    int64_t rows = task->end - task->begin, heads = task->head_end - task->head, size = result_size(&f);
    struct workspace w;
    int64_t bytes = make_workspace(&f, task, NULL, &w);
    char *memory = alloca((size_t)bytes + 64);
    make_workspace(&f, task, memory + (64 - (uintptr_t)memory % 64) % 64, &w);
    struct attention_split *split = task->split < 0 ? NULL : a->splits + task->split;
    float *partials = split ? a->partials + split->partial * size : NULL;
    float *results = split ? partials + (task->chunk - split->chunk) * heads * rows * size : NULL;
    if (is_few(task)) {
        int64_t next = index + shoal_threads();
        if (!split) results = w.sums;
        attend_few(a, task, &f, &w, next < a->task_count ? a->tasks + next : NULL, results);
    } else {
        for (int64_t h = 0; h < heads; h++)
            attend_many(a, task, task->head + h, &f, &w, split ? results + h * rows * size : NULL);
        if (!split) return;
    }
    if (split) {
        if (__atomic_sub_fetch(&split->left, 1, __ATOMIC_ACQ_REL)) return;
        split->left = split->chunks; /* for the next layer */
        merge_split(split, heads * rows, &f, results = partials);
    }
    for (int64_t h = 0; h < heads; h++) finish(a, task, task->head + h, &f, results + h * rows * size);
}

static void run_task(void *context, int64_t index) {
    attend_task(context, index);
    end_tiles();
}

/* Floats of one query row's partial result. */
int64_t KERNEL(shoal_attention_partial)(const struct attention *a) {
    const struct format f = format_of(a->layer);
    return result_size(&f);
}

/* Write the new keys and values into the pool, then attend. */
void KERNEL(shoal_attend)(struct attention *a) {
    KERNEL(shoal_write_kv)(a, NULL);
    shoal_parallel(a->task_count, run_task, a);
}

/* The same of queries and keys that are to be normed and rotated first. */
void KERNEL(shoal_attend_rotated)(struct attention *a, const struct attention_rotary *rotary) {
    KERNEL(shoal_write_kv)(a, rotary);
    struct attention rotated = *a;
    rotated.query = rotary->queries;
    rotated.query_head = a->layer->key_dim * bytes_of(a->layer->dtype);
    rotated.query_token = a->heads * rotated.query_head;
    shoal_parallel(a->task_count, run_task, &rotated);
}
