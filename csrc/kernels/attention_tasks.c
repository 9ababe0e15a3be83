/* Splitting the attention of a step into tasks of about equal size. */
#include "../attention.h"

/* With this many tasks per thread, a task takes all KV heads of its keys, which are adjacent. */
#define ENOUGH 8

/* A multiple of the query rows that any instruction set computes together. */
#define WHOLE 48

struct counts {
    int64_t tasks, splits, partials;
};

static int64_t query_rows(const struct attention *a, int64_t row) {
    return (a->step->starts[row + 1] - a->step->starts[row]) * (a->heads / a->layer->kv_heads);
}

/* The chunks that query rows [begin, end) of a row see. */
static void find_chunks(const struct attention *a, int64_t row, int64_t begin, int64_t end, int64_t chunks[2]) {
    int64_t group = a->heads / a->layer->kv_heads;
    int64_t low = a->window ? larger(a->step->firsts[row] + begin / group - a->window + 1, 0) : 0;
    chunks[0] = low / CHUNK;
    chunks[1] = (a->step->firsts[row] + (end - 1) / group) / CHUNK + 1;
}

/* Query rows of a tile if there are more than TILE: whole products of all instruction sets. */
static int64_t tile_size(const struct attention *a, int64_t total) {
    int64_t share = total * a->layer->kv_heads / (ENOUGH * shoal_threads());
    return smaller(larger(share / WHOLE * WHOLE, TILE), LARGE_TILE);
}

/* Add the tasks of a row of several tiles, each a task over all its keys; the last, which see most, come first. */
static void add_tiles(struct attention *a, int64_t row, int64_t size, struct counts *counts) {
    int64_t rows = query_rows(a, row), chunks[2];
    for (int64_t tile = (rows - 1) / size; tile >= 0; tile--) {
        int64_t begin = tile * size, end = smaller(begin + size, rows);
        find_chunks(a, row, begin, end, chunks);
        for (int64_t head = 0; head < a->layer->kv_heads; head++, counts->tasks++)
            if (a->tasks)
                a->tasks[counts->tasks] =
                    (struct attention_task){row, begin, end, head, head + 1, chunks[0], chunks[1], -1};
    }
}

/* Add the tasks of a row of one tile: one for each chunk and `heads` KV heads. */
static void add_chunks(struct attention *a, int64_t row, int64_t heads, struct counts *counts) {
    int64_t rows = query_rows(a, row), chunks[2];
    find_chunks(a, row, 0, rows, chunks);
    int64_t count = chunks[1] - chunks[0];
    for (int64_t head = 0; head < a->layer->kv_heads; head += heads) {
        int64_t split = -1;
        if (count > 1) {
            split = counts->splits++;
            if (a->tasks) a->splits[split] = (struct attention_split){count, chunks[0], count, counts->partials};
            counts->partials += heads * count * rows;
        }
        for (int64_t chunk = chunks[0]; chunk < chunks[1]; chunk++, counts->tasks++)
            if (a->tasks)
                a->tasks[counts->tasks] =
                    (struct attention_task){row, 0, rows, head, head + heads, chunk, chunk + 1, split};
    }
}

/* Write the tasks for a step and a shape (rows, starts, firsts, heads, kv_heads and window) to a->tasks and
   a->splits; where a->tasks is NULL only count. counts: of tasks, splits, and query rows of partial results. */
void KERNEL(shoal_attention_tasks)(struct attention *a, int64_t counts[3]) {
    struct counts total = {0, 0, 0};
    int64_t single = 0, many = 0, chunks[2];
    for (int64_t row = 0; row < a->step->rows; row++)
        if (query_rows(a, row) > TILE) many += query_rows(a, row);
    for (int64_t row = 0; row < a->step->rows; row++) {
        if (query_rows(a, row) > TILE) {
            add_tiles(a, row, tile_size(a, many), &total);
            continue;
        }
        find_chunks(a, row, 0, query_rows(a, row), chunks);
        single += chunks[1] - chunks[0];
    }
    int64_t heads = single >= ENOUGH * shoal_threads() ? a->layer->kv_heads : 1;
    for (int64_t row = 0; row < a->step->rows; row++)
        if (query_rows(a, row) <= TILE) add_chunks(a, row, heads, &total);
    counts[0] = total.tasks, counts[1] = total.splits, counts[2] = total.partials;
}
