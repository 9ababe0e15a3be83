/* Products y = x W^T: code shared by all weight formats.

   Columns of weights are stored in panels, inputs in groups. A file that includes this has defined PANEL and GROUP,
   ROWS (of a tile) and PART_ROWS (of its parts), BLOCK_TILES (tiles that are multiplied with a panel while it is in the
   cache; LARGE_BLOCK_TILES where there are more), GROUP_BYTES (weights of a panel's group), struct group (inputs of a
   part's group, as products want them) and struct panel. It then defines

       begin_products() and end_products(), around the products of a task,
       can_read_inputs(job), whether products take the inputs of a whole part from x,
       prepare_row(job, row, groups), which puts the inputs of a row into the groups of its part,
       multiply_tile(inputs, panel, rows, out), which gives the products of a tile and a panel in float, and
       ROUND_PANEL(values, y), where there is a faster way to write PANEL results as bfloat16. */
#ifndef SHOAL_PRODUCT_H
#define SHOAL_PRODUCT_H

#include "activation.h"
#include "bf16.h"
#include "inputs.h"
#include "shoal.h"

#include <stdlib.h>
#include <string.h>

enum {
    TASKS_PER_THREAD = 4,    /* so that a slow thread delays little */
    SERIAL_INPUTS = 1 << 15, /* fewer are prepared by one thread before another wakes up */
    CACHED_BYTES = 1 << 20,  /* weights that stay in the second cache, to be multiplied with all rows in turn */
    SERIAL_WORK = 1600,      /* less, counted in groups of panels times rows, is done before, too */
};

/* The weights of a layer, as Python lays them out. */
struct linear {
    const uint8_t *weights; /* [panels, groups, GROUP_BYTES] */
    const float *scales;    /* of weights: [panels, groups, PANEL], [panels, PANEL] for whole columns, or NULL */
    const float *bias;      /* [panels, PANEL] or NULL */
    int64_t columns;
    int64_t grouped; /* whether scales are of groups */
};

/* Layers with the same input, whose outputs stand side by side; or a gate and what it is to be multiplied with. */
struct product {
    const struct linear *parts;
    int64_t num_parts, inputs;
    int64_t activation; /* of the gate, which is the first of two parts; NO_ACTIVATION where there is no gate */
};

struct job {
    const struct product *product;
    const void *x;        /* [rows, inputs] */
    void *y;              /* [rows, columns] */
    int64_t rows, columns, bf16;
    int64_t groups, panels, tiles;
    int64_t block_tiles; /* that are multiplied with a panel while it is in the cache */
    int64_t task_panels, column_tasks, row_tasks;
    int64_t prepared_from;  /* a multiple of PART_ROWS: rows before it are read from x */
    struct group *prepared; /* [parts, groups] of the other rows */
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int can_read_inputs(const struct job *job);
static void prepare_row(const struct job *job, int64_t row, struct group *groups);

/* values = x[at ...]. */
INLINE void read_values(const void *x, int64_t bf16, int64_t at, float *restrict values, int64_t count) {
    const float *x32 = (const float *)x + at;
    const uint16_t *x16 = (const uint16_t *)x + at;
    if (bf16)
        for (int64_t i = 0; i < count; i++) values[i] = bf16_to_float(x16[i]);
    else
        for (int64_t i = 0; i < count; i++) values[i] = x32[i];
}

/* values = 32 inputs of a row from first on, 0 beyond its end. */
INLINE void read_group(const struct job *job, int64_t row, int64_t first, float *restrict values) {
    const int64_t inputs = job->product->inputs, at = row * inputs + first;
    if (inputs - first >= GROUP) {
        read_values(job->x, job->bf16, at, values, GROUP);
        return;
    }
    memset(values, 0, GROUP * sizeof *values);
    read_values(job->x, job->bf16, at, values, inputs - first);
}

static void prepare_part(void *context, int64_t part) {
    const struct job *job = context;
    const int64_t first = job->prepared_from + part * PART_ROWS, end = smaller(first + PART_ROWS, job->rows);
    for (int64_t row = first; row < end; row++) prepare_row(job, row, job->prepared + part * job->groups);
}

/* The inputs of the part that begins with a row. */
static struct inputs inputs_of(const struct job *job, int64_t row) {
    const int64_t bytes = job->product->inputs * (job->bf16 ? 2 : 4);
    if (row < job->prepared_from) return (struct inputs){(const char *)job->x + row * bytes, bytes, bytes / job->groups};
    const struct group *first = job->prepared + (row - job->prepared_from) / PART_ROWS * job->groups;
    return (struct inputs){(const char *)first, sizeof *first / PART_ROWS, sizeof *first};
}

/* y[at ...] = values. */
INLINE void write_values(void *y, int64_t bf16, int64_t at, const float *restrict values, int64_t count) {
    float *restrict y32 = (float *)y + at;
    uint16_t *restrict y16 = (uint16_t *)y + at;
#ifdef ROUND_PANEL
    if (bf16 && count == PANEL) {
        ROUND_PANEL(values, y16);
        return;
    }
#endif
    if (bf16)
        for (int64_t i = 0; i < count; i++) y16[i] = float_to_bf16(values[i]);
    else
        for (int64_t i = 0; i < count; i++) y32[i] = values[i];
}

/* Scale a row's values of a panel and add the bias. */
static void scale_row(const struct linear *linear, int64_t panel, float *restrict values) {
    if (linear->scales && !linear->grouped) {
        const float *restrict scales = linear->scales + panel * PANEL;
        for (int i = 0; i < PANEL; i++) values[i] *= scales[i];
    }
    if (linear->bias) {
        const float *restrict bias = linear->bias + panel * PANEL;
        for (int i = 0; i < PANEL; i++) values[i] += bias[i];
    }
}

/* values = activation(gates) * values. */
static void apply_gates(int64_t activation, const float *restrict gates, float *restrict values) {
    if (activation == SILU)
        for (int i = 0; i < PANEL; i++) values[i] = silu(gates[i]) * values[i];
    else if (activation == GELU_TANH)
        for (int i = 0; i < PANEL; i++) values[i] = gelu_tanh(gates[i]) * values[i];
    else
        for (int i = 0; i < PANEL; i++) values[i] = gelu_erf(gates[i]) * values[i];
}

/* The weights of a panel, to be multiplied with several tiles: each fetches a part of the next panel, unless the panel
   is the last one of its task. */
static struct panel panel_at(const struct linear *linear, int64_t index, int64_t groups, int64_t tiles, int last) {
    struct panel panel = {.weights = linear->weights + index * groups * GROUP_BYTES, .groups = groups};
    if (linear->grouped) panel.scales = linear->scales + index * groups * PANEL;
    panel.ahead = panel.weights + groups * GROUP_BYTES;
    panel.ahead_groups = tiles > 1 && !last ? (groups + tiles - 1) / tiles : 0; /* a single one reads at full speed */
    return panel;
}

/* values[row] = scaled products of a tile and a panel. */
static void multiply_panel(const struct linear *linear, struct panel *panel, int64_t index,
                           const struct inputs *inputs, int rows, float (*values)[PANEL]) {
    multiply_tile(inputs, panel, rows, values);
    for (int row = 0; row < rows; row++) scale_row(linear, index, values[row]);
    panel->ahead += panel->ahead_groups * GROUP_BYTES;
}

/* Tiles [first, last) times the panel of a part, and of the gate where there is one; start: its first output. */
static void multiply_tiles(const struct job *job, int64_t first, int64_t last, const struct linear *linear,
                           int64_t index, int64_t start, int is_last) {
    const struct linear *gate = job->product->activation != NO_ACTIVATION ? job->product->parts : NULL;
    struct panel panel = panel_at(linear, index, job->groups, last - first, is_last), gate_panel;
    if (gate) gate_panel = panel_at(gate, index, job->groups, last - first, is_last);
    const int64_t count = smaller(linear->columns - index * PANEL, PANEL);
    for (int64_t tile = first; tile < last; tile++) {
        _Alignas(64) float values[ROWS][PANEL], gates[ROWS][PANEL];
        const int rows = (int)smaller(job->rows - tile * ROWS, ROWS);
        struct inputs inputs[ROWS / PART_ROWS] = {0};
        for (int part = 0; part * PART_ROWS < rows; part++)
            inputs[part] = inputs_of(job, tile * ROWS + part * PART_ROWS);
        multiply_panel(linear, &panel, index, inputs, rows, values);
        if (gate) multiply_panel(gate, &gate_panel, index, inputs, rows, gates);
        for (int row = 0; row < rows; row++) {
            const int64_t at = (tile * ROWS + row) * job->columns + start;
            if (gate) apply_gates(job->product->activation, gates[row], values[row]);
            if (count == PANEL)
                write_values(job->y, job->bf16, at, values[row], PANEL);
            else
                write_values(job->y, job->bf16, at, values[row], count);
        }
    }
}

static int64_t panels_of(const struct linear *linear) { return (linear->columns + PANEL - 1) / PANEL; }

/* Some tiles times some panels, counted through all parts. */
static void multiply_block(void *context, int64_t task) {
    const struct job *job = context;
    const int64_t first = task % job->row_tasks * job->block_tiles;
    const int64_t last = smaller(first + job->block_tiles, job->tiles);
    int64_t index = task / job->row_tasks * job->task_panels;
    int64_t left = smaller(job->task_panels, job->panels - index);
    const struct linear *linear = job->product->parts + (job->product->activation != NO_ACTIVATION);
    int64_t start = 0;
    begin_products();
    for (; index >= panels_of(linear); linear++) index -= panels_of(linear), start += linear->columns;
    for (; left > 0; left--) {
        multiply_tiles(job, first, last, linear, index, start + index * PANEL, left == 1);
        if (++index == panels_of(linear)) index = 0, start += linear->columns, linear++;
    }
    end_products();
}

static struct job job_of(const struct product *product, int64_t rows) {
    struct job job = {.product = product, .rows = rows, .tiles = (rows + ROWS - 1) / ROWS};
    job.groups = (product->inputs + GROUP - 1) / GROUP;
    for (int64_t i = product->activation != NO_ACTIVATION; i < product->num_parts; i++) {
        job.columns += product->parts[i].columns;
        job.panels += panels_of(product->parts + i);
    }
    job.block_tiles = job.tiles > BLOCK_TILES ? LARGE_BLOCK_TILES : BLOCK_TILES;
    job.row_tasks = (job.tiles + job.block_tiles - 1) / job.block_tiles;
    /* A panel's group takes memory the time of multiplying it with some eight rows. */
    const int64_t work = job.panels * job.groups * (rows > 8 ? rows : 8);
    const int64_t tasks = work < SERIAL_WORK ? 1 : TASKS_PER_THREAD * shoal_threads();
    job.task_panels = smaller((job.panels * job.row_tasks + tasks - 1) / tasks, job.panels);
    const int64_t weights = job.groups * GROUP_BYTES * (product->activation != NO_ACTIVATION ? 2 : 1);
    const int64_t cached = CACHED_BYTES / weights;
    if (tasks > 1) job.task_panels = smaller(job.task_panels, cached > 1 ? cached : 1);
    job.column_tasks = (job.panels + job.task_panels - 1) / job.task_panels;
    return job;
}

/* y [rows, columns] = x [rows, inputs] W^T + bias, both in float32 or both in bfloat16.

   A row's result depends on nothing but the row. Returns 0 where memory did not suffice, else 1. */
static int64_t multiply(const struct product *product, const void *x, void *y, int64_t rows, int64_t bf16) {
    if (!rows) return 1;
    struct job job = job_of(product, rows);
    job.x = x, job.y = y, job.bf16 = bf16;
    job.prepared_from = can_read_inputs(&job) ? rows / PART_ROWS * PART_ROWS : 0;
    const int64_t parts = (rows - job.prepared_from + PART_ROWS - 1) / PART_ROWS;
    /* In whole cache lines: a row of 64 bytes across two lines takes twice as long to load. */
    const size_t bytes = (size_t)(parts * job.groups) * sizeof(struct group);
    job.prepared = aligned_alloc(64, bytes / 64 * 64 + 64);
    if (!job.prepared) return 0;
    if ((rows - job.prepared_from) * product->inputs < SERIAL_INPUTS)
        for (int64_t part = 0; part < parts; part++) prepare_part(&job, part);
    else
        shoal_parallel(parts, prepare_part, &job);
    shoal_parallel(job.row_tasks * job.column_tasks, multiply_block, &job);
    free(job.prepared);
    return 1;
}

#endif
