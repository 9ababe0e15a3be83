/* Paged attention: structs that Python passes (shoal.execute.attention.native_structs), and shared constants. */
#ifndef SHOAL_ATTENTION_H
#define SHOAL_ATTENTION_H

#include "shoal.h"

/* Keys whose scores are held at once. Sums are made over such chunks, which begin at multiples of it in the
   sequence, and are then merged in order: so a token's result does not depend on what else is computed. */
#define CHUNK 256

/* Query rows (a token and a head each) that share one reading of the keys: at least this many, if there are more, and
   at most LARGE_TILE, where that leaves enough tasks for all threads. */
#define TILE 96
#define LARGE_TILE 384

/* Largest size of a key or value, in elements. */
#define LARGEST_HEAD 256

/* Numbers of an int8 key or value that share a scale; a multiple of every PANEL. */
#define SCALED 64

/* int8 is for keys and values in the pool alone, whose numbers are multiplied by scales, which are bfloat16. */
enum { SHOAL_FLOAT32, SHOAL_BFLOAT16, SHOAL_INT8 };

/* All fields of what Python passes have 8 bytes; strides are in bytes, but for the table's. */

/* The packed tokens of a step; every row is one sequence. */
struct attention_step {
    int64_t rows, block_size;
    const int64_t *starts; /* [rows + 1]: where a row's tokens begin in the step */
    const int64_t *firsts; /* [rows]: position of its first token in the sequence */
    const int64_t *table;  /* [rows][blocks][...]: entries of the pool, blocks or units of a KV head each */
    int64_t table_row, table_block;
};

/* Location of one layer's keys and values: those of head 0 at token 0 of entry 0, and strides from there. Scales of
   int8 are found likewise: [groups of a head][tokens]. */
struct attention_layer {
    int64_t dtype;  /* of queries, of new keys and values, and of what comes out */
    int64_t stored; /* of keys and values in the pool: the same, or int8 */
    int64_t kv_heads, key_dim, value_dim;
    char *keys, *values, *key_scales, *value_scales;
    int64_t entry, key_token, value_token, key_head, value_head, key_scale_head, value_scale_head;
    int64_t table_first, table_head; /* head 0's entry in a block's part of the table, and the step to the next */
};

/* One layer's attention: queries [tokens, heads, key_dim], new keys and values, out [tokens, heads, value_dim]. */
struct attention {
    const struct attention_step *step;
    const struct attention_layer *layer;
    int64_t heads, window; /* 0: no window */
    double scale, softcap; /* 0: no softcap */
    const char *query, *key, *value;
    int64_t query_token, query_head, new_key_token, new_key_head, new_value_token, new_value_head;
    char *out;
    /* How the work is shared, from shoal_attention_tasks. */
    int64_t task_count;
    struct attention_task *tasks;
    struct attention_split *splits;
    float *partials;
};

/* What is done to queries and keys first. */
struct attention_rotary {
    const float *cos, *sin; /* [tokens, dim]: of each of a head's first dim elements */
    int64_t dim, interleaved; /* element i turns with i + dim / 2, or with its neighbour */
    const float *query_scale, *key_scale; /* [key_dim] of a norm of each head; NULL: no norm */
    double eps;
    char *queries; /* [tokens, heads, key_dim]: where they are put */
};

/* Query rows [begin, end) (token of the row * heads per KV head + head) of one row and each of KV heads
   [head, head_end), over the keys of chunks [chunk, chunk_end). */
struct attention_task {
    int64_t row, begin, end, head, head_end, chunk, chunk_end;
    int64_t split; /* the split that it is a part of; -1: none, and its result is final */
};

/* Query rows whose chunks are computed by a task each. */
struct attention_split {
    int64_t left;           /* chunks not computed yet */
    int64_t chunk, chunks;  /* the first chunk, and how many there are */
    int64_t partial;        /* place of the partial results [chunks][heads][rows] among those of all */
};

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Scales of a key or value of that many numbers. */
static inline int64_t scales_of(int64_t dim) { return (dim + SCALED - 1) / SCALED; }

/* Bytes of one number. */
static inline int64_t bytes_of(int64_t dtype) { return dtype == SHOAL_FLOAT32 ? 4 : dtype == SHOAL_BFLOAT16 ? 2 : 1; }

void KERNEL(shoal_write_kv)(const struct attention *a, const struct attention_rotary *rotary);

#endif
