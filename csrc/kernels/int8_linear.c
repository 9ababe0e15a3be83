/* Products with int8 weights: y = x W^T, x quantised on the fly in groups of 32. */
#include "../int8_tile.h"
#include "../shoal.h"

#include <stdlib.h>

enum {
    BLOCK_TILES = 16,        /* tiles of rows that are multiplied with a panel while it is in the cache */
    TASKS_PER_THREAD = 4,    /* so that a slow thread delays little */
    SERIAL_INPUTS = 1 << 14, /* fewer are quantised faster than threads wake up */
};

/* Weights and what follows the product. As Int8Linear in Python lays them out. */
struct int8_linear {
    const uint8_t *weights; /* [panels, groups, STEPS, PANEL, 4], weight + 128 */
    const float *scales;    /* [panels, groups, PANEL], or [panels, 1, PANEL] for whole columns */
    const float *bias;      /* [panels, PANEL] or NULL */
    int64_t inputs, columns;
    int64_t grouped; /* whether scales are of groups */
};

struct product {
    const struct int8_linear *linear;
    const void *x; /* [rows, inputs] */
    void *y;       /* [rows, columns] */
    int64_t rows, bf16;
    int64_t groups, panels, tiles;
    int64_t task_panels, column_tasks;
    struct group *quantised; /* [tiles, groups] */
};

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static float from_bits(uint32_t bits) {
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t to_bits(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* Rounded to the nearest bfloat16, ties to even. */
static uint16_t to_bf16(float value) {
    uint32_t bits = to_bits(value);
    if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fc0;
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

/* Quantise the 32 inputs of a group: the scale is their largest magnitude / 127.

   A group too small for a finite 127 / magnitude becomes 0; one that is not finite makes the outputs NaN. */
static void quantise_group(const float *x, struct group *group, int row) {
    uint32_t largest = 0;
    for (int i = 0; i < GROUP; i++) {
        uint32_t magnitude = to_bits(x[i]) & 0x7fffffff;
        largest = magnitude > largest ? magnitude : largest;
    }
    const int finite = largest < 0x7f800000, usable = finite && from_bits(largest) >= 0x1p-100f;
    const float inverse = usable ? 127.0f / from_bits(largest) : 0.0f;
    int32_t rounded[GROUP], sum = 0;
    for (int i = 0; i < GROUP; i++) {
        /* Adding 1.5 * 2^23 rounds to the nearest integer, ties to even, in the lowest bits. */
        rounded[i] = (int32_t)to_bits(x[i] * inverse + 12582912.0f) - 0x4b400000;
        rounded[i] = usable ? rounded[i] : 0;
        sum += rounded[i];
    }
    put_values(rounded, group, row);
    group->scales[row] = !finite ? from_bits(0x7fc00000) : usable ? from_bits(largest) / 127.0f : 0.0f;
    group->offsets[row] = -128 * sum;
}

static void quantise_row(const struct product *product, int64_t row, struct group *groups) {
    const int64_t inputs = product->linear->inputs;
    const float *x = (const float *)product->x + row * inputs;
    const uint16_t *x16 = (const uint16_t *)product->x + row * inputs;
    for (int64_t g = 0; g < product->groups; g++) {
        float values[GROUP] = {0};
        const int64_t count = smaller(inputs - g * GROUP, GROUP);
        if (!product->bf16)
            for (int64_t i = 0; i < count; i++) values[i] = x[g * GROUP + i];
        else
            for (int64_t i = 0; i < count; i++) values[i] = from_bits((uint32_t)x16[g * GROUP + i] << 16);
        quantise_group(values, groups + g, row % ROWS);
    }
}

static void quantise_tile(void *context, int64_t tile) {
    const struct product *product = context;
    const int64_t end = smaller((tile + 1) * ROWS, product->rows);
    for (int64_t row = tile * ROWS; row < end; row++)
        quantise_row(product, row, product->quantised + tile * product->groups);
}

/* Write count values at y + at. */
INLINE void write_values(void *y, int64_t bf16, int64_t at, const float *restrict values, int64_t count) {
    float *restrict y32 = (float *)y + at;
    uint16_t *restrict y16 = (uint16_t *)y + at;
    if (bf16)
        for (int64_t i = 0; i < count; i++) y16[i] = to_bf16(values[i]);
    else
        for (int64_t i = 0; i < count; i++) y32[i] = values[i];
}

/* Scale a row's part of a panel, add the bias, and write it. */
static void finish_row(const struct product *product, int64_t row, int64_t panel, float *restrict values) {
    const struct int8_linear *linear = product->linear;
    const int64_t column = panel * PANEL, left = linear->columns - column;
    const float *restrict scales = linear->scales + column, *restrict bias = linear->bias + column;
    if (!linear->grouped)
        for (int i = 0; i < PANEL; i++) values[i] *= scales[i];
    if (linear->bias)
        for (int i = 0; i < PANEL; i++) values[i] += bias[i];
    if (left >= PANEL)
        write_values(product->y, product->bf16, row * linear->columns + column, values, PANEL);
    else
        write_values(product->y, product->bf16, row * linear->columns + column, values, left);
}

/* The weights of a panel, to be multiplied with several tiles: each fetches a part of the next panel. */
static struct panel panel_at(const struct product *product, int64_t index, int64_t tiles) {
    const struct int8_linear *linear = product->linear;
    const int64_t groups = product->groups;
    struct panel panel = {.weights = linear->weights + index * groups * GROUP * PANEL, .groups = groups};
    if (linear->grouped) panel.scales = linear->scales + index * groups * PANEL;
    panel.ahead = panel.weights + groups * GROUP * PANEL;
    panel.ahead_groups = tiles > 1 ? (groups + tiles - 1) / tiles : 0; /* a single one reads at full speed */
    return panel;
}

/* Some tiles times some panels. */
static void multiply_block(void *context, int64_t task) {
    const struct product *product = context;
    const int64_t first = task / product->column_tasks * BLOCK_TILES;
    const int64_t last = smaller(first + BLOCK_TILES, product->tiles);
    int64_t index = task % product->column_tasks * product->task_panels;
    const int64_t end = smaller(index + product->task_panels, product->panels);
    for (; index < end; index++) {
        struct panel panel = panel_at(product, index, last - first);
        for (int64_t tile = first; tile < last; tile++) {
            float sums[ROWS][PANEL];
            const int rows = (int)smaller(product->rows - tile * ROWS, ROWS);
            multiply_tile(product->quantised + tile * product->groups, &panel, rows, sums);
            for (int row = 0; row < rows; row++) finish_row(product, tile * ROWS + row, index, sums[row]);
            panel.ahead += panel.ahead_groups * GROUP * PANEL;
        }
    }
}

/* y [rows, columns] = x [rows, inputs] W^T + bias, x and y in float32 or both in bfloat16.

   A row's result depends on nothing but the row. Returns 0 where memory did not suffice, else 1. */
int64_t KERNEL(shoal_int8_linear)(const struct int8_linear *linear, const void *x, void *y, int64_t rows,
                                  int64_t bf16) {
    struct product product = {.linear = linear, .x = x, .y = y, .rows = rows, .bf16 = bf16};
    product.groups = (linear->inputs + GROUP - 1) / GROUP;
    product.panels = (linear->columns + PANEL - 1) / PANEL;
    product.tiles = (rows + ROWS - 1) / ROWS;
    product.quantised = malloc((size_t)(product.tiles * product.groups) * sizeof(struct group));
    if (!product.quantised) return 0;
    if (rows * linear->inputs < SERIAL_INPUTS)
        for (int64_t tile = 0; tile < product.tiles; tile++) quantise_tile(&product, tile);
    else
        shoal_parallel(product.tiles, quantise_tile, &product);
    const int64_t row_tasks = (product.tiles + BLOCK_TILES - 1) / BLOCK_TILES;
    const int64_t tasks = TASKS_PER_THREAD * shoal_threads();
    product.task_panels = smaller((product.panels * row_tasks + tasks - 1) / tasks, product.panels);
    product.column_tasks = (product.panels + product.task_panels - 1) / product.task_panels;
    shoal_parallel(row_tasks * product.column_tasks, multiply_block, &product);
    free(product.quantised);
    return 1;
}
