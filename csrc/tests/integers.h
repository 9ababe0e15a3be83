/* Products with integer weights: all shapes of tiles, panels and groups keep to their buffers, and are close to those
   in float. A program that includes this has included the kernel, and defined PRODUCT. */
#ifndef SHOAL_INTEGERS_H
#define SHOAL_INTEGERS_H

#include "guard.h"

enum { PARTS = 2 };

static float number(int64_t i, float period) { return sinf((float)i * period); }

/* Store a weight, of which the padding is 0, of the input i. */
static void put_weight(uint8_t *panel, int64_t i, int64_t lane, int weight) {
    const int64_t step = i / 4;
    if (WEIGHT_BITS == 8) {
        panel[(step * PANEL + lane) * 4 + i % 4] = (uint8_t)(weight + ZERO);
        return;
    }
    uint8_t *byte = panel + (step / 2 * PANEL + lane) * 4 + i % 4;
    *byte = (uint8_t)(step % 2 ? (*byte & 15) | (weight + ZERO) << 4 : weight + ZERO);
}

/* A part of columns with weights of all values in no order, packed; dense [columns, inputs] gets their values. */
static struct linear part_of(int64_t inputs, int64_t columns, int grouped, float *dense) {
    const int64_t groups = (inputs + GROUP - 1) / GROUP, panels = (columns + PANEL - 1) / PANEL;
    uint8_t *weights = guarded((size_t)(panels * groups * GROUP_BYTES));
    float *scales = guarded((size_t)(panels * (grouped ? groups : 1) * PANEL) * sizeof *scales);
    float *bias = guarded((size_t)(panels * PANEL) * sizeof *bias);
    for (int64_t column = 0; column < panels * PANEL; column++) {
        const int64_t panel = column / PANEL, lane = column % PANEL;
        bias[column] = number(column, 0.3f);
        for (int64_t g = 0; g < (grouped ? groups : 1); g++)
            scales[(grouped ? panel * groups + g : panel) * PANEL + lane] = 0.01f * (1 + number(column + g, 0.7f));
        for (int64_t i = 0; i < groups * GROUP; i++) {
            const int inside = i < inputs && column < columns;
            const int value = inside ? (int)((i * 37 + column * 101) % (2 * ZERO)) - ZERO : 0;
            const float scale = scales[(grouped ? panel * groups + i / GROUP : panel) * PANEL + lane];
            put_weight(weights + panel * groups * GROUP_BYTES, i, lane, value);
            if (inside) dense[column * inputs + i] = (float)value * scale;
        }
    }
    return (struct linear){weights, scales, bias, columns, grouped};
}

static void check(int64_t rows, int64_t inputs, int64_t columns, int64_t activation) {
    const int64_t outputs = activation == NO_ACTIVATION ? PARTS * columns : columns;
    struct linear parts[PARTS];
    float *dense = guarded_floats((size_t)(PARTS * columns * inputs), 1);
    for (int i = 0; i < PARTS; i++) parts[i] = part_of(inputs, columns, i, dense + i * columns * inputs);
    const struct product product = {parts, PARTS, inputs, activation};
    const float *x = guarded_floats((size_t)(rows * inputs), 2);
    float *y = guarded((size_t)(rows * outputs) * sizeof *y);
    CHECK(PRODUCT(&product, x, y, rows, 0));
    for (int64_t row = 0; row < rows && activation == NO_ACTIVATION; row++)
        for (int64_t column = 0; column < outputs; column++) {
            double sum = number(column % columns, 0.3f), size = 1;
            for (int64_t i = 0; i < inputs; i++) {
                const double term = (double)x[row * inputs + i] * dense[column * inputs + i];
                sum += term, size += fabs(term);
            }
            CHECK(fabs(y[row * outputs + column] - sum) < 0.01 * size);
        }
    uint16_t *x16 = guarded((size_t)(rows * inputs) * sizeof *x16);
    uint16_t *y16 = guarded((size_t)(rows * outputs) * sizeof *y16);
    for (int64_t i = 0; i < rows * inputs; i++) x16[i] = float_to_bf16(x[i]);
    CHECK(PRODUCT(&product, x16, y16, rows, 1));
    for (int64_t i = 0; i < rows * outputs; i++) CHECK((y16[i] & 0x7f80) != 0x7f80);
}

static void check_all(void) {
    const int64_t rows[] = {0, 1, 2, 3, 4, 5, 6, 7, 12, 13, 100}, inputs[] = {1, 32, 71}, columns[] = {1, 32, 67};
    for (int r = 0; r < 11; r++)
        for (int i = 0; i < 3; i++)
            for (int c = 0; c < 3; c++)
                for (int64_t activation = NO_ACTIVATION; activation <= GELU_ERF; activation++)
                    check(rows[r], inputs[i], columns[c], activation);
}

#endif
