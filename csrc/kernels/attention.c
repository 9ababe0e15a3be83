/* Attention over keys and values in the pool, with softmax in two passes over each chunk of keys.
 *
 * Scores have a lane for each key and are summed over the head's dimensions in order; outputs have a lane for
 * each dimension and are summed over a chunk's keys in order. So the order of every sum is the same however
 * many query rows are computed together. */
#include "../attention.h"
#include "../attention_vec.h"

#include <alloca.h>
#include <math.h>
#include <stdatomic.h>

/* Query rows whose sums are in registers together, and vectors of keys (or of dimensions) of each. */
#define ROWS 6
#if WIDTH == 16
#define VECTORS 4
#else
#define VECTORS 2
#endif
#define PANEL (VECTORS * WIDTH)

/* A task's working memory, 64-byte aligned. A unit is 32 bits: a float, or two bfloat16 where they are
   multiplied in pairs. */
struct workspace {
    float *queries; /* [TILE][units] */
    float *keys;    /* [CHUNK / PANEL][units][PANEL]: keys side by side */
    float *values;  /* panels of dimensions, as value_panel says */
    float *scores;  /* [ROWS][CHUNK] */
    float *sums;    /* [ROWS][out_dim]: of one chunk */
    float *state;   /* [TILE][out_dim + 2]: of the chunks so far */
    const char *rows[CHUNK];
    int64_t units, out_dim;
    int paired;
};

/* Results are rows of out_dim sums, the largest score, and the sum of weights. */
static int64_t out_dim(const struct attention *a) { return (a->layer->value_dim + WIDTH - 1) / WIDTH * WIDTH; }

static int is_paired(const struct attention *a) {
#if defined(__AVX512BF16__)
    return a->layer->dtype == SHOAL_BFLOAT16;
#else
    (void)a;
    return 0;
#endif
}

static int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* Where the vectors of dimension `dim` (a multiple of WIDTH) begin in the values, [CHUNK][*vectors * WIDTH]. */
INLINE float *value_panel(const struct workspace *w, int64_t dim, int *vectors) {
    *vectors = w->out_dim - dim >= PANEL ? VECTORS : 1;
    return w->values + dim * CHUNK;
}

/* ---- Reading queries, keys and values into the workspace ---- */

static void pack_query(const struct attention *a, const char *from, float *to, const struct workspace *w) {
    if (a->layer->dtype == SHOAL_FLOAT32 || w->paired) {
        int64_t bytes = a->layer->key_dim * (w->paired ? 2 : 4);
        to[w->units - 1] = 0;
        memcpy(to, from, (size_t)bytes);
        return;
    }
    for (int64_t i = 0; i < a->layer->key_dim; i++) {
        uint32_t bits = (uint32_t)((const uint16_t *)from)[i] << 16;
        memcpy(to + i, &bits, 4);
    }
}

/* Addresses of the keys or values (`base`, `token_bytes`) of KV head `head` at positions [first + low,
   first + high). */
static void find_rows(const struct attention *a, int64_t row, int64_t head, const char *base, int64_t token_bytes,
                      int64_t first, int64_t low, int64_t high, const char **rows) {
    const struct attention_step *step = a->step;
    const int64_t *table = step->table + row * step->table_row + a->layer->table_first + head * a->layer->table_head;
    int64_t block = (first + low) / step->block_size, token = (first + low) % step->block_size;
    for (int64_t i = low; i < high; block++, token = 0) {
        const char *at = base + table[block * step->table_block] * a->layer->entry + token * token_bytes;
        for (; token < step->block_size && i < high; token++, i++, at += token_bytes) rows[i] = at;
    }
}

/* Keys [low, high) of a chunk side by side; those around them, up to a whole vector, are 0. */
static void pack_keys(const struct attention *a, int64_t low, int64_t high, struct workspace *w) {
    const int widen = a->layer->dtype == SHOAL_BFLOAT16 && !w->paired;
    int64_t bytes = a->layer->key_dim * (a->layer->dtype == SHOAL_BFLOAT16 ? 2 : 4);
    for (int64_t group = low / WIDTH * WIDTH; group < high; group += WIDTH) {
        float *panel = w->keys + group / PANEL * PANEL * w->units + group % PANEL;
        for (int64_t at = 0; at < bytes; at += 4 * WIDTH) {
            vec columns[WIDTH];
            for (int i = 0; i < WIDTH; i++)
                columns[i] = group + i >= low && group + i < high ? vec_load_bytes(w->rows[group + i] + at, bytes - at)
                                                                  : vec_all(0);
            vec_transpose(columns);
            int64_t unit = widen ? at / 2 : at / 4;
            for (int i = 0; i < WIDTH && unit < w->units; i++, unit++) {
                if (!widen) {
                    vec_store(panel + unit * PANEL, columns[i]);
                    continue;
                }
                vec_store(panel + unit * PANEL, (vec)((ivec)columns[i] << 16));
                if (++unit < w->units) vec_store(panel + unit * PANEL, (vec)((ivec)columns[i] & (int32_t)0xffff0000));
            }
        }
    }
}

/* Values [low, high) of a chunk as floats; those around them, up to a whole vector, are 0. */
static void pack_values(const struct attention *a, int64_t low, int64_t high, struct workspace *w) {
    for (int64_t dim = 0, step; dim < w->out_dim; dim += step) {
        int vectors;
        float *panel = value_panel(w, dim, &vectors);
        step = vectors * WIDTH;
        for (int64_t i = low; i < high; i++)
            for (int64_t d = dim; d < dim + step; d += WIDTH) {
                float *to = panel + i * step + d - dim;
                if (a->layer->dtype == SHOAL_BFLOAT16)
                    vec_store(to, vec_load_bf16((const uint16_t *)w->rows[i] + d, a->layer->value_dim - d));
                else
                    vec_store(to, vec_load_bytes(w->rows[i] + 4 * d, 4 * (a->layer->value_dim - d)));
            }
    }
}

/* ---- Products ---- */

/* scores[row][key] for `rows` queries and `vectors` vectors of keys. */
INLINE void score(const int rows, const int vectors, const int paired, const float *queries, int64_t units,
                  const float *keys, float *scores) {
    vec sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = vec_all(0);
    for (int64_t u = 0; u < units; u++) {
        vec key[VECTORS];
        for (int v = 0; v < vectors; v++) key[v] = vec_load(keys + u * PANEL + v * WIDTH);
        for (int r = 0; r < rows; r++) {
            vec query = vec_all(queries[r * units + u]);
            for (int v = 0; v < vectors; v++) sums[r][v] = vec_dot(paired, query, key[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) vec_store(scores + r * CHUNK + v * WIDTH, sums[r][v]);
}

/* out[row] [vectors * WIDTH] = the sum of values [keys][vectors * WIDTH] by weights [row][keys]. */
INLINE void weigh(const int rows, const int vectors, const float *weights, const float *values, int64_t keys,
                  float *out, int64_t out_stride) {
    vec sums[ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = vec_all(0);
    for (int64_t k = 0; k < keys; k++) {
        vec value[VECTORS];
        for (int v = 0; v < vectors; v++) value[v] = vec_load(values + (k * vectors + v) * WIDTH);
        for (int r = 0; r < rows; r++) {
            vec weight = vec_all(weights[r * CHUNK + k]);
            for (int v = 0; v < vectors; v++) sums[r][v] = vec_madd(weight, value[v], sums[r][v]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) vec_store(out + r * out_stride + v * WIDTH, sums[r][v]);
}

INLINE void score_rows(const int rows, const int paired, const float *queries, const struct workspace *w,
                       int64_t low, int64_t high) {
    for (int64_t key = low / WIDTH * WIDTH; key < high;) {
        const float *panel = w->keys + key / PANEL * PANEL * w->units + key % PANEL;
        if (key % PANEL == 0 && high - key > PANEL - WIDTH) {
            score(rows, VECTORS, paired, queries, w->units, panel, w->scores + key);
            key += PANEL;
        } else {
            score(rows, 1, paired, queries, w->units, panel, w->scores + key);
            key += WIDTH;
        }
    }
}

INLINE void weigh_rows(const int rows, const struct workspace *w, int64_t low, int64_t high, float *out,
                       int64_t out_stride) {
    for (int64_t dim = 0; dim < w->out_dim;) {
        int vectors;
        const float *values = value_panel(w, dim, &vectors) + low * vectors * WIDTH;
        if (vectors == VECTORS)
            weigh(rows, VECTORS, w->scores + low, values, high - low, out + dim, out_stride);
        else
            weigh(rows, 1, w->scores + low, values, high - low, out + dim, out_stride);
        dim += vectors * WIDTH;
    }
}

#define EACH_NUMBER_OF_ROWS(DO) DO(1) DO(2) DO(3) DO(4) DO(5) DO(6)

static void score_tile(int rows, const float *queries, const struct workspace *w, int64_t low, int64_t high) {
#define SCORE(N)                                              \
    if (rows == N) {                                          \
        if (w->paired) score_rows(N, 1, queries, w, low, high); \
        else score_rows(N, 0, queries, w, low, high);          \
    }
    EACH_NUMBER_OF_ROWS(SCORE)
}

static void weigh_tile(int rows, const struct workspace *w, int64_t low, int64_t high, float *out,
                       int64_t out_stride) {
#define WEIGH(N) \
    if (rows == N) weigh_rows(N, w, low, high, out, out_stride);
    EACH_NUMBER_OF_ROWS(WEIGH)
}

/* ---- Softmax ---- */

/* Turn one row's scores into weights, exp(score - largest), where keys [low, high) are visible and what is
   around them in whole vectors becomes 0. result: the largest score, and the sum of weights. */
static void soften(const struct attention *a, float *scores, int64_t low, int64_t high, int64_t all_low,
                   int64_t all_high, float result[2]) {
    for (int64_t i = all_low; i < low; i++) scores[i] = -INFINITY;
    for (int64_t i = high; i < all_high; i++) scores[i] = -INFINITY;
    const vec scale = vec_all((float)a->scale), softcap = vec_all((float)a->softcap);
    const vec inner = vec_all((float)(a->softcap ? a->scale / a->softcap : 1));
    vec top = vec_all(-INFINITY);
    for (int64_t i = all_low; i < all_high; i += WIDTH) {
        vec s = vec_load(scores + i);
        s = a->softcap ? softcap * vec_tanh(s * inner) : s * scale;
        vec_store(scores + i, s);
        top = vec_max(s, top);
    }
    if (a->softcap) { /* tanh made masked scores finite */
        for (int64_t i = all_low; i < low; i++) scores[i] = -INFINITY;
        for (int64_t i = high; i < all_high; i++) scores[i] = -INFINITY;
        top = vec_all(-INFINITY);
        for (int64_t i = all_low; i < all_high; i += WIDTH) top = vec_max(vec_load(scores + i), top);
    }
    result[0] = vec_largest(top);
    vec sum = vec_all(0), largest = vec_all(result[0]);
    for (int64_t i = all_low; i < all_high; i += WIDTH) {
        vec weight = vec_exp(vec_load(scores + i) - largest);
        vec_store(scores + i, weight);
        sum += weight;
    }
    result[1] = vec_sum(sum);
}

/* Merge a chunk's result into that of the chunks before it; each is out_dim sums, the largest score and the
   sum of weights (negative infinity and 0: no key was visible). */
static void merge(float *state, const float *sums, int64_t dim) {
    const float *chunk = sums + dim;
    float *before = state + dim;
    if (chunk[1] == 0) return;
    if (before[1] == 0) {
        memcpy(state, sums, 4 * (size_t)(dim + 2));
        return;
    }
    float largest = before[0] > chunk[0] ? before[0] : chunk[0];
    vec old = vec_exp(vec_all(before[0] - largest)), new = vec_exp(vec_all(chunk[0] - largest));
    for (int64_t i = 0; i < dim; i += WIDTH)
        vec_store(state + i, vec_madd(vec_load(sums + i), new, vec_load(state + i) * old));
    before[0] = largest;
    before[1] = before[1] * old[0] + chunk[1] * new[0];
}

/* ---- Tasks ---- */

/* Chunk `chunk` for the query rows of a task and one KV head; merged into the state, or where `partials` is
   given put there. */
static void attend_chunk(const struct attention *a, const struct attention_task *task, int64_t head, int64_t chunk,
                         struct workspace *w, float *partials) {
    int64_t group = a->heads / a->layer->kv_heads, stride = w->out_dim + 2;
    int64_t first = chunk * CHUNK, position = a->step->firsts[task->row];
    int64_t low = a->window ? larger(position + task->begin / group - a->window + 1 - first, 0) : 0;
    int64_t high = smaller(position + (task->end - 1) / group + 1 - first, CHUNK);
    if (low >= high) return;
    find_rows(a, task->row, head, a->layer->keys + head * a->layer->key_head, a->layer->key_token, first, low, high,
              w->rows);
    pack_keys(a, low, high, w);
    find_rows(a, task->row, head, a->layer->values + head * a->layer->value_head, a->layer->value_token, first, low,
              high, w->rows);
    pack_values(a, low, high, w);
    for (int64_t row = task->begin; row < task->end; row += ROWS) {
        int rows = (int)smaller(ROWS, task->end - row);
        int64_t here = a->window ? larger(position + row / group - a->window + 1 - first, 0) : 0;
        int64_t end = smaller(position + (row + rows - 1) / group + 1 - first, CHUNK);
        float *out = partials ? partials + (row - task->begin) * stride : w->sums;
        if (here >= end) {
            for (int r = 0; partials && r < rows; r++) out[r * stride + w->out_dim + 1] = 0;
            continue;
        }
        score_tile(rows, w->queries + (row - task->begin) * w->units, w, here, end);
        int64_t all_here = here / WIDTH * WIDTH, all_end = round_up(end, WIDTH);
        for (int r = 0; r < rows; r++) {
            int64_t at = position + (row + r) / group - first;
            int64_t row_low = a->window ? larger(at - a->window + 1, 0) : 0, row_high = smaller(at + 1, CHUNK);
            float *scores = w->scores + r * CHUNK, *result = out + r * stride + w->out_dim;
            if (row_low < row_high) {
                soften(a, scores, row_low, row_high, all_here, all_end, result);
            } else {
                memset(scores + all_here, 0, 4 * (size_t)(all_end - all_here));
                result[0] = -INFINITY, result[1] = 0;
            }
        }
        weigh_tile(rows, w, here, end, out, stride);
        for (int r = 0; !partials && r < rows; r++)
            merge(w->state + (row - task->begin + r) * stride, out + r * stride, w->out_dim);
    }
}

/* Divide by the sum of weights and store: `state` has the query rows of a task for one KV head. */
static void finish(const struct attention *a, const struct attention_task *task, int64_t head, const float *state,
                   int64_t dim) {
    int64_t group = a->heads / a->layer->kv_heads;
    for (int64_t row = task->begin; row < task->end; row++, state += dim + 2) {
        int64_t token = a->step->starts[task->row] + row / group;
        int64_t at = (token * a->heads + head * group + row % group) * a->layer->value_dim;
        vec factor = vec_all(1.0f / state[dim + 1]);
        for (int64_t d = 0; d < a->layer->value_dim; d += WIDTH) {
            vec v = vec_load(state + d) * factor;
            int64_t count = smaller(a->layer->value_dim - d, WIDTH);
            if (a->layer->dtype == SHOAL_BFLOAT16)
                vec_store_bf16((uint16_t *)a->out + at + d, v, count);
            else
                vec_store_floats((float *)a->out + at + d, v, count);
        }
    }
}

/* The chunks of a task for one KV head; results are final unless `partials` is given. */
static void attend_head(const struct attention *a, const struct attention_task *task, int64_t head,
                        struct workspace *w, float *partials) {
    int64_t group = a->heads / a->layer->kv_heads, rows = task->end - task->begin;
    for (int64_t row = 0; row < rows; row++) {
        int64_t at = task->begin + row, token = a->step->starts[task->row] + at / group;
        pack_query(a, a->query + token * a->query_token + (head * group + at % group) * a->query_head,
                   w->queries + row * w->units, w);
        w->state[row * (w->out_dim + 2) + w->out_dim + 1] = 0;
    }
    for (int64_t chunk = task->chunk; chunk < task->chunk_end; chunk++)
        attend_chunk(a, task, head, chunk, w, partials);
    if (!partials) finish(a, task, head, w->state, w->out_dim);
}

/* Merge the partial results of a split. */
static void finish_split(const struct attention *a, const struct attention_task *task, int64_t dim) {
    const struct attention_split *split = a->splits + task->split;
    int64_t rows = task->end - task->begin, stride = dim + 2;
    float *state = a->partials + split->partial * stride;
    for (int64_t head = task->head; head < task->head_end; head++, state += split->chunks * rows * stride) {
        for (int64_t chunk = 1; chunk < split->chunks; chunk++)
            for (int64_t row = 0; row < rows; row++)
                merge(state + row * stride, state + (chunk * rows + row) * stride, dim);
        finish(a, task, head, state, dim);
    }
}

static struct workspace make_workspace(const struct attention *a, int64_t rows, char *memory, int64_t *bytes) {
    struct workspace w = {.paired = is_paired(a), .out_dim = out_dim(a)};
    w.units = w.paired ? (a->layer->key_dim + 1) / 2 : a->layer->key_dim;
    float **parts[] = {&w.queries, &w.keys, &w.values, &w.scores, &w.sums, &w.state};
    int64_t sizes[] = {rows * w.units,    CHUNK * w.units,          CHUNK * w.out_dim,
                       ROWS * CHUNK,      ROWS * (w.out_dim + 2),   rows * (w.out_dim + 2)};
    int64_t used = 0;
    for (int i = 0; i < 6; i++, used = round_up(used, 64)) {
        *parts[i] = (float *)(memory + used);
        used += 4 * sizes[i];
    }
    *bytes = used;
    return w;
}

static void run_task(void *context, int64_t index) {
    const struct attention *a = context;
    const struct attention_task *task = a->tasks + index;
    int64_t rows = task->end - task->begin, bytes;
    make_workspace(a, rows, NULL, &bytes);
    char *memory = alloca((size_t)bytes + 64);
    struct workspace w = make_workspace(a, rows, memory + (64 - (uintptr_t)memory % 64) % 64, &bytes);
    struct attention_split *split = task->split < 0 ? NULL : a->splits + task->split;
    for (int64_t head = task->head; head < task->head_end; head++) {
        float *partials = NULL;
        if (split) {
            int64_t place = (head - task->head) * split->chunks + task->chunk - split->chunk;
            partials = a->partials + (split->partial + place * rows) * (w.out_dim + 2);
        }
        attend_head(a, task, head, &w, partials);
    }
    if (split && !__atomic_sub_fetch(&split->left, 1, __ATOMIC_ACQ_REL)) {
        finish_split(a, task, w.out_dim);
        split->left = split->chunks; /* for the next layer */
    }
}

/* Floats of one query row's partial result. */
int64_t KERNEL(shoal_attention_partial)(const struct attention *a) { return out_dim(a) + 2; }

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
    rotated.query_head = a->layer->key_dim * (a->layer->dtype == SHOAL_BFLOAT16 ? 2 : 4);
    rotated.query_token = a->heads * rotated.query_head;
    shoal_parallel(a->task_count, run_task, &rotated);
}
